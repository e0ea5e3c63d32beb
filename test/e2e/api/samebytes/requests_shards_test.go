package samebytes

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// shardRange is a shard selector for the hashes of a field from the start-th to the end-th
// sixteenth.
func shardRange(field string, start, end int) string {
	bound := func(i int) string {
		if i == 16 {
			return "0x10000000000000000"
		}
		return fmt.Sprintf("0x%x000000000000000", i)
	}
	return fmt.Sprintf("shardRange(object.metadata.%s, '%s', '%s')", field, bound(start), bound(end))
}

// shardSelectors are selectors of shards, valid or not, by name.
var shardSelectors = map[string]string{
	"all":              shardRange("uid", 0, 16),
	"first-half":       shardRange("uid", 0, 8),
	"second-half":      shardRange("uid", 8, 16),
	"sixteenth":        shardRange("uid", 5, 6),
	"nearly-nothing":   "shardRange(object.metadata.uid, '0x0000000000000000', '0x0000000000000001')",
	"namespace":        shardRange("namespace", 0, 8),
	"other-namespaces": shardRange("namespace", 8, 16),
	"two":              shardRange("uid", 12, 14) + " || " + shardRange("uid", 1, 3),
	"overlapping":      shardRange("uid", 2, 9) + "||" + shardRange("uid", 4, 12),
	"spaces":           "  shardRange( object.metadata.uid ,'0x0000000000000000','0x8000000000000000' ) ",
	"blank":            " ",
	"garbage":          "x",
	"no-function":      "object.metadata.uid == 'x'",
	"other-function":   "hash(object.metadata.uid, '0x0000000000000000', '0x8000000000000000')",
	"and":              shardRange("uid", 0, 8) + " && " + shardRange("uid", 4, 16),
	"two-fields":       shardRange("uid", 0, 8) + " || " + shardRange("namespace", 8, 16),
	"name":             shardRange("name", 0, 8),
	"empty-range":      shardRange("uid", 8, 8),
	"reversed":         shardRange("uid", 9, 8),
	"upper-case":       "shardRange(object.metadata.uid, '0x000000000000000A', '0x8000000000000000')",
	"short":            "shardRange(object.metadata.uid, '0x0', '0x8')",
	"no-prefix":        "shardRange(object.metadata.uid, '0000000000000000', '8000000000000000')",
	"unclosed":         "shardRange(object.metadata.uid",
}

// TestShards_ListAndWatch_MatchUpstream lists and watches shards of resources, combined with all
// other selectors of a request.
func TestShards_ListAndWatch_MatchUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	w.eachSubject(t, ctx, func(t *testing.T, s subject, present int64) {
		all, watches, initial := cases{}, cases{}, cases{}
		for where, path := range s.paths() {
			for name, selector := range shardSelectors {
				query := "shardSelector=" + url.QueryEscape(selector)
				for with, more := range map[string]string{
					"alone": "", "limit": "&limit=1", "any": "&resourceVersion=0", "past": fmt.Sprintf("&resourceVersionMatch=Exact&resourceVersion=%d", w.past),
					"labels": "&labelSelector=app", "labels-limit": "&limit=1&labelSelector=app", "name": "&fieldSelector=metadata.name%3D" + s.name,
					"namespace": "&fieldSelector=metadata.namespace%3D" + oddNamespace, "continue": "&limit=1&continue=garbage",
				} {
					all[named(where+" with "+with, name)] = request{path: path, query: query + more, accept: jsonType}
				}
				watches[named(where, name, "begin")] = request{path: path, query: "watch=true&resourceVersion=0&" + query + "&" + shortTimeout, accept: jsonType}
			}
			for _, m := range media {
				for _, v := range wires {
					query := "shardSelector=" + url.QueryEscape(shardSelectors["first-half"])
					all[named(where, "media", m.name, v.name)] = v.on(request{path: path, query: query, accept: m.list})
					initial[named(where, m.name, v.name)] = v.on(request{path: path, query: initialEvents + "&" + query, accept: m.object})
				}
			}
		}
		w.run(t, ctx, s.part(all))
		t.Run("initial-events", func(t *testing.T) { w.runInitialEvents(t, ctx, s.part(initial)) })
		w.watchAll(t, ctx, s.part(watches), func() {}, func() func([]byte) bool { return untilEnd })
	})
}

