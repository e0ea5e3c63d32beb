package kubestorage

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/metrics"
)

// TestInitialEvents_MoreThanHeld_AreSifted begins watches that select half of the objects, more
// than a stream holds: the index selects the rest too, at the revision of the start, though objects
// change before they are read. Metrics have the plan and the numbers.
func TestInitialEvents_MoreThanHeld_AreSifted(t *testing.T) {
	t.Parallel()
	const pods = 10_000
	w := indexTwin(t, "initial")
	pod := func(i int, half string) {
		w.put(t, withLabel(newPod(fmt.Sprintf("pod-%05d", i)), "half", half))
	}
	for i := range pods {
		pod(i, []string{"a", "b"}[i%2])
	}
	w.catchUp(t)
	w.listLabelled(t, "half", "none") // the first use of the label
	count := func(name string) float64 {
		t.Helper()
		n, _ := series(t, name, w.group, "plan", metrics.PlanIndex)
		return n
	}
	sendInitialEvents := true
	for _, c := range []struct {
		selector           string
		examined, returned int // of the initial events
	}{
		{"half=a", pods / 2, pods / 2},
		{"half!=a", pods / 2, pods / 2},
		{"half in (a,b),half=b", pods / 2, pods / 2},
		{"half=none", 0, 0},
	} {
		t.Run(c.selector, func(t *testing.T) {
			plans, examined, returned := count("strata_list_plans_total"), count("strata_list_examined_objects_total"), count("strata_list_selected_objects_total")
			opts := storage.ListOptions{Recursive: true, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan, SendInitialEvents: &sendInitialEvents, Predicate: labelled("half", "")}
			opts.Predicate.Label, opts.Predicate.AllowWatchBookmarks = parseLabels(t, c.selector), true
			watching, err := w.Watch(contextFor(t), "/pods/", opts)
			testcheck.NoError(t, err)
			defer watching.Stop()
			next := func() (watch.Event, metav1.Object) {
				t.Helper()
				ev, ok := <-watching.ResultChan()
				if !ok || ev.Type == watch.Error {
					t.Fatalf("the watch ended: %+v", ev)
				}
				if shared, ok := ev.Object.(runtime.CacheableObject); ok {
					ev.Object = shared.GetObject()
				}
				obj, err := meta.Accessor(ev.Object)
				testcheck.NoError(t, err)
				return ev, obj
			}
			last, n := "", 0
			for ev, obj := next(); ev.Type != watch.Bookmark; ev, obj = next() {
				if ev.Type != watch.Added || obj.GetName() <= last {
					t.Fatalf("event %d: %s of %s after %s", n, ev.Type, obj.GetName(), last)
				}
				if last, n = obj.GetName(), n+1; n == 1 {
					for i := pods - 100; i < pods; i++ { // the last ones lose or gain the label
						pod(i, "c")
					}
				}
			}
			if n != c.returned {
				t.Errorf("%d initial events, want %d", n, c.returned)
			}
			if got := [3]float64{count("strata_list_plans_total") - plans, count("strata_list_examined_objects_total") - examined, count("strata_list_selected_objects_total") - returned}; got != [3]float64{1, float64(c.examined), float64(c.returned)} {
				t.Errorf("plans, examined and returned objects: %v, want 1, %d and %d", got, c.examined, c.returned)
			}
			for i := pods - 100; i < pods; i++ {
				pod(i, []string{"a", "b"}[i%2])
			}
			w.catchUp(t)
		})
	}
}
