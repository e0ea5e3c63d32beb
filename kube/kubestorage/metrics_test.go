package kubestorage

import (
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics/testutil"

	"github.com/stratakube/strata/etcdsource/memory"
)

// TestReadMetrics_CountConsistentReadsByOutcome: by outcome, with the time that they waited, under
// upstream's names; memory's lag behind etcd is reported too.
func TestReadMetrics_CountConsistentReadsByOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stallable{}
		counted := schema.GroupResource{Group: "metrics", Resource: "counted"}
		f := setup(t, inMemory(memory.New()), s.through, func(o *options) { o.store.GroupResource = counted })
		pod := f.create(t, newPod("a"))[0]
		f.catchUp(t)
		ctx := contextFor(t)
		type outcomes struct{ memory, fallback, refused, waits uint64 }
		now := func() (o outcomes) {
			t.Helper()
			count := func(success, fallback string) uint64 {
				v, err := testutil.GetCounterMetricValue(cachermetrics.ConsistentReadTotal.WithLabelValues(counted.Group, counted.Resource, success, fallback))
				if err != nil {
					t.Fatal(err)
				}
				return uint64(v)
			}
			var err error
			if o.waits, err = testutil.GetHistogramMetricCount(cachermetrics.WatchCacheReadWait.WithLabelValues(counted.Group, counted.Resource)); err != nil {
				t.Fatal(err)
			}
			o.memory, o.fallback, o.refused = count("true", "false"), count("true", "true"), count("false", "false")
			return o
		}
		during := func(what string, want outcomes, do func()) {
			t.Helper()
			before := now()
			do()
			after := now()
			if got := (outcomes{after.memory - before.memory, after.fallback - before.fallback, after.refused - before.refused, after.waits - before.waits}); got != want {
				t.Errorf("%s: counted %+v, want %+v", what, got, want)
			}
		}
		get := func(rv string) func() {
			return func() {
				if err := f.Get(ctx, podKey(pod), storage.GetOptions{ResourceVersion: rv}, &example.Pod{}); err != nil {
					t.Error(err)
				}
			}
		}
		list := func() { f.list(t, everything()) }
		during("get", outcomes{memory: 1, waits: 1}, get(""))
		during("get at 0", outcomes{}, get("0"))
		during("get not older", outcomes{waits: 1}, get(pod.ResourceVersion))
		during("list", outcomes{memory: 1, waits: 1}, list)
		during("watch", outcomes{memory: 1, waits: 1}, func() { f.watchPods(t, everything()) })

		shared := f.cluster.mirror.Stats()
		list()
		if st := f.cluster.mirror.Stats(); st.RevisionReads != shared.RevisionReads+1 || st.RevisionReadWaiters != shared.RevisionReadWaiters+1 {
			t.Errorf("a lone list: %d reads of the revision for %d requests, want 1 for 1", st.RevisionReads-shared.RevisionReads, st.RevisionReadWaiters-shared.RevisionReadWaiters)
		}

		s.feed.shut()
		defer s.feed.open()
		f.putPod(t, withLabel(pod, "state", "new"))
		during("get while memory is behind", outcomes{fallback: 1, waits: 1}, get(""))
		during("list while memory is behind", outcomes{refused: 1, waits: 1}, func() {
			requireRetry(t, "list", f.GetList(ctx, "/pods/", everything(), &example.PodList{}))
		})
		if st := f.cluster.mirror.Stats(); st.EtcdRevision <= st.PublishedRevision {
			t.Errorf("etcd is at %d, memory at %d, by the metrics", st.EtcdRevision, st.PublishedRevision)
		}
		s.feed.open()
		f.catchUp(t)
		if st := f.cluster.mirror.Stats(); st.EtcdRevision != st.PublishedRevision {
			t.Errorf("etcd is at %d, memory at %d, by the metrics, after it has caught up", st.EtcdRevision, st.PublishedRevision)
		}
	})
}
