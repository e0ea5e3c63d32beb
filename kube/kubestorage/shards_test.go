package kubestorage

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
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

	"github.com/stratakube/strata/kube/internal/encoded"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/selected"
	"github.com/stratakube/strata/mirror"
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

// ofShard selects by a shard selector alone.
func ofShard(sel sharding.Selector) storage.SelectionPredicate {
	pred := storage.Everything
	pred.ShardSelector = sel
	return pred
}

// podsIn returns the names of the pods that a list has, in its order, its token, and what the list
// says of its shard.
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

// TestShards_AmongWrites_AreWhatTheirSelectorsSelect writes pods at random, and compares lists of
// shards, at the present and at revisions of the past, in pages and with other selectors, with what
// the selectors select among all pods of the same revision.
func TestShards_AmongWrites_AreWhatTheirSelectorsSelect(t *testing.T) {
	shardGate(t)
	f := setup(t)
	s := f.engine(t)
	const seed = 7
	rnd := rand.New(rand.NewPCG(seed, 0))
	pods := map[string]*example.Pod{}
	uids := 0
	write := func() {
		name := fmt.Sprintf("pod-%03d", rnd.IntN(150))
		ns := fmt.Sprintf("ns-%d", rnd.IntN(4))
		key := "/pods/" + ns + "/" + name
		if pods[key] != nil && rnd.IntN(3) == 0 {
			if err := f.Delete(contextFor(t), key, &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			delete(pods, key)
			return
		}
		if pods[key] == nil {
			uids++
			pods[key] = &example.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, UID: types.UID(fmt.Sprint("uid-", uids))}}
		}
		pods[key].Labels = map[string]string{"even": strconv.FormatBool(rnd.IntN(2) == 0)}
		pod := pods[key].DeepCopy()
		err := f.GuaranteedUpdate(contextFor(t), key, &example.Pod{}, true, nil, storage.SimpleUpdate(func(runtime.Object) (runtime.Object, error) { return pod, nil }), nil)
		if err != nil {
			t.Fatal(err)
		}
	}
	var past []string
	for round := range 25 {
		for range 1 + rnd.IntN(40) {
			write()
		}
		f.catchUp(t)
		_, all := podsIn(t, s, "/pods", storage.ListOptions{Predicate: storage.Everything})
		past = append(past, all.ResourceVersion)
		for range 12 {
			n := []int{1, 2, 16, 64}[rnd.IntN(4)]
			sel := shardOf([]string{uidField, namespaceField}[rnd.IntN(2)], rnd.IntN(n), n)
			pred := ofShard(sel)
			if rnd.IntN(4) == 0 {
				pred.Label = labels.SelectorFromSet(labels.Set{"even": "true"})
			}
			opts := storage.ListOptions{Predicate: pred}
			key := "/pods"
			if rnd.IntN(3) == 0 {
				key = fmt.Sprintf("/pods/ns-%d", rnd.IntN(4))
			}
			if rnd.IntN(2) == 0 {
				opts.ResourceVersion, opts.ResourceVersionMatch = past[rnd.IntN(len(past))], metav1.ResourceVersionMatchExact
			}
			if rnd.IntN(2) == 0 {
				opts.Predicate.Limit = int64(1 + rnd.IntN(9))
			}
			whole := opts
			whole.Predicate = storage.Everything
			_, list := podsIn(t, s, key, whole)
			var want []string
			for _, pod := range list.Items {
				if ok, err := sel.Matches(&pod); err != nil {
					t.Fatal(err)
				} else if ok && pred.Label.Matches(labels.Set(pod.Labels)) {
					want = append(want, pod.Namespace+"/"+pod.Name)
				}
			}
			var got []string
			for {
				names, page := podsIn(t, s, key, opts)
				got = append(got, names...)
				if page.ResourceVersion != list.ResourceVersion {
					t.Fatalf("seed %d, round %d: a page of %s, want %s", seed, round, page.ResourceVersion, list.ResourceVersion)
				}
				if page.Continue == "" {
					break
				}
				if n := len(names); int64(n) != opts.Predicate.Limit {
					t.Fatalf("seed %d, round %d: a page of %d pods that is not the last", seed, round, n)
				}
				opts.Predicate.Continue, opts.ResourceVersion, opts.ResourceVersionMatch = page.Continue, "", ""
			}
			if !slices.Equal(got, want) {
				t.Fatalf("seed %d, round %d: %s, %s, labels %s, limit %d at %s has\n%v, want\n%v", seed, round, key, sel, pred.Label, opts.Predicate.Limit, list.ResourceVersion, got, want)
			}
		}
	}
}

