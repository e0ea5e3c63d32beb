package kubestorage

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/mirror"
)

// transformedTwin is a storage of events (see eventTwin) whose values are found after the transformer has read them.
func transformedTwin(t *testing.T, transformer value.Transformer, found *atomic.Int64) *twin {
	t.Helper()
	return newTwinOf(t, mirror.Window{}, func(cfg *storeConfig) {
		cfg.GroupResource, cfg.GetAttrs, cfg.Transformer = schema.GroupResource{Group: t.Name(), Resource: "events"}, involvedAttrs, transformer
	}, podFinder(found))
}

// seal writes pods of numbers from start to end, in steps, as the transformer stores them: of 100 nodes, with 50 values of a label.
func (w *twin) seal(t *testing.T, transformer value.Transformer, start, end, step int) {
	t.Helper()
	for i := start; i < end; i += step {
		pod := newPod(fmt.Sprintf("event-%04d", i))
		pod.Spec.NodeName, pod.Labels = fmt.Sprint("object-", i%100), map[string]string{"n": fmt.Sprint(i % 50)}
		pod.Annotations = map[string]string{"text": strings.Repeat("a text that is like others, ", 30)}
		data, err := transformer.TransformToStorage(contextFor(t), []byte(storedPod(t, pod)), value.DefaultContext(etcdKey(pod)))
		if err != nil {
			t.Fatal(err)
		}
		w.etcd.Put(etcdKey(pod), string(data))
	}
	w.catchUp(t)
}

// listEvents returns the plan of a list, the number of objects in its answer, and its error.
func (w *twin) listEvents(t *testing.T, pred storage.SelectionPredicate) (plan string, n int, err error) {
	t.Helper()
	pred.GetAttrs = involvedAttrs
	opts := storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred}
	r, err := w.Read(contextFor(t), "/pods/", opts)
	if err != nil {
		t.Fatal(err)
	}
	plan = r.planName()
	for e := range r.Candidates() {
		ok, err := r.Matches(contextFor(t), e)
		if err != nil {
			r.Close()
			return plan, 0, err
		}
		if ok {
			n++
		}
	}
	r.Close()
	return plan, n, nil
}

// TestFinder_KeysReplaced_ReadsValuesAgain: values of indexes belong to the keys that decrypted them. After a change of keys lists find them again, and fail
// while an object is encrypted with a removed key.
func TestFinder_KeysReplaced_ReadsValuesAgain(t *testing.T) {
	const n = 400
	var found atomic.Int64
	first, both, second := encryption(t, "1"), encryption(t, "2", "1"), encryption(t, "2")
	swap := newSwappable(first)
	w := transformedTwin(t, swap, &found)
	w.seal(t, first, 0, n, 1)
	field := involved(t, "spec.nodeName=object-8")
	field.IndexFields = []string{"spec.nodeName"}
	// lists have the plans of keys that were just replaced.
	lists := func(when string, fails bool) {
		t.Helper()
		for i, c := range []struct {
			pred storage.SelectionPredicate
			plan string
			want int
		}{
			{labelled("n", "7"), metrics.PlanStored, n / 50},
			{labelled("n", "7"), metrics.PlanIndex, n / 50},
			{field, metrics.PlanIndex, n / 100},
			{involved(t, "spec.nodeName!=object-9"), metrics.PlanIndex, n / 100 * 99},
		} {
			before := found.Load()
			plan, got, err := w.listEvents(t, c.pred)
			switch {
			case (err != nil) != fails:
				t.Errorf("%s, list %d: %v", when, i, err)
			case !fails && got != c.want:
				t.Errorf("%s, list %d has %d objects, want %d", when, i, got, c.want)
			case plan != c.plan:
				t.Errorf("%s, list %d has the plan %s, want %s", when, i, plan, c.plan)
			case !fails && found.Load() == before:
				t.Errorf("%s, list %d has found no stored value", when, i)
			}
		}
	}
	lists("with the first key", false)
	swap.set(both)
	lists("with a further key", false)
	w.seal(t, both, 0, n, 2)
	swap.set(second)
	lists("without the first key", true)
	w.seal(t, second, 1, n, 2)
	swap.set(encryption(t, "2"))
	lists("after all were written again", false)
}

// TestFinder_CompressedAndTransformedValues_AreFound: values that have no readers are compressed in memory; they are decompressed and transformed in buffers
// that a pass shares, beside values that are not compressed.
func TestFinder_CompressedAndTransformedValues_AreFound(t *testing.T) {
	const n = 1500
	synctest.Test(t, func(t *testing.T) {
		var found atomic.Int64
		transformer := storagetesting.NewPrefixTransformer([]byte("a prefix:"), false)
		w := transformedTwin(t, transformer, &found)
		w.seal(t, transformer, 0, n, 1)
		time.Sleep(20 * time.Minute) // of the bubble
		if got := w.resource.Stats().Compressed; got != n {
			t.Fatalf("%d values are compressed, want %d", got, n)
		}
		w.seal(t, transformer, 0, n, 3) // not compressed now
		for i, plan := range []string{metrics.PlanStored, metrics.PlanIndex} {
			got, selected, err := w.listEvents(t, labelled("n", "7"))
			if err != nil || got != plan || selected != n/50 {
				t.Errorf("list %d has the plan %s and %d objects, want %s and %d: %v", i, got, selected, plan, n/50, err)
			}
		}
		if got := found.Load(); got != 2*n-n/50 { // the selected objects have attributes after the first list
			t.Errorf("%d values were found, want %d", got, 2*n-n/50)
		}
	})
}
