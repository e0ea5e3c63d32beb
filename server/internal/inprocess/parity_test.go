package inprocess

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
)

// newServer starts a server of HTTP/2 with handler, and returns a client that uses its connection
// and one that calls the handler. Server and connection have the implementation of HTTP/2 that API
// servers and client-go use, which is not that of net/http.
func newServer(t *testing.T, handler http.Handler) (connection, inProcess *http.Client, transport *Transport, serverURL string) {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.EnableHTTP2 = true
	//lint:ignore SA1019 upstream's servers call it
	if err := http2.ConfigureServer(server.Config, nil); err != nil {
		t.Fatal(err)
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	base := utilnet.SetTransportDefaults(server.Client().Transport.(*http.Transport))
	base.DisableCompression = true
	transport, err := New(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	transport.Serve(handler)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := transport.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	return &http.Client{Transport: base}, &http.Client{Transport: transport.wrap(base)}, transport, server.URL
}

// observed is a response as its client sees it.
type observed struct {
	Status        string
	Proto         string
	Header        http.Header
	ContentLength int64
	Uncompressed  bool
	Body          string
	Trailer       http.Header
	TLS           bool
	Failed        string // "": no error
}

// observe sends a request with client.
func observe(client *http.Client, req *http.Request) observed {
	resp, err := client.Do(req)
	if err != nil {
		return observed{Failed: "request: " + kind(err)}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	resp.Header.Del("Date")
	o := observed{Status: resp.Status, Proto: resp.Proto, Header: resp.Header, ContentLength: resp.ContentLength, Uncompressed: resp.Uncompressed,
		Body: string(body), Trailer: resp.Trailer, TLS: resp.TLS != nil && resp.TLS.NegotiatedProtocol == "h2"}
	if err != nil {
		o.Failed = "body: " + kind(err)
	}
	return o
}

// kind reduces an error to the part that clients distinguish; client-go tests for the type of a
// stream's error.
func kind(err error) string {
	if request, ok := err.(*url.Error); ok {
		err = request.Err
	}
	if stream, ok := err.(http2.StreamError); ok {
		return "stream error: " + stream.Code.String()
	}
	for _, known := range []error{context.Canceled, context.DeadlineExceeded, io.ErrUnexpectedEOF} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	return "another error"
}

// closeNotifier is http.CloseNotifier, which is deprecated; upstream's filters ask for it.
type closeNotifier interface{ CloseNotify() <-chan bool }

// responses are handlers whose responses have to be the same over both transports.
var responses = map[string]http.HandlerFunc{
	"nothing":        func(http.ResponseWriter, *http.Request) {},
	"short":          func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") },
	"status":         func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusConflict) },
	"unknown status": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(799) },
	"second status":  func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404); w.WriteHeader(500) },
	"informational":  func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(103); w.WriteHeader(200) },
	"no content":     func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) },
	"not modified":   func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Etag", `"1"`); w.WriteHeader(304) },
	"JSON, sniffed":  func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html><body>") },
	"own type": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "a/b")
		fmt.Fprint(w, "x")
	},
	"no type": func(w http.ResponseWriter, _ *http.Request) { w.Header()["Content-Type"] = nil; fmt.Fprint(w, "x") },
	"gzip, not typed": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		fmt.Fprint(w, "x")
	},
	"4096 bytes": func(w http.ResponseWriter, _ *http.Request) { w.Write(bytes.Repeat([]byte("a"), 4096)) },
	"4097 bytes": func(w http.ResponseWriter, _ *http.Request) { w.Write(bytes.Repeat([]byte("a"), 4097)) },
	"many writes": func(w http.ResponseWriter, _ *http.Request) {
		for i := range 3000 {
			fmt.Fprintln(w, i)
		}
	},
	"large writes": func(w http.ResponseWriter, _ *http.Request) {
		for range 5 {
			w.Write(bytes.Repeat([]byte("0123456789"), 1<<17))
		}
	},
	"flushed": func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "a")
		w.(http.Flusher).Flush()
		fmt.Fprint(w, "b")
	},
	"flushed header": func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush() },
	"declared length": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "5")
		fmt.Fprint(w, "hello")
	},
	"invalid length": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "x")
		fmt.Fprint(w, "hello")
	},
	"length too long": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "9")
		fmt.Fprint(w, "hello")
	},
	"length too short": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "3")
		fmt.Fprint(w, "hello")
	},
	"length too short in two writes": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		fmt.Fprint(w, "hello,")
		fmt.Fprint(w, " world")
	},
	"length too short, and a write that fits": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		for _, part := range []string{"hello,", " world", "!"} {
			fmt.Fprint(w, part)
		}
	},
	"length too short, flushed": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		fmt.Fprint(w, "hello,")
		w.(http.Flusher).Flush()
		fmt.Fprint(w, " world")
	},
	"length zero": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "0")
		fmt.Fprint(w, "hello")
	},
	"header after status": func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(200)
		w.Header().Set("X-Late", "1")
		fmt.Fprint(w, "x")
	},
	"connection headers": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Transfer-Encoding", "chunked")
		w.Header().Set("Keep-Alive", "1")
		w.Header().Set("Upgrade", "x")
		fmt.Fprint(w, "x")
	},
	"asked to reconnect": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		fmt.Fprint(w, "x")
	},
	"several values": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Add("Warning", "299 - a")
		w.Header().Add("Warning", "299 - b")
	},
	"trailers": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-One, X-Two")
		fmt.Fprint(w, "x")
		w.Header().Set("X-One", "1")
		w.Header().Set(http.TrailerPrefix+"X-Three", "3")
	},
	"aborted before the header": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	"aborted in the body": func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "a")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	},
	"write deadline has passed": func(w http.ResponseWriter, req *http.Request) {
		fmt.Fprint(w, "a")
		w.(http.Flusher).Flush()
		http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0))
		<-req.Context().Done()
	},
	"write deadline in the future": func(w http.ResponseWriter, req *http.Request) {
		http.NewResponseController(w).SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
		<-req.Context().Done()
	},
	"write deadline removed": func(w http.ResponseWriter, _ *http.Request) {
		c := http.NewResponseController(w)
		c.SetWriteDeadline(time.Now().Add(time.Hour))
		c.SetWriteDeadline(time.Time{})
		fmt.Fprint(w, "done")
	},
	"interfaces": func(w http.ResponseWriter, _ *http.Request) {
		_, flusher := w.(http.Flusher)
		_, hijacker := w.(http.Hijacker)
		_, notifier := w.(closeNotifier)
		_, text := w.(io.StringWriter)
		c := http.NewResponseController(w)
		fmt.Fprintln(w, flusher, hijacker, notifier, text, c.EnableFullDuplex(), c.Flush(), c.SetReadDeadline(time.Time{}))
		_, _, err := c.Hijack()
		fmt.Fprintln(w, errors.Is(err, http.ErrNotSupported))
	},
}