// TestShards_PagesAreUpstreams compares pages of a shard, their tokens and metadata, with those of
// upstream's store on the same etcd.
func TestShards_PagesAreUpstreams(t *testing.T) {
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

// TestShards_ReadTwice_WalkNothing: the second list of a shard looks at no entry of another one,
// and finds the items of its leaves.
func TestShards_ReadTwice_WalkNothing(t *testing.T) {
	shardGate(t)
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 400)
	f.catchUp(t)
	rep := newRepresentation(s, podItem, nil)
	defer rep.Close()
	read := func(i int) (objects int) {
		r, err := s.Read(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: ofShard(shardOf(namespaceField, i, 4))})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if r.Selective() {
			t.Fatal("the shard has no tree")
		}
		var spans encoded.Spans
		for run := range r.Runs() {
			if !run.Selected {
				t.Fatal("a leaf of a shard is taken for one of the resource's own")
			}
			objects += len(run.Items())
			if err := rep.AppendRun(t.Context(), &spans, run); err != nil {
				t.Fatal(err)
			}
		}
		return objects
	}
	total := 0
	for i := range 4 {
		total += read(i)
	}
	if total != 400 {
		t.Fatalf("the shards have %d pods", total)
	}
	for i := range 4 {
		r, err := s.Read(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: ofShard(shardOf(namespaceField, i, 4))})
		if err != nil {
			t.Fatal(err)
		}
		want, _ := r.Objects().Count("", "")
		for run := range r.Runs() {
			if !rep.Keeps(run) {
				t.Error("what was made of a leaf is not kept")
			}
		}
		if _, ok := rep.Measure(r.Objects(), "", ""); !ok && want > 0 {
			t.Error("the size of a shard that was read is not known")
		}
		r.Close()
	}
	// The whole list does not move the items of shards.
	readAll(t, s, rep, storage.ListOptions{Recursive: true, Predicate: storage.Everything})
	if r := shardReading(t, s, 0); r != nil {
		for run := range r.Runs() {
			var spans encoded.Spans
			if err := rep.AppendRun(t.Context(), &spans, run); err != nil {
				t.Fatal(err)
			}
		}
		r.Close()
	}
}

func shardReading(t testing.TB, s *Store, i int) *Reading {
	t.Helper()
	r, err := s.Read(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: ofShard(shardOf(namespaceField, i, 4))})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestShards_Kept_AreBounded: many selectors do not add up, and the shard that was just read stays.
func TestShards_Kept_AreBounded(t *testing.T) {
	shardGate(t)
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 300)
	f.catchUp(t)
	for i := range 20 {
		sel := sharding.NewSelector(sharding.ShardRangeRequirement{Key: uidField, Start: fmt.Sprintf("0x%016x", i), End: endOfHashes})
		r, err := s.Read(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: ofShard(sel)})
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		set, _ := objects.ParseShardSet(sel)
		if s.selections.KnownShard(set) == nil {
			t.Fatalf("the shard that was just read is gone")
		}
		if _, kept := s.selections.KeptShards(); kept > selected.MaxShardCopies*300+selected.MaxEmptyShards {
			t.Fatalf("%d entries are kept in shards of 300 pods", kept)
		}
	}
}

// TestShards_WithoutReaders_AreDropped with all their versions.
func TestShards_WithoutReaders_AreDropped(t *testing.T) {
	shardGate(t)
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, mirror.DefaultWindow)
		w.put(t, newPod("a"))
		w.catchUp(t)
		for i := range 2 {
			shardReading(t, w.Store, i).Close()
		}
		if shards, _ := w.selections.KeptShards(); shards != 2 {
			t.Fatalf("%d shards are kept, want 2", shards)
		}
		time.Sleep(2 * selected.ShardIdle)
		synctest.Wait()
		if shards, _ := w.selections.KeptShards(); shards != 0 {
			t.Errorf("%d idle shards are kept", shards)
		}
	})
}

