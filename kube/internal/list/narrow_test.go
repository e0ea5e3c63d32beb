package list

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

const (
	uidField       = "object.metadata.uid"
	namespaceField = "object.metadata.namespace"
	endOfHashes    = "0x10000000000000000"
)

// shardGate turns the gate of shard selectors on.
func shardGate(t testing.TB) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ShardedListAndWatch, true)
}

// withShard adds the i-th of n shards of equal size to a selector.
func withShard(pred storage.SelectionPredicate, field string, i, n int) storage.SelectionPredicate {
	bound := func(i int) string {
		if i == n {
			return endOfHashes
		}
		return fmt.Sprintf("0x%016x", uint64(i)*(1<<63/uint64(n)*2))
	}
	pred.ShardSelector = sharding.NewSelector(sharding.ShardRangeRequirement{Key: field, Start: bound(i), End: bound(i + 1)})
	return pred
}

// TestShards_DuringWrites_EqualSelectedPods: lists of shards of any size, at the latest and at old
// revisions, in pages between which pods change, and with other selectors.
func TestShards_DuringWrites_EqualSelectedPods(t *testing.T) {
	shardGate(t)
	f, m := newFixture(t), podtest.NewModel(testseed.New(t), 3)
	for range 15 {
		for range 1 + m.Rand.IntN(40) {
			m.Step(t, f.Etcd)
		}
		for range 12 {
			pred := storage.Everything
			if m.Rand.IntN(4) == 0 {
				pred = m.Selector(t)
			}
			n := []int{1, 2, 16, 64}[m.Rand.IntN(4)]
			l := drawList(t, m, withShard(pred, []string{uidField, namespaceField}[m.Rand.IntN(2)], m.Rand.IntN(n), n))
			if err := l.walk(t, f, m, func() {
				if m.Rand.IntN(4) == 0 {
					m.Step(t, f.Etcd)
				}
			}); err != nil {
				t.Fatalf("shard %s of %s: %v", l.opts.Predicate.ShardSelector, &l, err)
			}
		}
	}
	if n := f.series(t, "strata_list_plans_total", "plan", metrics.PlanShard); n < 50 {
		t.Errorf("only %v lists used the tree of a shard", n)
	}
}

// TestShards_Pages_EqualUpstream compares pages of a shard, their tokens and metadata, with those
// of upstream's store on the same etcd.
func TestShards_Pages_EqualUpstream(t *testing.T) {
	shardGate(t)
	f := newFixture(t)
	f.env.Gates.Shards = true
	for i := range 60 {
		pod := podtest.Pod(podName(i))
		pod.UID = types.UID(fmt.Sprint("uid-", i))
		f.Put(t, pod)
	}
	for shard := range 3 {
		for limit := range 25 {
			opts := limited(selecting(withShard(storage.Everything, uidField, shard, 3)), int64(limit))
			for more := true; more; {
				got, want := f.list(t, "/pods/ns/", opts), &example.PodList{}
				testcheck.NoError(t, f.env.Etcd.GetList(podtest.Context(t), "/pods/ns/", opts, want))
				if !reflect.DeepEqual(got, want) || got.ShardInfo == nil {
					t.Fatalf("shard %d, limit %d:\n got %+v %v\nwant %+v %v", shard, limit, got.ListMeta, paths(got), want.ListMeta, paths(want))
				}
				opts, more = continued(opts, got.Continue), got.Continue != ""
			}
		}
	}
}

// TestShards_WithGateOff_AreIgnored: the list has every object, and does not show a shard.
func TestShards_WithGateOff_AreIgnored(t *testing.T) {
	f := newFixture(t)
	f.Fill(t, 20)
	list := f.list(t, "/pods", selecting(withShard(storage.Everything, uidField, 0, 1<<20)))
	if len(list.Items) != 20 || list.ShardInfo != nil {
		t.Errorf("%d pods, %v", len(list.Items), list.ShardInfo)
	}
}

