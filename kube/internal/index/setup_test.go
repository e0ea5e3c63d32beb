package index

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"weak"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/transcode"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// fixture is the selections of pods in memory, and counts what they report.
type fixture struct {
	*podtest.Cluster
	s *Selections

	stored, decoded, refused, indexes, bytes, unindexed, filtered atomic.Int64

	found atomic.Int64 // values in stored bytes, with finds

	started atomic.Int64 // goroutines
}

// involvedAttrs are the attributes of pods that stand for events: their node is the name of the
// involved object.
func involvedAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	l, f, err := podtest.Attrs(obj)
	if err != nil {
		return nil, nil, err
	}
	f = maps.Clone(f)
	f["involvedObject.name"], f["involvedObject.kind"] = obj.(*example.Pod).Spec.NodeName, "Pod"
	return l, f, nil
}

// newFixture returns the selections of no pods. Their involved objects are eager fields, as those
// of events are.
func newFixture(t testing.TB, change ...func(*podtest.Options)) *fixture {
	t.Helper()
	return newDeclaring(t, nil, change...)
}

// newDeclaring is newFixture of a resource with declared fields.
func newDeclaring(t testing.TB, declared []string, change ...func(*podtest.Options)) *fixture {
	t.Helper()
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ShardedListAndWatch, true)
	f := &fixture{}
	attrs := func(o *podtest.Options) { o.Config.GetAttrs, o.Config.Declared = involvedAttrs, declared }
	rotated := func(o *podtest.Options) {
		o.OnRotate = func() { f.s.KeysReplaced() }
	}
	f.Cluster = podtest.New(t, append([]func(*podtest.Options){attrs, rotated}, change...)...)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	f.s = New(Config{Logger: slog.Default(),
		Resource: f.Resource, View: f.View, Blocks: f.Blocks, Context: ctx,
		Eager:     map[string]bool{"involvedObject.name": true, "involvedObject.kind": true},
		Start:     func(run func()) bool { f.started.Add(1); running.Go(run); return true },
		Read:      func(stored, decoded int) { f.stored.Add(int64(stored)); f.decoded.Add(int64(decoded)) },
		Refused:   func() { f.refused.Add(1) },
		Measured:  func(indexes, bytes int64) { f.indexes.Add(indexes); f.bytes.Add(bytes) },
		Unindexed: func() { f.unindexed.Add(1) },
		Filtered:  func(n int) { f.filtered.Add(int64(n)) },
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
		f.s.EndShards()
		f.s.DropIndexes()
	})
	return f
}

// finding returns a fixture whose labels and nodes are found in stored bytes.
func finding(t testing.TB, change ...func(*podtest.Options)) *fixture {
	t.Helper()
	return findingDeclared(t, nil, change...)
}

// findingDeclared is finding of a resource with declared fields.
func findingDeclared(t testing.TB, declared []string, change ...func(*podtest.Options)) *fixture {
	t.Helper()
	var f *fixture
	stored := examplev1.SchemeGroupVersion.WithKind("Pod")
	find := func(label bool, name string) transcode.Find {
		var find transcode.Find
		switch {
		case label:
			find = transcode.FindJSONLabel(stored, name)
		case name == "involvedObject.name", name == "spec.nodeName":
			find = transcode.FindJSONField(stored, "spec.nodeName")
		}
		if find == nil {
			return nil
		}
		return func(stored []byte) ([]byte, bool, bool) {
			value, present, ok := find(stored)
			if ok {
				f.found.Add(1)
			}
			return value, present, ok
		}
	}
	f = newDeclaring(t, declared, append(change, func(o *podtest.Options) { o.Config.Find = find })...)
	return f
}

// podOn returns a pod on a node.
func podOn(name, node string) *example.Pod {
	pod := podtest.Pod(name)
	pod.Spec.NodeName = node
	return pod
}

// events stores n pods of 100 nodes, with 50 values of the label n.
func (f *fixture) events(t testing.TB, n int) {
	t.Helper()
	for i := range n {
		pod := podOn(fmt.Sprintf("event-%05d", i), fmt.Sprint("object-", i%100))
		pod.Labels = map[string]string{"n": fmt.Sprint(i % 50)}
		f.Put(t, pod)
	}
	f.CatchUp(t)
}

