package kubestorage

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
			w := &watchedShards{f: setupInMemory(t), field: field, pods: map[string]int{}}
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

// TestShardedList_GateOn_HasShardInfo: the storage passes the gate to its lists.
func TestShardedList_GateOn_HasShardInfo(t *testing.T) {
	shardGate(t)
	f := setupInMemory(t)
	f.create(t, newPod("a"))
	opts := storage.ListOptions{Recursive: true, Predicate: ofShard(shardOf(uidField, 0, 1))}
	if list := f.list(t, opts); list.ShardInfo == nil {
		t.Errorf("a list of a shard has no ShardInfo: %v", list.ListMeta)
	}
}
