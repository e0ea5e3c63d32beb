package samebytes

import (
	"fmt"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestList_OlderThanMemory_MatchesUpstream lists a revision that a server does not have in memory,
// because it restores no history and was started later: the server reads etcd, and answers with the
// same bytes as upstream. Large objects are among them.
func TestList_OlderThanMemory_MatchesUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	// It does not register as a member of the cluster: the end of its lease would advance the
	// revision during other tests.
	late := newEngine(harness.Strata, e.APIServer(w.etcd, append(serverFlags(e), "--engine="+harness.Strata, "--strata-feature-gates=WatchHistoryRestore=false",
		"--endpoint-reconciler-type=none")...))
	withoutHistory := &world{kv: w.kv, engines: [2]*engine{late, w.engines[1]}, resources: w.resources, compacted: w.compacted, past: w.past, quiet: w.quiet}
	t.Run("lists", func(t *testing.T) {
		for _, s := range subjects {
			t.Run(s.String(), func(t *testing.T) {
				t.Parallel()
				withoutHistory.settle(t, ctx, s.path())
				exactly := fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", w.past)
				all := cases{}
				for where, path := range s.paths() {
					for _, m := range media {
						for _, v := range wires {
							all[named(where, m.name, v.name)] = v.on(request{path: path, accept: m.list, query: exactly})
						}
						all[named(where, m.name, "selected")] = request{path: path, accept: m.list, query: exactly + "&labelSelector=app"}
						all[named(where, m.name, "page")] = request{path: path, accept: m.list, query: exactly + "&limit=2"}
					}
					all[named(where, "legacy")] = request{path: path, accept: jsonType, query: fmt.Sprintf("limit=2&resourceVersion=%d", w.past)}
					all[named(where, "name")] = request{path: path, accept: jsonType, query: exactly + "&fieldSelector=metadata.name%3D" + s.name}
					all[named(where, "compacted")] = request{path: path, accept: jsonType, query: fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", w.compacted)}
				}
				withoutHistory.run(t, ctx, s.part(all))
				for where, path := range s.paths() {
					t.Run(named(where, "pages"), func(t *testing.T) { withoutHistory.pages(t, path, exactly, jsonType) })
				}
			})
		}
	})
	counters := readpathMetrics(t, ctx, late)
	if n := counters[passedToEtcd]; n > lateReads(counters) { // the server itself sends GETs
		t.Errorf("%v lists were passed on", n)
	}
}