// TestShards_OfManySelectors_AreBounded: the shards of many selectors are dropped, except the one
// just read.
func TestShards_OfManySelectors_AreBounded(t *testing.T) {
	shardGate(t)
	f := newFixture(t)
	f.Fill(t, 300)
	var first *objects.ShardSet
	for i := range 20 {
		pred := storage.Everything
		pred.ShardSelector = sharding.NewSelector(sharding.ShardRangeRequirement{Key: uidField, Start: fmt.Sprintf("0x%016x", i), End: endOfHashes})
		if r := f.read(t, selecting(pred)); r.Selective() || r.Shard() == nil {
			t.Fatal("the shard has no tree")
		}
		set := f.View.CurrentGeneration().Selector(pred).Shard
		if f.env.Selections.KnownShard(set) == nil {
			t.Fatal("the shard of the last read was evicted")
		}
		if first == nil {
			first = set
		}
	}
	if f.env.Selections.KnownShard(first) != nil {
		t.Error("the first of 20 shards, each of all pods, is still cached")
	}
}

// TestShards_LatestShardNewerThanSnapshot_MovesListToIt: the request allows a later revision. A
// list at a revision keeps it, and uses the shard as it was then.
func TestShards_LatestShardNewerThanSnapshot_MovesListToIt(t *testing.T) {
	shardGate(t)
	f := newFixture(t)
	f.Fill(t, 100)
	before := f.Latest(t)
	pred := withShard(storage.Everything, uidField, 0, 1)
	f.Put(t, podtest.Pod("new"))
	f.CatchUp(t)
	f.read(t, selecting(pred)) // makes the shard
	selector := f.View.CurrentGeneration().Selector(pred)
	if r := f.env.Selected(podtest.Context(t), before, podtest.Root, After(podtest.Root), selector); r.Rev != f.Etcd.Revision() || r.Snapshot.Rev != r.Rev || r.Count() != 101 {
		t.Errorf("the list is at %d, its snapshot at %d, with %d pods", r.Rev, r.Snapshot.Rev, r.Count())
	}
	if r := f.read(t, exactly(selecting(pred), before.Rev)); r.Rev != before.Rev || r.Shard() == nil || r.Count() != 100 {
		t.Errorf("at %d: at %d, %d pods", before.Rev, r.Rev, r.Count())
	}
}

// TestChangedSince_Keys_AreSortedAndBounded: each key once; none if more than maxChanged have
// changed.
func TestChangedSince_Keys_AreSortedAndBounded(t *testing.T) {
	f := newFixture(t)
	rev := f.Put(t, podtest.Pod("z"))
	f.CatchUp(t)
	changed := func() ([]string, bool) {
		cursor, err := f.Resource.CursorAfter(rev, "", "")
		testcheck.NoError(t, err)
		return changedSince(cursor)
	}
	if keys, ok := changed(); len(keys) != 0 || !ok {
		t.Errorf("without changes: %q, %t", keys, ok)
	}
	f.Put(t, podtest.Pod("b"), podtest.Pod("a"), podtest.Pod("b"))
	f.CatchUp(t)
	if keys, ok := changed(); !ok || !slices.Equal(keys, []string{podtest.Root + "ns/a", podtest.Root + "ns/b"}) {
		t.Errorf("%q, %t", keys, ok)
	}
	for i := range maxChanged + readAtOnce {
		f.Etcd.Put(podtest.Root+"ns/"+podName(i), "")
	}
	f.CatchUp(t)
	if keys, ok := changed(); ok {
		t.Errorf("%d keys", len(keys))
	}
}

