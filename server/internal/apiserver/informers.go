package apiserver

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/informers/admissionregistration"
	"k8s.io/client-go/informers/apiserverinternal"
	"k8s.io/client-go/informers/apps"
	"k8s.io/client-go/informers/autoscaling"
	"k8s.io/client-go/informers/batch"
	"k8s.io/client-go/informers/certificates"
	"k8s.io/client-go/informers/coordination"
	"k8s.io/client-go/informers/core"
	"k8s.io/client-go/informers/discovery"
	"k8s.io/client-go/informers/events"
	"k8s.io/client-go/informers/extensions"
	"k8s.io/client-go/informers/flowcontrol"
	"k8s.io/client-go/informers/internalinterfaces"
	"k8s.io/client-go/informers/lifecycle"
	"k8s.io/client-go/informers/networking"
	"k8s.io/client-go/informers/node"
	policyinformers "k8s.io/client-go/informers/policy"
	"k8s.io/client-go/informers/rbac"
	"k8s.io/client-go/informers/resource"
	"k8s.io/client-go/informers/scheduling"
	"k8s.io/client-go/informers/storage"
	"k8s.io/client-go/informers/storagemigration"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/pkg/api/legacyscheme"

	"github.com/stratakube/strata/kube/informer"
	"github.com/stratakube/strata/kube/kubestorage"
)

// engineInformers is the factory of the informers that authentication, authorization, admission and
// hooks of a server share. Its informers read the engine of the server (package informer), except
// for resources that are not held in memory, which have informers of client-go.
type engineInformers struct {
	informers.SharedInformerFactory
	uncached func(schema.GroupResource) bool

	engine *kubestorage.Engine // set before an informer runs
}

// resync is the period that upstream gives the informers of a kube-apiserver.
const resync = 10 * time.Minute

// readByKey are kinds of many or large objects that the server reads one at a time: without the
// object, it refuses the request. Their informers keep no objects and have no resync, which would
// decode all of them. A missing object of another kind, such as a ResourceQuota, would admit what
// it forbids; informers of those keep each object as it was last decoded.
var readByKey = map[schema.GroupResource]bool{
	{Resource: "pods"}:                                 true,
	{Resource: "nodes"}:                                true,
	{Resource: "secrets"}:                              true,
	{Resource: "configmaps"}:                           true,
	{Resource: "services"}:                             true,
	{Resource: "endpoints"}:                            true,
	{Resource: "serviceaccounts"}:                      true,
	{Resource: "persistentvolumes"}:                    true,
	{Resource: "persistentvolumeclaims"}:               true,
	{Group: "coordination.k8s.io", Resource: "leases"}: true,
	{Group: "certificates.k8s.io", Resource: "podcertificaterequests"}: true,
	{Group: "discovery.k8s.io", Resource: "endpointslices"}:            true,
	{Group: "resource.k8s.io", Resource: "resourceclaims"}:             true,
	{Group: "resource.k8s.io", Resource: "resourceslices"}:             true,
	{Group: "storage.k8s.io", Resource: "csinodes"}:                    true,
	{Group: "storage.k8s.io", Resource: "volumeattachments"}:           true,
}

// newEngineInformers returns a factory with the options of upstream's. client is for resources that
// are not held in memory.
func newEngineInformers(client kubernetes.Interface, name *cache.InformerName, uncached func(schema.GroupResource) bool) *engineInformers {
	return &engineInformers{
		SharedInformerFactory: informers.NewSharedInformerFactoryWithOptions(client, resync,
			informers.WithTransform(withoutManagedFields), informers.WithInformerName(name)),
		uncached: uncached,
	}
}

// withoutManagedFields drops what no reader in the process needs, as upstream does.
func withoutManagedFields(obj any) (any, error) {
	if m, err := meta.Accessor(obj); err == nil {
		m.SetManagedFields(nil)
	}
	return obj, nil
}

