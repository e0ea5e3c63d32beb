package replica

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/stratakube/strata/server/internal/pki"
)

// stubTimeout bounds a failing test.
const stubTimeout = time.Minute

// testTiming are durations of health checks that let a test end soon. The timeout has to suffice on
// a busy machine.
var testTiming = timing{interval: 10 * time.Millisecond, timeout: 30 * time.Second, proof: 50 * time.Millisecond, proofAge: time.Minute, unanswered: healthUnanswered}

// stubPrimary is an API server that takes the user of a request from its headers, if its
// certificate is that of a front proxy, or else from the certificate, as kube-apiserver does.
type stubPrimary struct {
	trusted      string // common name of the certificate of front proxies
	refuse       bool   // answers other certificates with 401
	userHeader   string
	withoutUID   bool
	withoutExtra bool
	moreGroups   []string
	reviewCode   int // of SelfSubjectReviews, in place of 201

	hang     atomic.Bool // while true, requests wait for release
	distrust atomic.Bool // while true, no certificate is that of a front proxy
	overload atomic.Bool // while true, SelfSubjectReviews are answered with 429
	release  chan struct{}

	others, proofs atomic.Int64 // requests other than health checks; SelfSubjectReviews
	server         *httptest.Server
	files          *pki.Files
}

func newStub(t *testing.T, s *stubPrimary) *stubPrimary {
	t.Helper()
	files, err := pki.Ensure(t.TempDir(), []string{"127.0.0.1"}, time.Now())
	check(t, err)
	serving, err := tls.LoadX509KeyPair(files.Serving, files.Serving)
	check(t, err)
	s.files, s.release = files, make(chan struct{})
	if s.trusted == "" {
		s.trusted = pki.FrontProxyUser
	}
	if s.userHeader == "" {
		s.userHeader = "X-Remote-User"
	}
	s.server = httptest.NewUnstartedServer(s)
	s.server.TLS = &tls.Config{Certificates: []tls.Certificate{serving}, ClientAuth: tls.RequestClientCert}
	s.server.EnableHTTP2 = true
	s.server.StartTLS()
	t.Cleanup(func() {
		close(s.release)
		s.server.CloseClientConnections()
		s.server.Close()
	})
	return s
}

func (s *stubPrimary) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if s.hang.Load() {
		<-s.release
		return
	}
	who, known := s.user(req)
	switch {
	case !known:
		w.WriteHeader(http.StatusUnauthorized)
	case req.URL.Path == "/readyz":
	case req.URL.Path == reviewPath:
		s.proofs.Add(1)
		if s.overload.Load() {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if s.reviewCode != 0 {
			w.WriteHeader(s.reviewCode)
			return
		}
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(&authenticationv1.SelfSubjectReview{Status: authenticationv1.SelfSubjectReviewStatus{UserInfo: who}})
	case req.URL.Path == "/upgrade":
		s.others.Add(1)
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", "echo")
		w.WriteHeader(http.StatusSwitchingProtocols)
		conn, stream, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.Copy(conn, stream) // which may have bytes that arrived before
	case req.URL.Path == "/refuse":
		s.others.Add(1)
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, "refused")
	case req.URL.Path == "/hang":
		s.others.Add(1)
		<-req.Context().Done()
	default:
		s.others.Add(1)
		_, _ = io.WriteString(w, who.Username)
	}
}

func (s *stubPrimary) user(req *http.Request) (authenticationv1.UserInfo, bool) {
	if len(req.TLS.PeerCertificates) == 0 {
		return authenticationv1.UserInfo{}, false
	}
	subject := req.TLS.PeerCertificates[0].Subject
	if name := req.Header.Get(s.userHeader); subject.CommonName != s.trusted || name == "" || s.distrust.Load() {
		return authenticationv1.UserInfo{Username: subject.CommonName, Groups: append(subject.Organization, user.AllAuthenticated)}, !s.refuse
	}
	uids, extras := headerrequest.StaticStringSlice{"X-Remote-Uid"}, headerrequest.StaticStringSlice{"X-Remote-Extra-"}
	if s.withoutUID {
		uids = nil
	}
	if s.withoutExtra {
		extras = nil
	}
	resp, _, _ := headerrequest.NewDynamic(headerrequest.StaticStringSlice{s.userHeader}, uids, headerrequest.StaticStringSlice{"X-Remote-Group"}, extras).AuthenticateRequest(req)
	info := authenticationv1.UserInfo{Username: resp.User.GetName(), UID: resp.User.GetUID(), Groups: append(resp.User.GetGroups(), s.moreGroups...), Extra: map[string]authenticationv1.ExtraValue{}}
	for key, values := range resp.User.GetExtra() {
		info.Extra[key] = values
	}
	return info, true
}

