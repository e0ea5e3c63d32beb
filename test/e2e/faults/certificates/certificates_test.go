// Package certificates tests a server whose certificates, or those of its peers, expire: those for
// serving, of the client of etcd, and of a front proxy. The tests of package replica in the server
// module do the same for the feed and for the certificate that a replica presents.
package certificates

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/faulty"
)

const mapsPath = "/api/v1/namespaces/default/configmaps"

type object = map[string]any

// scene is a server on an etcd that requires client certificates, behind a link.
type scene struct {
	etcd   harness.Certificate // of the server, as the client of etcd
	ca     *harness.Authority  // of etcd's clients, and of front proxies
	link   *faulty.Link
	server *harness.Server
	api    *harness.API
	watch  *harness.Watch
}

// TestCertificates_Expired_AreRefusedUntilRenewed: certificates of some seconds, 90 s in the long
// form, expire while they are used. A renewal in the files, before or after that, is used without a
// restart. An expired certificate is refused, and the log says so. A watch continues.
func TestCertificates_Expired_AreRefusedUntilRenewed(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, harness.Pick(4*time.Minute, 12*time.Minute))
	env := harness.New(t)
	s := &scene{ca: env.Authority()}
	s.etcd = s.ca.Issue("etcd-client")
	etcd := *env.EtcdTLS(s.ca).As(s.etcd)
	s.link = faulty.NewLink(t, env, etcd.URL)
	etcd.URL = strings.Replace(s.link.URL, "http:", "https:", 1)
	s.server = env.APIServer(&etcd, "--requestheader-client-ca-file="+s.ca.CertFile,
		"--requestheader-allowed-names=front-proxy-client", "--requestheader-username-headers=X-Remote-User")
	s.api = s.server.API()
	list, err := s.api.List(ctx, mapsPath, "")
	harness.Check(t, err)
	s.watch = harness.StartWatch(t, ctx, s.api, mapsPath, "resourceVersion="+list.Metadata.ResourceVersion)
	t.Run("of a front proxy", func(t *testing.T) { s.frontProxy(t, ctx) })
	t.Run("for serving", func(t *testing.T) { s.serving(t, ctx) })
	t.Run("of the client of etcd", func(t *testing.T) { s.clientOfEtcd(t, ctx) })
	if harness.Long() {
		t.Run("while the server stops", func(t *testing.T) { s.stops(t, ctx) })
	}
}

// expired is a time in the past.
func expired() time.Time { return time.Now().Add(-time.Minute) }

// requireLogged returns when the server has logged a text, and fails the test if it does not.
func (s *scene) requireLogged(t *testing.T, ctx context.Context, text string) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return strings.Contains(s.server.Output(), text), fmt.Errorf("the log does not have %q", text)
	}))
}

// requireWatch fails the test unless the watch shows the next change.
func (s *scene) requireWatch(t *testing.T, ctx context.Context, name string) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := s.api.Do(ctx, http.MethodPost, mapsPath, "", object{"metadata": object{"name": name}})
		if err != nil {
			return false, err
		}
		return r.Code == http.StatusCreated || r.Code == http.StatusConflict, r.Err()
	}))
	for {
		e, err := s.watch.Next(ctx)
		harness.Check(t, err)
		if e.Type != "ADDED" {
			t.Fatalf("the watch has %s %+v", e.Type, e.Status)
		}
		if e.Object.Metadata.Name == name {
			return
		}
	}
}

// user adds the header with the name of a user.
type user struct{ http.RoundTripper }

func (u user) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-Remote-User", "someone")
	return u.RoundTripper.RoundTrip(r)
}

// as sends a request as a front proxy with a certificate.
func (s *scene) as(c harness.Certificate) func(context.Context) (*harness.Response, error) {
	config := &rest.Config{Host: s.server.URL, TLSClientConfig: rest.TLSClientConfig{CAFile: s.server.CAFile, CertData: c.CertPEM, KeyData: c.KeyPEM}}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return user{next} })
	api := s.server.APIFor(config)
	return func(ctx context.Context) (*harness.Response, error) {
		return api.Do(ctx, http.MethodGet, "/api", "", nil)
	}
}

// frontProxy: a certificate that expires while its connection is open is refused from then on.
func (s *scene) frontProxy(t *testing.T, ctx context.Context) {
	r, err := s.as(s.ca.Issue("front-proxy-client"))(ctx)
	if err != nil || r.Code != http.StatusOK {
		t.Fatalf("with a valid certificate: %+v, %v", r, err)
	}
	expires := time.Now().Add(2 * time.Second)
	request := s.as(s.ca.IssueUntil("front-proxy-client", expires))
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		late := time.Now().After(expires.Add(time.Second)) // a certificate has seconds
		r, err := request(ctx)
		if err != nil {
			return false, err
		}
		if late && r.Code != http.StatusUnauthorized {
			t.Fatalf("an expired certificate is accepted: %v", r.Err())
		}
		return late, r.Err()
	}))
	s.requireLogged(t, ctx, "certificate has expired")
}

