// This file is part of package kubestorage in `make test-next` only: `go mod tidy` looks at every
// build tag, and k8s.io/apiserver has the model since v0.38.

package kubestorage

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/apiserver/pkg/storage/testing/correctness"
	"k8s.io/client-go/tools/cache"
)

// TestCorrectness compares writes, reads and watches with upstream's model of a storage.
func TestCorrectness(t *testing.T) {
	for name, storageOf := range map[string]func(*testing.T, *fixture) storage.Interface{
		"engine": func(t *testing.T, f *fixture) storage.Interface { return invalidVersions(f.engine(t)) },
		"etcd3":  func(t *testing.T, f *fixture) storage.Interface { return f.engine(t).etcd },
		"cacher": func(t *testing.T, f *fixture) storage.Interface {
			return f.upstream(t, cacher.Config{
				GetAttrsFunc: podAttrs, Indexers: &cache.Indexers{}, NewFunc: newExamplePod, NewListFunc: newExamplePodList, Codec: testCodec(),
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := setup(t)
			keyOf := func(obj runtime.Object) (string, error) { return podKey(obj.(*example.Pod)), nil }
			correctness.RunTestCorrectness(contextFor(t), t, storageOf(t, f), strings.TrimSuffix(testPrefix, "/"), keyOf)
		})
	}
}
