package handlerchain

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	basecompatibility "k8s.io/component-base/compatibility"

	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/apiserver/pkg/util/notfoundhandler"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// patience bounds every wait of the tests below, far above the expected durations.
const patience = 2 * time.Minute

// chainServer is a GenericAPIServer without resources, on a port of loopback.
type chainServer struct {
	server *genericapiserver.GenericAPIServer
	seats  *seats
	url    string // URL of configmaps, which the server does not serve
}

// serving returns the certificate of all servers: its keys are expensive to make.
var serving = sync.OnceValues(func() (dynamiccertificates.CertKeyContentProvider, error) {
	cert, key, err := certutil.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{{127, 0, 0, 1}}, nil)
	if err != nil {
		return nil, err
	}
	return dynamiccertificates.NewStaticCertKeyContent("test", cert, key)
})

// newChainServer returns a server that is not running. mount returns the read handler; its
// responses name the chain that the request took in the header Chain.
func newChainServer(t *testing.T, change func(*genericapiserver.Config), mount func(next http.Handler) http.Handler) *chainServer {
	t.Helper()
	c, seats := chainConfig()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	content, err := serving()
	testcheck.NoError(t, err)
	c.SecureServing = &genericapiserver.SecureServingInfo{Listener: listener, Cert: content}
	c.ExternalAddress = listener.Addr().String()
	c.LoopbackClientConfig = &rest.Config{}
	c.EffectiveVersion = basecompatibility.NewEffectiveVersionFromString("", "", "")
	c.SkipOpenAPIInstallation = true
	if change != nil {
		change(c)
	}
	c.BuildHandlerChainFunc = func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		names := []string{"full", "fast"}
		return New(apiHandler, c, Options{Mount: func(next http.Handler) http.Handler {
			name, inner := names[0], mount(next)
			names = names[1:]
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				w.Header().Set("Chain", name)
				inner.ServeHTTP(w, req)
			})
		}})
	}
	missing := notfoundhandler.New(chainCodecs, genericapifilters.NoMuxAndDiscoveryIncompleteKey)
	server, err := c.Complete(nil).New("test", genericapiserver.NewEmptyDelegateWithCustomHandler(missing))
	testcheck.NoError(t, err)
	return &chainServer{server: server, seats: seats, url: "https://" + listener.Addr().String() + configmapsPath}
}

// start runs the server until stop is called or the test ends, and waits until requests take
// the fast chain. stopped is closed when the server has returned.
func (s *chainServer) start(t *testing.T) (stop func(), stopped <-chan struct{}) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	prepared := s.server.PrepareRun()
	go func() {
		defer close(done)
		if err := prepared.RunWithContext(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	}()
	t.Cleanup(func() { cancel(); wait(t, "the server to stop", done) })
	client := s.client(t, false)
	eventually(t, "the fast chain", func() bool {
		resp, err := client.Do(s.list(t, "?limit=1"))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.Header.Get("Chain") == "fast"
	})
	return cancel, done
}

func (s *chainServer) client(t *testing.T, http2 bool) *http.Client {
	return s.clientOver(t, http2, (&net.Dialer{}).DialContext)
}

func (s *chainServer) clientOver(t *testing.T, http2 bool, dial func(ctx context.Context, network, addr string) (net.Conn, error)) *http.Client {
	transport := &http.Transport{
		DialContext:       dial,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // self-signed certificate
		ForceAttemptHTTP2: http2,
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: patience}
}

func (s *chainServer) list(t *testing.T, query string) *http.Request {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, s.url+query, nil)
	testcheck.NoError(t, err)
	req.Header.Set("Authorization", "reader")
	return req
}

func wait(t *testing.T, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
	}
}

