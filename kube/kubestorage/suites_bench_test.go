package kubestorage

import (
	"flag"
	"fmt"
	"os"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// Upstream's benchmarks of a storage, on the engine and on upstream's cacher, at a part of the
// sizes that the cacher's own benchmarks use.

var suitesPercent = flag.Int("suites.percent", 0, "size of upstream's benchmarks in percent of its own; 0 means 10, and 100 with STRATA_TEST_LONG=1")

// ofSuites returns the part of a size of upstream's benchmarks that is used.
func ofSuites(size int) int {
	percent := *suitesPercent
	if percent == 0 {
		percent = 10
		if os.Getenv("STRATA_TEST_LONG") == "1" {
			percent = 100
		}
	}
	return max(1, size*percent/100)
}

func BenchmarkStoreList(b *testing.B) {
	for _, size := range []struct{ namespaces, podsEach, nodes int }{
		{ofSuites(10_000), 15, ofSuites(5000)},
		{ofSuites(50), 3000, ofSuites(5000)},
		{ofSuites(100), 1100, ofSuites(1000)},
	} {
		b.Run(fmt.Sprintf("namespaces=%d/pods=%d/nodes=%d", size.namespaces, size.namespaces*size.podsEach, size.nodes), func(b *testing.B) {
			data := benchmarkData(size.namespaces, size.podsEach, size.nodes)
			f := setup(b, withSuitePods)
			f.createAll(b, data.Pods)
			for name, s := range map[string]storage.Interface{"engine": f.engine(b), "cacher": f.cacher(b)} {
				for _, useIndex := range []bool{true, false} {
					b.Run(fmt.Sprintf("%s/indexed=%t", name, useIndex), func(b *testing.B) {
						storagetesting.RunBenchmarkStoreList(b.Context(), b, s, data, useIndex)
					})
				}
			}
		})
	}
}

// withSuitePods makes the storage of a fixture one of pods of upstream's benchmarks.
func withSuitePods(o *options) { o.store.Codec, o.store.Kind = suiteCodec(), suitePods }

// cacher returns upstream's watch cache, with the indexes of nodes and namespaces that its own
// benchmarks have, on the etcd of the fixture.
func (f *fixture) cacher(b *testing.B) storage.Interface {
	b.Helper()
	byNode := func(obj any) ([]string, error) { return []string{obj.(*suitePod).Spec.NodeName}, nil }
	byNamespace := func(obj any) ([]string, error) { return []string{obj.(*suitePod).Namespace}, nil }
	return f.upstream(b, cacher.Config{
		GetAttrsFunc: suitePods.GetAttrs,
		IndexerFuncs: map[string]storage.IndexerFunc{"spec.nodeName": func(obj runtime.Object) string { return obj.(*suitePod).Spec.NodeName }},
		Indexers:     &cache.Indexers{storage.FieldIndex("spec.nodeName"): byNode, storage.FieldIndex("metadata.namespace"): byNamespace},
		NewFunc:      suitePods.NewFunc,
		NewListFunc:  suitePods.NewListFunc,
		Codec:        suiteCodec(),
	})
}

// upstream returns upstream's watch cache of the pods of the fixture.
func (f *fixture) upstream(t testing.TB, config cacher.Config) storage.Interface {
	t.Helper()
	config.Storage = f.engine(t).etcd
	config.Versioner = storage.APIObjectVersioner{}
	config.GroupResource = schema.GroupResource{Resource: "pods"}
	config.EventsHistoryWindow = cacher.DefaultEventFreshDuration
	config.ResourcePrefix = "/pods/"
	config.KeyFunc = func(obj runtime.Object) (string, error) { return podKey(obj.(metav1.Object)), nil }
	config.Clock = clock.RealClock{}
	c, err := cacher.NewCacherFromConfig(config)
	testcheck.NoError(t, err)
	t.Cleanup(c.Stop)
	testcheck.NoError(t, c.Wait(t.Context()))
	delegator := cacher.NewCacheDelegator(c, config.Storage)
	t.Cleanup(delegator.Stop)
	return delegator
}

func BenchmarkStoreStats(b *testing.B) {
	f := setup(b, withSuitePods)
	f.createAll(b, benchmarkData(ofSuites(50), 3000, ofSuites(5000)).Pods)
	storagetesting.RunBenchmarkStoreStats(b.Context(), b, f.engine(b))
}

// createAll stores the pods, several at a time, and returns when memory has them.
func (f *fixture) createAll(b *testing.B, pods []*suitePod) {
	b.Helper()
	work := make(chan *suitePod)
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
			data.Pods = append(data.Pods, &suitePod{
				ObjectMeta: metav1.ObjectMeta{Namespace: data.NamespaceNames[ns], Name: fmt.Sprintf("pod-%d", n)},
			})
			data.Pods[n].Spec.NodeName = data.NodeNames[n%nodes]
		}
	}
	return data
}
