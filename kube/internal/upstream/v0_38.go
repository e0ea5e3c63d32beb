//go:build apiserver_v0_38

package upstream

import (
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/client-go/tools/cache"
)

// ReverseKeyFunc returns the name and namespace in a key.
type ReverseKeyFunc = storage.ReverseKeyFunc

// Decorator returns the decorator that calls open.
func Decorator(open OpenFunc) generic.StorageDecorator {
	return func(config *storagebackend.ConfigForResource, resourcePrefix string, _ generic.CacheKeyFunc, reverse storage.ReverseKeyFunc,
		newFunc, newListFunc func() runtime.Object, getAttrs storage.AttrFunc, _ storage.IndexerFuncs, indexers *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		return open(config, resourcePrefix, reverse, newFunc, newListFunc, getAttrs, indexers)
	}
}

// Open calls a decorator without the arguments that an OpenFunc lacks, and without reverse.
func Open(decorator generic.StorageDecorator, config *storagebackend.ConfigForResource, resourcePrefix string,
	newFunc, newListFunc func() runtime.Object, getAttrs storage.AttrFunc, indexers *cache.Indexers) (storage.Interface, factory.DestroyFunc, error) {
	return decorator(config, resourcePrefix, nil, nil, newFunc, newListFunc, getAttrs, nil, indexers)
}

// NewEtcd calls etcd3.New.
func NewEtcd(client *kubernetes.Client, compactor etcd3.Compactor, codec runtime.Codec, newFunc, newListFunc func() runtime.Object, reverse ReverseKeyFunc,
	prefix, resourcePrefix string, resource schema.GroupResource, transformer value.Transformer, leases etcd3.LeaseManagerConfig,
	decoder etcd3.Decoder, versioner storage.Versioner) (Etcd, error) {
	return etcd3.New(client, compactor, codec, newFunc, newListFunc, reverse, prefix, resourcePrefix, resource, transformer, leases, decoder, versioner)
}
