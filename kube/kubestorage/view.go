package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"
	"k8s.io/apiserver/pkg/storage/value"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"github.com/stratakube/strata/mirror"
)

type (
	groupResource = schema.GroupResource
	transformer   = value.Transformer
)

// view is one served version of one resource: how entries become objects, and the
// generation in which derived data is cached. Nothing is decoded before
// somebody reads it, and readers of different entries never wait for each other
// (I9). All methods may be called concurrently.
type view struct {
	resource    groupResource
	transformer transformer
	// keys identifies the keys that the transformer decrypts with at present (see keysOf); nil if
	// they never change.
	keys     func() any
	decoder  etcd3.Decoder
	newFunc  func() runtime.Object
	getAttrs storage.AttrFunc
	// unsafeDelete is AllowUnsafeMalformedObjectDeletion: LISTs report all corrupt
	// objects instead of the first.
	unsafeDelete bool
	// retryFor is how long a watcher tries again to decode an event before it gives up.
	retryFor time.Duration

	// selective: there are watches with a selector, which want to know the attributes of
	// what is written.
	selective atomic.Bool

	budget *budget

	cur    atomic.Pointer[generation] // see now
	mu     sync.Mutex                 // leaf but for what ends a generation; held to replace cur
	closed bool                       // guarded by mu
	// ended, if set, is called after a generation has been replaced, with mu held. It must not
	// block.
	ended func(*generation)
}

func newView(cfg StoreConfig, t transformer, keys func() any, d etcd3.Decoder, unsafeDelete bool, budget *budget) *view {
	v := &view{
		resource:     cfg.GroupResource,
		transformer:  t,
		keys:         keys,
		decoder:      d,
		newFunc:      cfg.NewFunc,
		getAttrs:     cfg.GetAttrs,
		unsafeDelete: unsafeDelete,
		retryFor:     undecodableFor,
		budget:       budget,
	}
	v.cur.Store(v.newGeneration())
	return v
}

// close ends the view: its memory is released.
func (v *view) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	v.cur.Load().end()
}

// data returns the entry's value as it was before encryption. It may share memory
// with the entry: do not write to it.
func (v *view) data(ctx context.Context, e *mirror.Entry) ([]byte, error) {
	data, _, err := v.transformer.TransformFromStorage(ctx, e.Value(), value.DefaultContext(e.Key()))
	if err != nil {
		return nil, storage.NewInternalError(&transformError{e.Key(), err})
	}
	return data, nil
}

// transformError is the failure to decrypt a value, with the key as LISTs show it.
type transformError struct {
	key string
	err error
}

func (e *transformError) Error() string {
	return fmt.Sprintf("unable to transform key %q: %v", e.key, e.err)
}

func (e *transformError) Unwrap() error { return e.err }

// cause is an error of decoding without the key, for those who name it themselves.
func cause(err error) error {
	var t *transformError
	if errors.As(err, &t) {
		return t.err
	}
	return err
}

// decode returns the entry's object, which belongs to the caller, with the
// resource version rev.
func (g *generation) decode(ctx context.Context, e *mirror.Entry, rev mirror.Revision) (runtime.Object, error) {
	if u := g.recall(e, rev); u != nil {
		return u, nil
	}
	data, err := g.view.data(ctx, e)
	if err != nil {
		return nil, err
	}
	obj, err := g.view.decoder.DecodeListItem(ctx, data, uint64(rev), g.view.newFunc)
	if err != nil {
		g.view.undecodable()
		return nil, err
	}
	g.remember(e, data, obj)
	return obj, nil
}

// decodeInto is decode into an object of the caller.
func (g *generation) decodeInto(ctx context.Context, e *mirror.Entry, out runtime.Object) error {
	if u := g.recall(e, e.ModRevision()); u != nil {
		if out, ok := out.(*unstructured.Unstructured); ok {
			out.Object = u.Object
			return nil
		}
	}
	data, err := g.view.data(ctx, e)
	if err != nil {
		return err
	}
	if err := g.view.decoder.Decode(data, out, e.ModRevision()); err != nil {
		g.view.undecodable()
		return err
	}
	g.remember(e, data, out)
	return nil
}

func (v *view) undecodable() { etcdmetrics.RecordDecodeError(v.resource) }

