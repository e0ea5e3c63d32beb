package kubestorage

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/testutil"

	"github.com/stratakube/strata/kube/internal/objects"
)

// shardGate turns the gate of shard selectors on.
func shardGate(t testing.TB) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ShardedListAndWatch, true)
}

// endOfHashes is the end of a range without an upper bound.
const endOfHashes = "0x10000000000000000"

// shardOf returns the selector of the i-th of n shards of equal size.
func shardOf(key string, i, n int) sharding.Selector {
	bound := func(i int) string {
		if i == n {
			return endOfHashes
		}
		return fmt.Sprintf("0x%016x", uint64(i)*(1<<63/uint64(n)*2))
	}
	return sharding.NewSelector(sharding.ShardRangeRequirement{Key: key, Start: bound(i), End: bound(i + 1)})
}

const (
	uidField       = "object.metadata.uid"
	namespaceField = "object.metadata.namespace"
)

// ofShard selects by a shard selector only.
func ofShard(sel sharding.Selector) storage.SelectionPredicate {
	pred := storage.Everything
	pred.ShardSelector = sel
	return pred
}

// podsIn returns the names of the pods of a list, in its order, and the list with its token and
// shard metadata.
func podsIn(t testing.TB, s storage.Interface, key string, opts storage.ListOptions) (names []string, list *example.PodList) {
	t.Helper()
	list = &example.PodList{}
	opts.Recursive = true
	if err := s.GetList(contextFor(t), key, opts, list); err != nil {
		t.Fatal(err)
	}
	for _, pod := range list.Items {
		names = append(names, pod.Namespace+"/"+pod.Name)
	}
	return names, list
}

// randomPods writes pods of four namespaces at random.
type randomPods struct {
	f    *fixture
	rnd  *rand.Rand
	pods map[string]*example.Pod // by key
	uids int
}

// write creates, changes or deletes a pod.
func (r *randomPods) write(t *testing.T) {
	t.Helper()
	name := fmt.Sprintf("pod-%03d", r.rnd.IntN(150))
	ns := fmt.Sprintf("ns-%d", r.rnd.IntN(4))
	key := "/pods/" + ns + "/" + name
	if r.pods[key] != nil && r.rnd.IntN(3) == 0 {
		if err := r.f.Delete(contextFor(t), key, &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		delete(r.pods, key)
		return
	}
	if r.pods[key] == nil {
		r.uids++
		r.pods[key] = &example.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, UID: types.UID(fmt.Sprint("uid-", r.uids))}}
	}
	r.pods[key].Labels = map[string]string{"even": strconv.FormatBool(r.rnd.IntN(2) == 0)}
	pod := r.pods[key].DeepCopy()
	err := r.f.GuaranteedUpdate(contextFor(t), key, &example.Pod{}, true, nil, storage.SimpleUpdate(func(runtime.Object) (runtime.Object, error) { return pod, nil }), nil)
	if err != nil {
		t.Fatal(err)
	}
}

// shardList is a list of one shard.
type shardList struct {
	key  string
	sel  sharding.Selector
	opts storage.ListOptions
}

// randomShardList draws a list of the present or of a revision in past, with or without labels,
// namespace and limit.
func randomShardList(rnd *rand.Rand, past []string) shardList {
	n := []int{1, 2, 16, 64}[rnd.IntN(4)]
	l := shardList{key: "/pods", sel: shardOf([]string{uidField, namespaceField}[rnd.IntN(2)], rnd.IntN(n), n)}
	l.opts.Predicate = ofShard(l.sel)
	if rnd.IntN(4) == 0 {
		l.opts.Predicate.Label = labels.SelectorFromSet(labels.Set{"even": "true"})
	}
	if rnd.IntN(3) == 0 {
		l.key = fmt.Sprintf("/pods/ns-%d", rnd.IntN(4))
	}
	if rnd.IntN(2) == 0 {
		l.opts.ResourceVersion, l.opts.ResourceVersionMatch = past[rnd.IntN(len(past))], metav1.ResourceVersionMatchExact
	}
	if rnd.IntN(2) == 0 {
		l.opts.Predicate.Limit = int64(1 + rnd.IntN(9))
	}
	return l
}

func (l shardList) String() string {
	return fmt.Sprintf("%s, %s, labels %s, limit %d", l.key, l.sel, l.opts.Predicate.Label, l.opts.Predicate.Limit)
}

// selected returns the pods that the selectors of the list select in a list of all pods, and the
// resource version of that list.
func (l shardList) selected(t *testing.T, s storage.Interface) (names []string, resourceVersion string) {
	t.Helper()
	whole := l.opts
	whole.Predicate = storage.Everything
	_, list := podsIn(t, s, l.key, whole)
	for _, pod := range list.Items {
		if ok, err := l.sel.Matches(&pod); err != nil {
			t.Fatal(err)
		} else if ok && l.opts.Predicate.Label.Matches(labels.Set(pod.Labels)) {
			names = append(names, pod.Namespace+"/"+pod.Name)
		}
	}
	return names, list.ResourceVersion
}