// pool returns a pool of the stub, with the certificate in the file, and runs it until the test
// ends.
func (s *stubPrimary) pool(t *testing.T, certFile string, durations timing) *pool {
	t.Helper()
	p := s.idlePool(t, certFile)
	p.timing = durations
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return p
}

// idlePool returns a pool of the stub that does not run.
func (s *stubPrimary) idlePool(t *testing.T, certFile string) *pool {
	t.Helper()
	id, err := newIdentity(certFile, certFile)
	check(t, err)
	target, err := url.Parse(s.server.URL)
	check(t, err)
	authorities := x509.NewCertPool()
	pem, err := os.ReadFile(s.files.CA)
	check(t, err)
	authorities.AppendCertsFromPEM(pem)
	return newPool([]*url.URL{target}, func() *x509.CertPool { return authorities }, id)
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// get sends a request to the pool as the user reader.
func get(t *testing.T, p *pool, path string) (*http.Response, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stubTimeout)
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://primary"+path, nil)
	check(t, err)
	req.Header.Set("X-Remote-User", "reader")
	return p.RoundTrip(req)
}

// await polls a condition until it is true.
func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stubTimeout)
	defer cancel()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for !condition() {
		select {
		case <-ctx.Done():
			t.Fatalf("%s: not within %v", what, stubTimeout)
		case <-ticker.C:
		}
	}
}

// TestPool_PrimaryTakesAnotherUser_GetsNoRequests: with a certificate that the primary does not
// accept from a front proxy, every user would have the rights of that certificate.
func TestPool_PrimaryTakesAnotherUser_GetsNoRequests(t *testing.T) {
	for name, c := range map[string]struct {
		stub *stubPrimary
		want string // in the reason
	}{
		"certificate of another client":   {&stubPrimary{trusted: "other"}, "takes another user than that of the headers"},
		"unknown certificate":             {&stubPrimary{trusted: "other", refuse: true}, "answers 401 Unauthorized"},
		"other name of the user header":   {&stubPrimary{userHeader: "X-Other-User"}, "takes another user than that of the headers"},
		"more groups":                     {&stubPrimary{moreGroups: []string{"system:masters"}}, "adds groups to those of the headers"},
		"review is forbidden":             {&stubPrimary{reviewCode: http.StatusForbidden}, "403 Forbidden to a SelfSubjectReview"},
		"SelfSubjectReview is not served": {&stubPrimary{reviewCode: http.StatusNotFound}, "404 Not Found to a SelfSubjectReview"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStub(t, c.stub)
			p := s.pool(t, s.files.FrontProxyClient, testTiming)
			// a first dial may be too slow
			await(t, "refusal", func() bool { return p.refusal() != nil })
			var none *errNoPrimary
			if resp, err := get(t, p, "/write"); !errors.As(err, &none) || !strings.Contains(none.reason, c.want) || !strings.Contains(none.reason, "--proxy-client-cert-file") {
				t.Errorf("response %v, error %v, want one with %q", resp, err, c.want)
			}
			if err := p.refusal(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the check replica-identity returns %v, want an error with %q", err, c.want)
			}
			if n := s.others.Load(); n != 0 {
				t.Errorf("the primary has received %d requests of users, want none", n)
			}
		})
	}
}

// TestPool_PrimaryWithoutUIDOrExtra_IsUsedAndLogged: API servers without the flag for UIDs are
// usable; the log names it.
func TestPool_PrimaryWithoutUIDOrExtra_IsUsedAndLogged(t *testing.T) {
	for name, c := range map[string]struct {
		stub *stubPrimary
		want string
	}{
		"all":           {&stubPrimary{}, ""},
		"without UID":   {&stubPrimary{withoutUID: true}, "--requestheader-uid-headers=X-Remote-Uid"},
		"without extra": {&stubPrimary{withoutExtra: true}, "--requestheader-extra-headers-prefix=X-Remote-Extra-"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStub(t, c.stub)
			p := s.pool(t, s.files.FrontProxyClient, testTiming)
			await(t, "first proof", p.primaries[0].healthy.Load)
			resp, err := get(t, p, "/name")
			check(t, err)
			text, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || string(text) != "reader" {
				t.Errorf("the primary has taken user %q, %v", text, err)
			}
			lost, err := p.primaries[0].prove(t.Context(), p.primaries[0].links.Load(), testTiming)
			if err != nil || lost != c.want {
				t.Errorf("the proof reports lack of %q, %v, want %q", lost, err, c.want)
			}
			if err := p.refusal(); err != nil {
				t.Errorf("the check replica-identity fails: %v", err)
			}
		})
	}
}

