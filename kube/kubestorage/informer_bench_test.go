package kubestorage

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/kube/informer"
	"github.com/stratakube/strata/mirror"
)

// BenchmarkInformerStore reads 200 cached objects from the store of an informer, and from an
// indexer of client-go.
func BenchmarkInformerStore(b *testing.B) {
	const objects = 200
	w := newTwin(b, mirror.Window{})
	for i := range objects {
		w.put(b, &example.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprintf("ns%d", i%10), Name: fmt.Sprintf("pod%d", i), Labels: map[string]string{"app": "bench"}},
			Spec:       example.PodSpec{NodeName: "node"},
		})
	}
	w.catchUp(b)
	in := informer.New(&example.Pod{}, func(_ context.Context, transform cache.TransformFunc) (informer.Source, error) {
		return w.informerSource(nil, transform), nil
	}, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc, "node": byNode})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		in.RunWithContext(ctx)
	}()
	defer func() { cancel(); <-done }()
	<-in.HasSyncedChecker().Done()

	upstream := cache.NewIndexer(cache.MetaNamespaceKeyFunc, in.GetIndexer().GetIndexers())
	for _, obj := range in.GetStore().List() {
		if err := upstream.Add(obj); err != nil {
			b.Fatal(err)
		}
	}
	for _, store := range []struct {
		name string
		cache.Indexer
	}{{"strata", in.GetIndexer()}, {"client-go", upstream}} {
		b.Run("List/"+store.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if n := len(store.List()); n != objects {
					b.Fatalf("%d objects", n)
				}
			}
		})
		b.Run("GetByKey/"+store.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, ok, err := store.GetByKey("ns7/pod77"); !ok || err != nil {
					b.Fatal(ok, err)
				}
			}
		})
		for index, value := range map[string]string{cache.NamespaceIndex: "ns7", "node": "node"} {
			b.Run(strings.Join([]string{"ByIndex", index, store.name}, "/"), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if objs, err := store.ByIndex(index, value); len(objs) == 0 || err != nil {
						b.Fatal(len(objs), err)
					}
				}
			})
		}
	}
}

func byNode(obj any) ([]string, error) { return []string{obj.(*example.Pod).Spec.NodeName}, nil }
