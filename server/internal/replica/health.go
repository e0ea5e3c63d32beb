package replica

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/transport"
	"k8s.io/klog/v2"
)

// healthUnanswered is the silence of a primary after which its requests in flight are cancelled.
const healthUnanswered = 10 * time.Second

// timing are the durations of health checks.
type timing struct {
	interval time.Duration // between two checks of a primary
	timeout  time.Duration // of one request of a check
	proof    time.Duration // between two proofs that a primary accepts the identity headers
	// for which a proof holds while the next ones fail for other reasons, such as 429
	proofAge   time.Duration
	unanswered time.Duration // healthUnanswered
}

var defaultTiming = timing{interval: time.Second, timeout: 2 * time.Second, proof: 10 * time.Second, proofAge: 30 * time.Second, unanswered: healthUnanswered}

// failure is the reason for which a primary gets no requests.
type failure struct {
	reason  string
	refused bool // the primary does not accept the identity headers of this replica
}

// refusedError is the error of a primary that answered and does not accept the identity headers, so
// that a request would be one of the user of the certificate, or of none. It ends with a change of
// a certificate or of flags.
type refusedError struct{ reason string }

func (e *refusedError) Error() string { return e.reason }

// health is the state of the checks of one primary, owned by the goroutine that makes them.
type health struct {
	candidate *links // with the newest certificate; becomes primary.links by its proof
	proven    time.Time
	dials     int64  // of the links at the last proof
	lost      string // identity fields that the primary does not accept, as logged last
}

// Run checks each primary until ctx ends, and then closes idle connections. It is called once.
func (p *pool) Run(ctx context.Context) {
	var checks sync.WaitGroup
	for _, one := range p.primaries {
		checks.Go(func() { p.watch(ctx, one) })
	}
	checks.Wait()
	for _, one := range p.primaries {
		for _, l := range []*links{one.links.Load(), one.health.candidate} {
			if l != nil {
				l.closeIdle()
			}
		}
	}
}