// errExpired: a new connection was refused because its certificate has expired.
var errExpired = errors.New("refused: the certificate has expired")

// inUse: a certificate is renewed before it expires, and new connections go on with the renewal. It
// expires without another one, and new connections are refused. connect makes a connection and
// returns when its certificate expires.
func inUse(t *testing.T, ctx context.Context, renew func(expires time.Time), connect func(context.Context) (expires time.Time, err error)) {
	t.Helper()
	use := func(expires time.Time) {
		renew(expires)
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			used, err := connect(ctx)
			return err == nil && used.Equal(expires) || time.Now().After(expires), err
		}))
	}
	short := harness.Pick(5*time.Second, 90*time.Second)
	var last time.Time
	goesOn := false // a connection was made with the renewal, after the first one has expired
	// A busy machine may need another attempt.
	for life := short; !goesOn; life *= 2 {
		if life > 8*short {
			t.Fatalf("new connections do not use a renewal within %v", life/2)
		}
		first := time.Now().Add(life).Truncate(time.Second) // a certificate has seconds
		last = first.Add(life)
		use(first)
		use(last)
		if !time.Now().Before(first) {
			continue
		}
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			began := time.Now()
			_, err := connect(ctx)
			if errors.Is(err, errExpired) && time.Now().Before(last) {
				t.Fatalf("%v before it expires: %v", time.Until(last), err)
			}
			goesOn = began.After(first) && time.Now().Before(last) && err == nil
			return goesOn || began.After(last), err
		}))
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		late := time.Now().After(last.Add(time.Second))
		_, err := connect(ctx)
		if err == nil && late {
			t.Fatal("an expired certificate is accepted")
		}
		return errors.Is(err, errExpired), err
	}))
}

// serving: new connections get the certificate that is in the file.
func (s *scene) serving(t *testing.T, ctx context.Context) {
	connect := func(ctx context.Context) (time.Time, error) {
		conn, err := s.server.Dial(ctx)
		if err != nil {
			if strings.Contains(err.Error(), "certificate has expired") {
				err = errExpired
			}
			return time.Time{}, err
		}
		defer conn.Close()
		return conn.(*tls.Conn).ConnectionState().PeerCertificates[0].NotAfter, nil
	}
	inUse(t, ctx, s.server.RenewServing, connect)
	s.requireLogged(t, ctx, `"A certificate for serving has expired, clients refuse it" source="serving-cert::`)
	s.requireWatch(t, ctx, "serving")
	s.server.RenewServing(time.Now().Add(time.Hour))
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		_, err := connect(ctx)
		return err == nil, err
	}))
}

// clientOfEtcd: new connections use the certificate that is in the file. While etcd refuses it,
// reads of the latest state are refused, and memory answers others.
func (s *scene) clientOfEtcd(t *testing.T, ctx context.Context) {
	const refusal = "tls: expired certificate"
	var used time.Time
	before := 0
	renew := func(expires time.Time) {
		used, before = expires, strings.Count(s.server.Output(), refusal)
		harness.Check(t, s.etcd.Replace(s.ca.IssueUntil("etcd-client", expires)))
	}
	inUse(t, ctx, renew, func(ctx context.Context) (time.Time, error) {
		s.link.Reset()
		r, err := s.api.Do(ctx, http.MethodGet, mapsPath, "", nil)
		switch {
		case strings.Count(s.server.Output(), refusal) > before:
			return time.Time{}, errExpired
		case err != nil:
			return time.Time{}, err
		case r.Code != http.StatusOK:
			return time.Time{}, r.Err()
		}
		return used, nil
	})
	s.expireClient(t, ctx)
	_, err := s.api.List(ctx, mapsPath, "resourceVersion=0")
	harness.Check(t, err)
	harness.Check(t, s.etcd.Replace(s.ca.Issue("etcd-client")))
	s.requireWatch(t, ctx, "etcd")
}

// expireClient returns when etcd refuses the server.
func (s *scene) expireClient(t *testing.T, ctx context.Context) {
	t.Helper()
	harness.Check(t, s.etcd.Replace(s.ca.IssueUntil("etcd-client", expired())))
	s.link.Reset()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := s.api.Do(ctx, http.MethodGet, mapsPath, "", nil)
		if err != nil {
			return false, err
		}
		return r.Code == http.StatusTooManyRequests && r.Header.Get("Retry-After") != "", r.Err()
	}))
}

// stops: a server ends although etcd refuses it. Upstream's hooks wait for etcd.
func (s *scene) stops(t *testing.T, ctx context.Context) {
	s.expireClient(t, ctx)
	harness.Check(t, s.server.Signal(syscall.SIGTERM))
	code, err := s.server.Wait(ctx)
	harness.Check(t, err)
	if code != 1 || !strings.Contains(s.server.Output(), "does etcd answer?") {
		t.Errorf("the server ends with code %d, want 1 and the reason", code)
	}
}
