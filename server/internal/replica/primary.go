package replica

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/transport"
)

const (
	// dialTimeout bounds a connection to a primary, its TLS handshake included. A primary whose
	// machine is gone refuses no connection.
	dialTimeout = 3 * time.Second
	// pingAfter is the silence on an HTTP/2 connection after which it is tested, pingTimeout the
	// time in which it must answer. Their sum is healthUnanswered, after which requests in flight
	// are cancelled in any case.
	pingAfter   = 5 * time.Second
	pingTimeout = 5 * time.Second

	// username is the user of the replica's own requests: health checks and, with --delegate-auth,
	// reviews.
	username = "system:strata-replica"
)

// primary is one API server of --primary. Its methods may be called concurrently, except for those
// of health.go that say otherwise.
type primary struct {
	name    string // host and port, the value of metric labels
	connect func(*tls.Certificate) *links
	healthy atomic.Bool // false until the first proof, see health.go
	// of the last check or dial; nil while healthy, and before the first check
	failure atomic.Pointer[failure]
	// with the certificate that was proven last; not nil while healthy
	links  atomic.Pointer[links]
	life   life
	health health // of the goroutine that checks the primary
}

// links are the connections to a primary with one client certificate.
type links struct {
	certificate *tls.Certificate
	plain       *http.Transport // HTTP/2
	upgrade     *http.Transport // HTTP/1.1, for connections that change their protocol
	dials       atomic.Int64    // connections that plain has made
}

func (l *links) closeIdle() {
	l.plain.CloseIdleConnections()
	l.upgrade.CloseIdleConnections()
}

// pool distributes requests over the primaries. Its methods may be called concurrently.
type pool struct {
	primaries []*primary
	next      atomic.Uint64 // round robin
	identity  *identity
	timing    timing

	// closed when a primary is healthy or all have been checked, whichever is first
	settled   chan struct{}
	settle    sync.Once
	unchecked atomic.Int64 // primaries without a first check
}

// dialError is the error of a connection that could not be made, so that nothing of a request was
// sent.
type dialError struct{ err error }

func (e *dialError) Error() string { return e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// identity is the replica's certificate towards the primaries, which follows changes of its files.
type identity struct {
	*dynamiccertificates.DynamicCertKeyPairContent

	mu     sync.Mutex // leaf
	parsed *parsedPair
}

type parsedPair struct {
	cert, key string
	pair      tls.Certificate
}

func newIdentity(certFile, keyFile string) (*identity, error) {
	content, err := dynamiccertificates.NewDynamicServingContentFromFiles("replica-proxy-client", certFile, keyFile)
	if err != nil {
		return nil, fmt.Errorf("read the certificate for requests to the primaries: %w; check --proxy-client-cert-file and --proxy-client-key-file", err)
	}
	return &identity{DynamicCertKeyPairContent: content}, nil
}

// current returns the certificate. The same content has the same pointer.
func (i *identity) current() (*tls.Certificate, error) {
	cert, key := i.CurrentCertKeyContent()
	i.mu.Lock()
	defer i.mu.Unlock()
	if p := i.parsed; p != nil && p.cert == string(cert) && p.key == string(key) {
		return &p.pair, nil
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("certificate for requests to the primaries: %w; check --proxy-client-cert-file and --proxy-client-key-file", err)
	}
	i.parsed = &parsedPair{cert: string(cert), key: string(key), pair: pair}
	return &i.parsed.pair, nil
}

// newPool returns the primaries at the URLs, which have been validated. roots verifies their
// certificates, the system's authorities do if it is nil; it is asked for each connection. Requests
// wait until Run has checked the primaries.
func newPool(urls []*url.URL, roots func() *x509.CertPool, id *identity) *pool {
	p := &pool{identity: id, timing: defaultTiming, settled: make(chan struct{})}
	for _, u := range urls {
		host := u.Host
		if u.Port() == "" {
			host = net.JoinHostPort(u.Hostname(), "443")
		}
		one := &primary{name: host, connect: func(certificate *tls.Certificate) *links { return newLinks(host, roots, certificate) }}
		one.life.renew()
		p.primaries = append(p.primaries, one)
		primaryHealthy.WithLabelValues(one.name).Set(0)
	}
	p.unchecked.Store(int64(len(p.primaries)))
	return p
}

func newLinks(host string, roots func() *x509.CertPool, certificate *tls.Certificate) *links {
	config := func() *tls.Config {
		c := &tls.Config{MinVersion: tls.VersionTLS12, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return certificate, nil }}
		if roots != nil {
			c.RootCAs = roots()
		}
		return c
	}
	l := &links{certificate: certificate}
	l.plain, l.upgrade = newTransport(host, config, true, &l.dials), newTransport(host, config, false, nil)
	return l
}

// rootsOf returns the authorities of a file, which follow its changes.
func rootsOf(ca dynamiccertificates.CAContentProvider) func() *x509.CertPool {
	return func() *x509.CertPool {
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(ca.CurrentCABundleContent())
		return pool
	}
}