// TestPool_CertificateChanges_IsProvenBeforeUse: a new certificate that the primary does not accept
// ends requests to it, and the next good one resumes them.
func TestPool_CertificateChanges_IsProvenBeforeUse(t *testing.T) {
	t.Parallel()
	s := newStub(t, &stubPrimary{})
	file := filepath.Join(t.TempDir(), "client.pem")
	install := func(from string) {
		content, err := os.ReadFile(from)
		check(t, err)
		check(t, os.WriteFile(file, content, 0o600))
	}
	install(s.files.FrontProxyClient)
	p := s.pool(t, file, testTiming)
	one := p.primaries[0]
	await(t, "first proof", one.healthy.Load)
	before := s.proofs.Load()
	await(t, "proof at an interval", func() bool { return s.proofs.Load() > before+1 })
	first := one.links.Load()

	install(s.files.Serving) // of another client
	check(t, p.identity.RunOnce(t.Context()))
	await(t, "refusal", func() bool { return p.refusal() != nil })
	if _, err := get(t, p, "/write"); !errors.As(err, new(*errNoPrimary)) {
		t.Errorf("error %v after a change to a certificate that is not accepted", err)
	}
	if n := s.others.Load(); n != 0 {
		t.Errorf("the primary has received %d requests, want none", n)
	}

	install(s.files.FrontProxyClient)
	check(t, p.identity.RunOnce(t.Context()))
	await(t, "proof of the new certificate", one.healthy.Load)
	if one.links.Load() == first {
		t.Error("connections of the former certificate are used")
	}
	resp, err := get(t, p, "/name")
	check(t, err)
	resp.Body.Close()
}

// TestPool_PrimaryChangesItsFlags_IsDownByNextProof: a change at the primary is found without a
// change here.
func TestPool_PrimaryChangesItsFlags_IsDownByNextProof(t *testing.T) {
	t.Parallel()
	s := newStub(t, &stubPrimary{})
	p := s.pool(t, s.files.FrontProxyClient, testTiming)
	await(t, "first proof", p.primaries[0].healthy.Load)
	s.distrust.Store(true)
	await(t, "refusal", func() bool { return p.refusal() != nil })
	s.distrust.Store(false)
	await(t, "next proof", p.primaries[0].healthy.Load)
}

// provenPrimary returns a primary of the stub whose first check has succeeded, and a function that
// makes the next check.
func (s *stubPrimary) provenPrimary(t *testing.T, durations timing) (one *primary, next func() error) {
	t.Helper()
	p := s.idlePool(t, s.files.FrontProxyClient)
	one = p.primaries[0]
	next = func() error { return one.check(t.Context(), p.identity, durations, func() {}) }
	await(t, "first proof", func() bool { return next() == nil })
	one.up()
	t.Cleanup(one.links.Load().closeIdle)
	return one, next
}

// TestPrimary_NewConnection_IsProven: another process may answer on a new connection, so a proof is
// due before its time.
func TestPrimary_NewConnection_IsProven(t *testing.T) {
	t.Parallel()
	s := newStub(t, &stubPrimary{})
	durations := testTiming
	durations.proof, durations.proofAge = time.Hour, 2*time.Hour
	one, next := s.provenPrimary(t, durations)
	check(t, next())
	if n := s.proofs.Load(); n != 1 {
		t.Fatalf("%d proofs on one connection, want 1", n)
	}
	l := one.links.Load()
	dials := l.dials.Load()
	s.server.CloseClientConnections()
	await(t, "check on a new connection", func() bool { return next() == nil && l.dials.Load() > dials })
	if n := s.proofs.Load(); n != 2 {
		t.Errorf("%d proofs on two connections, want 2", n)
	}
}

