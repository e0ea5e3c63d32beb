package readpath

import (
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/transcode"
)

// boundResource describes one served version of a resource: the settings with which upstream's
// handlers serve it, and the storage that they read from. Its exported fields are immutable once it
// is in use.
type boundResource struct {
	// GVR and Kind are the served version.
	GVR  schema.GroupVersionResource
	Kind schema.GroupVersionKind
	// ListKind is the kind of a list, for example ConfigMapList.
	ListKind string
	// Namespaced means that keys are prefix/namespace/name, otherwise prefix/name.
	Namespaced bool
	// Custom means that objects are unstructured, and items of a list carry kind and apiVersion.
	Custom bool

	// Store is the storage that is read; for a custom resource, the one of this version.
	Store *kubestorage.Store
	// Serializer is the one that upstream negotiates media types and encodes with.
	Serializer runtime.NegotiatedSerializer
	// StandardSerializers, if set, are the serializers of Serializer that support whole objects:
	// for custom resources, protobuf supports metadata only.
	StandardSerializers []runtime.SerializerInfo
	// IndexFields and IndexLabels are the fields and labels that the registry's predicates declare
	// as indexed (storage.SelectionPredicate).
	IndexFields, IndexLabels []string
	// FieldLabel converts a field label of a selector to the internal one, or returns the error for
	// the client (400).
	FieldLabel func(label, value string) (newLabel, newValue string, err error)
	// Decorate modifies an object after it was read from the storage, as the registries of services
	// and persistentvolumeclaims do; nil for most resources.
	Decorate func(runtime.Object)
	// Transcoder makes JSON from stored objects of Kind; nil: they are decoded.
	Transcoder *transcode.Transcoder
	// CustomTranscoder does so for custom resources.
	CustomTranscoder *transcode.Custom
	// Table returns the convertor that upstream's handlers make tables with. It is used by one
	// request. nil: they answer requests for tables.
	Table func() rest.TableConvertor
	// Deprecation is that of the version, nil if it is not deprecated.
	Deprecation *versionDeprecation

	encodings    encodings
	requestScope atomic.Pointer[handlers.RequestScope]
	accepted     struct{ get, list, watch acceptCache }
}

// versionDeprecation is of a version of a resource.
type versionDeprecation struct {
	Warning        string // sent with each response
	RemovedRelease string // a label of request metrics; "" if it is not known
}

// labels returns the labels of request metrics.
func (d *versionDeprecation) labels() (deprecated bool, removedRelease string) {
	if d == nil {
		return false, ""
	}
	return true, d.RemovedRelease
}
