package replica

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
)

// body counts calls of Close.
type body struct {
	io.Reader
	closed int
}

func (b *body) Close() error {
	b.closed++
	return nil
}

// TestAttemptBody_ClosedUnread_IsClosedByLastAttempt: a failed attempt leaves the body to the next
// one. A body that its transport closed without reading it, because the response came first, is
// closed once no attempt follows: a client that has stopped to send would block its reader.
func TestAttemptBody_ClosedUnread_IsClosedByLastAttempt(t *testing.T) {
	b := &body{Reader: strings.NewReader("text")}
	first := &attemptBody{ReadCloser: b}
	if err := first.Close(); err != nil || b.closed != 0 || first.wasRead() {
		t.Fatalf("after the first attempt: error %v, closed %d times, read %v", err, b.closed, first.wasRead())
	}
	last := &attemptBody{ReadCloser: b}
	if err := last.Close(); err != nil || b.closed != 0 {
		t.Fatalf("after Close of the last attempt: error %v, closed %d times", err, b.closed)
	}
	if _, err := last.Read(make([]byte, 4)); !errors.Is(err, http.ErrBodyReadAfterClose) {
		t.Errorf("read after Close: %v, want %v", err, http.ErrBodyReadAfterClose)
	}
	if last.end(); b.closed != 1 {
		t.Errorf("closed %d times at the end, want once", b.closed)
	}
}

// TestAttemptBody_Read_CannotBeSentAgain: and Close takes effect at once.
func TestAttemptBody_Read_CannotBeSentAgain(t *testing.T) {
	b := &body{Reader: strings.NewReader("text")}
	a := &attemptBody{ReadCloser: b}
	if text, err := io.ReadAll(a); err != nil || string(text) != "text" || !a.wasRead() {
		t.Errorf("read %q, %v, wasRead %v", text, err, a.wasRead())
	}
	if a.Close(); b.closed != 1 {
		t.Errorf("closed %d times, want once", b.closed)
	}
}

// unsentBody is a body of which nothing can be read before it is closed.
type unsentBody struct{ closed chan struct{} }

func (b unsentBody) Read([]byte) (int, error) {
	<-b.closed
	return 0, io.ErrUnexpectedEOF
}

func (b unsentBody) Close() error {
	close(b.closed)
	return nil
}

// TestProxy_RefusedBeforeTheBody_EndsTheResponse: a client of HTTP/2 sends no more of the body when
// it receives an error, and waits for the end of the response. The proxy must not wait for the end
// of the body.
func TestProxy_RefusedBeforeTheBody_EndsTheResponse(t *testing.T) {
	s := newStub(t, &stubPrimary{})
	p := s.pool(t, s.files.FrontProxyClient, testTiming)
	await(t, "first proof", p.primaries[0].healthy.Load)
	proxy := newProxy(p, newClaims(nil), legacyscheme.Codecs, false)
	front := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { proxy.ServeHTTP(w, as(req, "reader")) }))
	front.EnableHTTP2 = true
	front.StartTLS()
	t.Cleanup(func() {
		front.CloseClientConnections()
		front.Close()
	})
	ctx, cancel := context.WithTimeout(t.Context(), stubTimeout)
	defer cancel()
	for range 50 { // the response is early enough to hang in most of them
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, front.URL+"/refuse", unsentBody{make(chan struct{})})
		check(t, err)
		req.ContentLength = 100
		resp, err := front.Client().Do(req)
		check(t, err)
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(text) != "refused" || resp.StatusCode != http.StatusForbidden || resp.ProtoMajor != 2 {
			t.Fatalf("%s, code %d, body %q, error %v, want code 403 and the body \"refused\" over HTTP/2", resp.Proto, resp.StatusCode, text, err)
		}
	}
}

func TestIsDocument_Paths_AreDiscoveryOpenAPIAndVersion(t *testing.T) {
	for path, want := range map[string]bool{
		"/version": true, "/version/": true, "/api": true, "/api/": true, "/api/v1": true, "/apis": true, "/apis/apps": true, "/apis/apps/v1": true,
		"/openapi/v2": true, "/openapi/v3": true, "/openapi/v3/apis/apps/v1": true,
		"/": false, "/versions": false, "/api/v1/pods": false, "/apis/apps/v1/deployments": false, "/openapi": false, "/openapi/v4": false, "/healthz": false,
		"/openid/v1/jwks": false,
	} {
		if got := isDocument(http.MethodGet, path); got != want {
			t.Errorf("GET %s: %v, want %v", path, got, want)
		}
		if isDocument(http.MethodPost, path) {
			t.Errorf("POST %s is a document", path)
		}
	}
}

func TestIsOwnPath_Paths_EndAtSlash(t *testing.T) {
	for path, want := range map[string]bool{
		"/healthz": true, "/healthz/etcd": true, "/readyz/replica-lag": true, "/metrics": true, "/metrics/slis": true, "/debug/pprof/heap": true,
		"/debug/strata/status": true, "/healthzz": false, "/metricsx": false, "/": false, "/logs": false,
	} {
		if got := isOwnPath(path); got != want {
			t.Errorf("%s: %v, want %v", path, got, want)
		}
	}
}

// TestDispatcher_Request_IsLocalOrProxied covers the decisions that do not depend on the resources
// of the chain.
func TestDispatcher_Request_IsLocalOrProxied(t *testing.T) {
	d := &dispatcher{} // asking it for a resource would panic
	resource := func(verb, resource, subresource string) *request.RequestInfo {
		return &request.RequestInfo{IsResourceRequest: true, Verb: verb, APIVersion: "v1", Resource: resource, Subresource: subresource}
	}
	for _, c := range []struct {
		name   string
		header http.Header
		info   *request.RequestInfo
		want   bool
	}{
		{"own path", nil, &request.RequestInfo{Path: "/readyz"}, true},
		{"unknown path", nil, &request.RequestInfo{Path: "/unknown"}, false},
		{"discovery", nil, &request.RequestInfo{Path: "/apis"}, true},
		{"create", nil, resource("create", "pods", ""), false},
		{"delete of a collection", nil, resource("deletecollection", "pods", ""), false},
		{"log", nil, resource("get", "pods", "log"), false},
		{"exec by GET", nil, resource("get", "pods", "exec"), false},
		{"watch over a WebSocket", http.Header{"Upgrade": {"websocket"}}, resource("watch", "pods", ""), false},
		{"component statuses", nil, resource("list", "componentstatuses", ""), false},
	} {
		req := &http.Request{Method: http.MethodGet, Header: c.header}
		if got := d.isLocal(req, c.info); got != c.want {
			t.Errorf("%s: local %v, want %v", c.name, got, c.want)
		}
	}
}
