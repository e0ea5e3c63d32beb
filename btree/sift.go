package btree

import (
	"iter"
	"math/bits"

	"github.com/stratakube/strata/mirror/memo"
)

// Sieve selects items by digests: values that it derives from a leaf, or from the digests of the
// leaves below one node, and caches among the memos of the node. Trees share nodes, so they share
// digests: the tree after an edit lacks only those of the nodes that the edit copied. Methods may
// be called concurrently.
type Sieve[T Item] interface {
	// Leaf returns the bits of the items that may be selected; bit i is items[i]. A reader may get
	// items that are not.
	Leaf(items []T, in *memo.List) uint64
	// Parent returns the bits of the leaves that may have such items. leaves has their digests.
	Parent(leaves MemosOfLeaves, in *memo.List) uint64
}

// MemosOfLeaves are the memos of the leaves below a node, in key order.
type MemosOfLeaves interface {
	Len() int
	At(i int) *memo.List
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
		chosen = s.Parent((*leavesBelow[T])(n), n.memoList())
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
	for chosen := s.Leaf(items, n.memoList()) & span(from, to); chosen != 0; chosen &= chosen - 1 {
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

// leavesBelow implements MemosOfLeaves for a node above leaves.
type leavesBelow[T Item] node[T]

func (n *leavesBelow[T]) Len() int            { return len(n.kids) }
func (n *leavesBelow[T]) At(i int) *memo.List { return &n.kids[i].leaf.memos }

// Memos yields the memos of all nodes: of leaves, and of nodes above them. Cost is O(nodes).
func (t Tree[T]) Memos() iter.Seq[*memo.List] {
	return func(yield func(*memo.List) bool) {
		if t.root != nil {
			t.root.eachMemos(yield)
		}
	}
}

func (n *node[T]) eachMemos(yield func(*memo.List) bool) bool {
	for _, kid := range n.kids {
		if !kid.eachMemos(yield) {
			return false
		}
	}
	return yield(n.memoList())
}