// TestShardedWatches_GetWhatTheirShardHas: an event goes to the watches of its shard only, is sorted
// once, and what it is not delivered to is counted as upstream counts it.
func TestShardedWatches_GetWhatTheirShardHas(t *testing.T) {
	shardGate(t)
	cachermetrics.Register()
	for _, m := range []metrics.Registerable{cachermetrics.WatchFilteredEventsTotal, cachermetrics.WatchShardsTotal} {
		_ = legacyregistry.Register(m) // upstream registers them where the gate is on when the process begins
	}
	for _, key := range []string{uidField, namespaceField} {
		t.Run(key, func(t *testing.T) {
			f := setup(t)
			s := f.engine(t)
			cachermetrics.WatchFilteredEventsTotal.Reset()
			cachermetrics.WatchShardsTotal.Reset()
			group := s.group
			filtered := func() float64 {
				n, err := testutil.GetCounterMetricValue(cachermetrics.WatchFilteredEventsTotal.WithLabelValues(group.Group, group.Resource))
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			const n = 4
			pods := map[string]int{} // their shards
			create := func(name string) {
				pod := newPod(name)
				pod.Namespace = "ns-" + name[len(name)-1:]
				pod.UID = types.UID("uid-" + name)
				for i := range n {
					if ok, err := shardOf(key, i, n).Matches(pod); err != nil {
						t.Fatal(err)
					} else if ok {
						pods[name] = i
					}
				}
				f.create(t, pod)
			}
			for i := range 10 {
				create(fmt.Sprintf("before-%d", i))
			}
			f.catchUp(t)
			var watches [n]watch.Interface
			for i := range n {
				w, err := s.Watch(contextFor(t), "/pods", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: ofShard(shardOf(key, i, n))})
				if err != nil {
					t.Fatal(err)
				}
				defer w.Stop()
				watches[i] = w
			}
			for i := range 10 {
				create(fmt.Sprintf("after-%d", i))
			}
			for name := range maps.Clone(pods) {
				if strings.HasPrefix(name, "before") {
					key := "/pods/ns-" + name[len(name)-1:] + "/" + name
					if err := f.Delete(contextFor(t), key, &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
						t.Fatal(err)
					}
				}
			}
			for i, w := range watches {
				var want, got []string
				for name, shard := range pods {
					if shard != i {
						continue
					}
					want = append(want, "ADDED "+name)
					if strings.HasPrefix(name, "before") {
						want = append(want, "DELETED "+name)
					}
				}
				for range want {
					select {
					case ev := <-w.ResultChan():
						got = append(got, fmt.Sprintf("%s %s", ev.Type, ev.Object.(metav1.Object).GetName()))
					case <-time.After(patience):
						t.Fatalf("shard %d: %v, want %v", i, got, want)
					}
				}
				slices.Sort(got)
				slices.Sort(want)
				if !slices.Equal(got, want) {
					t.Fatalf("shard %d: %v, want %v", i, got, want)
				}
			}
			// 30 objects (10 initial, 10 created, 10 deleted), each kept from all watches but one.
			want := float64(30 * (n - 1))
			for end := time.Now().Add(patience); filtered() != want; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("%v objects are counted, want %v", filtered(), want)
				}
			}
			if shards, err := testutil.GetGaugeMetricValue(cachermetrics.WatchShardsTotal.WithLabelValues(group.Group, group.Resource)); err != nil || shards != n {
				t.Errorf("%v watches are counted, %v", shards, err)
			}
			for _, w := range watches {
				w.Stop()
			}
			eventually(t, "the end of watches is counted", func() bool {
				shards, err := testutil.GetGaugeMetricValue(cachermetrics.WatchShardsTotal.WithLabelValues(group.Group, group.Resource))
				return err == nil && shards == 0
			})
			eventually(t, "no watch follows a shard", func() bool {
				of := map[string]objects.ShardKey{uidField: objects.ByUID, namespaceField: objects.ByNamespace}[key]
				watches, sets := s.selections.ShardFollowers(of)
				return watches == 0 && sets == 0
			})
		})
	}
}

// TestShardedWatch_OfNamespace_Selects: one that is not of the whole resource follows its keys.
func TestShardedWatch_OfNamespace_Selects(t *testing.T) {
	shardGate(t)
	f := setup(t)
	s := f.engine(t)
	f.catchUp(t)
	sel := shardOf(uidField, 0, 2)
	st, err := s.OpenStream(contextFor(t), "/pods/ns", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: ofShard(sel)})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if st.unfollow != nil {
		t.Error("a watch of a namespace follows the events of all of them")
	}
	var want []string
	for i := range 20 {
		pod := newPod(fmt.Sprintf("pod-%02d", i))
		pod.UID = types.UID(fmt.Sprint("uid-", i))
		f.create(t, pod)
		if ok, _ := sel.Matches(pod); ok {
			want = append(want, pod.Name)
		}
	}
	f.catchUp(t)
	var got []string
	for len(got) < len(want) {
		b, err := st.next()
		if err != nil {
			t.Fatal(err)
		}
		for _, ev := range b.events {
			if typ, err := st.translate(ev); err != nil {
				t.Fatal(err)
			} else if typ == watch.Added {
				got = append(got, ev.Key()[strings.LastIndex(ev.Key(), "/")+1:])
			}
		}
		if b.empty() {
			if err := st.wait(nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
