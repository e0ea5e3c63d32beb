// Package kind describes the kinds of objects that a server serves. The engine builds one
// description for each storage: the declarations of the registry, and the stored form from the
// server's table. The views of the storage and the byte read path share it.
package kind

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"

	"github.com/stratakube/strata/kube/transcode"
)

// Kind is one served kind: a resource in the version of one storage. It is immutable once the
// storage is made.
type Kind struct {
	GroupResource schema.GroupResource
	NewFunc       func() runtime.Object // in the version that the storage decodes to
	NewListFunc   func() runtime.Object
	Decoder       etcd3.Decoder
	GetAttrs      storage.AttrFunc
	Declared      []string // the fields for which the registry has declared an index
	Form
}

// Form describes the objects of a kind beside its registry: how they are stored, and how they are
// completed. With the zero value objects are decoded as a whole, and served as they
// were decoded. Functions are called concurrently.
type Form struct {
	// Abridge appends a stored value, after decryption, to dst without the fields that selectors do
	// not evaluate: the name, the namespace, the UID, the labels, and the fields of GetAttrs
	// remain. Not ok: it cannot, and the whole value is decoded, as it is if Abridge is nil.
	// Abridge does not keep the slices; see transcode.Abridger.
	Abridge func(dst, value []byte) (_ []byte, ok bool)
	// Find returns a function that finds the value of a label, or of a field of GetAttrs; nil if it
	// has no such function. Then, and if the function is not ok, objects are decoded; after 1,000
	// values that were not found, all objects are, if most were not found. See transcode.Finder.
	Find func(label bool, name string) transcode.Find
	// Transcoder makes JSON from stored objects; nil: they are decoded. It is used for the version
	// Stored alone.
	Transcoder *transcode.Transcoder
	Stored     schema.GroupVersionKind
	// Decorate completes an object after it was read from the storage, as the registry does
	// (registry.Store.Decorator); nil for most kinds. Watches of such a kind through
	// storage.Interface get private copies of objects, which the registry may change; other watches
	// share them.
	Decorate func(runtime.Object)
}

// Table returns the form of a resource with objects like obj.
type Table func(resource schema.GroupResource, obj runtime.Object) Form
