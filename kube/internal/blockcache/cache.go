// Package blockcache bounds the memory of data that is derived from stored values and can be made
// again: encoded items, compressed runs, decoded objects (I7).
package blockcache

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// Cache bounds the bytes of its blocks. Reading a block takes no lock; adding one does.
//
// When the cache is full, a block that was not read for idleTime is evicted to make room. If there
// is none, the new block is refused: a scan over more data than fits evicts neither the data that
// its next scan reads first, nor data in use by other readers. Blocks beyond the size at rest are
// dropped within a minute after their last read, so a burst of reads does not occupy memory for
// longer. Methods may be called concurrently.
type Cache struct {
	limit       int64
	rest        int64
	objectLimit int64
	trimming    atomic.Bool // trim is scheduled
	used        atomic.Int64
	charged     atomic.Int64 // the part of used that Charge has counted
	// objects is the part of used that decoded objects take; live is the number of blocks with a
	// payload.
	objects, live atomic.Int64

	evictions, refusals atomic.Int64

	// full is the time of the last search that found no idle block. The next pause additions at
	// that time do not search.
	full  atomic.Uint32
	pause atomic.Int32

	mu    sync.Mutex // leaf; guards the fields below
	ring  []*Block   // unordered; may contain released blocks
	hand  int
	start time.Time
}

const (
	// idleTime is how long a block must not have been read before it may be evicted: longer than
	// writing a large list takes, short compared to the time between two of them.
	idleTime = 3 * time.Second
	// restTime is the same for blocks beyond the size at rest; trimInterval is the time between two
	// searches for them.
	restTime     = 45 * time.Second
	trimInterval = 10 * time.Second
	// searchSteps bounds how many blocks one addition inspects, plus one for each stepBytes, since
	// a large block may need the room of many small ones. searchPause is how many additions skip
	// the search after an unsuccessful one.
	searchSteps = 64
	stepBytes   = 512
	searchPause = 32
	// overhead is the cost of a block in addition to its bytes: the struct, its payload, its place
	// in the ring.
	overhead = 128
)

// New returns a cache of at most limit bytes, of which rest bytes stay when they are not read, and
// objectLimit may be decoded objects.
func New(limit, rest, objectLimit int64) *Cache {
	return &Cache{limit: limit, rest: rest, objectLimit: objectLimit, start: time.Now()}
}

// Stats are the counters of a cache at one call.
type Stats struct {
	Used, Limit         int64 // bytes
	Evictions, Refusals int64 // counters
}

// Stats returns the counters. Cost is a few loads.
func (c *Cache) Stats() Stats {
	return Stats{Used: c.used.Load(), Limit: c.limit, Evictions: c.evictions.Load(), Refusals: c.refusals.Load()}
}

// Now is the coarse time at which a block was read.
func (c *Cache) Now() uint32 { return 1 + uint32(time.Since(c.start)/time.Second) }

// Unread is passed to Block.Load for a load that does not count as a read.
const Unread = 0

// Payload is the content of a block: bytes, such as neighbouring items, or an object.
type Payload struct {
	Data   []byte
	Object any
}

// Block is one unit of the cache. Its payload is dropped when it is evicted, or when the last
// reference to it is released. A payload that was loaded stays valid for its reader.
type Block struct {
	cache   *Cache
	memoKey *memo.Key // the memo key of its references
	payload atomic.Pointer[Payload]
	size    int64
	object  bool         // the payload is a decoded object
	refs    atomic.Int32 // entries or leaves of the newest version that refer to it
	read    atomic.Uint32
}

// Load returns the payload, nil if it was dropped, and records the time of the read unless that is
// Unread.
func (b *Block) Load(now uint32) *Payload {
	p := b.payload.Load()
	if p != nil && now != Unread && b.read.Load() != now {
		b.read.Store(now)
	}
	return p
}

// SwapMemo is Entry.Memos().Swap for an old memo that may be a nil pointer, which means that there
// was none.
func SwapMemo[T any](e *mirror.Entry, memoKey *memo.Key, old, value *T) bool {
	if old == nil {
		return e.Memos().Swap(memoKey, nil, value)
	}
	return e.Memos().Swap(memoKey, old, value)
}

// Ref adds a reference: an entry or a leaf refers to the block.
func (b *Block) Ref() { b.refs.Add(1) }

// Unref removes a reference; without any, the payload is dropped.
func (b *Block) Unref() {
	if b.refs.Add(-1) == 0 {
		b.release()
	}
}

// release drops the payload.
func (b *Block) release() {
	if b.payload.Swap(nil) != nil {
		b.cache.used.Add(-b.size)
		b.cache.live.Add(-1)
		if b.object {
			b.cache.objects.Add(-b.size)
		}
	}
}

// Add returns a block with a payload of size bytes and one reference, nil if there is no room for
// it.
func (c *Cache) Add(p Payload, size int64, memoKey *memo.Key) *Block {
	return c.add(p, size+overhead, memoKey, false)
}

// AddObject is Add for a decoded object, within the limit of objects.
func (c *Cache) AddObject(obj any, size int64, memoKey *memo.Key) *Block {
	size += overhead
	if c.objects.Add(size) > c.objectLimit && !c.makeRoom(size, true) {
		c.objects.Add(-size)
		c.refusals.Add(1)
		return nil
	}
	b := c.add(Payload{Object: obj}, size, memoKey, true)
	if b == nil {
		c.objects.Add(-size)
	}
	return b
}

