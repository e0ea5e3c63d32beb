package objects

import (
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

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
