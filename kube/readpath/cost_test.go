package readpath

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// serverOf returns a server that has already served lists and watches of the resource.
func serverOf(resource *boundResource) *Server {
	s := &Server{resolver: NewResolver(ResolverOptions{})}
	bound := &routeEntry{}
	bound.bound.Store(&binding{resource: resource})
	routes := map[route]*routeEntry{}
	for _, verb := range []string{"list", "watch"} {
		for _, namespaced := range []bool{true, false} {
			gvr := resource.GVR
			routes[route{gvr.Group, gvr.Version, gvr.Resource, verb, namespaced}] = bound
		}
	}
	s.resolver.routes.Store(&routes)
	return s
}

// TestCost_PredictsSizeOfReads checks the predicted size of reads.
func TestCost_PredictsSizeOfReads(t *testing.T) {
	t.Parallel()
	w := watchedPods(t)
	const objects, size = 30, 10_000
	for i := range objects {
		w.put(t, w.object(fmt.Sprintf("pod-%02d", i), map[string]string{"fill": strings.Repeat("x", size)}))
	}
	rev := w.catchUp(t)

	infos := &request.RequestInfoFactory{APIPrefixes: sets.NewString("apis")}
	get := func(path, accept string) (*http.Request, *request.RequestInfo) {
		t.Helper()
		req := httptest.NewRequest(http.MethodGet, path, nil)
		req.Header.Set("Accept", accept)
		info, err := infos.NewRequestInfo(req)
		if err != nil {
			t.Fatal(err)
		}
		return req.WithContext(request.WithRequestInfo(req.Context(), info)), info
	}
	s := serverOf(w.resource)

	const all = "/apis/example.apiserver.k8s.io/v1/pods"
	const ns = "/apis/example.apiserver.k8s.io/v1/namespaces/ns/pods"
	const unknown = -1
	cost := func(path, accept string) int64 {
		t.Helper()
		bytes, ok := s.cost(get(path, accept))
		if !ok {
			return unknown
		}
		return bytes
	}
	for path, want := range map[string]int64{
		all: objects, ns: objects,
		"/apis/example.apiserver.k8s.io/v1/namespaces/other/pods": 0,
		all + "?limit=10":                            10,
		all + "?limit=10&resourceVersion=0":          objects,
		all + "?limit=100":                           objects,
		ns + "?fieldSelector=metadata.name%3Dpod-07": 1,
		ns + "?labelSelector=a%3Db":                  objects,
		all + "?watch=1":                             objects,
		all + "?watch=1&resourceVersion=0":           objects,
		all + "?watch=1&resourceVersion=" + rev:      unknown,
		all + "?watch=1&allowWatchBookmarks=1&sendInitialEvents=1&resourceVersionMatch=NotOlderThan&resourceVersion=" + rev: objects,
		all + "?resourceVersionMatch=Exact&resourceVersion=" + rev:                                                          objects,
		all + "?resourceVersionMatch=Exact&resourceVersion=999999999":                                                       unknown,
		all + "?limit=many":                             unknown,
		"/apis/example.apiserver.k8s.io/v1/replicasets": unknown,
	} {
		got := cost(path, "application/json")
		if want != unknown && want != 0 {
			got /= size // the rest of an object is smaller
		}
		if got != want {
			t.Errorf("%s: %d, want %d", path, got, want)
		}
	}
	for _, accept := range []string{"application/json;as=Table;v=v1;g=meta.k8s.io", "application/cbor"} {
		if got := cost(all, accept); got != unknown {
			t.Errorf("a list as %s, which is passed on: %d bytes, want it unknown", accept, got)
		}
	}

	// Priority and fairness asks before the authorizer: a user without rights fills no memory.
	for n, cache := range []*acceptCache{&w.resource.accepted.list, &w.resource.accepted.watch} {
		if known := cache.n.Load(); known != 0 {
			t.Errorf("%d media types are remembered in cache %d", known, n)
		}
	}

	// After encoding, the cost is the size of the response without the envelope.
	for _, accept := range []string{"application/json", "application/vnd.kubernetes.protobuf"} {
		req, _ := get(all+"?resourceVersion=0", accept)
		recorder := httptest.NewRecorder()
		s.Handler(http.NotFoundHandler()).ServeHTTP(recorder, req)
		sent := int64(recorder.Body.Len())
		if got := cost(all, accept); recorder.Code != 200 || got > sent || got < sent-200 {
			t.Errorf("a list as %s: %d bytes were sent (status %d), the cost is %d", accept, sent, recorder.Code, got)
		}
	}
}