// watch checks one primary until ctx ends.
func (p *pool) watch(ctx context.Context, one *primary) {
	ticker := time.NewTicker(p.timing.interval)
	defer ticker.Stop()
	silence := time.AfterFunc(p.timing.unanswered, one.silent)
	defer silence.Stop()
	for first := true; ; first = false {
		err := one.check(ctx, p.identity, p.timing, func() {
			silence.Reset(p.timing.unanswered)
			one.life.renew()
		})
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			var refused *refusedError
			one.down(&failure{reason: err.Error(), refused: errors.As(err, &refused)})
		} else {
			one.up()
		}
		if first && p.unchecked.Add(-1) == 0 || err == nil {
			p.settle.Do(func() { close(p.settled) })
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// silent ends the requests in flight to a primary that does not answer.
func (p *primary) silent() {
	p.life.cut()
	klog.InfoS("Requests in flight to a primary are cancelled", "primary", p.name, "reason", errSilent.Error())
}

// down records a failure. The next check that succeeds ends it.
func (p *primary) down(f *failure) {
	last := p.failure.Swap(f)
	p.healthy.Store(false)
	primaryHealthy.WithLabelValues(p.name).Set(0)
	if last == nil || f.refused && last.reason != f.reason {
		klog.InfoS("Primary is not healthy; requests go to the others", "primary", p.name, "reason", f.reason)
	}
}

// up records a successful check.
func (p *primary) up() {
	p.failure.Store(nil)
	if !p.healthy.Swap(true) {
		primaryHealthy.WithLabelValues(p.name).Set(1)
		klog.InfoS("Primary is healthy", "primary", p.name)
	}
}

// refusal returns an error while a primary refuses the identity headers and no other one accepts
// them: a fault of flags or certificates, which does not end by itself. A primary that does not
// answer is none.
func (p *pool) refusal() error {
	var all []error
	for _, one := range p.primaries {
		if one.healthy.Load() {
			return nil
		}
		if f := one.failure.Load(); f != nil && f.refused {
			all = append(all, fmt.Errorf("primary %s: %s", one.name, f.reason))
		}
	}
	return errors.Join(all...)
}

// check asks the primary whether it is ready and, when that is due, for a proof that it accepts the
// identity headers. A proof is due on connections with a new certificate, on new connections, after
// a failure, and after timing.proof. It calls answered if the primary, or the machine in its place,
// has answered.
func (p *primary) check(ctx context.Context, id *identity, t timing, answered func()) error {
	certificate, err := id.current()
	if err != nil {
		return err
	}
	h := &p.health
	if h.candidate == nil || h.candidate.certificate != certificate {
		h.candidate, h.proven = p.connect(certificate), time.Time{}
	}
	l := h.candidate
	err = p.checkReady(ctx, l, t)
	if err == nil || !isSilence(err) {
		answered()
	}
	if err != nil {
		return err
	}
	isProven := p.healthy.Load() && p.links.Load() == l && time.Since(h.proven) < t.proofAge
	if isProven && time.Since(h.proven) < t.proof && l.dials.Load() == h.dials {
		return nil
	}
	began, dials := time.Now(), l.dials.Load()
	var refused *refusedError
	switch lost, err := p.prove(ctx, l, t); {
	case err == nil:
		p.logLost(lost)
		h.proven, h.dials = began, dials
		if old := p.links.Swap(l); old != nil && old != l {
			old.closeIdle()
		}
		return nil
	case isProven && !errors.As(err, &refused):
		return nil // repeated at the next check
	default:
		return err
	}
}

// isSilence reports whether an error of a request means that no machine has answered. A refused
// connection is an answer: connections to a process that has ended break by themselves.
func isSilence(err error) bool {
	var status *statusError
	var refused *refusedError
	return !errors.As(err, &status) && !errors.As(err, &refused) && !errors.Is(err, syscall.ECONNREFUSED)
}

// statusError is the error of a response.
type statusError struct{ path, status string }

func (e *statusError) Error() string { return e.path + ": " + e.status }

// checkReady asks the primary whether it is ready. A primary that refuses the answer to this user
// is as good as ready.
func (p *primary) checkReady(ctx context.Context, l *links, t timing) error {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+p.name+"/readyz", nil)
	if err != nil {
		return err
	}
	setOwnIdentity(req)
	resp, err := l.plain.RoundTrip(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		return errCertificate("answers 401 Unauthorized")
	case resp.StatusCode >= http.StatusInternalServerError:
		return &statusError{"/readyz", resp.Status}
	}
	return nil
}

// errCertificate is the error of a primary that does not take the user from the headers.
func errCertificate(symptom string) error {
	return &refusedError{"it does not accept the front-proxy certificate with the headers X-Remote-*: it " + symptom + "; check --proxy-client-cert-file of this replica, and " +
		"--requestheader-client-ca-file, --requestheader-allowed-names, --requestheader-username-headers=X-Remote-User and --requestheader-group-headers=X-Remote-Group of the API server"}
}

// reviewPath is the path of SelfSubjectReviews, and proofExtra the extra field of the user of a
// proof.
const (
	reviewPath = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
	proofExtra = "strata-proof"
)

// prove asks the primary for the user of a request whose headers have a random UID, a random group
// and a random extra field. It returns the flags for fields that the primary does not accept and
// that older API servers do not know. Errors: refusedError if the primary takes another user.
func (p *primary) prove(ctx context.Context, l *links, t timing) (lost string, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	body, err := json.Marshal(&authenticationv1.SelfSubjectReview{TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "SelfSubjectReview"}})
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+p.name+reviewPath, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	secret := rand.Text()
	sent := authenticationv1.UserInfo{Username: username, UID: "uid-" + secret, Groups: []string{"system:strata-proof:" + secret, user.AllAuthenticated},
		Extra: map[string]authenticationv1.ExtraValue{proofExtra: {secret}}}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	transport.SetAuthProxyHeaders(req, sent.Username, sent.UID, sent.Groups, map[string][]string{proofExtra: {secret}})
	resp, err := l.plain.RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		return "", errCertificate("answers 401 Unauthorized")
	case resp.StatusCode == http.StatusForbidden, resp.StatusCode == http.StatusNotFound:
		return "", &refusedError{"it answers " + resp.Status + " to a SelfSubjectReview, by which the replica verifies that the API server takes the user from the headers X-Remote-*; " +
			"permit SelfSubjectReviews to the group system:authenticated (ClusterRole system:basic-user), and check --proxy-client-cert-file"}
	case resp.StatusCode != http.StatusCreated:
		return "", &statusError{reviewPath, resp.Status}
	}
	var review authenticationv1.SelfSubjectReview
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&review); err != nil {
		return "", fmt.Errorf("%s: %w", reviewPath, err)
	}
	return compareUser(sent, review.Status.UserInfo)
}

// compareUser compares the user of a proof with the one that the primary took. The name and the
// groups must be equal. A UID or an extra field that is missing is returned as the flag that the
// API server lacks; another UID is an error.
func compareUser(sent, got authenticationv1.UserInfo) (lost string, err error) {
	groups := slices.Compact(slices.Sorted(slices.Values(got.Groups)))
	switch {
	case got.Username != sent.Username || !slices.Contains(groups, sent.Groups[0]):
		return "", errCertificate("takes another user than that of the headers")
	case !slices.Equal(groups, slices.Sorted(slices.Values(sent.Groups))):
		return "", errCertificate("adds groups to those of the headers")
	case got.UID != "" && got.UID != sent.UID:
		return "", errCertificate("takes another UID than that of the headers")
	}
	var flags []string
	if got.UID == "" {
		flags = append(flags, "--requestheader-uid-headers=X-Remote-Uid")
	}
	if !slices.Equal(got.Extra[proofExtra], sent.Extra[proofExtra]) {
		flags = append(flags, "--requestheader-extra-headers-prefix=X-Remote-Extra-")
	}
	return strings.Join(flags, " "), nil
}

// logLost logs a change of the flags that an API server lacks.
func (p *primary) logLost(lost string) {
	if lost == p.health.lost {
		return
	}
	p.health.lost = lost
	if lost == "" {
		klog.InfoS("Primary accepts all fields of users", "primary", p.name)
		return
	}
	klog.Warningf("Primary %s does not accept all fields of users, so that proxied requests are authorized and audited without them; start the API server with %s", p.name, lost)
}
