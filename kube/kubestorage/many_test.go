package kubestorage

import (
	"fmt"
	goruntime "runtime"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestManyStorages_AtRest_HaveNoGoroutines opens 200 storages of different resources and reads
// each: when their loading has ended, the process has no more goroutines than with one.
func TestManyStorages_AtRest_HaveNoGoroutines(t *testing.T) {
	const storages = 200
	etcd := memory.New()
	f := setup(t, inMemory(etcd))
	f.list(t, everything())
	open := func(i int) *Store {
		t.Helper()
		name := fmt.Sprint("resource-", i)
		s, destroy, err := f.cluster.open(storeConfig{
			Codec:          f.codec,
			Kind:           podKind(schema.GroupResource{Group: "many", Resource: name}),
			ResourcePrefix: "/" + name + "/",
			Transformer:    identity.NewEncryptCheckTransformer(),
		})
		testcheck.NoError(t, err)
		t.Cleanup(destroy)
		return s.(*Store)
	}
	read := func(s *Store) {
		t.Helper()
		testcheck.NoError(t, s.resource.WaitReady(contextFor(t)))
		if err := getList(contextFor(t), s, s.ResourcePrefix(), everything(), &example.PodList{}); err != nil {
			t.Fatal(err)
		}
	}
	read(open(0))
	const others = 20 // of the clients of etcd, which may start meanwhile; fewer than storages
	before := goruntime.NumGoroutine() + others
	for i := 1; i < storages; i++ {
		read(open(i))
	}
	eventually(t, fmt.Sprintf("at most %d goroutines", before), func() bool { return goruntime.NumGoroutine() <= before })
}
