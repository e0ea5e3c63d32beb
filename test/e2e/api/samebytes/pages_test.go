package samebytes

import (
	"slices"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestPagesOfNamespaceBySelector_AllNamespaces_AreComplete (D-PAGES): a list of all namespaces
// whose field selector selects one has the same objects in pages as without a limit. Upstream's
// second page ends the list or begins it again, by the order of the names of objects and
// namespaces; if it no longer does, remove the difference.
func TestPagesOfNamespaceBySelector_AllNamespaces_AreComplete(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	const path, query, limit = "/api/v1/configmaps", "fieldSelector=metadata.namespace=" + oddNamespace, 2
	for _, e := range w.engines {
		whole, err := e.server.API().List(ctx, path, query)
		harness.Check(t, err)
		items, _, err := e.server.API().ListAll(ctx, path, query, limit)
		harness.Check(t, err)
		var names []string
		for _, o := range items {
			names = append(names, o.Metadata.Name)
		}
		want := whole.Names()
		if len(want) <= limit {
			t.Fatalf("%d ConfigMaps are less than two pages", len(want))
		}
		if e.name == harness.Upstream {
			if slices.Equal(names, want) {
				t.Errorf("upstream: the pages are complete, so that the difference is none")
			}
			continue
		}
		if !slices.Equal(names, want) {
			t.Errorf("%s: the pages have %d objects %q, want %d: %q", e.name, len(names), names, len(want), want)
		}
	}
}