// TestTransport_Responses_EqualConnection: a client sees the same response as over a connection.
func TestTransport_Responses_EqualConnection(t *testing.T) {
	for name, handler := range responses {
		t.Run(name, func(t *testing.T) {
			connection, inProcess, _, serverURL := newServer(t, handler)
			for _, method := range []string{"GET", "HEAD", "POST"} {
				if method == "HEAD" && (name == "trailers" || name == "aborted in the body" || name == "write deadline has passed") {
					continue // over a connection, the end of such a response races with its header
				}
				request := func() *http.Request {
					req, err := http.NewRequest(method, serverURL+"/a", nil)
					if err != nil {
						t.Fatal(err)
					}
					return req
				}
				want, got := observe(connection, request()), observe(inProcess, request())
				if !reflect.DeepEqual(got, want) {
					t.Errorf("%s:\ngot  %+v\nwant %+v", method, abridged(got), abridged(want))
				}
			}
		})
	}
}

func abridged(o observed) observed {
	if len(o.Body) > 100 {
		o.Body = fmt.Sprintf("%s... %d bytes", o.Body[:100], len(o.Body))
	}
	return o
}

// received is a request as its handler sees it.
type received struct {
	Method, URI, Path, Query, Host, Proto string
	Header                                http.Header
	ContentLength                         int64
	Body, BodyError                       string
	NoBody, TLS, Server, Local, Loopback  bool
	PeerCertificates                      int
	Value                                 any // of the client's context
}

