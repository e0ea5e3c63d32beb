package apiserver

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"
	api "k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/controlplane"
	claims "k8s.io/kubernetes/pkg/registry/core/persistentvolumeclaim/storage"
	"k8s.io/kubernetes/pkg/registry/core/service/ipallocator"
	services "k8s.io/kubernetes/pkg/registry/core/service/storage"
	netutils "k8s.io/utils/net"
)

// readDecorators returns the decorators that upstream's registries apply when objects are read:
// they complete Services and PersistentVolumeClaims that were written by older releases without
// some fields. The functions are upstream's own, taken from registries without storage; no other
// registry has a decorator.
func readDecorators(config controlplane.Extra) (map[schema.GroupResource]func(runtime.Object), error) {
	primary, secondary := api.IPv4Protocol, api.IPv6Protocol
	if netutils.IsIPv6CIDR(&config.ServiceIPRange) {
		primary, secondary = secondary, primary
	}
	// A registry of Services does not call its allocators for reads, but may count them.
	allocators := map[api.IPFamily]ipallocator.Interface{primary: nil}
	if config.SecondaryServiceIPRange.IP != nil {
		allocators[secondary] = nil
	}
	service, _, _, err := services.NewREST(noStorage{}, primary, allocators, nil, nil, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("registry of services: %w", err)
	}
	claim, _, err := claims.NewREST(noStorage{})
	if err != nil {
		return nil, fmt.Errorf("registry of persistentvolumeclaims: %w", err)
	}
	return map[schema.GroupResource]func(runtime.Object){
		{Resource: "services"}:               service.Decorator,
		{Resource: "persistentvolumeclaims"}: claim.Decorator,
	}, nil
}

// noStorage is a RESTOptionsGetter for registries without storage.
type noStorage struct{}

func (noStorage) GetRESTOptions(resource schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return generic.RESTOptions{
		StorageConfig:  &storagebackend.ConfigForResource{GroupResource: resource},
		ResourcePrefix: resource.Resource,
		Decorator: func(*storagebackend.ConfigForResource, string, func(runtime.Object) (string, error), func() runtime.Object,
			func() runtime.Object, storage.AttrFunc, storage.IndexerFuncs, *cache.Indexers) (storage.Interface, factory.DestroyFunc, error) {
			return nil, func() {}, nil
		},
	}, nil
}