// TestShards_PagedList_MatchesUpstream reads shards in pages.
func TestShards_PagedList_MatchesUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	for _, s := range subjects {
		all := cases{}
		for where, path := range s.paths() {
			for _, shard := range []string{"first-half", "two", "namespace", "all"} {
				for _, start := range []string{"", "&labelSelector=app", fmt.Sprintf("&resourceVersionMatch=Exact&resourceVersion=%d", w.past)} {
					all[named(where, shard, cmp.Or(start, "plain"))] = request{path: path, query: "shardSelector=" + url.QueryEscape(shardSelectors[shard]) + start, accept: jsonType}
				}
			}
		}
		w.runPages(t, ctx, s, all)
	}
}

// TestShards_LiveWatch_MatchesUpstream compares watches of shards while objects are created,
// changed and deleted. All shards together contain every object once. No other test compares the
// history of ServiceAccounts, whose oldest events upstream drops here.
func TestShards_LiveWatch_MatchesUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	accounts := live{resource: core("serviceaccounts"), namespace: liveNamespace}
	w.settle(t, ctx, accounts.path())
	api := w.engines[1].server.API()
	const objects = 24 // enough for some in each shard
	selectors := map[string]string{
		"first": shardRange("uid", 0, 8), "second": shardRange("uid", 8, 16),
		"all-namespaces": shardRange("namespace", 0, 16),
	}
	all := cases{}
	for name, selector := range selectors {
		for where, path := range map[string]string{"all": accounts.path(), "namespace": accounts.in(liveNamespace)} {
			for _, m := range []mediaType{media[0], media[1], media[5], media[6]} {
				for _, v := range wires {
					query := "&fieldSelector=metadata.namespace%3D" + liveNamespace + "&shardSelector=" + url.QueryEscape(selector)
					all[named(name, where, m.name, v.name)] = v.on(request{path: path, query: "watch=true" + query, accept: m.object})
					all[named(name, where, m.name, v.name, "with-initial-events")] = v.on(request{path: path, query: initialEvents + query, accept: m.object})
					plain := "&shardSelector=" + url.QueryEscape(selector)
					all[named(name, where, m.name, v.name, "alone")] = v.on(request{path: path, query: initialEvents + plain, accept: m.object})
				}
			}
		}
	}
	const prefix = "live-shard-"
	name := func(i int) string { return fmt.Sprintf("%s%02d", prefix, i) }
	path := accounts.in(liveNamespace)

	// Upstream ends a watch that is more than ten events behind, so the writer waits for the
	// watches. An event concerns two of the three watches of each kind: the one of all namespaces,
	// and the one of a half.
	var received atomic.Int64
	written := 0
	wrote := func() {
		t.Helper()
		written++
		due := int64((written - 4) * len(w.engines) * len(all) * 2 / 3)
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			n := received.Load()
			return n >= due, fmt.Errorf("%d of %d events have arrived", n, due)
		}))
	}
	create := func(i int) {
		harness.Check(t, post(ctx, api, path, fmt.Sprintf(`{"metadata":{"name":%q}}`, name(i))))
	}
	annotate := func(i int, key, value string) {
		r, err := api.DoAs(ctx, http.MethodPatch, path+"/"+name(i), "", "application/merge-patch+json", "", fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, key, value))
		harness.Check(t, err)
		if r.Code != http.StatusOK {
			t.Fatalf("patch %s: %v", name(i), r.Err())
		}
	}
	write := func() {
		for i := range objects {
			create(i)
			wrote()
		}
		for i := range objects {
			annotate(i, "changed", "yes")
			wrote()
		}
		for i := range objects / 2 {
			harness.Check(t, api.Delete(ctx, path+"/"+name(i)))
			wrote()
			create(i) // with another UID
			wrote()
		}
		for i := range objects { // the first of them ends a watch
			annotate(i, "end", theEnd)
		}
	}
	w.watchAll(t, ctx, all, write, func() func([]byte) bool {
		return func(frame []byte) bool {
			if bytes.Contains(frame, []byte(prefix)) {
				received.Add(1)
			}
			return bytes.Contains(frame, []byte(theEnd))
		}
	})
	for i := range objects {
		harness.Check(t, api.Delete(ctx, path+"/"+name(i)))
	}
}
