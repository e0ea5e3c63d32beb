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

func BenchmarkStoreList(b *testing.B) {
	for _, size := range []struct{ namespaces, podsEach, nodes int }{
		{1000, 15, 500},
		{5, 3000, 500},
		{10, 1100, 100},
	} {
		b.Run(fmt.Sprintf("namespaces=%d/pods=%d/nodes=%d", size.namespaces, size.namespaces*size.podsEach, size.nodes), func(b *testing.B) {
			data := benchmarkData(size.namespaces, size.podsEach, size.nodes)
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
	f.createAll(b, benchmarkData(50, 300, 500).Pods)
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

// benchmarkData are pods spread over namespaces and nodes.
func benchmarkData(namespaces, podsEach, nodes int) storagetesting.BenchmarkData {
	var data storagetesting.BenchmarkData
	for n := range nodes {
		data.NodeNames = append(data.NodeNames, fmt.Sprintf("node-%d", n))
	}
	for ns := range namespaces {
		data.NamespaceNames = append(data.NamespaceNames, fmt.Sprintf("namespace-%d", ns))
		for range podsEach {
			n := len(data.Pods)
			data.Pods = append(data.Pods, &example.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: data.NamespaceNames[ns], Name: fmt.Sprintf("pod-%d", n)},
				Spec:       example.PodSpec{NodeName: data.NodeNames[n%nodes]},
			})
		}
	}
	return data
}
