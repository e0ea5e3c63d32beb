package kubestorage

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/mirror"
)

// BenchmarkFirstUse lists 6,400 pods, stored as JSON, by a label that no list has named before: with the plan stored, which makes no digest, and with
// the plan index, which makes them all.
func BenchmarkFirstUse(b *testing.B) {
	const pods = 6400
	for _, size := range []int{500, 2_000, 10_000} {
		w := newTwinOf(b, mirror.Window{}, func(*storeConfig) {}, podFinder(new(atomic.Int64)))
		for i := range pods {
			pod := newPod(fmt.Sprintf("pod-%05d", i))
			pod.Labels = map[string]string{"n": fmt.Sprint(i % 100)}
			pod.Annotations = map[string]string{"text": strings.Repeat("t", size)}
			w.put(b, pod)
		}
		w.catchUp(b)
		label, used := "", 0
		read := func(value, want string, walk bool) {
			pred := storage.SelectionPredicate{Label: labels.SelectorFromSet(labels.Set{label: value}), Field: fields.Everything(), GetAttrs: podAttrs}
			r, err := w.Read(b.Context(), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred})
			if err != nil {
				b.Fatal(err)
			}
			defer r.Close()
			if got := r.planName(); got != want {
				b.Fatalf("plan %s, want %s", got, want)
			}
			if walk {
				for range r.Candidates() {
					b.Fatal("a candidate")
				}
			}
		}
		for _, plan := range []string{metrics.PlanStored, metrics.PlanIndex} {
			b.Run(fmt.Sprintf("bytes=%d/plan=%s", size, plan), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					used++
					label = fmt.Sprint("label-", used)
					if plan == metrics.PlanIndex {
						read("x", metrics.PlanStored, false)
					}
					read("x", plan, true)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/pods, "ns/object")
			})
		}
	}
}