func eventually(t *testing.T, what string, reached func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !reached(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// TestChain_MuxIncomplete_Returns503: an unknown path is answered with 503 until all paths are
// installed, then with 404; a request through the full chain detects the change.
func TestChain_MuxIncomplete_Returns503(t *testing.T) {
	s := newChainServer(t, nil, func(next http.Handler) http.Handler { return next })
	for range 2 {
		before := send(s.server.Handler, readBy("reader", ""))
		if chain := before.Header.Get("Chain"); before.StatusCode != 503 || chain != "full" {
			t.Errorf("before the start: status %d by the %s chain, want 503 by the full one", before.StatusCode, chain)
		}
	}
	s.start(t)
	after := send(s.server.Handler, readBy("reader", ""))
	if chain := after.Header.Get("Chain"); after.StatusCode != 404 || chain != "fast" {
		t.Errorf("after the start: status %d by the %s chain, want 404 by the fast one", after.StatusCode, chain)
	}
}

// TestChain_Shutdown_UsesFullChain: once shutdown has begun, requests take the full chain, which
// sets Retry-After; an in-flight list in the fast chain is answered.
func TestChain_Shutdown_UsesFullChain(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	s := newChainServer(t, func(c *genericapiserver.Config) { c.ShutdownSendRetryAfter = true },
		func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if req.URL.Query().Get("limit") == "7" {
					close(entered)
					<-leave
				}
				w.WriteHeader(http.StatusOK)
			})
		})
	hold := make(chan struct{}) // after shutdown has begun, before requests are rejected
	if err := s.server.AddPreShutdownHook("hold", func() error { <-hold; return nil }); err != nil {
		t.Fatal(err)
	}
	stop, stopped := s.start(t)
	client := s.client(t, true)

	var underWay sync.WaitGroup
	underWay.Go(func() {
		resp, err := client.Do(s.list(t, "?limit=7"))
		if err != nil {
			t.Errorf("the list under way: %v", err)
			return
		}
		resp.Body.Close()
		if resp.StatusCode != 200 || resp.Header.Get("Chain") != "fast" {
			t.Errorf("the list under way: status %d by the %s chain", resp.StatusCode, resp.Header.Get("Chain"))
		}
	})
	wait(t, "the list to be under way", entered)

	stop()
	answer := func() (status int, chain, retryAfter string) {
		resp := send(s.server.Handler, readBy("reader", ""))
		return resp.StatusCode, resp.Header.Get("Chain"), resp.Header.Get("Retry-After")
	}
	eventually(t, "the full chain", func() bool {
		status, chain, _ := answer()
		return status == 200 && chain == "full"
	})
	close(hold)
	eventually(t, "429 with a Retry-After", func() bool {
		status, _, retryAfter := answer()
		return status == 429 && retryAfter == "5"
	})
	close(leave)
	underWay.Wait()
	wait(t, "the server to stop", stopped)
}

// endless answers a request without a timeout at once, and writes to others until that fails; the
// error is sent to returned.
func endless(returned chan<- error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Query().Get("timeout") == "" {
			w.WriteHeader(http.StatusOK)
			return
		}
		item := make([]byte, 64<<10)
		for {
			if _, err := w.Write(item); err != nil {
				returned <- err
				return
			}
		}
	})
}

// connectionOf sends a list, reads the response, and returns the local address of its connection.
func (s *chainServer) connectionOf(t *testing.T, client *http.Client, http2 bool) (local string) {
	t.Helper()
	req := s.list(t, "")
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) { local = info.Conn.LocalAddr().String() },
	}))
	resp, err := client.Do(req)
	if err != nil {
		t.Fatalf("a list that is read: %v", err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	if resp.StatusCode != 200 || http2 != (resp.ProtoMajor == 2) {
		t.Fatalf("a list that is read: status %d over %s", resp.StatusCode, resp.Proto)
	}
	return local
}

// TestFastChain_StalledReader_LosesSeatAtDeadline: a client that does not read loses its seat at
// the deadline, and cannot mistake the partial response for a complete one.
func TestFastChain_StalledReader_LosesSeatAtDeadline(t *testing.T) {
	for name, test := range map[string]struct {
		http2 bool
		// deaf means that the client reads nothing from its connection, so that a stream reset
		// cannot be sent. Several streams fill the buffers of the connection.
		deaf    bool
		streams int
	}{
		"HTTP/1.1":                     {streams: 1},
		"HTTP/2":                       {streams: 1, http2: true},
		"HTTP/2, the whole connection": {streams: 4, http2: true, deaf: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			returned := make(chan error, test.streams)
			s := newChainServer(t, nil, func(http.Handler) http.Handler {
				return endless(returned)
			})
			s.start(t)
			var deaf atomic.Bool
			client := s.clientOver(t, test.http2, func(ctx context.Context, network, addr string) (net.Conn, error) {
				conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
				if err != nil {
					return nil, err
				}
				return &deafConn{Conn: conn, deaf: &deaf, closed: make(chan struct{})}, nil
			})
			before := s.connectionOf(t, client, test.http2)

			deaf.Store(test.deaf)
			var clients sync.WaitGroup
			read := make(chan struct{})
			for range test.streams {
				clients.Go(func() {
					resp, err := client.Do(s.list(t, "?timeout=15s")) // enough for a busy machine
					if err != nil {
						if !test.deaf {
							t.Errorf("no response: %v", err)
						}
						return
					}
					defer resp.Body.Close()
					<-read
					if _, err := io.Copy(io.Discard, resp.Body); err == nil {
						t.Error("the response seems complete")
					}
				})
			}
			for range test.streams {
				select {
				case <-returned:
				case <-time.After(patience):
					t.Fatal("the handler still writes to a stalled reader")
				}
			}
			eventually(t, "the seats to be free", func() bool { return s.seats.taken.Load() == 0 })
			deaf.Store(false)
			close(read)
			clients.Wait()
			after := s.connectionOf(t, client, test.http2)
			if reused := before == after; reused != (test.http2 && !test.deaf) {
				t.Errorf("connection %s before, %s after", before, after)
			}
		})
	}
}

