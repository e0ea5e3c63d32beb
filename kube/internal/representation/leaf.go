package representation

import (
	"sync/atomic"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// leafItems is the memo of a leaf: the positions of the items of all its entries.
type leafItems struct {
	bytes int64 // of all items
	// parts are the positions of the items; empty if there was no room for all of them.
	parts []part
	// deflated is the compressed run, by form, once a reader has requested it.
	deflated [forms]atomic.Pointer[blockcache.Block]
}

// part is a span of neighbouring items.
type part struct {
	block    *blockcache.Block
	from, to uint32
}

// Superseded implements memo.Superseder: the leaf is no longer part of the newest version.
func (r *leafItems) Superseded() {
	for i := range r.deflated {
		if k := r.deflated[i].Swap(nil); k != nil {
			k.Unref()
		}
	}
}

// leaf is the leaf of a mirror.Run.
type leaf = btree.Leaf[*mirror.Entry]

// itemsOf returns the memo of a leaf, nil if there is none.
func (p *leaves) itemsOf(l *leaf) *leafItems {
	kept, _ := l.Memos().Get(p.memoKey).(*leafItems)
	return kept
}

// setLeafItems sets r on the leaf in place of an older memo of the representation.
func (p *leaves) setLeafItems(l *leaf, r *leafItems) {
	old := l.Memos().Get(p.memoKey)
	for !l.Memos().Swap(p.memoKey, old, r) {
		old = l.Memos().Get(p.memoKey)
	}
	replaced, _ := old.(*leafItems)
	if replaced == nil {
		return
	}
	same := replaced.bytes == r.bytes
	if !same {
		p.varies.Store(true)
	}
	// The leaf has the same entries, so the compressed forms stay valid, unless the items have
	// other bytes than before.
	for i := range replaced.deflated {
		if k := replaced.deflated[i].Swap(nil); k != nil && !(same && r.deflated[i].CompareAndSwap(nil, k)) {
			k.Unref()
		}
	}
}

// load appends the bytes of the run to spans, and reports whether all of them are cached.
func (r *leafItems) load(spans [][]byte, now uint32) ([][]byte, bool) {
	if len(r.parts) == 0 {
		return spans, false // only its size is known
	}
	n := len(spans)
	for i := range r.parts {
		p := &r.parts[i]
		k := p.block.Load(now)
		if k == nil {
			return spans[:n], false
		}
		spans = append(spans, k.Data[p.from:p.to])
	}
	return spans, true
}

const (
	// blockBytes is the size of a block of items; larger single items have a block each.
	blockBytes = 64 << 10
	// partBytes is the minimum average size of a run's parts; below it the leaf is copied into new
	// blocks.
	partBytes = 8 << 10
)

// size returns the bytes of the items of a run, which are known once the run has been read. Cost is
// a few loads for a whole leaf.
func (p *leaves) size(r mirror.Run) (int64, bool) {
	if r.Whole() {
		if kept := p.itemsOf(r.Leaf); kept != nil {
			return kept.bytes, true
		}
		return 0, false
	}
	var n int64
	for _, e := range r.Items() {
		it, ok := e.Memos().Get(p.memoKey).(*item)
		if !ok {
			return 0, false
		}
		n += int64(it.to - it.from)
	}
	return n, true
}

// estimate is size, or the stored bytes of a run that has not been read, which is not known.
func (p *leaves) estimate(r mirror.Run) (n int64, known bool) {
	if n, known = p.size(r); known {
		return n, true
	}
	for _, e := range r.Items() {
		n += e.Size()
	}
	return n, false
}

// keeps reports whether all items of the run are cached, so that appendRun only loads them.
func (p *leaves) keeps(r mirror.Run) bool {
	if !r.Whole() {
		for _, e := range r.Items() {
			if it, _ := e.Memos().Get(p.memoKey).(*item); it.load(blockcache.Unread) == nil && !it.canSplice() {
				return false
			}
		}
		return true
	}
	kept := p.itemsOf(r.Leaf)
	if kept == nil || len(kept.parts) == 0 {
		return false
	}
	for i := range kept.parts {
		if kept.parts[i].block.Load(blockcache.Unread) == nil {
			return false
		}
	}
	return true
}

// Measure returns the bytes of the items with start <= key < end, an empty end meaning no upper
// bound, if all of them have been read before. Cost is O(log n) once it is known.
func (p *leaves) Measure(entries Measurer, start, end string) (int64, bool) {
	if p.varies.Load() {
		return 0, false
	}
	return entries.Measure(start, end, p.memoKey, p.size)
}

// largeRun is about half of the item bytes that one reader may hold while it waits for a client: a
// leaf of objects of 1 MB has 64 MB of them. The items of a larger run must be made, and written,
// one by one.
const largeRun = 1 << 20

// Measurer are entries in key order with memoized sums, see mirror.Snapshot.Measure.
type Measurer interface {
	Measure(start, end string, of *memo.Key, measure func(mirror.Run) (int64, bool)) (int64, bool)
}
