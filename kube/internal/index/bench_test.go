package index

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// BenchmarkCandidates walks the candidates of selectors of 20,000 pods: by a label of which ten
// pods have the value, and by further labels that all or a tenth of them have, named before it.
func BenchmarkCandidates(b *testing.B) {
	const pods = 20_000
	f := newFixture(b)
	for i := range pods {
		pod := podtest.Pod(fmt.Sprintf("pod-%05d", i))
		pod.Labels = map[string]string{"all": "x", "tenth": fmt.Sprint(i % 10), "rare": fmt.Sprint(i * 7919 % pods / 10)}
		f.Put(b, pod)
	}
	f.CatchUp(b)
	for _, selector := range []string{"rare=7", "all=x,rare=7", "all=x,tenth in (1,2,3),rare=7"} {
		b.Run(selector, func(b *testing.B) {
			pred := podtest.Selecting(b, selector, "")
			for range 20 { // makes the indexes, and the digests of inner nodes
				f.list(b, pred)
			}
			b.ReportAllocs()
			for b.Loop() {
				f.list(b, pred)
			}
		})
	}
}

// BenchmarkFirstUse lists 6,400 pods, stored as JSON, by a label that no list has named before:
// with the plan stored, which makes no digest, and with the plan index, which makes them all.
func BenchmarkFirstUse(b *testing.B) {
	const pods = 6400
	for _, size := range []int{500, 2_000, 3_500} {
		f := finding(b)
		for i := range pods {
			pod := podtest.Labelled(fmt.Sprintf("pod-%05d", i), "n", fmt.Sprint(i%100))
			pod.Annotations = map[string]string{"text": strings.Repeat("t", size)}
			f.Put(b, pod)
		}
		f.CatchUp(b)
		used := 0
		for _, plan := range []string{byStored, byIndex} {
			b.Run(fmt.Sprintf("bytes=%d/plan=%s", size, plan), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					used++
					pred := podtest.Selecting(b, fmt.Sprintf("label-%d=x", used), "")
					if plan == byIndex {
						f.of(b, pred) // the second use makes the index
					}
					f.require(b, pred, plan, 0)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/pods, "ns/object")
			})
		}
	}
}
