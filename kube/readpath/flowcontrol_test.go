package readpath

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
)

// TestWorkEstimator: seats follow the bytes, within upstream's bounds; upstream's estimate is used
// if the bytes are unknown.
func TestWorkEstimator(t *testing.T) {
	const unknown, upstreams = -1, 77
	for name, test := range map[string]struct {
		verb    string
		bytes   int64
		bound   uint64 // of the priority level
		want    uint64
		askCost bool
	}{
		"an empty list":                {verb: "list", bytes: 0, want: 1, askCost: true},
		"a seat":                       {verb: "list", bytes: 100_000, want: 1, askCost: true},
		"and a byte":                   {verb: "list", bytes: 100_001, want: 2, askCost: true},
		"just below the most":          {verb: "list", bytes: 999_999, want: 10, askCost: true},
		"a long list":                  {verb: "list", bytes: 300_000_000, want: 10, askCost: true},
		"a long list at a small level": {verb: "list", bytes: 300_000_000, bound: 3, want: 3, askCost: true},
		"a short list at such a level": {verb: "list", bytes: 150_000, bound: 3, want: 2, askCost: true},
		"initial events":               {verb: "watch", bytes: 250_000, want: 3, askCost: true},
		"not known":                    {verb: "list", bytes: unknown, want: upstreams, askCost: true},
		"a get":                        {verb: "get", bytes: 250_000, want: upstreams},
	} {
		t.Run(name, func(t *testing.T) {
			asked := false
			estimate := workEstimator(
				func(*http.Request, string, string) flowcontrolrequest.WorkEstimate {
					return flowcontrolrequest.WorkEstimate{InitialSeats: upstreams}
				},
				func(req *http.Request, info *request.RequestInfo) (int64, bool) {
					asked = info.Verb == test.verb && req.URL.RawQuery == "limit=5"
					return test.bytes, test.bytes != unknown
				},
				func(level string) uint64 {
					if level != "level" {
						t.Errorf("asked for the bound of %q", level)
					}
					return test.bound
				})
			req := httptest.NewRequest(http.MethodGet, "/api/v1/configmaps?limit=5", nil)
			req = req.WithContext(request.WithRequestInfo(req.Context(), &request.RequestInfo{Verb: test.verb}))
			if got := estimate(req, "schema", "level"); got != (flowcontrolrequest.WorkEstimate{InitialSeats: test.want}) {
				t.Errorf("estimate %+v, want %d seats and nothing else", got, test.want)
			}
			if asked != test.askCost {
				t.Errorf("asked for the cost: %v, want %v", asked, test.askCost)
			}
		})
	}
}

// TestCostReachesFlowControl: the cost reaches the priority and fairness filter of the lean chain.
func TestCostReachesFlowControl(t *testing.T) {
	c, seats := chainConfig()
	h := newChain(nil, c, chainOptions{
		Mount: func(http.Handler) http.Handler { return http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}) },
		Cost: func(*http.Request, *request.RequestInfo) (int64, bool) {
			return 450_000, true
		},
	})
	h.complete.Store(true)
	send(requireLean{t, h}, readBy("reader", ""))
	if got := seats.estimate.Load(); got == nil || got.InitialSeats != 5 {
		t.Errorf("estimate %+v, want 5 seats", got)
	}
}

// serverOf returns a server that has already served lists and watches of the resource.
func serverOf(resource *Resource) *Server {
	s := &Server{resolver: NewResolver(ResolverConfig{})}
	bound := &cell{}
	bound.bound.Store(&binding{resource: resource})
	routes := map[route]*cell{}
	for _, verb := range []string{"list", "watch"} {
		for _, namespaced := range []bool{true, false} {
			gvr := resource.GVR
			routes[route{gvr.Group, gvr.Version, gvr.Resource, verb, namespaced}] = bound
		}
	}
	s.resolver.routes.Store(&routes)
	return s
}

// TestCost checks the predicted size of reads.
func TestCost(t *testing.T) {
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
	for _, accept := range []string{"application/json;as=Table;v=v1;g=meta.k8s.io", "application/yaml"} {
		if got := cost(all, accept); got != unknown {
			t.Errorf("a list as %s, which is passed on: %d bytes, want it unknown", accept, got)
		}
	}

	// After encoding, the cost is the size of the response without the envelope.
	for _, accept := range []string{"application/json", "application/vnd.kubernetes.protobuf"} {
		req, _ := get(all, accept)
		recorder := httptest.NewRecorder()
		s.Handler(http.NotFoundHandler()).ServeHTTP(recorder, req)
		sent := int64(recorder.Body.Len())
		if got := cost(all, accept); recorder.Code != 200 || got > sent || got < sent-200 {
			t.Errorf("a list as %s: %d bytes were sent (status %d), the cost is %d", accept, sent, recorder.Code, got)
		}
	}
}