// InformerFor implements internalinterfaces.SharedInformerFactory. newFunc makes the informer of a
// resource that is not held in memory.
func (f *engineInformers) InformerFor(obj runtime.Object, newFunc internalinterfaces.NewInformerFunc) cache.SharedIndexInformer {
	return f.SharedInformerFactory.InformerFor(obj, func(client kubernetes.Interface, resync time.Duration) cache.SharedIndexInformer {
		kinds, _, err := clientscheme.Scheme.ObjectKinds(obj)
		if err != nil {
			return newFunc(client, resync)
		}
		// Resources of Kubernetes' own API have the names that are guessed.
		plural, _ := meta.UnsafeGuessKindToResource(kinds[0])
		group := plural.GroupResource()
		if !f.inMemory(group) {
			return newFunc(client, resync)
		}
		if readByKey[group] {
			resync = 0
		}
		return informer.New(obj, f.open(group, kinds[0].GroupVersion()), resync, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	})
}

// inMemory reports whether informers of the resource read the engine. Two groups share the storage
// of events.
func (f *engineInformers) inMemory(resource schema.GroupResource) bool {
	return !f.uncached(resource) && !slices.Contains(eventResources, resource)
}

// open returns the opener of a resource, with objects in the version gv, as a client gets them.
func (f *engineInformers) open(resource schema.GroupResource, gv schema.GroupVersion) informer.Opener {
	return func(ctx context.Context, transform cache.TransformFunc) (informer.Source, error) {
		return f.engine.Objects(resource, func(obj runtime.Object) (runtime.Object, error) {
			obj, err := legacyscheme.Scheme.UnsafeConvertToVersion(obj, gv)
			if err == nil {
				obj.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
			}
			return obj, err
		}, !readByKey[resource])(ctx, transform)
	}
}

// ForResource implements informers.SharedInformerFactory.
func (f *engineInformers) ForResource(resource schema.GroupVersionResource) (informers.GenericInformer, error) {
	for kind := range clientscheme.Scheme.KnownTypes(resource.GroupVersion()) {
		gvk := resource.GroupVersion().WithKind(kind)
		if plural, _ := meta.UnsafeGuessKindToResource(gvk); plural != resource || !f.inMemory(resource.GroupResource()) {
			continue // upstream's function makes an informer of client-go
		}
		if obj, err := clientscheme.Scheme.New(gvk); err == nil {
			f.InformerFor(obj, nil) // upstream's function finds it by the type
		}
	}
	return f.SharedInformerFactory.ForResource(resource)
}

// The groups of upstream's factory call its own InformerFor. These call the one above.

func (f *engineInformers) Admissionregistration() admissionregistration.Interface {
	return admissionregistration.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Internal() apiserverinternal.Interface {
	return apiserverinternal.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Apps() apps.Interface { return apps.New(f, metav1.NamespaceAll, nil) }
func (f *engineInformers) Autoscaling() autoscaling.Interface {
	return autoscaling.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Batch() batch.Interface { return batch.New(f, metav1.NamespaceAll, nil) }
func (f *engineInformers) Certificates() certificates.Interface {
	return certificates.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Coordination() coordination.Interface {
	return coordination.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Core() core.Interface { return core.New(f, metav1.NamespaceAll, nil) }
func (f *engineInformers) Discovery() discovery.Interface {
	return discovery.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Events() events.Interface { return events.New(f, metav1.NamespaceAll, nil) }
func (f *engineInformers) Extensions() extensions.Interface {
	return extensions.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Flowcontrol() flowcontrol.Interface {
	return flowcontrol.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Lifecycle() lifecycle.Interface {
	return lifecycle.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Networking() networking.Interface {
	return networking.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Node() node.Interface { return node.New(f, metav1.NamespaceAll, nil) }
func (f *engineInformers) Policy() policyinformers.Interface {
	return policyinformers.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Rbac() rbac.Interface { return rbac.New(f, metav1.NamespaceAll, nil) }
func (f *engineInformers) Resource() resource.Interface {
	return resource.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Scheduling() scheduling.Interface {
	return scheduling.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Storage() storage.Interface {
	return storage.New(f, metav1.NamespaceAll, nil)
}
func (f *engineInformers) Storagemigration() storagemigration.Interface {
	return storagemigration.New(f, metav1.NamespaceAll, nil)
}