// newTransport returns a transport that connects to host, whatever the host of a request, and
// counts its connections in dials if that is not nil. Its errors of connections are dialErrors.
func newTransport(host string, base func() *tls.Config, http2 bool, dials *atomic.Int64) *http.Transport {
	protocols := []string{"http/1.1"}
	if http2 {
		protocols = []string{"h2", "http/1.1"}
	}
	t := &http.Transport{
		DialTLSContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialTimeout)
			defer cancel()
			config := base()
			config.ServerName, _, _ = net.SplitHostPort(host)
			config.NextProtos = protocols
			conn, err := (&tls.Dialer{NetDialer: &net.Dialer{KeepAlive: 30 * time.Second}, Config: config}).DialContext(ctx, network, host)
			if err != nil {
				return nil, &dialError{err}
			}
			if dials != nil {
				dials.Add(1)
			}
			return conn, nil
		},
		ForceAttemptHTTP2:   http2,
		DisableCompression:  true, // bodies pass as they are
		MaxIdleConnsPerHost: 32,
		IdleConnTimeout:     90 * time.Second,
	}
	if http2 {
		t.HTTP2 = &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout}
	} else {
		t.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	}
	return t
}

// errNoPrimary means that no primary was healthy, so that nothing was sent.
type errNoPrimary struct{ reason string }

func (e *errNoPrimary) Error() string { return e.reason }

// RoundTrip sends the request to a healthy primary, in turn. If no connection to it can be made,
// the request is sent to the next one: nothing of it has been sent. Before the first checks have
// ended, it waits for them. Errors: errNoPrimary; every other error means that a primary may have
// received the request.
func (p *pool) RoundTrip(req *http.Request) (*http.Response, error) {
	select {
	case <-p.settled:
	case <-req.Context().Done():
		return nil, &errNoPrimary{p.unhealthy()}
	}
	first := int(p.next.Add(1))
	for i := range p.primaries {
		to := p.primaries[(first+i)%len(p.primaries)]
		if !to.healthy.Load() {
			continue
		}
		body := &attemptBody{ReadCloser: req.Body}
		resp, err := to.send(req, body)
		var dial *dialError
		if err == nil || !errors.As(err, &dial) || body.wasRead() || req.Context().Err() != nil {
			body.end()
			return resp, err
		}
		to.down(&failure{reason: dial.Error()})
	}
	return nil, &errNoPrimary{p.unhealthy()}
}

// unhealthy describes the failures of the primaries.
func (p *pool) unhealthy() string {
	text := ""
	for _, one := range p.primaries {
		reason := "not checked yet"
		if f := one.failure.Load(); f != nil {
			reason = f.reason
		}
		if text != "" {
			text += "; "
		}
		text += one.name + ": " + reason
	}
	return text
}

// send sends a request to the primary and counts it. The request and its response end when the
// primary has been silent for too long.
func (p *primary) send(req *http.Request, body *attemptBody) (*http.Response, error) {
	bound := p.life.bind(req.Context())
	attempt := req.Clone(bound.ctx)
	attempt.URL.Scheme, attempt.URL.Host, attempt.Host = "https", p.name, ""
	if req.Body != nil && req.Body != http.NoBody {
		attempt.Body = body
	}
	l := p.links.Load()
	t := l.plain
	if req.Header.Get("Upgrade") != "" {
		t = l.upgrade
	}
	began := time.Now()
	resp, err := t.RoundTrip(attempt)
	observe(p.name, resp, err, time.Since(began))
	if err != nil {
		if cause := context.Cause(bound.ctx); errors.Is(cause, errSilent) {
			err = fmt.Errorf("%s: %w", p.name, cause)
		}
		bound.release()
		return nil, err
	}
	bound.follow(resp)
	return resp, nil
}

// setOwnIdentity makes a request one of the replica itself.
func setOwnIdentity(req *http.Request) {
	transport.SetAuthProxyHeaders(req, username, "", []string{"system:authenticated"}, nil)
}

// ownRequests sends requests of the replica itself.
type ownRequests struct{ to http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (o ownRequests) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	setOwnIdentity(req)
	return o.to.RoundTrip(req)
}

// attemptBody is the body of one attempt to send a request. While no byte of it was read, closing
// it does not close the body of the request, because a transport closes the body of a request whose
// connection it could not make, and the next attempt needs it.
type attemptBody struct {
	io.ReadCloser

	mu            sync.Mutex // leaf; not held while the body is read
	began, closed bool
	last          bool // no attempt follows: Close takes effect
}

// Read implements io.Reader.
func (b *attemptBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return 0, http.ErrBodyReadAfterClose
	}
	b.began = true
	b.mu.Unlock()
	return b.ReadCloser.Read(p)
}

// Close implements io.Closer.
func (b *attemptBody) Close() error {
	b.mu.Lock()
	b.closed = true
	effective := b.began || b.last
	b.mu.Unlock()
	if effective {
		return b.ReadCloser.Close()
	}
	return nil
}

// wasRead reports whether a byte may have been read, so that the request cannot be sent again.
func (b *attemptBody) wasRead() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.began
}

// end makes Close take effect, also if it was called before.
func (b *attemptBody) end() {
	b.mu.Lock()
	b.last = true
	closed := b.closed
	b.mu.Unlock()
	if closed && b.ReadCloser != nil {
		b.ReadCloser.Close()
	}
}