// TestMoreAfter_FullPage_CountsWhatUpstreamCounts: with an index that only memory has, any pod that
// follows; with a declared one, those of the index.
func TestMoreAfter_FullPage_CountsWhatUpstreamCounts(t *testing.T) {
	f := newFixture(t, func(o *options) { o.eager = map[string]bool{"spec.nodeName": true} })
	for i := range 500 {
		pod := podtest.Pod(podName(i))
		pod.Spec.NodeName = fmt.Sprint("node-", i%100)
		f.Put(t, pod)
	}
	f.CatchUp(t)
	for _, declared := range []bool{false, true} {
		pred := podtest.Selecting(t, "", "spec.nodeName=node-7")
		if declared {
			pred.IndexFields = []string{"spec.nodeName"}
		}
		opts := selecting(pred)
		opts.ResourceVersion, opts.Predicate.GetAttrs = "0", podtest.Attrs
		r := f.read(t, opts)
		if r.Plan() == nil || !r.CountsMore() {
			t.Fatal("the list uses no index")
		}
		for name, want := range map[string]bool{podName(307): true, podName(407): !declared, podName(499): false} {
			if got := r.MoreAfter(podtest.Context(t), podtest.Root+"ns/"+name); got != want {
				t.Errorf("declared: %t: another page after %s: %t, want %t", declared, name, got, want)
			}
		}
		page := f.list(t, "/pods/", limited(selecting(pred), 5))
		if len(page.Items) != 5 || (page.Continue != "") != !declared || page.RemainingItemCount != nil {
			t.Errorf("declared: %t: %d pods, continue %q, %v remain", declared, len(page.Items), page.Continue, page.RemainingItemCount)
		}
	}
}

// TestGetList_EachPlan_IsCounted: each plan, and the objects that were examined and returned.
// Lists from etcd are not recorded.
func TestGetList_EachPlan_IsCounted(t *testing.T) {
	shardGate(t)
	f := newFixture(t, finding)
	for i := range 500 {
		pod := podtest.Labelled(podName(i), "n", fmt.Sprint(i%50))
		pod.Spec.NodeName = fmt.Sprint("node-", i%100)
		pod.UID = types.UID(fmt.Sprint("uid-", i))
		f.Put(t, pod)
	}
	f.CatchUp(t)
	for _, c := range []struct {
		pred               storage.SelectionPredicate
		plan               string
		examined, returned float64
	}{
		{podtest.Selecting(t, "n=7", ""), metrics.PlanStored, 10, 10}, // the first use of the label
		{podtest.Selecting(t, "n=7", ""), metrics.PlanIndex, 10, 10},
		{podtest.Selecting(t, "n=7", "metadata.name=pod-0007"), metrics.PlanIndex, 10, 1},
		{podtest.Selecting(t, "m!=7", ""), metrics.PlanScan, 500, 500},
		{withShard(storage.Everything, uidField, 0, 1), metrics.PlanShard, 500, 500},
	} {
		count := func(name string) float64 { return f.series(t, name, "plan", c.plan) }
		plans, examined, returned := count("strata_list_plans_total"), count("strata_list_examined_objects_total"), count("strata_list_selected_objects_total")
		f.list(t, "/pods/", selecting(c.pred))
		if count("strata_list_plans_total") != plans+1 || count("strata_list_examined_objects_total") != examined+c.examined || count("strata_list_selected_objects_total") != returned+c.returned {
			t.Errorf("%s: %v lists, %v examined, %v returned, want 1, %v, %v", c.plan, count("strata_list_plans_total")-plans,
				count("strata_list_examined_objects_total")-examined, count("strata_list_selected_objects_total")-returned, c.examined, c.returned)
		}
	}
	first := f.Etcd.Revision()
	f.Put(t, podtest.Pod("later"))
	f.olderThanMemory(t)
	before := f.series(t, "strata_list_plans_total", "plan", metrics.PlanScan)
	f.list(t, "/pods/", exactly(selecting(podtest.Selecting(t, "n=7", "")), first))
	if n := f.series(t, "strata_list_plans_total", "plan", metrics.PlanScan) - before; n != 0 {
		t.Errorf("%v lists from etcd are recorded", n)
	}
}
