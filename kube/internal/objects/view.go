package objects

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/mirror"
)

// Config describes the conversion of stored values to objects.
type Config struct {
	kind.Kind
	Transformer value.Transformer
	// Keys identifies the keys that the transformer decrypts with now, as a comparable value. nil:
	// they never change.
	Keys func() any
	// Conversions runs those that may block; nil: no conversion blocks.
	Conversions *Conversions
	// Blocks holds decoded and converted objects.
	Blocks *blockcache.Cache
}

// View is one served version of one resource. Methods may be called concurrently.
type View struct {
	cfg    Config
	served servedVersion

	// selective: there are watches with a selector, which need the attributes of new objects.
	selective atomic.Bool

	// unabridged counts the values that Abridge could not cut down, up to maxUnabridged.
	unabridged atomic.Int32

	labelSearches, fieldSearches searches

	fieldNames atomic.Pointer[[]string] // of the last FieldSet

	cur    atomic.Pointer[Generation] // see CurrentGeneration
	mu     sync.Mutex                 // held to replace cur; leaf but for the callback onRotate
	closed bool                       // guarded by mu
	// onRotate, if set, is called after a generation was replaced, with mu held. It must not block.
	onRotate func()
}

// New returns a view. If onRotate is not nil, it is called after each change of keys and must not
// block. Close the view after use.
func New(cfg Config, onRotate func()) *View {
	v := &View{cfg: cfg, served: versionOf(cfg.NewFunc), onRotate: onRotate}
	v.cur.Store(v.newGeneration())
	return v
}

// Close releases the memory of the view.
func (v *View) Close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	v.cur.Load().end()
}

// Kind returns the kind of the objects.
func (v *View) Kind() *kind.Kind { return &v.cfg.Kind }

// WantAttributes makes events keep the attributes of their objects: there are watches with a
// selector.
func (v *View) WantAttributes() { v.selective.Store(true) }

// Rekeyed reports whether the keys may change.
func (v *View) Rekeyed() bool { return v.cfg.Keys != nil }

// data returns the decrypted value of an entry, which may share memory with it or with buf: do not
// write to it. buf is as in mirror.Entry.ValueIn.
func (v *View) data(ctx context.Context, e *mirror.Entry, buf *[]byte) ([]byte, error) {
	data, _, err := v.cfg.Transformer.TransformFromStorage(ctx, e.ValueIn(buf), value.DefaultContext(e.Key()))
	if err != nil {
		return nil, storage.NewInternalError(&transformError{e.Key(), err})
	}
	return data, nil
}

// transformError is a decryption failure, with the key for LISTs.
type transformError struct {
	key string
	err error
}

func (e *transformError) Error() string {
	return fmt.Sprintf("unable to transform key %q: %v", e.key, e.err)
}

func (e *transformError) Unwrap() error { return e.err }

// Cause returns an error of decoding without the key, for callers that add it themselves.
func Cause(err error) error {
	var t *transformError
	if errors.As(err, &t) {
		return t.err
	}
	return err
}

// Decode returns the object of an entry with the resource version rev. The caller owns the object.
// Errors: those of the transformer, as storage.InternalError, of the decoder, and of
// Conversions.Detach.
func (g *Generation) Decode(ctx context.Context, e *mirror.Entry, rev mirror.Revision) (runtime.Object, error) {
	data, err := g.view.data(ctx, e, nil)
	if err != nil {
		return nil, err
	}
	return g.DecodeStored(ctx, e, data, rev)
}

// Stored returns the decrypted value of an entry, which may share memory with it or with buf: do
// not write to it. The caller reuses buf, into which a value is decompressed. Errors: those of the
// transformer, as storage.InternalError.
func (g *Generation) Stored(ctx context.Context, e *mirror.Entry, buf *[]byte) ([]byte, error) {
	return g.view.data(ctx, e, buf)
}

// DecodeStored is Decode of the entry's decrypted value.
func (g *Generation) DecodeStored(ctx context.Context, e *mirror.Entry, data []byte, rev mirror.Revision) (runtime.Object, error) {
	if u := g.converted(e, rev); u != nil {
		return u, nil
	}
	if g.view.cfg.Conversions.MayBlock(data) {
		return g.convert(ctx, e, data, rev)
	}
	obj, err := g.view.cfg.Decoder.DecodeListItem(ctx, data, uint64(rev), g.view.cfg.NewFunc)
	if err != nil {
		etcdmetrics.RecordDecodeError(g.view.cfg.GroupResource)
		return nil, err
	}
	g.keepConverted(e, data, obj)
	return obj, nil
}

// DecodeInto is Decode into an object of the caller, with the entry's own revision.
func (g *Generation) DecodeInto(ctx context.Context, e *mirror.Entry, out runtime.Object) error {
	custom, _ := out.(*unstructured.Unstructured)
	if u := g.converted(e, e.ModRevision()); u != nil && custom != nil {
		custom.Object = u.Object
		return nil
	}
	data, err := g.view.data(ctx, e, nil)
	if err != nil {
		return err
	}
	if custom != nil && g.view.cfg.Conversions.MayBlock(data) {
		u, err := g.convert(ctx, e, data, e.ModRevision())
		if err == nil {
			custom.Object = u.(*unstructured.Unstructured).Object
		}
		return err
	}
	if err := g.view.cfg.Decoder.Decode(data, out, e.ModRevision()); err != nil {
		etcdmetrics.RecordDecodeError(g.view.cfg.GroupResource)
		return err
	}
	g.keepConverted(e, data, out)
	return nil
}
