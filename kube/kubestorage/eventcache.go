package kubestorage

import (
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/mirror"
)

// eventCache bounds what is kept on events for the next watcher (decoded objects,
// items): that of the newest events, within eventCacheBytes of stored size (what is
// kept may be a few times larger). A watcher that is further behind makes it again.
type eventCache struct {
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

// eventCachesBytes is what all event caches hold now.
var eventCachesBytes atomic.Int64

// cachedEvent is something that is kept on an event under a slot.
type cachedEvent struct {
	slot  *mirror.Slot
	ev    *mirror.Event
	kept  any
	bytes int64
}

func (c *eventCache) add(e cachedEvent) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended { // a watcher is still at it
		e.ev.SwapMemo(e.slot, e.kept, nil)
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
func (c *eventCache) dropLocked() {
	old := &c.ring[c.first]
	old.ev.SwapMemo(old.slot, old.kept, nil)
	c.bytes -= old.bytes
	eventCachesBytes.Add(-old.bytes)
	*old = cachedEvent{}
	c.first = (c.first + 1) % len(c.ring)
	c.n--
}

// end drops all events, for good.
func (c *eventCache) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	for c.n > 0 {
		c.dropLocked()
	}
}
