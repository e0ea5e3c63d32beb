//go:build !apiserver_v0_38

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

// ReverseKeyFunc is storage.ReverseKeyFunc since v0.38. Before, it is unused.
type ReverseKeyFunc func(key string) (name, namespace string, err error)

// Decorator returns the decorator that calls open.
func Decorator(open OpenFunc) generic.StorageDecorator {
	return func(config *storagebackend.ConfigForResource, resourcePrefix string, _ func(runtime.Object) (string, error),
		newFunc, newListFunc func() runtime.Object, getAttrs storage.AttrFunc, _ storage.IndexerFuncs, indexers *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		return open(config, resourcePrefix, nil, newFunc, newListFunc, getAttrs, indexers)
	}
}

// Open calls a decorator without the arguments that an OpenFunc lacks, and without reverse.
func Open(decorator generic.StorageDecorator, config *storagebackend.ConfigForResource, resourcePrefix string,
	newFunc, newListFunc func() runtime.Object, getAttrs storage.AttrFunc, indexers *cache.Indexers) (storage.Interface, factory.DestroyFunc, error) {
	return decorator(config, resourcePrefix, nil, newFunc, newListFunc, getAttrs, nil, indexers)
}

// NewEtcd calls etcd3.New.
func NewEtcd(client *kubernetes.Client, compactor etcd3.Compactor, codec runtime.Codec, newFunc, newListFunc func() runtime.Object, _ ReverseKeyFunc,
	prefix, resourcePrefix string, resource schema.GroupResource, transformer value.Transformer, leases etcd3.LeaseManagerConfig,
	decoder etcd3.Decoder, versioner storage.Versioner) (Etcd, error) {
	return etcd3.New(client, compactor, codec, newFunc, newListFunc, prefix, resourcePrefix, resource, transformer, leases, decoder, versioner)
}
