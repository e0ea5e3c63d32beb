package kubestorage

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/mirror"
)

// DefaultRepresentationBytes bounds, unless Options say otherwise, what all
// representations of an engine keep together.
const DefaultRepresentationBytes = 384 << 20

// budget bounds the bytes that representations keep, of all resources of an engine
// together (I7). What is kept is in blocks: a run of neighbouring items, a run
// compressed, a decoded object. Readers take no lock; who adds a block takes one.
//
// When the budget is full, a block that nobody has read for idleTime makes room. If
// there is none the new block is not kept: a reader that walks through more than
// fits does not drive out what it will want first when it comes again, nor what
// others use.
type budget struct {
	limit int64
	used  atomic.Int64
	// objects is the part of used that decoded objects take, live the number of blocks
	// that hold something.
	objects, live atomic.Int64

	evictions, refusals atomic.Int64

	// full is when a search for idle blocks last found none; the next pause additions at
	// that time do not search again.
	full  atomic.Uint32
	pause atomic.Int32

	mu    sync.Mutex // leaf; guards what follows
	ring  []*block   // in no order; may contain blocks that were released
	hand  int
	start time.Time
}

const (
	// idleTime is how long a block must not have been read before it may go: longer than
	// a large list takes to write, short beside the time between two.
	idleTime = 3 * time.Second
	// searchSteps bounds how many blocks one addition looks at, one more for each
	// stepBytes, since it may take many small blocks to make room for a large one;
	// searchPause is how many additions do not look after one that has found nothing.
	searchSteps = 64
	stepBytes   = 512
	searchPause = 32
	// blockOverhead is what a block costs beside its bytes: the struct, its payload,
	// its place in the ring.
	blockOverhead = 128
)

func newBudget(limit int64) *budget {
	return &budget{limit: limit, start: time.Now()}
}

// now is the coarse time by which blocks remember when they were read.
func (b *budget) now() uint32 { return 1 + uint32(time.Since(b.start)/time.Second) }

// block is something that is kept. Its payload goes when it is evicted, or when
// nothing of the present refers to it any more; whoever has loaded the payload may
// use it for as long as they like.
type block struct {
	budget  *budget
	slot    *mirror.Slot // under which it is referred to
	payload atomic.Pointer[payload]
	size    int64
	object  bool         // the payload is a decoded object
	refs    atomic.Int32 // entries or leaves of the present that refer to it
	read    atomic.Uint32
}

// payload is what a block holds: items, one beside the other, a run of them
// compressed, an object, or a custom resource as it was converted.
type payload struct {
	data   []byte
	object any
}

// unread is the time that load does not remember.
const unread = 0

// load returns the payload, nil if it is gone.
func (b *block) load(now uint32) *payload {
	p := b.payload.Load()
	if p != nil && now != unread && b.read.Load() != now {
		b.read.Store(now)
	}
	return p
}

// release lets go of the payload.
func (b *block) release() {
	if b.payload.Swap(nil) != nil {
		b.budget.used.Add(-b.size)
		b.budget.live.Add(-1)
		if b.object {
			b.budget.objects.Add(-b.size)
		}
	}
}

// ref is called by whoever makes an entry or a leaf refer to the block.
func (b *block) ref() { b.refs.Add(1) }

// unref is called when one does so no longer.
func (b *block) unref() {
	if b.refs.Add(-1) == 0 {
		b.release()
	}
}

// add keeps a payload of size bytes, or returns nil if there is no room for it. The
// block has one reference, which the caller gives up with unref.
func (b *budget) add(p payload, size int64, slot *mirror.Slot) *block {
	return b.keep(p, size+blockOverhead, slot, false)
}

// addObject is add for a decoded object, of which there is a share of the budget.
func (b *budget) addObject(obj any, size int64, slot *mirror.Slot) *block {
	size += blockOverhead
	if b.objects.Add(size) > b.limit/objectShare && !b.makeRoom(size, true) {
		b.objects.Add(-size)
		b.refusals.Add(1)
		return nil
	}
	k := b.keep(payload{object: obj}, size, slot, true)
	if k == nil {
		b.objects.Add(-size)
	}
	return k
}

