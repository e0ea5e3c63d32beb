package readpath

import (
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers"

	"github.com/stratakube/strata/kube/kubestorage"
)

// Resource is what the byte path knows of one served version of a resource: how
// upstream's handlers serve it, and the storage they read from. Its fields are not
// changed once it is in use.
type Resource struct {
	// GVR and Kind are the served version.
	GVR  schema.GroupVersionResource
	Kind schema.GroupVersionKind
	// ListKind is the kind of a list, for example ConfigMapList.
	ListKind string
	// Namespaced: keys are prefix/namespace/name, otherwise prefix/name.
	Namespaced bool
	// Custom: objects are unstructured, and items of a list carry kind and apiVersion.
	Custom bool

	// Store is the storage that answers; for a custom resource that of this version.
	Store *kubestorage.Store
	// Serializer is what upstream negotiates media types with and encodes by.
	Serializer runtime.NegotiatedSerializer
	// StandardSerializers, if set, are those of Serializer that may be used for whole
	// objects: of custom resources there is only metadata in protobuf.
	StandardSerializers []runtime.SerializerInfo
	// IndexFields and IndexLabels are what the registry's predicates declare as indexed
	// (storage.SelectionPredicate).
	IndexFields, IndexLabels []string
	// FieldLabel converts a field label of a selector to the internal one, or returns
	// the error that the client is shown (400).
	FieldLabel func(label, value string) (newLabel, newValue string, err error)
	// Decorate changes an object when it is read, above the storage, as the registries
	// of services and persistentvolumeclaims do; nil for most.
	Decorate func(runtime.Object)
	// Warnings are sent with each response, for a deprecated version.
	Warnings []string
	// Deprecated and RemovedRelease are the labels of request metrics.
	Deprecated     bool
	RemovedRelease string

	encodings    encodings
	requestScope atomic.Pointer[handlers.RequestScope]
	accepted     struct{ get, list, watch acceptCache }
}
