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

// BenchmarkKeys measures the keys of the nodes of 100,000 pods, with 20 on each node: a build, a
// list of a node, and a write that moves no pod, beside a write without keys. Memory is that of the
// keys for each pod.
func BenchmarkKeys(b *testing.B) {
	const pods, nodes = 100_000, 5_000
	fill := func(b *testing.B, f *fixture) {
		for i := range pods {
			f.Put(b, podOn(fmt.Sprintf("pod-%05d", i), fmt.Sprint("node-", i*7919%nodes)))
		}
		f.CatchUp(b)
	}
	f := findingDeclared(b, []string{"spec.nodeName"})
	fill(b, f)
	byNode := func(i int) string {
		r := f.of(b, onNode(b, fmt.Sprint("node-", i%nodes)))
		if n := len(r.candidates("")); n != pods/nodes {
			b.Fatalf("%d candidates", n)
		}
		return r.name()
	}
	podtest.Eventually(b, "keys are built", func() bool { return byNode(0) == byKeys })
	k := f.nodeKeys()
	b.Run("list", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if plan := byNode(i); plan != byKeys {
				b.Fatal(plan)
			}
		}
		b.ReportMetric(float64(k.charged)/pods, "bytes/pod")
	})
	b.Run("build", func(b *testing.B) {
		for b.Loop() {
			if err := k.build(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/pods, "ns/pod")
	})
	write := func(b *testing.B, f *fixture, most int) {
		value := podtest.Stored(b, podOn("pod-00007", fmt.Sprint("node-", 7*7919%nodes)))
		for i := 0; b.Loop(); i++ {
			if f.Etcd.Put(podtest.Root+"ns/pod-00007", value); i%most == most-1 {
				f.CatchUp(b)
			}
		}
	}
	none := finding(b)
	fill(b, none)
	b.Run("write/keys=1", func(b *testing.B) { write(b, f, 20) })
	b.Run("write/keys=0", func(b *testing.B) { write(b, none, 20) })
}
