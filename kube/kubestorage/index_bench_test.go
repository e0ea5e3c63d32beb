package kubestorage

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// BenchmarkCandidates walks the candidates of selectors of 20,000 pods: by a label of which ten pods have the value, and by further labels
// that all or a tenth of them have, named before it.
func BenchmarkCandidates(b *testing.B) {
	const pods = 20_000
	w := newTwin(b, mirror.Window{})
	for i := range pods {
		pod := newPod(fmt.Sprintf("pod-%05d", i))
		pod.Labels = map[string]string{"all": "x", "tenth": fmt.Sprint(i % 10), "rare": fmt.Sprint(i * 7919 % pods / 10)}
		w.put(b, pod)
	}
	w.catchUp(b)
	for _, selector := range []string{"rare=7", "all=x,rare=7", "all=x,tenth in (1,2,3),rare=7"} {
		b.Run(selector, func(b *testing.B) {
			label, err := labels.Parse(selector)
			if err != nil {
				b.Fatal(err)
			}
			pred := storage.SelectionPredicate{Label: label, Field: fields.Everything(), GetAttrs: podAttrs}
			read := func() (n int) {
				r, err := w.Read(b.Context(), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred})
				if err != nil {
					b.Fatal(err)
				}
				defer r.Close()
				for e := range r.Candidates() {
					if ok, err := r.Matches(b.Context(), e); err != nil {
						b.Fatal(err)
					} else if ok {
						n++
					}
				}
				return n
			}
			for range 20 { // makes the indexes, and the digests of inner nodes
				read()
			}
			b.ReportAllocs()
			for b.Loop() {
				read()
			}
		})
	}
}
