// Package upstream has the calls of k8s.io/apiserver whose signatures differ between minor
// versions. The build tag apiserver_v0_38 is for a version that is not supported yet.
package upstream

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"
)

// OpenFunc opens the storage of a resource. It is a generic.StorageDecorator without the arguments
// that the engine ignores. reverse may be nil.
type OpenFunc func(config *storagebackend.ConfigForResource, resourcePrefix string, reverse ReverseKeyFunc,
	newFunc, newListFunc func() runtime.Object, getAttrs storage.AttrFunc, indexers *cache.Indexers) (storage.Interface, factory.DestroyFunc, error)

// Etcd is upstream's store.
type Etcd interface {
	storage.Interface
	Close()
}
