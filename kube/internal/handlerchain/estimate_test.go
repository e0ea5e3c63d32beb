package handlerchain

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
)

// TestWorkEstimator_Bytes_DetermineSeats: seats follow the bytes, within upstream's bounds;
// upstream's estimate is used if the bytes are unknown.
func TestWorkEstimator_Bytes_DetermineSeats(t *testing.T) {
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
						t.Errorf("bound requested for level %q, want \"level\"", level)
					}
					return test.bound
				})
			req := httptest.NewRequest(http.MethodGet, "/api/v1/configmaps?limit=5", nil)
			req = req.WithContext(request.WithRequestInfo(req.Context(), &request.RequestInfo{Verb: test.verb}))
			if got := estimate(req, "schema", "level"); got != (flowcontrolrequest.WorkEstimate{InitialSeats: test.want}) {
				t.Errorf("estimate %+v, want only %d seats", got, test.want)
			}
			if asked != test.askCost {
				t.Errorf("cost requested: %v, want %v", asked, test.askCost)
			}
		})
	}
}

// TestFastChain_Cost_ReachesFlowControl: the cost reaches the priority and fairness filter of the
// fast chain.
func TestFastChain_Cost_ReachesFlowControl(t *testing.T) {
	c, seats := chainConfig()
	h := New(nil, c, Options{
		Mount: func(http.Handler) http.Handler { return http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}) },
		Cost: func(*http.Request, *request.RequestInfo) (int64, bool) {
			return 450_000, true
		},
	})
	h.complete.Store(true)
	send(requireFast{t, h}, readBy("reader", ""))
	if got := seats.estimate.Load(); got == nil || got.InitialSeats != 5 {
		t.Errorf("estimate %+v, want 5 seats", got)
	}
}
