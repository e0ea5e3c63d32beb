package readpath

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
)

// TestNegotiate_RepeatedAccept_IsNotCached: results are cached by the first line of the header, so
// only requests without a second one may add to the cache.
func TestNegotiate_RepeatedAccept_IsNotCached(t *testing.T) {
	o := newOptionsRegistry(true)
	cached := &o.resource.accepted.list
	negotiate := func(accept ...string) {
		t.Helper()
		req := httptest.NewRequest(http.MethodGet, "/", nil)
		req.Header["Accept"] = accept
		r := &readRequest{server: &Server{}, resource: o.resource, info: &request.RequestInfo{Verb: "list"}, scope: o.resource.scope(), req: req}
		if n := r.negotiate(); n.reason != "" || n.media != mediaJSON {
			t.Errorf("Accept %q: %q, %q; want JSON", accept, n.media, n.reason)
		}
	}
	negotiate("application/json", "application/json;as=Table;v=v1;g=meta.k8s.io")
	if _, ok := cached.load("application/json"); ok {
		t.Error("the result of a request with two lines is cached")
	}
	negotiate("application/json")
	if _, ok := cached.load("application/json"); !ok {
		t.Error("the result of a request with one line is not cached")
	}
}