// attrs returns the entry's labels and fields, decoding it if nobody has before.
// An entry that cannot be decoded is tried again by the next reader.
func (g *generation) attrs(ctx context.Context, e *mirror.Entry) (*attrs, error) {
	if a, ok := e.Memo(g.slot).(*attrs); ok {
		return a, nil
	}
	obj, err := g.decode(ctx, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	return g.learn(e, obj)
}

// learn keeps the attributes of an entry that was decoded.
func (g *generation) learn(e *mirror.Entry, obj runtime.Object) (*attrs, error) {
	if a, ok := e.Memo(g.slot).(*attrs); ok {
		return a, nil
	}
	l, f, err := g.view.getAttrs(obj)
	if err != nil {
		return nil, err
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, err
	}
	a := newAttrs(l, f, m)
	if e.SwapMemo(g.slot, nil, a) && g.ended.Load() {
		e.DropClosed() // dropClosed may have been here before
	}
	return a, nil
}

// selector decides which objects a request is about.
type selector struct {
	gen   *generation
	pred  storage.SelectionPredicate
	all   bool      // every object matches
	plain bool      // every object of the shard matches
	shard *shardSet // nil: of all shards
	// object: the object itself decides, not only its attributes. No request asks for that.
	object bool
}

func (g *generation) selector(pred storage.SelectionPredicate) selector {
	s := selector{gen: g, pred: pred}
	if pred.ShardSelector != nil && !pred.ShardSelector.Empty() && utilfeature.DefaultFeatureGate.Enabled(features.ShardedListAndWatch) {
		if set, ok := parseShardSet(pred.ShardSelector); ok {
			s.shard = set
		} else {
			s.object = true
		}
	}
	s.plain = !s.object && (pred.Label == nil || pred.Label.Empty()) && (pred.Field == nil || pred.Field.Empty())
	s.all = s.plain && s.shard == nil
	return s
}

// matches reports whether the entry's object is selected. The error is that of
// decoding it; without a selector nothing is decoded.
func (s *selector) matches(ctx context.Context, e *mirror.Entry) (bool, error) {
	return s.matchesObject(e, func() (runtime.Object, error) { return s.gen.decode(ctx, e, e.ModRevision()) })
}

// matchesEvent is matches for the states before and after an event, each decoded
// once for all watchers.
func (s *selector) matchesEvent(ev *mirror.Event) (before, now bool, err error) {
	if ev.Prev != nil {
		before, err = s.matchesObject(ev.Prev, func() (runtime.Object, error) { return s.gen.deleted(ev) })
	}
	if ev.Entry != nil && err == nil {
		now, err = s.matchesObject(ev.Entry, func() (runtime.Object, error) { return s.gen.added(ev) })
	}
	return before, now, err
}

func (s *selector) matchesObject(e *mirror.Entry, decode func() (runtime.Object, error)) (bool, error) {
	if s.all {
		return true, nil
	}
	a, known := e.Memo(s.gen.slot).(*attrs)
	if !known || s.object {
		obj, err := decode()
		if err != nil {
			return false, err
		}
		if shared, ok := obj.(*sharedObject); ok {
			obj = shared.obj
		}
		if a, err = s.gen.learn(e, obj); err != nil {
			return false, err
		}
		if s.object {
			if ok, err := s.pred.MatchesSharding(obj); err != nil || !ok {
				return false, err
			}
		}
	}
	if s.shard != nil && !s.shard.selects(a) {
		return false, nil
	}
	return (s.pred.Label == nil || s.pred.Label.Matches(a.labels)) && (s.pred.Field == nil || s.pred.Field.Matches(a.fields)), nil
}

// decodeTimeout bounds one decryption or conversion on behalf of a watcher.
const decodeTimeout = 10 * time.Second

// eventObjects are the objects of one event, each decoded once for all watchers.
type eventObjects struct {
	current, deleted lazyObject
}

// lazyObject is decoded by whoever asks first; the others wait for that. A failure
// is forgotten, so that a later caller tries again.
type lazyObject struct {
	mu  sync.Mutex
	obj runtime.Object
}

func (l *lazyObject) get(decode func() (runtime.Object, error)) (runtime.Object, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.obj == nil {
		obj, err := decode()
		if err != nil {
			return nil, err
		}
		l.obj = share(obj)
	}
	return l.obj, nil
}

// added returns the object after the event, shared by all watchers.
func (g *generation) added(ev *mirror.Event) (runtime.Object, error) {
	return g.eventObjects(ev).current.get(func() (runtime.Object, error) {
		ctx, cancel := context.WithTimeout(context.Background(), decodeTimeout)
		defer cancel()
		obj, err := g.decode(ctx, ev.Entry, ev.Rev)
		if err == nil {
			_, err = g.learn(ev.Entry, obj)
		}
		return obj, err
	})
}

// deleted returns the object before the event with the revision of the event, as a
// DELETED carries it, shared by all watchers.
func (g *generation) deleted(ev *mirror.Event) (runtime.Object, error) {
	return g.eventObjects(ev).deleted.get(func() (runtime.Object, error) {
		ctx, cancel := context.WithTimeout(context.Background(), decodeTimeout)
		defer cancel()
		obj, err := g.decode(ctx, ev.Prev, ev.Rev)
		if err == nil {
			_, err = g.learn(ev.Prev, obj)
		}
		return obj, err
	})
}

func (g *generation) eventObjects(ev *mirror.Event) *eventObjects {
	for {
		if o, ok := ev.Memo(g.slot).(*eventObjects); ok {
			return o
		}
		o := &eventObjects{}
		if ev.SwapMemo(g.slot, nil, o) {
			bytes := int64(1024)
			if ev.Entry != nil {
				bytes += ev.Entry.Size()
			}
			if ev.Prev != nil {
				bytes += ev.Prev.Size()
			}
			g.events.add(cachedEvent{slot: g.slot, ev: ev, kept: o, bytes: bytes})
			return o
		}
	}
}