// reserve takes room for a payload of size bytes, to be filled, or reports that there is none.
func (b *budget) reserve(size int64) bool { return b.take(size + blockOverhead) }

// room reports whether there is room for size bytes now.
func (b *budget) room(size int64) bool {
	if !b.take(size) {
		return false
	}
	b.used.Add(-size)
	return true
}

// charge counts bytes that are held whether or not there is room for them; a negative number gives
// them back. Blocks make room for them.
func (b *budget) charge(bytes int64) {
	if b.used.Add(bytes) > b.limit && bytes > 0 {
		b.makeRoom(bytes, false)
	}
}

// fill is add for a payload that has its room already.
func (b *budget) fill(p payload, size int64, slot *mirror.Slot) *block {
	return b.newBlock(p, size+blockOverhead, slot, false)
}

func (b *budget) take(size int64) bool {
	if b.used.Add(size) > b.limit && !b.makeRoom(size, false) {
		b.used.Add(-size)
		b.refusals.Add(1)
		return false
	}
	return true
}

func (b *budget) keep(p payload, size int64, slot *mirror.Slot, object bool) *block {
	if !b.take(size) {
		return nil
	}
	return b.newBlock(p, size, slot, object)
}

func (b *budget) newBlock(p payload, size int64, slot *mirror.Slot, object bool) *block {
	k := &block{budget: b, slot: slot, size: size, object: object}
	k.payload.Store(&p)
	k.read.Store(b.now())
	k.refs.Store(1)
	live := b.live.Add(1)
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.ring) == cap(b.ring) && int64(len(b.ring)) > 2*live {
		b.sweepLocked()
	}
	b.ring = append(b.ring, k)
	if slot.Closed() { // releaseClosed may have come too early
		k.release()
	}
	return k
}

// releaseClosed releases the blocks whose slots have been closed. Cost is O(blocks).
func (b *budget) releaseClosed() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range b.ring {
		if k.slot.Closed() {
			k.release()
		}
	}
	b.sweepLocked()
}

// roomy reports whether less than half of the budget is used.
func (b *budget) roomy() bool { return b.used.Load() < b.limit/2 }

// sweepLocked forgets the blocks that were released.
func (b *budget) sweepLocked() {
	kept := b.ring[:0]
	for _, k := range b.ring {
		if k.payload.Load() != nil {
			kept = append(kept, k)
		}
	}
	clear(b.ring[len(kept):])
	b.ring, b.hand = kept, 0
}

// fits reports whether the budget holds, or the share of it that decoded objects have.
func (b *budget) fits(objects bool) bool {
	if objects {
		return b.objects.Load() <= b.limit/objectShare
	}
	return b.used.Load() <= b.limit
}

// makeRoom evicts idle blocks until the budget holds, or only objects until their share of it
// does, and reports whether it does.
func (b *budget) makeRoom(size int64, objects bool) bool {
	now := b.now()
	if b.full.Load() == now && b.pause.Add(-1) >= 0 {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.searchLocked(searchSteps+int(size/stepBytes), objects, now) {
		return true
	}
	b.pause.Store(searchPause)
	b.full.Store(now)
	return false
}

func (b *budget) searchLocked(steps int, objects bool, now uint32) bool {
	for range steps {
		if b.fits(objects) {
			return true
		}
		if len(b.ring) == 0 {
			return false
		}
		if b.hand >= len(b.ring) {
			b.hand = 0
		}
		k := b.ring[b.hand]
		gone := k.payload.Load() == nil
		// What was read after now was looked at is not idle either.
		if idle := int32(now - k.read.Load()); !gone && (idle < int32(idleTime/time.Second) || objects && !k.object) {
			b.hand++
			continue
		}
		if !gone {
			k.release()
			b.evictions.Add(1)
		}
		last := len(b.ring) - 1
		b.ring[b.hand] = b.ring[last]
		b.ring[last] = nil
		b.ring = b.ring[:last]
	}
	return b.fits(objects)
}