type clientKey struct{}

func describe(w http.ResponseWriter, req *http.Request) {
	host, _, err := net.SplitHostPort(req.RemoteAddr)
	r := received{
		Method: req.Method, URI: req.RequestURI, Path: req.URL.EscapedPath(), Query: req.URL.RawQuery, Host: req.Host, Proto: req.Proto,
		Header: req.Header, ContentLength: req.ContentLength, NoBody: req.Body == http.NoBody,
		TLS: req.TLS != nil && req.TLS.HandshakeComplete && req.TLS.NegotiatedProtocol == "h2", PeerCertificates: len(req.TLS.PeerCertificates),
		Loopback: err == nil && net.ParseIP(host).IsLoopback(), Value: req.Context().Value(clientKey{}),
	}
	_, r.Server = req.Context().Value(http.ServerContextKey).(*http.Server)
	local, ok := req.Context().Value(http.LocalAddrContextKey).(net.Addr)
	r.Local = ok && local.String() == req.Host || req.Host == "other.example"
	body, err := io.ReadAll(req.Body)
	r.Body = string(body)
	if err != nil {
		r.BodyError = "failed"
	}
	json.NewEncoder(w).Encode(r)
}

// TestTransport_Requests_EqualConnection: a handler sees the same request as over a connection.
func TestTransport_Requests_EqualConnection(t *testing.T) {
	connection, inProcess, _, serverURL := newServer(t, http.HandlerFunc(describe))
	header := func(pairs ...string) func(*http.Request) {
		return func(req *http.Request) {
			for i := 0; i < len(pairs); i += 2 {
				req.Header.Add(pairs[i], pairs[i+1])
			}
		}
	}
	for _, tt := range []struct {
		name, method, target string
		body                 func() io.Reader
		change               func(*http.Request)
	}{
		{name: "plain", method: "GET", target: "/api/v1/pods?watch=1&fieldSelector=a%3Db"},
		{name: "no method", target: "/"},
		{name: "escaped path", method: "GET", target: "/a%2Fb/%20?x=%20y;z"},
		{name: "empty query", method: "GET", target: "/a?"},
		{name: "fragment", method: "GET", target: "/a#b"},
		{name: "double slash", method: "GET", target: "//a/../b"},
		{name: "headers", method: "GET", target: "/a", change: header("Accept", "a/b", "Accept", "c/d", "Authorization", "Bearer x", "User-Agent", "me")},
		{name: "empty user agent", method: "GET", target: "/a", change: header("User-Agent", "")},
		{name: "lower case", method: "GET", target: "/a", change: func(req *http.Request) { req.Header["impersonate-user"] = []string{"x"} }},
		{name: "connection headers", method: "GET", target: "/a", change: header("Keep-Alive", "1", "Proxy-Connection", "x", "Connection", "keep-alive")},
		{name: "content length header", method: "GET", target: "/a", change: header("Content-Length", "77")},
		{name: "accept encoding", method: "GET", target: "/a", change: header("Accept-Encoding", "gzip")},
		{name: "other host", method: "GET", target: "/a", change: func(req *http.Request) { req.Host = "other.example" }},
		{name: "value of the context", method: "GET", target: "/a", change: func(req *http.Request) {
			*req = *req.WithContext(context.WithValue(req.Context(), clientKey{}, "x"))
		}},
		{name: "body", method: "POST", target: "/a", body: func() io.Reader { return strings.NewReader("hello") }},
		{name: "empty body", method: "PUT", target: "/a", body: func() io.Reader { return strings.NewReader("") }},
		{name: "no body", method: "PATCH", target: "/a"},
		{name: "body of unknown length", method: "POST", target: "/a", body: func() io.Reader { return io.MultiReader(strings.NewReader("hello")) }},
		{name: "large body", method: "POST", target: "/a", body: func() io.Reader { return strings.NewReader(strings.Repeat("x", 1<<20)) }},
		{name: "GET with a body", method: "GET", target: "/a", body: func() io.Reader { return strings.NewReader("hello") }},
		{name: "DELETE with a body", method: "DELETE", target: "/a", body: func() io.Reader { return strings.NewReader("{}") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			request := func() *http.Request {
				var body io.Reader
				if tt.body != nil {
					body = tt.body()
				}
				req, err := http.NewRequest(tt.method, serverURL+tt.target, body)
				if err != nil {
					t.Fatal(err)
				}
				req.Method = tt.method
				if tt.change != nil {
					tt.change(req)
				}
				return req
			}
			want, got := observe(connection, request()), observe(inProcess, request())
			if want.Failed != "" || want.Body == "" {
				t.Fatalf("connection: %+v", want)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("\ngot  %+v\nwant %+v", got, want)
			}
		})
	}
}