// The plans of a list. Their names are those of the metric strata_list_plans_total.
const (
	byKeys   = "keys"
	byIndex  = "index"
	byStored = "stored"
	byScan   = "scan"
)

// read is a list of a range of a snapshot, as a storage reads it.
type read struct {
	f    *fixture
	sel  objects.Selector
	plan *Plan
	snap mirror.Snapshot
}

// read plans a list of all pods of the snapshot.
func (f *fixture) read(ctx context.Context, snap mirror.Snapshot, pred storage.SelectionPredicate) *read {
	sel := f.View.CurrentGeneration().Selector(pred)
	return &read{f, sel, f.s.Plan(ctx, &sel, snap, "", ""), snap}
}

// of plans a list of the newest pods.
func (f *fixture) of(t testing.TB, pred storage.SelectionPredicate) *read {
	t.Helper()
	return f.read(podtest.Context(t), f.Latest(t), pred)
}

func (r *read) name() string {
	switch {
	case r.plan == nil:
		return byScan
	case r.plan.Keyed():
		return byKeys
	case r.plan.Indexed():
		return byIndex
	}
	return byStored
}

// candidates returns the names of the candidates from start on.
func (r *read) candidates(start string) (names []string) {
	all := r.snap.All(start, "")
	if r.plan != nil {
		all = r.plan.Candidates(r.snap, start, "")
	}
	for e := range all {
		names = append(names, nameOf(e))
	}
	return names
}

func nameOf(e *mirror.Entry) string { return strings.TrimPrefix(e.Key(), podtest.Root) }

// selected returns the names of the pods that the selector selects among the candidates.
func (r *read) selected(ctx context.Context) (names []string, err error) {
	all := r.snap.All("", "")
	if r.plan != nil {
		all = r.plan.Candidates(r.snap, "", "")
	}
	for e := range all {
		ok, err := r.sel.Matches(ctx, e)
		if err != nil {
			return nil, err
		}
		if ok {
			names = append(names, nameOf(e))
		}
	}
	return names, nil
}

// list returns the plan of a list of the newest pods, and the number of selected ones.
func (f *fixture) list(t testing.TB, pred storage.SelectionPredicate) (plan string, n int) {
	t.Helper()
	r := f.of(t, pred)
	names, err := r.selected(podtest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	return r.name(), len(names)
}

// require fails unless a list has the plan and selects n pods.
func (f *fixture) require(t testing.TB, pred storage.SelectionPredicate, plan string, n int) {
	t.Helper()
	if gotPlan, got := f.list(t, pred); gotPlan != plan || got != n {
		t.Errorf("%q %q has the plan %s and %d pods, want %s and %d", pred.Label, pred.Field, gotPlan, got, plan, n)
	}
}

// onNode selects the pods of a node, with the index that a registry declares for it.
func onNode(t testing.TB, node string) storage.SelectionPredicate {
	t.Helper()
	pred := podtest.Selecting(t, "", "spec.nodeName="+node)
	pred.IndexFields = []string{"spec.nodeName"}
	return pred
}

// digests returns the number of digests by index, in ascending order.
func (f *fixture) digests(t testing.TB) []int {
	t.Helper()
	by := map[*memo.Key]int{}
	for l := range f.Latest(t).Memos() {
		for of := range l.All() {
			by[of]++
		}
	}
	return slices.Sorted(maps.Values(by))
}

// attributes counts the pods that have cached attributes.
func (f *fixture) attributes(t testing.TB) (n int) {
	t.Helper()
	gen := f.View.CurrentGeneration()
	for e := range f.Latest(t).All("", "") {
		if gen.KnownAttributes(e) != nil {
			n++
		}
	}
	return n
}

// held collects garbage and returns the number of entries that something still holds.
func held(entries []weak.Pointer[mirror.Entry]) (n int) {
	for range 10 { // a stack that is scanned conservatively may keep some for a cycle
		goruntime.GC()
		n = 0
		for _, e := range entries {
			if e.Value() != nil {
				n++
			}
		}
		if n == 0 {
			break
		}
	}
	return n
}
