package replica

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/options"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
)

// recorder is a primary that records the last request, and answers with text or an error.
type recorder struct {
	last *http.Request
	err  error
}

func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	r.last = req
	if r.err != nil {
		return nil, r.err
	}
	w := httptest.NewRecorder()
	_, _ = io.WriteString(w, "ok")
	return w.Result(), nil
}

// as returns the request with a user and the information of its path.
func as(req *http.Request, name string, groups ...string) *http.Request {
	ctx := request.WithUser(req.Context(), &user.DefaultInfo{Name: name, UID: name + "-uid", Groups: groups})
	return req.WithContext(request.WithRequestInfo(ctx, &request.RequestInfo{IsResourceRequest: true, Verb: "create", APIVersion: "v1", Resource: "pods", Path: req.URL.Path}))
}

// TestProxy_ClaimsAndCredentials_AreRemoved: headers in which a front proxy names a user, and
// credentials, do not reach the primary.
func TestProxy_ClaimsAndCredentials_AreRemoved(t *testing.T) {
	primary := &recorder{}
	proxy := newProxy(primary, newClaims(&options.RequestHeaderAuthenticationOptions{UsernameHeaders: []string{"X-Remote-User", "X-Own-User"}, UIDHeaders: []string{"X-Own-Uid"},
		GroupHeaders: []string{" x-own-group "}, ExtraHeaderPrefixes: []string{"X-Own-Extra-"}}), legacyscheme.Codecs, false)
	req := httptest.NewRequest(http.MethodPost, "/api/v1/pods", nil)
	req.Header = http.Header{
		"X-Own-User": {"admin"}, "X-Own-Uid": {"1"}, "X-Own-Group": {"system:masters"}, "X-Own-Extra-Scopes": {"all"}, "x-own-group": {"system:masters"},
		"X-Remote-User": {"admin"}, "X-Remote-Uid": {"1"}, "X-Remote-Group": {"system:masters"}, "X-Remote-Extra-Scopes": {"all"}, "X-Remote-Other": {"all"},
		"x-remote-group": {"system:masters"}, "Authorization": {"Bearer token"}, "Cookie": {"session"}, "X-Own": {"kept"},
		"Sec-Websocket-Protocol": {"v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.dG9rZW4", "base64url.bearer.authorization.k8s.io.dG9rZW4"},
	}
	w := httptest.NewRecorder()
	proxy.ServeHTTP(w, as(req, "reader", "readers"))
	if w.Code != http.StatusOK {
		t.Fatalf("code %d", w.Code)
	}
	got := primary.last.Header.Clone()
	for _, name := range []string{"User-Agent", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		got.Del(name)
	}
	want := http.Header{"X-Remote-User": {"reader"}, "X-Remote-Uid": {"reader-uid"}, "X-Remote-Group": {"readers"}, "X-Own": {"kept"}, "Sec-Websocket-Protocol": {"v5.channel.k8s.io"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the primary has received %v, want %v", got, want)
	}
}

func TestRemoveSocketToken_OnlyToken_RemovesHeader(t *testing.T) {
	header := http.Header{"Sec-Websocket-Protocol": {"base64url.bearer.authorization.k8s.io.dG9rZW4"}}
	if removeSocketToken(header); len(header) != 0 {
		t.Errorf("header %v, want none", header)
	}
}

func TestUnsetClaimFlags_NamesMissingFlags(t *testing.T) {
	got := unsetClaimFlags(&options.RequestHeaderAuthenticationOptions{GroupHeaders: []string{"X-Remote-Group"}})
	if want := []string{"--requestheader-username-headers", "--requestheader-uid-headers", "--requestheader-extra-headers-prefix"}; !slices.Equal(got, want) {
		t.Errorf("unset flags %v, want %v", got, want)
	}
}

// TestProxy_SilentPrimary_Is502: a primary may have received the request.
func TestProxy_SilentPrimary_Is502(t *testing.T) {
	w := httptest.NewRecorder()
	newProxy(&recorder{err: errSilent}, newClaims(nil), legacyscheme.Codecs, false).ServeHTTP(w, as(httptest.NewRequest(http.MethodPost, "/api/v1/pods", nil), "reader"))
	if w.Code != http.StatusBadGateway || !strings.Contains(w.Body.String(), "not answered its health check for 10s") {
		t.Errorf("code %d: %s", w.Code, w.Body)
	}
}

// TestInFlightBound_AboveBound_Is429: except for long-running requests and administrators.
func TestInFlightBound_AboveBound_Is429(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	handler := withInFlightBound(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/held" {
			entered <- struct{}{}
			<-release
		}
	}), 2, func(req *http.Request, _ *request.RequestInfo) bool { return req.URL.Path == "/watch" }, legacyscheme.Codecs)
	send := func(path, name string, groups ...string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, as(httptest.NewRequest(http.MethodPost, path, nil), name, groups...))
		return w
	}
	done := make(chan int, 2)
	for range 2 {
		go func() { done <- send("/held", "reader").Code }()
		<-entered
	}
	if w := send("/more", "reader"); w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") != "1" || !strings.Contains(w.Body.String(), "--max-requests-inflight") {
		t.Errorf("above the bound: code %d, header %v: %s", w.Code, w.Header(), w.Body)
	}
	if w := send("/watch", "reader"); w.Code != http.StatusOK {
		t.Errorf("a long-running request above the bound: code %d", w.Code)
	}
	if w := send("/more", "admin", "system:masters"); w.Code != http.StatusOK {
		t.Errorf("an administrator above the bound: code %d", w.Code)
	}
	close(release)
	for range 2 {
		if code := <-done; code != http.StatusOK {
			t.Errorf("a request within the bound: code %d", code)
		}
	}
	if w := send("/more", "reader"); w.Code != http.StatusOK {
		t.Errorf("after the end of the others: code %d", w.Code)
	}
}