// walk returns the pods of all pages. Each page must be of the resource version, and full if it is
// not the last.
func (l shardList) walk(t *testing.T, s storage.Interface, resourceVersion string) (names []string, err error) {
	t.Helper()
	opts := l.opts
	for {
		some, page := podsIn(t, s, l.key, opts)
		names = append(names, some...)
		if page.ResourceVersion != resourceVersion {
			return nil, fmt.Errorf("a page of %s, want %s", page.ResourceVersion, resourceVersion)
		}
		if page.Continue == "" {
			return names, nil
		}
		if n := len(some); int64(n) != opts.Predicate.Limit {
			return nil, fmt.Errorf("a page of %d pods that is not the last", n)
		}
		opts.Predicate.Continue, opts.ResourceVersion, opts.ResourceVersionMatch = page.Continue, "", ""
	}
}

// TestShards_DuringWrites_EqualSelectedPods writes pods at random, and compares lists of shards, at
// the present and at revisions of the past, in pages and with other selectors, with the pods that
// the selectors select among all pods of the same revision.
func TestShards_DuringWrites_EqualSelectedPods(t *testing.T) {
	shardGate(t)
	f := setup(t)
	s := f.engine(t)
	const seed = 7
	rnd := rand.New(rand.NewPCG(seed, 0))
	writer := &randomPods{f: f, rnd: rnd, pods: map[string]*example.Pod{}}
	var past []string
	for round := range 25 {
		for range 1 + rnd.IntN(40) {
			writer.write(t)
		}
		f.catchUp(t)
		_, all := podsIn(t, s, "/pods", storage.ListOptions{Predicate: storage.Everything})
		past = append(past, all.ResourceVersion)
		for range 12 {
			l := randomShardList(rnd, past)
			want, resourceVersion := l.selected(t, s)
			got, err := l.walk(t, s, resourceVersion)
			if err != nil {
				t.Fatalf("seed %d, round %d: %s: %v", seed, round, l, err)
			}
			if !slices.Equal(got, want) {
				t.Fatalf("seed %d, round %d: %s at %s has\n%v, want\n%v", seed, round, l, resourceVersion, got, want)
			}
		}
	}
}

// TestShards_Pages_EqualUpstream compares pages of a shard, their tokens and metadata, with those
// of upstream's store on the same etcd.
func TestShards_Pages_EqualUpstream(t *testing.T) {
	shardGate(t)
	f := setup(t)
	s := f.engine(t)
	for i := range 60 {
		pod := newPod(fmt.Sprintf("pod-%02d", i))
		pod.UID = types.UID(fmt.Sprint("uid-", i))
		f.create(t, pod)
	}
	f.catchUp(t)
	for shard := range 3 {
		for limit := range 25 {
			pred := ofShard(shardOf(uidField, shard, 3))
			pred.Limit = int64(limit)
			opts := storage.ListOptions{Predicate: pred}
			for page := 0; ; page++ {
				_, want := podsIn(t, f, "/pods/ns/", opts)
				_, got := podsIn(t, s, "/pods/ns/", opts)
				if fmt.Sprint(got) != fmt.Sprint(want) || fmt.Sprint(got.ShardInfo) != fmt.Sprint(want.ShardInfo) || got.ShardInfo == nil {
					t.Fatalf("shard %d, limit %d, page %d:\n got %v %v\nwant %v %v", shard, limit, page, got.ListMeta, got.ShardInfo, want.ListMeta, want.ShardInfo)
				}
				if opts.Predicate.Continue = got.Continue; got.Continue == "" {
					break
				}
			}
		}
	}
}

// TestShards_WithGateOff_AreIgnored: the list has every object, and does not show a shard.
func TestShards_WithGateOff_AreIgnored(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 20)
	f.catchUp(t)
	names, list := podsIn(t, s, "/pods", storage.ListOptions{Predicate: ofShard(shardOf(uidField, 0, 1<<20))})
	if len(names) != 20 || list.ShardInfo != nil {
		t.Errorf("%d pods, %v", len(names), list.ShardInfo)
	}
}

// TestShards_OfManySelectors_AreBounded: the shards of many selectors are dropped, except the one
// just read.
func TestShards_OfManySelectors_AreBounded(t *testing.T) {
	shardGate(t)
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 300)
	f.catchUp(t)
	var first *objects.ShardSet
	for i := range 20 {
		sel := sharding.NewSelector(sharding.ShardRangeRequirement{Key: uidField, Start: fmt.Sprintf("0x%016x", i), End: endOfHashes})
		r, err := s.Read(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: ofShard(sel)})
		if err != nil {
			t.Fatal(err)
		}
		if r.Selective() {
			t.Fatal("the shard has no tree")
		}
		r.Close()
		set := s.view.CurrentGeneration().Selector(ofShard(sel)).Shard
		if s.selections.KnownShard(set) == nil {
			t.Fatalf("the shard of the last read was evicted")
		}
		if first == nil {
			first = set
		}
	}
	if s.selections.KnownShard(first) != nil {
		t.Error("the first of 20 shards, each of all pods, is still cached")
	}
}