// deafConn is a connection whose reads block while deaf is set.
type deafConn struct {
	net.Conn
	deaf   *atomic.Bool
	close  sync.Once
	closed chan struct{}
}

func (c *deafConn) Read(p []byte) (int, error) {
	for c.deaf.Load() {
		select {
		case <-c.closed:
			return 0, net.ErrClosed
		case <-time.After(time.Millisecond):
		}
	}
	return c.Conn.Read(p)
}

func (c *deafConn) Close() error {
	c.close.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// TestFastChain_PastDeadline_ConnectionIsReused: a connection whose response was in time carries
// the next one after the deadline of the first.
func TestFastChain_PastDeadline_ConnectionIsReused(t *testing.T) {
	for _, test := range []struct {
		name  string
		http2 bool
	}{{"HTTP/1.1", false}, {"HTTP/2", true}} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			body := bytes.Repeat([]byte("0123456789abcdef"), 64<<10/16) // enough to start the timer
			s := newChainServer(t, nil, func(http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(body) })
			})
			s.start(t)
			client := s.client(t, test.http2)
			const timeout = 15 * time.Second // a busy machine answers in time
			send := func() (reused bool) {
				t.Helper()
				req := s.list(t, "?timeout="+timeout.String())
				req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
					GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused },
				}))
				resp, err := client.Do(req)
				testcheck.NoError(t, err)
				got, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || !bytes.Equal(got, body) {
					t.Fatalf("a response has %d bytes, %v", len(got), err)
				}
				return reused
			}
			if send() {
				t.Fatal("the first connection was reused")
			}
			// A client of HTTP/1.1 may drop a connection by itself while the machine is busy.
			for range 5 {
				time.Sleep(timeout + 50*time.Millisecond) // past the deadline of the one before
				if send() {
					return
				}
			}
			t.Error("no connection was reused")
		})
	}
}

// TestFastChain_PassedOnRequest_HoldsSeat: a request that upstream's handlers answer within the
// fast chain holds its seat of priority and fairness until they return, even if its timeout is
// earlier.
func TestFastChain_PassedOnRequest_HoldsSeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		entered, leave := make(chan context.Context, 1), make(chan struct{})
		slow := http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
			entered <- req.Context()
			<-leave
		})
		c, seats := chainConfig()
		h := New(slow, c, Options{Mount: func(next http.Handler) http.Handler { return next }})
		h.complete.Store(true)
		answered := make(chan *http.Response, 1)
		go func() { answered <- send(requireFast{t, h}, readBy("reader", "?timeout=20ms")) }()
		<-(<-entered).Done() // the timeout of the request
		synctest.Wait()
		if n := seats.taken.Load(); n != 1 {
			t.Errorf("%d seats are taken while the handler works", n)
		}
		select {
		case resp := <-answered:
			t.Errorf("status %d while the handler works", resp.StatusCode)
			answered <- resp
		default:
		}
		close(leave)
		if resp := <-answered; resp.StatusCode != http.StatusGatewayTimeout {
			t.Errorf("status %d, want 504", resp.StatusCode)
		}
		if seats.taken.Load() != 0 {
			t.Error("the request still holds its seat")
		}
	})
}