// brokenBody returns an error in the middle.
type brokenBody struct{ rest string }

func (b *brokenBody) Read(p []byte) (int, error) {
	if b.rest == "" {
		return 0, errors.New("broken")
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// TestTransport_InvalidBody_FailsRead: a handler gets an error for a body that breaks off, or has
// another length than declared.
func TestTransport_InvalidBody_FailsRead(t *testing.T) {
	for name, set := range map[string]func(*http.Request){
		"broken":    func(req *http.Request) { req.Body = io.NopCloser(&brokenBody{"half"}) },
		"too short": func(req *http.Request) { req.ContentLength = 10 },
		"too long":  func(req *http.Request) { req.ContentLength = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			errs := make(chan error, 1)
			_, inProcess, _, serverURL := newServer(t, http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				_, err := io.ReadAll(req.Body)
				errs <- err
			}))
			req, err := http.NewRequest("POST", serverURL+"/a", strings.NewReader("hello"))
			if err != nil {
				t.Fatal(err)
			}
			set(req)
			if got := observe(inProcess, req); got.Status != "200 OK" {
				t.Errorf("%+v", got)
			}
			if err := <-errs; err == nil {
				t.Error("the handler read the body without an error")
			}
		})
	}
}

// TestTransport_ReadDeadline_EndsBody: a read of a body that does not arrive fails at its deadline.
func TestTransport_ReadDeadline_EndsBody(t *testing.T) {
	connection, inProcess, _, serverURL := newServer(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if err := http.NewResponseController(w).SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
			t.Error(err)
		}
		_, err := io.ReadAll(req.Body)
		fmt.Fprint(w, errors.Is(err, os.ErrDeadlineExceeded))
	}))
	for name, client := range map[string]*http.Client{"connection": connection, "in process": inProcess} {
		body, feed := io.Pipe()
		defer feed.Close()
		req, err := http.NewRequest("POST", serverURL+"/a", body)
		if err != nil {
			t.Fatal(err)
		}
		if got := observe(client, req); got.Body != "true" {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// TestTransport_BehindProxy_AbortsResponse: a reverse proxy breaks a response off as behind a
// connection, which it knows by the context's server.
func TestTransport_BehindProxy_AbortsResponse(t *testing.T) {
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "a")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}))
	defer broken.Close()
	target, err := url.Parse(broken.URL)
	if err != nil {
		t.Fatal(err)
	}
	_, inProcess, _, serverURL := newServer(t, httputil.NewSingleHostReverseProxy(target))
	req, err := http.NewRequest("GET", serverURL+"/a", nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := observe(inProcess, req); got.Body != "a" || got.Failed == "" {
		t.Errorf("%+v", got)
	}
}
