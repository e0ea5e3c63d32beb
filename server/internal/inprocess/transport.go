package inprocess

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime/debug"
	"sync"

	"golang.org/x/net/http2"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
	"k8s.io/klog/v2"
)

// errAborted is the error of a response whose handler has panicked, or whose write deadline has
// passed. A client of a connection gets the same type, which client-go tests for, and code.
var errAborted = http2.StreamError{Code: http2.ErrCodeInternal, Cause: errors.New("the server aborted the response")}

// errStopped is the error of responses that Stop has ended.
var errStopped = errors.New("the server has stopped")

// Transport sends requests to a handler in this process. It does so from Serve to Stop; before and
// after, requests use the connection. So do requests to other hosts, those that change the
// protocol, and those with trailers. It is safe for concurrent use.
//
// A request is delivered as over HTTP/2 with TLS: same URL, headers, context values, TLS state
// without client certificate. All requests have the same remote address, whose port is 0, which no
// connection has. A Transport does not request compression.
type Transport struct {
	host   string // of the URLs of the server
	local  net.Addr
	remote string
	server *http.Server // marks the handler's context as that of a server; it is not run
	tls    tls.ConnectionState

	mu       sync.Mutex // leaf
	handler  http.Handler
	running  sync.WaitGroup // handlers; increased with mu held while handler is set
	stopping context.Context
	stop     context.CancelCauseFunc
}

// New returns a Transport for the server of a loopback configuration, whose host must be a URL of
// https with an address.
func New(loopback *rest.Config) (*Transport, error) {
	u, _, err := rest.DefaultServerUrlFor(loopback)
	if err != nil {
		return nil, fmt.Errorf("parse the URL of the loopback client: %w", err)
	}
	if u.Scheme != "https" {
		return nil, fmt.Errorf("the URL of the loopback client is %s, want https", u)
	}
	t := &Transport{host: u.Host, server: &http.Server{}, local: address(u.Host), remote: net.JoinHostPort(u.Hostname(), "0")}
	t.tls = tls.ConnectionState{
		Version: tls.VersionTLS13, HandshakeComplete: true, CipherSuite: tls.TLS_AES_128_GCM_SHA256,
		NegotiatedProtocol: "h2", ServerName: loopback.ServerName,
	}
	t.stopping, t.stop = context.WithCancelCause(context.Background())
	return t, nil
}

// address is the address of a TCP listener as text.
type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) }

// Install makes clients that are created from config later use t. Wrappers that config has already,
// such as that of tracing, see the requests first.
func (t *Transport) Install(config *rest.Config) {
	config.WrapTransport = transport.Wrappers(t.wrap, config.WrapTransport)
}

// wrap returns a RoundTripper that uses t, or next where it cannot. A transport that upgrades
// connections or sends a client certificate is returned as it is.
func (t *Transport) wrap(next http.RoundTripper) http.RoundTripper {
	base := next
	for {
		wrapper, ok := base.(utilnet.RoundTripperWrapper)
		if !ok {
			break
		}
		base = wrapper.WrappedRoundTripper()
	}
	plain, ok := base.(*http.Transport)
	if !ok {
		return next
	}
	if c := plain.TLSClientConfig; c != nil && (c.GetClientCertificate != nil || len(c.Certificates) > 0) {
		return next
	}
	return &roundTripper{t, next}
}

// Serve begins to send requests to handler.
func (t *Transport) Serve(handler http.Handler) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stopping.Err() == nil {
		t.handler = handler
	}
}

// Stop ends all requests, and waits until their handlers have returned or ctx ends. Later requests
// use the connection.
func (t *Transport) Stop(ctx context.Context) error {
	t.mu.Lock()
	t.handler = nil
	t.mu.Unlock()
	t.stop(errStopped)
	done := make(chan struct{})
	go func() {
		defer close(done)
		t.running.Wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for handlers of the server's own requests: %w", ctx.Err())
	}
}

// begin returns the handler and counts a request, or returns nil.
func (t *Transport) begin() http.Handler {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.handler != nil {
		t.running.Add(1)
	}
	return t.handler
}

// roundTripper is an http.RoundTripper with a Transport in front of a connection.
type roundTripper struct {
	*Transport
	next http.RoundTripper
}

// WrappedRoundTripper implements utilnet.RoundTripperWrapper.
func (t *roundTripper) WrappedRoundTripper() http.RoundTripper { return t.next }

// RoundTrip implements http.RoundTripper.
func (t *roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL == nil || req.URL.Scheme != "https" || req.URL.Host != t.host || req.Method == http.MethodConnect ||
		len(req.Trailer) > 0 || req.Header.Get("Upgrade") != "" {
		return t.next.RoundTrip(req)
	}
	handler := t.begin()
	if handler == nil {
		return t.next.RoundTrip(req)
	}
	return t.send(handler, req)
}

// send calls handler and returns its response as soon as its header is known.
func (t *Transport) send(handler http.Handler, req *http.Request) (*http.Response, error) {
	body := newRequestBody(req)
	if err := req.Context().Err(); err != nil {
		t.running.Done()
		body.finish()
		return nil, err
	}
	// abort cancels the context, and nothing else does before the handler has returned: Stop would
	// cancel a context below t.stopping before the response has its error.
	ctx := context.WithValue(context.Background(), http.ServerContextKey, t.server)
	ctx = context.WithValue(ctx, http.LocalAddrContextKey, t.local)
	ctx, cancel := context.WithCancel(ctx)
	received, err := t.received(ctx, req, body)
	if err != nil {
		t.running.Done()
		cancel()
		body.finish()
		return nil, err
	}
	x := newExchange(req, body, &t.tls, cancel)
	w := &writer{exchange: x, req: received, header: http.Header{}, declared: -1}
	ended := context.AfterFunc(req.Context(), func() { x.abort(req.Context().Err()) })
	stopped := context.AfterFunc(t.stopping, func() { x.abort(errStopped) })
	go func() {
		defer t.running.Done()
		defer func() {
			ended()
			stopped()
			cancel()
		}()
		w.serve(handler)
	}()
	return x.wait()
}

// serve calls handler and completes the response.
func (w *writer) serve(handler http.Handler) {
	completed := false
	defer func() {
		if !completed {
			w.recovered(recover())
		}
		w.end()
	}()
	handler.ServeHTTP(w, w.req)
	w.finish()
	completed = true
}

// recovered aborts the response after a panic, and logs it as net/http does.
func (w *writer) recovered(p any) {
	if p != nil && p != http.ErrAbortHandler {
		klog.ErrorS(fmt.Errorf("%v", p), "Panic in a request of the server's own client", "method", w.req.Method, "path", w.req.URL.Path,
			"stack", string(debug.Stack()))
	}
	w.exchange.abort(errAborted)
}
