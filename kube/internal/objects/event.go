package objects

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// DecodeTimeout bounds one decryption or conversion on behalf of a watcher.
const DecodeTimeout = 10 * time.Second

// eventObjects are the objects of one event, each decoded once for all watchers.
type eventObjects struct {
	after, before lazyObject
}

// lazyObject is decoded by its first reader (Generation.lazy).
type lazyObject struct {
	obj atomic.Pointer[runtime.Object]
}

// lazy returns the object, decoded once for all readers; concurrent readers wait, each as long as
// its own context lasts. After a failure the next reader tries again.
func (g *Generation) lazy(ctx context.Context, l *lazyObject, decode func() (runtime.Object, error)) (runtime.Object, error) {
	if obj := l.obj.Load(); obj != nil {
		return *obj, nil
	}
	obj, _, err := g.decoding.Do(ctx, l, func() (runtime.Object, error) {
		if obj := l.obj.Load(); obj != nil { // decoded since the first check
			return *obj, nil
		}
		obj, err := decode()
		if err != nil {
			return nil, err
		}
		obj = share(obj)
		l.obj.Store(&obj)
		return obj, nil
	})
	return obj, err
}

// ObjectAfter returns the object after the event, shared by all watchers.
func (g *Generation) ObjectAfter(ctx context.Context, ev *mirror.Event) (runtime.Object, error) {
	return g.lazy(ctx, &g.eventObjects(ev).after, func() (runtime.Object, error) { return g.decodeEvent(ctx, ev.Entry, ev.Rev) })
}

// ObjectBefore returns the object before the event with the revision of the event, for a DELETED
// event, shared by all watchers.
func (g *Generation) ObjectBefore(ctx context.Context, ev *mirror.Event) (runtime.Object, error) {
	return g.lazy(ctx, &g.eventObjects(ev).before, func() (runtime.Object, error) { return g.decodeEvent(ctx, ev.Prev, ev.Rev) })
}

// decodeEvent decodes an entry for all watchers within DecodeTimeout, and keeps its attributes.
func (g *Generation) decodeEvent(ctx context.Context, e *mirror.Entry, rev mirror.Revision) (runtime.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, DecodeTimeout)
	defer cancel()
	obj, err := g.Decode(ctx, e, rev)
	if err == nil {
		_, err = g.keepAttributes(e, obj)
	}
	return obj, err
}

// ObjectAfterIfWanted returns the object after the event if watches with a selector need it too,
// nil otherwise. The caller owns the object.
func (g *Generation) ObjectAfterIfWanted(ctx context.Context, ev *mirror.Event) (runtime.Object, error) {
	if !g.view.selective.Load() {
		return nil, nil
	}
	obj, err := g.ObjectAfter(ctx, ev)
	if shared, ok := obj.(*CachingObject); ok {
		obj = shared.GetObject()
	}
	return obj, err
}

func (g *Generation) eventObjects(ev *mirror.Event) *eventObjects {
	for {
		if o, ok := ev.Memos().Get(g.memoKey).(*eventObjects); ok {
			return o
		}
		o := &eventObjects{}
		if ev.Memos().Swap(g.memoKey, nil, o) {
			bytes := int64(1024)
			if ev.Entry != nil {
				bytes += ev.Entry.Size()
			}
			if ev.Prev != nil {
				bytes += ev.Prev.Size()
			}
			g.events.Add(g.memoKey, ev, o, bytes)
			return o
		}
	}
}

// EventCache bounds the data that is cached on events for the next watcher (decoded objects,
// items): only the newest events have it, within eventCacheBytes of stored size (the cached data
// may be a few times larger). A watcher that is further behind derives it again. Methods may be
// called concurrently.
type EventCache struct {
	mu    sync.Mutex // leaf
	ring  []cachedEvent
	first int // the oldest
	n     int
	bytes int64
	ended bool
}

const (
	// cachedEvents bounds the number of one cache.
	cachedEvents = 256
	// eventCacheBytes bounds one cache, allEventCachesBytes all of the process together,
	// so that many resources do not add up.
	eventCacheBytes     = 4 << 20
	allEventCachesBytes = 64 << 20
)

// eventCachesBytes is the size of all event caches together.
var eventCachesBytes atomic.Int64

// cachedEvent is an event with data cached under a memo key.
type cachedEvent struct {
	memoKey *memo.Key
	ev      *mirror.Event
	data    any
	bytes   int64
}

// Add records that data of about so many bytes was cached on an event, and drops that of older
// events.
func (c *EventCache) Add(memoKey *memo.Key, ev *mirror.Event, data any, bytes int64) {
	e := cachedEvent{memoKey: memoKey, ev: ev, data: data, bytes: bytes}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended { // a watcher still uses it
		e.ev.Memos().Swap(e.memoKey, e.data, nil)
		return
	}
	if c.ring == nil {
		c.ring = make([]cachedEvent, cachedEvents)
	}
	for c.n > 0 && (c.n == len(c.ring) || c.bytes+e.bytes > eventCacheBytes ||
		eventCachesBytes.Load()+e.bytes > allEventCachesBytes) {
		c.dropLocked()
	}
	c.ring[(c.first+c.n)%len(c.ring)] = e
	c.n++
	c.bytes += e.bytes
	eventCachesBytes.Add(e.bytes)
}

// dropLocked drops the oldest event.
func (c *EventCache) dropLocked() {
	old := &c.ring[c.first]
	old.ev.Memos().Swap(old.memoKey, old.data, nil)
	c.bytes -= old.bytes
	eventCachesBytes.Add(-old.bytes)
	*old = cachedEvent{}
	c.first = (c.first + 1) % len(c.ring)
	c.n--
}

// End drops the data of all events, and of those added later.
func (c *EventCache) End() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	for c.n > 0 {
		c.dropLocked()
	}
}