// TestPrimary_ProofFails_LastOneHoldsForItsAge: an overloaded primary keeps its requests for as
// long as its last proof holds, and no longer.
func TestPrimary_ProofFails_LastOneHoldsForItsAge(t *testing.T) {
	t.Parallel()
	s := newStub(t, &stubPrimary{})
	durations := testTiming
	durations.proof, durations.proofAge = time.Hour, 2*time.Hour
	one, next := s.provenPrimary(t, durations)
	s.overload.Store(true)
	one.health.proven = time.Now().Add(-durations.proof)
	if err := next(); err != nil || s.proofs.Load() != 2 {
		t.Errorf("check while the last proof holds: %v after %d proofs, want success after 2", err, s.proofs.Load())
	}
	one.health.proven = time.Now().Add(-durations.proofAge)
	var status *statusError
	if err := next(); !errors.As(err, &status) {
		t.Errorf("check when the last proof is too old: %v, want the error of the proof", err)
	}
	s.overload.Store(false)
	check(t, next())
	if d := defaultTiming.proofAge; d != 30*time.Second {
		t.Errorf("a proof holds for %v, want the 30 s of docs/replicas.md", d)
	}
}

// TestPool_PrimaryFallsSilent_RequestsInFlightEnd: a stopped process closes no connection. Requests
// over HTTP/2, and connections that have changed their protocol, end with errSilent after the
// bound.
func TestPool_PrimaryFallsSilent_RequestsInFlightEnd(t *testing.T) {
	t.Parallel()
	s := newStub(t, &stubPrimary{})
	durations := testTiming
	durations.timeout = healthUnanswered / 2 // a check that has no answer fails before the bound
	p := s.pool(t, s.files.FrontProxyClient, durations)
	one := p.primaries[0]
	await(t, "first proof", one.healthy.Load)

	ctx, cancel := context.WithTimeout(t.Context(), stubTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://primary/upgrade", nil)
	check(t, err)
	req.Header = http.Header{"Connection": {"Upgrade"}, "Upgrade": {"echo"}, "X-Remote-User": {"reader"}}
	var upgraded *http.Response
	await(t, "upgraded connection", func() bool {
		upgraded, err = p.RoundTrip(req)
		return err == nil
	})
	conn := upgraded.Body.(io.ReadWriteCloser)
	_, err = io.WriteString(conn, "echo")
	check(t, err)
	_, err = io.ReadFull(conn, make([]byte, 4))
	check(t, err)

	before := s.others.Load()
	result := make(chan error, 1)
	go func() {
		_, err := get(t, p, "/hang")
		result <- err
	}()
	await(t, "request in flight", func() bool { return s.others.Load() == before+1 })
	s.hang.Store(true)
	select {
	case err := <-result:
		if !errors.Is(err, errSilent) {
			t.Errorf("the request in flight ended with %v, want %v", err, errSilent)
		}
	case <-ctx.Done():
		t.Fatal("the request in flight did not end")
	}
	if n, err := conn.Read(make([]byte, 1)); err == nil {
		t.Errorf("read %d bytes from the upgraded connection to a silent primary", n)
	}
	conn.Close()
	await(t, "silent primary that is not healthy", func() bool { return !one.healthy.Load() })
	s.hang.Store(false)
	await(t, "primary that answers again", one.healthy.Load)
	resp, err := get(t, p, "/name")
	check(t, err)
	resp.Body.Close()
}

// TestPool_RequestBeforeFirstCheck_Waits: and ends with its context, unsent.
func TestPool_RequestBeforeFirstCheck_Waits(t *testing.T) {
	s := newStub(t, &stubPrimary{})
	id, err := newIdentity(s.files.FrontProxyClient, s.files.FrontProxyClient)
	check(t, err)
	target, err := url.Parse(s.server.URL)
	check(t, err)
	p := newPool([]*url.URL{target}, nil, id)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://primary/name", nil)
	check(t, err)
	if _, err := p.RoundTrip(req); !errors.As(err, new(*errNoPrimary)) || !strings.Contains(err.Error(), "not checked yet") || ctx.Err() == nil {
		t.Errorf("error %v, want that the primary is not checked yet, at the end of the context", err)
	}
	if n := s.others.Load(); n != 0 {
		t.Errorf("the primary has received %d requests, want none", n)
	}
}
