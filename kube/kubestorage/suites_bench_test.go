package kubestorage

import (
	"fmt"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/example"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
)

// Upstream's benchmarks of a storage, at a tenth of the sizes that its cacher uses.

func BenchmarkStoreListCreate(b *testing.B) {
	for _, match := range []metav1.ResourceVersionMatch{metav1.ResourceVersionMatchNotOlderThan, metav1.ResourceVersionMatchExact} {
		b.Run(fmt.Sprintf("match=%s", match), func(b *testing.B) {
			storagetesting.RunBenchmarkStoreListCreate(b.Context(), b, setup(b).engine(b), match)
		})
	}
}

func BenchmarkStoreList(b *testing.B) {
	for _, size := range []struct{ namespaces, podsEach, nodes int }{
		{1000, 15, 500},
		{5, 3000, 500},
		{10, 1100, 100},
	} {
		b.Run(fmt.Sprintf("namespaces=%d/pods=%d/nodes=%d", size.namespaces, size.namespaces*size.podsEach, size.nodes), func(b *testing.B) {
			data := storagetesting.PrepareBenchchmarkData(size.namespaces, size.podsEach, size.nodes)
			f := setup(b)
			f.createAll(b, data.Pods)
			for _, useIndex := range []bool{true, false} {
				b.Run(fmt.Sprintf("indexed=%t", useIndex), func(b *testing.B) {
					storagetesting.RunBenchmarkStoreList(b.Context(), b, f.engine(b), data, useIndex)
				})
			}
		})
	}
}

func BenchmarkStoreStats(b *testing.B) {
	f := setup(b)
	f.createAll(b, storagetesting.PrepareBenchchmarkData(50, 300, 500).Pods)
	storagetesting.RunBenchmarkStoreStats(b.Context(), b, f.engine(b))
}

// createAll stores the pods, several at a time, and returns when memory has them.
func (f *fixture) createAll(b *testing.B, pods []*example.Pod) {
	b.Helper()
	work := make(chan *example.Pod)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for pod := range work {
				if err := f.Create(b.Context(), podKey(pod), pod, nil, 0); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for _, pod := range pods {
		work <- pod
	}
	close(work)
	wg.Wait()
	f.catchUp(b)
}