// Reserve takes room for a payload of size bytes, which Fill uses, or reports that there is none.
func (c *Cache) Reserve(size int64) bool { return c.take(size + overhead) }

// Fill is Add for a payload with reserved room.
func (c *Cache) Fill(p Payload, size int64, memoKey *memo.Key) *Block {
	return c.newBlock(p, size+overhead, memoKey, false)
}

// HasRoom reports whether there is room for size bytes now.
func (c *Cache) HasRoom(size int64) bool {
	if !c.take(size) {
		return false
	}
	c.used.Add(-size)
	return true
}

// HalfEmpty reports whether less than half of the limit is used.
func (c *Cache) HalfEmpty() bool { return c.used.Load() < c.limit/2 }

// Charge counts bytes of data outside of the cache towards its limit, even if there is no room;
// blocks are evicted for them. A negative number releases them.
func (c *Cache) Charge(bytes int64) {
	c.charged.Add(bytes)
	if c.used.Add(bytes) > c.limit && bytes > 0 {
		c.makeRoom(bytes, false)
	}
}

// Charged returns the bytes of data outside of the cache.
func (c *Cache) Charged() int64 { return c.charged.Load() }

func (c *Cache) take(size int64) bool {
	if c.used.Add(size) > c.limit && !c.makeRoom(size, false) {
		c.used.Add(-size)
		c.refusals.Add(1)
		return false
	}
	c.trimLater()
	return true
}

// trimLater schedules trim while the cache is above its size at rest.
func (c *Cache) trimLater() {
	if c.used.Load() > c.rest && c.trimming.CompareAndSwap(false, true) {
		time.AfterFunc(trimInterval, func() {
			c.trim()
			c.trimming.Store(false)
			c.trimLater()
		})
	}
}

// trim releases blocks that were not read for restTime until the cache has its size at rest. Cost
// is O(blocks).
func (c *Cache) trim() {
	now := c.Now()
	c.releaseIf(func(b *Block) bool {
		if c.used.Load() <= c.rest || b.payload.Load() == nil || int32(now-b.read.Load()) < int32(restTime/time.Second) {
			return false
		}
		c.evictions.Add(1)
		return true
	})
}

func (c *Cache) add(p Payload, size int64, memoKey *memo.Key, object bool) *Block {
	if !c.take(size) {
		return nil
	}
	return c.newBlock(p, size, memoKey, object)
}

func (c *Cache) newBlock(p Payload, size int64, memoKey *memo.Key, object bool) *Block {
	b := &Block{cache: c, memoKey: memoKey, size: size, object: object}
	b.payload.Store(&p)
	b.read.Store(c.Now())
	b.refs.Store(1)
	live := c.live.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ring) == cap(c.ring) && int64(len(c.ring)) > 2*live {
		c.sweepLocked()
	}
	c.ring = append(c.ring, b)
	if memoKey.Closed() { // ReleaseClosed may have run before
		b.release()
	}
	return b
}

// ReleaseClosed drops the payloads of blocks whose memo key was closed. Cost is O(blocks).
func (c *Cache) ReleaseClosed() {
	c.releaseIf(func(b *Block) bool { return b.memoKey.Closed() })
}

func (c *Cache) releaseIf(f func(*Block) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range c.ring {
		if f(b) {
			b.release()
		}
	}
	c.sweepLocked()
}

// sweepLocked removes released blocks from the ring.
func (c *Cache) sweepLocked() {
	held := c.ring[:0]
	for _, b := range c.ring {
		if b.payload.Load() != nil {
			held = append(held, b)
		}
	}
	clear(c.ring[len(held):])
	c.ring, c.hand = held, 0
}

// fits reports whether the cache is within its limit, or within that of decoded objects.
func (c *Cache) fits(objects bool) bool {
	if objects {
		return c.objects.Load() <= c.objectLimit
	}
	return c.used.Load() <= c.limit
}

// makeRoom evicts idle blocks until the cache is within its limit, or only objects until they are
// within theirs, and reports whether it is.
func (c *Cache) makeRoom(size int64, objects bool) bool {
	now := c.Now()
	if c.full.Load() == now && c.pause.Add(-1) >= 0 {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.evictLocked(searchSteps+int(size/stepBytes), objects, now) {
		return true
	}
	c.pause.Store(searchPause)
	c.full.Store(now)
	return false
}

func (c *Cache) evictLocked(steps int, objects bool, now uint32) bool {
	for range steps {
		if c.fits(objects) {
			return true
		}
		if len(c.ring) == 0 {
			return false
		}
		if c.hand >= len(c.ring) {
			c.hand = 0
		}
		b := c.ring[c.hand]
		gone := b.payload.Load() == nil
		// A block that was read after now was determined is not idle either, hence the signed
		// difference.
		if idle := int32(now - b.read.Load()); !gone && (idle < int32(idleTime/time.Second) || objects && !b.object) {
			c.hand++
			continue
		}
		if !gone {
			b.release()
			c.evictions.Add(1)
		}
		last := len(c.ring) - 1
		c.ring[c.hand] = c.ring[last]
		c.ring[last] = nil
		c.ring = c.ring[:last]
	}
	return c.fits(objects)
}
