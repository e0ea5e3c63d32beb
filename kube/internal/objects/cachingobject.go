package objects

import (
	"bytes"
	"io"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// CachingObject is an immutable object with many watchers. It is encoded once per encoder for all
// of them.
type CachingObject struct {
	metav1.Object // the object's metadata, for reading
	obj           runtime.Object

	mu        sync.Mutex // leaf; guards encodings
	encodings map[runtime.Identifier]*encoding
}

type encoding struct {
	once sync.Once
	data []byte
	err  error
}

// share wraps obj, which must not be written from then on.
func share(obj runtime.Object) runtime.Object {
	m, ok := obj.(metav1.Object)
	if !ok {
		// Some types only give access to their metadata.
		acc, ok := obj.(metav1.ObjectMetaAccessor)
		if !ok {
			return obj
		}
		m = acc.GetObjectMeta()
	}
	return &CachingObject{Object: m, obj: obj}
}

// cborEncoder is part of the identifiers of upstream's CBOR encoders. (An API group named cbor is
// mistaken for one; its encodings are then not shared.)
const cborEncoder = "cbor"

// CacheEncode implements runtime.CacheableObject. CBOR is encoded for each watch: upstream varies
// the order of its keys, so that no client relies on one, and the identifier of an encoder does not
// show whether it does.
func (o *CachingObject) CacheEncode(id runtime.Identifier, encode func(runtime.Object, io.Writer) error, w io.Writer) error {
	if strings.Contains(string(id), cborEncoder) {
		return encode(o.GetObject(), w)
	}
	o.mu.Lock()
	e := o.encodings[id]
	if e == nil {
		e = &encoding{}
		if o.encodings == nil {
			o.encodings = map[runtime.Identifier]*encoding{}
		}
		o.encodings[id] = e
	}
	o.mu.Unlock()
	e.once.Do(func() {
		var buf bytes.Buffer
		e.err = encode(o.GetObject(), &buf) // encoders may modify their input
		e.data = buf.Bytes()
	})
	if e.err != nil {
		return e.err
	}
	if splice, ok := w.(runtime.Splice); ok {
		splice.Splice(e.data)
		return nil
	}
	_, err := w.Write(e.data)
	return err
}

// GetObject implements runtime.CacheableObject: it returns a copy that the caller owns.
func (o *CachingObject) GetObject() runtime.Object { return o.obj.DeepCopyObject() }

// GetObjectKind implements runtime.Object.
func (o *CachingObject) GetObjectKind() schema.ObjectKind { return o.obj.GetObjectKind() }

// DeepCopyObject implements runtime.Object.
func (o *CachingObject) DeepCopyObject() runtime.Object { return o.obj.DeepCopyObject() }

var _ runtime.CacheableObject = (*CachingObject)(nil)
