package kubestorage

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/component-base/metrics/testutil"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/selected"
	"github.com/stratakube/strata/mirror"
)

// labelled selects the pods with one value of a label.
func labelled(key, value string) storage.SelectionPredicate {
	pred := storage.Everything
	pred.Label = labels.SelectorFromSet(labels.Set{key: value})
	pred.GetAttrs = podAttrs
	return pred
}

// indexTwin returns a storage of a resource of its own, so that its metrics are not those of other tests.
func indexTwin(t *testing.T, resource string) *twin {
	return newTwinWith(t, mirror.Window{}, func(cfg *storeConfig) {
		cfg.GroupResource = schema.GroupResource{Group: "bounds", Resource: resource}
	})
}

// listLabelled lists the pods with the value, and returns their number.
func (w *twin) listLabelled(t *testing.T, key, value string) int {
	t.Helper()
	out := &example.PodList{}
	if err := w.GetList(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: labelled(key, value)}, out); err != nil {
		t.Fatal(err)
	}
	return len(out.Items)
}

// digests returns the number of indexes that have digests in the newest version.
func (w *twin) digests(t *testing.T) int {
	t.Helper()
	indexes := map[any]bool{}
	for d := range mustLatest(t, w.Store).Digests() {
		d.Each(func(of, _ any) { indexes[of] = true })
	}
	return len(indexes)
}

// TestIndexes_MoreLabelsThanBound_AreDropped selects by more labels than a resource has indexes: the least recently used ones, and their
// digests, are dropped, and lists by every label stay right.
func TestIndexes_MoreLabelsThanBound_AreDropped(t *testing.T) {
	const bound, names, pods = 64, 80, 300
	synctest.Test(t, func(t *testing.T) {
		w := indexTwin(t, "many")
		for i := range pods {
			pod := newPod(fmt.Sprintf("pod-%03d", i))
			pod.Labels = map[string]string{}
			for n := range names {
				pod.Labels[fmt.Sprint("label-", n)] = fmt.Sprint(i % (n + 1))
			}
			w.put(t, pod)
		}
		w.catchUp(t)
		for n := range names {
			for range 3 {
				want := (pods + n) / (n + 1) // those with i % (n+1) == 0
				if got := w.listLabelled(t, fmt.Sprint("label-", n), "0"); got != want {
					t.Fatalf("label-%d=0 selects %d pods, want %d", n, got, want)
				}
			}
			indexes, err := testutil.GetGaugeMetricValue(metrics.Indexes.WithLabelValues("bounds", "many"))
			if err != nil {
				t.Fatal(err)
			}
			if want := min(n+1, bound); int(indexes) != want {
				t.Fatalf("%v indexes after %d labels, want %d", indexes, n+1, want)
			}
		}
		time.Sleep(5 * time.Second) // drops the digests of those that were removed
		synctest.Wait()
		if n := w.digests(t); n == 0 || n > bound {
			t.Errorf("%d indexes have digests, want 1 to %d", n, bound)
		}
	})
}