func TestDocumentURI_Queries_HaveOneURIEach(t *testing.T) {
	for text, want := range map[string]string{
		"/apis": "/apis", "/apis?timeout=32s": "/apis", "/openapi/v3/apis/apps/v1?hash=A%2B&timeout=1s": "/openapi/v3/apis/apps/v1?hash=A%2B",
		"/apis?hash=1": "", "/apis?x=1": "", "/openapi/v3/apis?hash=1&hash=2": "", "/openapi/v3/apis?hash=1&x": "", "/%61pis": "", "/apis%2Fapps": "", "/apis?%zz": "",
	} {
		u, err := url.ParseRequestURI(text)
		check(t, err)
		if got, cacheable := documentURI(u); got != want || cacheable != (want != "") {
			t.Errorf("%s: %q, cacheable %v, want %q", text, got, cacheable, want)
		}
	}
}

// TestDocuments_OtherQueries_ArePassedOnWithoutCache: they cannot evict documents.
func TestDocuments_OtherQueries_ArePassedOnWithoutCache(t *testing.T) {
	primary := &fakePrimary{text: "one"}
	d := newDocuments(primary, newClaims(nil), legacyscheme.Codecs, false)
	for i, path := range []string{"/apis", "/apis?a=1", "/apis?a=2", "/apis?hash=3"} {
		if code, text := ask(d, path, nil); code != http.StatusOK || text != "one" || len(primary.requests) != i+1 {
			t.Errorf("%s: %d %q after %d requests", path, code, text, len(primary.requests))
		}
		if got := primary.requests[i].URL.RequestURI(); got != path {
			t.Errorf("%s: the primary has received %s", path, got)
		}
	}
	if code, _ := ask(d, "/apis?timeout=32s", nil); code != http.StatusOK || len(primary.requests) != 4 {
		t.Errorf("a request with a timeout is not answered from the cache: %d after %d requests", code, len(primary.requests))
	}
	if keys := slices.Collect(maps.Keys(d.known)); len(keys) != 1 {
		t.Errorf("documents %q are cached, want one", keys)
	}
}

// TestReviews_AnonymousUser_ReadsHealthOnly: the single checks below /readyz are decided by the
// primaries, as at stock.
func TestReviews_AnonymousUser_ReadsHealthOnly(t *testing.T) {
	primary := &recorder{err: errors.New("asked")}
	r, err := newReviews(primary)
	check(t, err)
	a, err := r.authorizer()
	check(t, err)
	for path, asked := range map[string]bool{"/healthz": false, "/livez": false, "/readyz": false, "/readyz/etcd": true, "/livez/ping": true, "/healthz/log": true, "/metrics": true} {
		primary.last = nil
		decision, _, _ := a.Authorize(t.Context(), authorizer.AttributesRecord{User: &user.DefaultInfo{Name: user.Anonymous, Groups: []string{user.AllUnauthenticated}}, Verb: "get", Path: path})
		if (primary.last != nil) != asked || (decision == authorizer.DecisionAllow) == asked {
			t.Errorf("%s: decision %v, primary asked %v, want %v", path, decision, primary.last != nil, asked)
		}
	}
}