// watchedShards is a resource with one watch for each of its shards.
type watchedShards struct {
	f       *fixture
	field   string         // that the shards are of
	pods    map[string]int // the shard of each pod that was created, by name
	watches [4]watch.Interface
}

// create creates a pod, in a namespace named for the end of its name.
func (w *watchedShards) create(t *testing.T, name string) {
	t.Helper()
	pod := newPod(name)
	pod.Namespace = "ns-" + name[len(name)-1:]
	pod.UID = types.UID("uid-" + name)
	for i := range w.watches {
		if ok, err := shardOf(w.field, i, len(w.watches)).Matches(pod); err != nil {
			t.Fatal(err)
		} else if ok {
			w.pods[name] = i
		}
	}
	w.f.create(t, pod)
}

// remove deletes the pod in etcd. It remains in pods.
func (w *watchedShards) remove(t *testing.T, name string) {
	t.Helper()
	key := "/pods/ns-" + name[len(name)-1:] + "/" + name
	if err := w.f.Delete(contextFor(t), key, &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// watch starts the watches, each at the present state of its shard.
func (w *watchedShards) watch(t *testing.T) {
	t.Helper()
	for i := range w.watches {
		opts := storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: ofShard(shardOf(w.field, i, len(w.watches)))}
		var err error
		if w.watches[i], err = w.f.engine(t).Watch(contextFor(t), "/pods", opts); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.watches[i].Stop)
	}
}

// requireEvents fails unless the watch of the shard delivers an ADDED for each of its pods, and a
// DELETED for each pod named before-*, in any order.
func (w *watchedShards) requireEvents(t *testing.T, shard int) {
	t.Helper()
	var want, got []string
	for name, of := range w.pods {
		if of != shard {
			continue
		}
		want = append(want, "ADDED "+name)
		if strings.HasPrefix(name, "before") {
			want = append(want, "DELETED "+name)
		}
	}
	for range want {
		select {
		case ev := <-w.watches[shard].ResultChan():
			got = append(got, fmt.Sprintf("%s %s", ev.Type, ev.Object.(metav1.Object).GetName()))
		case <-time.After(patience):
			t.Fatalf("shard %d: %v, want %v", shard, got, want)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Fatalf("shard %d: %v, want %v", shard, got, want)
	}
}

// filtered returns the value of upstream's metric of objects that are not delivered to a watch of a
// shard.
func (w *watchedShards) filtered(t *testing.T) float64 {
	t.Helper()
	group := w.f.engine(t).group
	n, err := testutil.GetCounterMetricValue(cachermetrics.WatchFilteredEventsTotal.WithLabelValues(group.Group, group.Resource))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// counted returns the value of upstream's metric of watches of shards.
func (w *watchedShards) counted(t *testing.T) (float64, error) {
	group := w.f.engine(t).group
	return testutil.GetGaugeMetricValue(cachermetrics.WatchShardsTotal.WithLabelValues(group.Group, group.Resource))
}

// stop stops the watches and waits until they are not counted.
func (w *watchedShards) stop(t *testing.T) {
	t.Helper()
	for _, each := range w.watches {
		each.Stop()
	}
	eventually(t, "the end of watches is counted", func() bool {
		shards, err := w.counted(t)
		return err == nil && shards == 0
	})
}

// TestShardedWatch_Event_ReachesOnlyItsShard: an event is delivered to the watches of its shard
// only, is assigned once, and is counted for each other watch as upstream counts it.
func TestShardedWatch_Event_ReachesOnlyItsShard(t *testing.T) {
	shardGate(t)
	cachermetrics.Register()
	for _, m := range []metrics.Registerable{cachermetrics.WatchFilteredEventsTotal, cachermetrics.WatchShardsTotal} {
		// upstream registers them if the gate is on when the process starts
		_ = legacyregistry.Register(m)
	}
	for _, field := range []string{uidField, namespaceField} {
		t.Run(field, func(t *testing.T) {
			w := &watchedShards{f: setup(t), field: field, pods: map[string]int{}}
			cachermetrics.WatchFilteredEventsTotal.Reset()
			cachermetrics.WatchShardsTotal.Reset()
			for i := range 10 {
				w.create(t, fmt.Sprintf("before-%d", i))
			}
			w.f.catchUp(t)
			w.watch(t)
			for i := range 10 {
				w.create(t, fmt.Sprintf("after-%d", i))
			}
			for i := range 10 {
				w.remove(t, fmt.Sprintf("before-%d", i))
			}
			for i := range w.watches {
				w.requireEvents(t, i)
			}
			// 30 objects (10 initial, 10 created, 10 deleted), each withheld from all watches but
			// one.
			want := float64(30 * (len(w.watches) - 1))
			for end := time.Now().Add(patience); w.filtered(t) != want; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("%v objects are counted, want %v", w.filtered(t), want)
				}
			}
			if shards, err := w.counted(t); err != nil || shards != float64(len(w.watches)) {
				t.Errorf("%v watches are counted, %v", shards, err)
			}
			w.stop(t)
		})
	}
}
