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
	"k8s.io/klog/v2"
)

const (
	// healthInterval is the time between two health checks of a primary, healthTimeout the time that one may take.
	healthInterval = time.Second
	healthTimeout  = 2 * time.Second
	// dialTimeout bounds a connection to a primary, its TLS handshake included. A primary whose machine is gone refuses no connection.
	dialTimeout = 3 * time.Second
	// pingAfter is the silence on an HTTP/2 connection after which it is tested, pingTimeout the time in which it must answer. Values of
	// client-go.
	pingAfter   = 30 * time.Second
	pingTimeout = 15 * time.Second

	// username is the user of the replica's own requests: health checks and, with --delegate-auth, reviews.
	username = "system:strata-replica"
)

// primary is one API server of --primary. Its methods may be called concurrently.
type primary struct {
	name    string          // host and port, the value of metric labels
	plain   *http.Transport // HTTP/2
	upgrade *http.Transport // HTTP/1.1, for connections that change their protocol
	healthy atomic.Bool
	failure atomic.Pointer[string] // of the last check or dial; nil while healthy
}

// pool distributes requests over the primaries. Its methods may be called concurrently.
type pool struct {
	primaries []*primary
	next      atomic.Uint64 // round robin
}

// dialError is the error of a connection that could not be made, so that nothing of a request was sent.
type dialError struct{ err error }

func (e *dialError) Error() string { return e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// identity is the replica's certificate towards the primaries, which follows changes of its files.
type identity struct {
	*dynamiccertificates.DynamicCertKeyPairContent
	parsed atomic.Pointer[parsedPair]
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

// clientCertificate is a tls.Config.GetClientCertificate.
func (i *identity) clientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	cert, key := i.CurrentCertKeyContent()
	if p := i.parsed.Load(); p != nil && p.cert == string(cert) && p.key == string(key) {
		return &p.pair, nil
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("certificate for requests to the primaries: %w", err)
	}
	p := &parsedPair{cert: string(cert), key: string(key), pair: pair}
	i.parsed.Store(p)
	return &p.pair, nil
}

// newPool returns the primaries at the URLs, which have been validated. roots verifies their certificates, the system's authorities do
// if it is nil; it is asked for each connection.
func newPool(urls []*url.URL, roots func() *x509.CertPool, id *identity) *pool {
	config := func() *tls.Config {
		c := &tls.Config{MinVersion: tls.VersionTLS12, GetClientCertificate: id.clientCertificate}
		if roots != nil {
			c.RootCAs = roots()
		}
		return c
	}
	p := &pool{}
	for _, u := range urls {
		host := u.Host
		if u.Port() == "" {
			host = net.JoinHostPort(u.Hostname(), "443")
		}
		one := &primary{name: host, plain: newTransport(host, config, true), upgrade: newTransport(host, config, false)}
		one.healthy.Store(true) // until a check or a connection fails
		p.primaries = append(p.primaries, one)
		primaryHealthy.WithLabelValues(one.name).Set(1)
	}
	return p
}

// rootsOf returns the authorities of a file, which follow its changes.
func rootsOf(ca dynamiccertificates.CAContentProvider) func() *x509.CertPool {
	return func() *x509.CertPool {
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(ca.CurrentCABundleContent())
		return pool
	}
}

// newTransport returns a transport that connects to host, whatever the host of a request. Its errors of connections are dialErrors.
func newTransport(host string, base func() *tls.Config, http2 bool) *http.Transport {
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

// RoundTrip sends the request to a healthy primary, in turn. If no connection to it can be made, the request is sent to the next one:
// nothing of it has been sent. Errors: errNoPrimary; every other error means that a primary may have received the request.
func (p *pool) RoundTrip(req *http.Request) (*http.Response, error) {
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
		to.down(dial.Error())
	}
	return nil, &errNoPrimary{p.unhealthy()}
}

// unhealthy describes the failures of the primaries.
func (p *pool) unhealthy() string {
	text := ""
	for _, one := range p.primaries {
		reason := "not healthy"
		if r := one.failure.Load(); r != nil {
			reason = *r
		}
		if text != "" {
			text += "; "
		}
		text += one.name + ": " + reason
	}
	return text
}

// send sends a request to the primary and counts it.
func (p *primary) send(req *http.Request, body *attemptBody) (*http.Response, error) {
	attempt := req.Clone(req.Context())
	attempt.URL.Scheme, attempt.URL.Host, attempt.Host = "https", p.name, ""
	if req.Body != nil && req.Body != http.NoBody {
		attempt.Body = body
	}
	t := p.plain
	if req.Header.Get("Upgrade") != "" {
		t = p.upgrade
	}
	began := time.Now()
	resp, err := t.RoundTrip(attempt)
	observe(p.name, resp, err, time.Since(began))
	return resp, err
}

// down records a failure. The next health check that succeeds ends it.
func (p *primary) down(reason string) {
	p.failure.Store(&reason)
	if p.healthy.Swap(false) {
		primaryHealthy.WithLabelValues(p.name).Set(0)
		klog.InfoS("Primary is not healthy; requests go to the others", "primary", p.name, "reason", reason)
	}
}

// up records a successful check.
func (p *primary) up() {
	p.failure.Store(nil)
	if !p.healthy.Swap(true) {
		primaryHealthy.WithLabelValues(p.name).Set(1)
		klog.InfoS("Primary is healthy again", "primary", p.name)
	}
}

// check asks the primary whether it is ready. A server that refuses to tell is as good as ready.
func (p *primary) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+p.name+"/readyz", nil)
	if err != nil {
		return err
	}
	setOwnIdentity(req)
	resp, err := p.plain.RoundTrip(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode >= http.StatusInternalServerError {
		return fmt.Errorf("/readyz: %s", resp.Status)
	}
	return nil
}

// Run checks each primary every healthInterval until ctx ends, and then closes idle connections.
func (p *pool) Run(ctx context.Context) {
	var checks sync.WaitGroup
	for _, one := range p.primaries {
		checks.Go(func() {
			ticker := time.NewTicker(healthInterval)
			defer ticker.Stop()
			for {
				if err := one.check(ctx); ctx.Err() != nil {
					return
				} else if err != nil {
					one.down(err.Error())
				} else {
					one.up()
				}
				select {
				case <-ctx.Done():
					return
				case <-ticker.C:
				}
			}
		})
	}
	checks.Wait()
	for _, one := range p.primaries {
		one.plain.CloseIdleConnections()
		one.upgrade.CloseIdleConnections()
	}
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

// attemptBody is the body of one attempt to send a request. While no byte of it was read, closing it does not close the body of the request,
// because a transport closes the body of a request whose connection it could not make, and the next attempt needs it.
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
