package readpath

import (
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestFastChain_ServesPlainReads: the filters of plain reads are not measured individually, which
// distinguishes the fast chain from upstream's; those of all other requests are.
func TestFastChain_ServesPlainReads(t *testing.T) {
	if harness.Engine() == harness.Upstream {
		t.Skip("upstream has one chain")
	}
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "fast")
	_, err := api.Create(ctx, "/api/v1/namespaces/fast/configmaps", object{"metadata": object{"name": "cm"}})
	harness.Check(t, err)
	const path = "/api/v1/namespaces/fast/configmaps"
	const requests = 200 // far more than the server's own requests in that time
	const filters = `apiserver_request_filter_duration_seconds_count{filter="authorization"}`
	for _, test := range []struct {
		path, query string
		measured    bool
	}{
		{path + "/cm", "", false},
		{path + "/cm", "resourceVersion=0", false},
		{path, "limit=10", false},
		{"/apis/apps/v1", "", true}, // discovery
	} {
		before := metric(t, ctx, api, filters)
		for range requests {
			get(t, ctx, api, test.path, test.query)
		}
		if n := metric(t, ctx, api, filters) - before; (n >= requests) != test.measured {
			t.Errorf("%s?%s: %v measured in %d requests; want them measured: %v", test.path, test.query, n, requests, test.measured)
		}
	}
}