// TestIndexes_LargerThanBudget_IsRefused: a label whose digests take more than their part of the budget is scanned until it is tried
// again, and the metrics show it.
func TestIndexes_LargerThanBudget_IsRefused(t *testing.T) {
	const pods = 2000
	synctest.Test(t, func(t *testing.T) {
		w := indexTwin(t, "refused")
		for i := range pods {
			w.put(t, withLabel(newPod(fmt.Sprintf("pod-%04d", i)), "unique", fmt.Sprint(i)))
		}
		w.catchUp(t)
		w.cluster.blocks.SetLimit(4 * 4096)
		use := func() {
			t.Helper()
			for i := range 3 {
				if got := w.listLabelled(t, "unique", fmt.Sprint(7*i)); got != 1 {
					t.Fatalf("unique=%d selects %d pods, want 1", 7*i, got)
				}
			}
		}
		refused := func() float64 {
			n, err := testutil.GetCounterMetricValue(metrics.IndexRefusals.WithLabelValues("bounds", "refused"))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		scans := func() float64 {
			n, err := testutil.GetCounterMetricValue(metrics.ListPlans.WithLabelValues("bounds", "refused", metrics.PlanScan))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		already, before := refused(), scans()
		use()
		if n := scans() - before; n != 2 {
			t.Errorf("%v of 3 lists were scans, want the first, and the third, which finds the index full", n)
		}
		time.Sleep(selected.IndexIdle / 5) // the bytes are counted meanwhile
		synctest.Wait()
		if n := refused() - already; n != 1 {
			t.Errorf("%v refusals, want 1", n)
		}
		before = scans()
		use()
		if n := scans() - before; n != 3 {
			t.Errorf("%v of 3 lists by a refused label were scans", n)
		}
		time.Sleep(selected.IndexIdle * 3 / 2)
		synctest.Wait()
		w.cluster.blocks.SetLimit(DefaultRepresentationBytes)
		before = scans()
		use()
		if n := scans() - before; n > 1 {
			t.Errorf("%v of 3 lists were scans after the time of the refusal, want at most the first", n)
		}
		if n := w.digests(t); n != 1 {
			t.Errorf("%d indexes have digests, want the one that was tried again", n)
		}
	})
}

// TestIndexes_AllResourcesAtBound_RefuseAnother: indexes of other resources have taken the bytes of all. A declared index still has room.
func TestIndexes_AllResourcesAtBound_RefuseAnother(t *testing.T) {
	const pods = 500
	synctest.Test(t, func(t *testing.T) {
		w := indexTwin(t, "together")
		for i := range pods {
			pod := withLabel(newPod(fmt.Sprintf("pod-%04d", i)), "app", fmt.Sprint(i%50))
			pod.Spec.NodeName = fmt.Sprint("node-", i%50)
			w.put(t, pod)
		}
		w.catchUp(t)
		const limit = 1 << 20
		w.cluster.blocks.SetLimit(limit)
		w.cluster.blocks.Charge(limit / 2)
		for range 5 {
			if got := w.listLabelled(t, "app", "7"); got != pods/50 {
				t.Fatalf("%d pods with the label, want %d", got, pods/50)
			}
			list := storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: onNode("node-7", true)}
			out := &example.PodList{}
			if err := w.GetList(contextFor(t), "/pods/", list, out); err != nil || len(out.Items) != pods/50 {
				t.Fatalf("%d pods of the node, want %d (%v)", len(out.Items), pods/50, err)
			}
			time.Sleep(selected.IndexIdle / 8)
			synctest.Wait()
		}
		if n := w.digests(t); n != 1 {
			t.Errorf("%d indexes have digests, want the declared one", n)
		}
		if charged := w.cluster.blocks.Charged(); charged > limit/4*3 {
			t.Errorf("%d bytes of indexes in all, want at most %d", charged, limit/4*3)
		}
	})
}

// TestWatches_MoreLabelsThanBound_ReadEveryEvent: watches by a few labels are woken by the events of their values only, further ones by
// every event, until the others end.
func TestWatches_MoreLabelsThanBound_ReadEveryEvent(t *testing.T) {
	const bound = 8
	f, etcd := inMemory(t)
	ctx, s := contextFor(t), f.engine(t)
	rev := put(t, etcd, podOn("pod", "a", 1))
	f.catchUp(t)
	open := func(label string) *Stream {
		t.Helper()
		st, err := s.OpenStream(ctx, "/pods", storage.ListOptions{Recursive: true, ResourceVersion: fmt.Sprint(rev), Predicate: labelled(label, "x")})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(st.Close)
		for b, err := st.next(); err != nil || !b.empty(); b, err = st.next() {
			if err != nil {
				t.Fatal(err)
			}
		}
		return st
	}
	// woken reports whether the stream was woken before it had passed the revision.
	woken := func(st *Stream, rev mirror.Revision) bool {
		t.Helper()
		changed := st.logChanged
		eventually(t, "the stream passes the event", func() bool {
			if _, err := st.next(); err != nil {
				t.Fatal(err)
			}
			return st.cursor.Position() >= rev
		})
		select {
		case <-changed:
			return true
		default:
			return false
		}
	}
	var streams []*Stream
	for n := range bound + 1 {
		streams = append(streams, open(fmt.Sprint("label-", n)))
	}
	again := open("label-0") // shares the index
	rev = put(t, etcd, podOn("pod", "a", 2))
	f.catchUp(t)
	for n, st := range streams {
		if got, want := woken(st, rev), n == bound; got != want {
			t.Errorf("the watch by label %d: woken %t, want %t", n+1, got, want)
		}
	}
	if woken(again, rev) {
		t.Error("the second watch by the first label was woken")
	}
	streams[0].Close() // again still needs the index
	beyond := open("label-beyond")
	again.Close()
	last := open("label-last")
	rev = put(t, etcd, podOn("pod", "a", 3))
	f.catchUp(t)
	if !woken(beyond, rev) || woken(last, rev) {
		t.Error("the watch that began before an index was free must be woken, the one after it must not")
	}
	rev = put(t, etcd, withLabel(podOn("pod", "a", 4), "label-last", "x"))
	f.catchUp(t)
	if !woken(last, rev) {
		t.Error("the watch of a label was not woken by an event of its value")
	}
}
