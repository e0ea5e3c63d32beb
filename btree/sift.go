package btree

import (
	"iter"
	"math/bits"
	"sync/atomic"
)

// Sieve selects items by digests: values that it derives from a leaf, or from the digests of the
// leaves below one node, and caches on the node. Trees share nodes, so they share digests: the tree
// after an edit lacks only those of the nodes that the edit copied. Methods may be called
// concurrently.
type Sieve[T Item] interface {
	// Leaf returns the bits of the items that may be selected; bit i is items[i]. A reader may get
	// items that are not.
	Leaf(items []T, d *Digests) uint64
	// Parent returns the bits of the leaves that may have such items. leaves has their digests.
	Parent(leaves DigestsOfLeaves, d *Digests) uint64
}

// Digests are the digests of a node, by name: nearly always a few. Methods may be called
// concurrently.
type Digests struct{ head atomic.Pointer[derived] }

// DigestsOfLeaves are the digests of the leaves below a node, in key order.
type DigestsOfLeaves interface {
	Len() int
	At(i int) *Digests
}

// derived is a value that readers derive from the items below a node, by name, in a list: nearly
// always of a few. A name may have a sum (see Tree.Measure) or a digest.
type derived struct {
	of    any
	total int64
	value any // nil for a sum
	next  *derived
}

// find returns the value of the name, nil if there is none.
func (l *derived) find(of any) *derived {
	for l != nil && l.of != of {
		l = l.next
	}
	return l
}

// closer is the name of a derived value that may be closed.
type closer interface{ Closed() bool }

// without returns the values but those of the name, and of closed names.
func (l *derived) without(of any) *derived {
	var kept *derived
	for ; l != nil; l = l.next {
		if name, ok := l.of.(closer); l.of != of && !(ok && name.Closed()) {
			kept = &derived{of: l.of, total: l.total, value: l.value, next: kept}
		}
	}
	return kept
}

// closed reports whether a name is closed.
func (l *derived) closed() bool {
	for ; l != nil; l = l.next {
		if name, ok := l.of.(closer); ok && name.Closed() {
			return true
		}
	}
	return false
}

// Get returns the digest of the name, nil if there is none.
func (d *Digests) Get(of any) any {
	if l := d.head.Load().find(of); l != nil {
		return l.value
	}
	return nil
}

// Swap replaces the digest old of the name, nil for none, by value, and reports whether it did:
// false if the digest is not old. A nil value removes it. Digests of closed names (see
// Tree.Measure) are removed too.
func (d *Digests) Swap(of, old, value any) bool {
	for {
		cur := d.head.Load()
		var is any
		if l := cur.find(of); l != nil {
			is = l.value
		}
		if is != old {
			return false
		}
		next := cur
		if is != nil || cur.closed() {
			next = cur.without(of)
		}
		if value != nil {
			next = &derived{of: of, value: value, next: next}
		}
		if d.head.CompareAndSwap(cur, next) {
			return true
		}
	}
}

// DropClosed removes the values of closed names.
func (d *Digests) DropClosed() {
	for {
		cur := d.head.Load()
		if !cur.closed() || d.head.CompareAndSwap(cur, cur.without(nil)) {
			return
		}
	}
}

// Each calls f for every digest.
func (d *Digests) Each(f func(of, value any)) {
	for l := d.head.Load(); l != nil; l = l.next {
		if l.value != nil {
			f(l.of, l.value)
		}
	}
}

// Sizer is implemented by digests that count for Weigh.
type Sizer interface {
	// Size returns the bytes of memory, with those of its place on the node.
	Size() int64
}

// size returns the bytes of the digests.
func (d *Digests) size() (bytes int64) {
	for l := d.head.Load(); l != nil; l = l.next {
		if s, ok := l.value.(Sizer); ok {
			bytes += s.Size()
		}
	}
	return bytes
}

// Sift yields the items with start <= key < end that the sieve selects, in key order. An empty end
// means no upper bound. Cost is O(parents of leaves + selected leaves) once the digests are cached.
// Safe for concurrent use.
func (t Tree[T]) Sift(start, end string, s Sieve[T]) iter.Seq[T] {
	return func(yield func(T) bool) {
		if t.root != nil && (end == "" || start < end) {
			t.root.sift(start, end, s, yield)
		}
	}
}

func (n *node[T]) sift(start, end string, s Sieve[T], yield func(T) bool) bool {
	if n.kids == nil {
		return n.siftLeaf(start, end, s, yield)
	}
	chosen := ^uint64(0)
	if n.kids[0].kids == nil {
		chosen = s.Parent((*leavesBelow[T])(n), &n.digests)
	}
	first, last := 0, len(n.kids)-1
	if start != "" {
		first = childIndex(n.seps, start)
	}
	if end != "" {
		last = childIndex(n.seps, end)
	}
	for chosen &= span(first, last+1); chosen != 0; chosen &= chosen - 1 {
		i := bits.TrailingZeros64(chosen)
		from, to := "", ""
		if i == first {
			from = start
		}
		if i == last {
			to = end
		}
		if !n.kids[i].sift(from, to, s, yield) {
			return false
		}
	}
	return true
}

func (n *node[T]) siftLeaf(start, end string, s Sieve[T], yield func(T) bool) bool {
	items := n.leaf.items
	from, to := 0, len(items)
	if start != "" {
		from = search(items, start)
	}
	if end != "" {
		to = search(items, end)
	}
	if from >= to {
		return true
	}
	for chosen := s.Leaf(items, &n.digests) & span(from, to); chosen != 0; chosen &= chosen - 1 {
		if !yield(items[bits.TrailingZeros64(chosen)]) {
			return false
		}
	}
	return true
}

// span returns the bits from (inclusive) to to (exclusive), at most 64.
func span(from, to int) uint64 { return ^uint64(0) << from & (^uint64(0) >> (64 - to)) }

// Bits of a Sieve are those of one word.
var _ [64 - maxItems]struct{}

// leavesBelow implements DigestsOfLeaves for a node above leaves.
type leavesBelow[T Item] node[T]

func (n *leavesBelow[T]) Len() int          { return len(n.kids) }
func (n *leavesBelow[T]) At(i int) *Digests { return &n.kids[i].digests }

// Digests yields the digests of all nodes: of leaves, and of nodes above them. Cost is O(nodes).
func (t Tree[T]) Digests() iter.Seq[*Digests] {
	return func(yield func(*Digests) bool) {
		if t.root != nil {
			t.root.eachDigests(yield)
		}
	}
}

func (n *node[T]) eachDigests(yield func(*Digests) bool) bool {
	for _, kid := range n.kids {
		if !kid.eachDigests(yield) {
			return false
		}
	}
	return yield(&n.digests)
}
