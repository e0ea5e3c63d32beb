// Package btree is a persistent (path-copying) B-tree of items in key order.
//
// A Tree is immutable: any number of goroutines may read it without a lock. An Edit builds the next
// tree privately and copies each node it touches once; the trees share all other nodes. Every node
// stores the number of items and bytes below it, so counting a key range costs O(log n) for any
// range.
//
// Items are in leaves only. Readers that stream a range receive it as runs, one per leaf. A leaf
// that two versions share is the same *Leaf in both, so a reader can cache a value derived from a
// whole leaf (joined or compressed bytes) on the leaf, and readers of other versions find it there.
package btree

import (
	"fmt"
	"iter"
	"sort"
	"strings"
	"sync/atomic"

	"github.com/stratakube/strata/mirror/memo"
)

// maxItems bounds the items of a leaf and the children of an inner node. A write copies one node
// per level, so the bound is a trade-off between the cost of a write (and the memory of a version,
// about 0.7 KB per leaf) and the length of the runs that readers stream. 64 is a compromise,
// measured with BenchmarkSet and BenchmarkRuns.
const (
	maxItems = 64
	minItems = maxItems / 3
)

// Item is an element of a tree. Key must not change while the item is in a tree; Size is the number
// of bytes the item counts for in Bytes.
type Item interface {
	Key() string
	Size() int64
}

// Tree is an immutable ordered set of items, unique by key. The zero value is an empty tree. A Tree
// may be copied and read concurrently; a reference to it keeps all its items alive.
type Tree[T Item] struct {
	root *node[T]
}

// Leaf is a sequence of neighbouring items, with memos for values derived from all of them. All
// trees that contain exactly these items unchanged share the leaf.
type Leaf[T Item] struct {
	items []T
	memos memo.List
}

// Memos returns the memos of the leaf. They belong to the readers of the tree; a value must be a
// pure function of the items, which never change once the tree is published.
func (l *Leaf[T]) Memos() *memo.List { return &l.memos }

// Items returns the items of the leaf in key order. Do not write to the slice.
func (l *Leaf[T]) Items() []T { return l.items }

// Run is a part of one leaf: its items in a range.
type Run[T Item] struct {
	Leaf *Leaf[T]
	// From and To delimit the items of the run in Leaf.Items(): From inclusive,
	// To exclusive. The run is the whole leaf when From is 0 and To its length.
	From, To int
	// Selected is set by readers that build a tree from some items of another tree: the leaf shares
	// items with several leaves of that tree.
	Selected bool
}

// Items returns the items of the run in key order. Do not write to the slice.
func (r Run[T]) Items() []T { return r.Leaf.items[r.From:r.To] }

// Whole reports whether the run covers its leaf from end to end.
func (r Run[T]) Whole() bool { return r.From == 0 && r.To == len(r.Leaf.items) }

// node is a leaf (kids == nil) or an inner node. Only the Edit with the number edit may write the
// node. Once that edit has ended, no Edit has this number any more, so the node is frozen.
type node[T Item] struct {
	edit  uint64
	count int   // items below
	bytes int64 // sum of their sizes

	weighed uint64 // see Weigh; not read by other code

	leaf  *Leaf[T]  // leaf only
	inner memo.List // of an inner node: sums and digests, see Measure and Sift

	// Inner node: seps[i] is greater than every key in kids[i] and at most the
	// smallest key in kids[i+1]; len(seps) == len(kids)-1.
	kids []*node[T]
	seps []string
}

// memoList returns the memos of the node.
func (n *node[T]) memoList() *memo.List {
	if n.leaf != nil {
		return &n.leaf.memos
	}
	return &n.inner
}

// sum is the memo of an inner node that Measure caches.
type sum int64

// edits numbers the edits of all trees; each number is used once.
var edits atomic.Uint64

// Len returns the number of items.
func (t Tree[T]) Len() int {
	if t.root == nil {
		return 0
	}
	return t.root.count
}

// Bytes returns the sum of the sizes of all items.
func (t Tree[T]) Bytes() int64 {
	if t.root == nil {
		return 0
	}
	return t.root.bytes
}

// Get returns the item with the key. Cost is O(log n), no allocation.
func (t Tree[T]) Get(key string) (item T, ok bool) {
	n := t.root
	if n == nil {
		return item, false
	}
	for n.kids != nil {
		n = n.kids[childIndex(n.seps, key)]
	}
	i := search(n.leaf.items, key)
	if i < len(n.leaf.items) && n.leaf.items[i].Key() == key {
		return n.leaf.items[i], true
	}
	return item, false
}

// rank returns the number of items with a key below key and the sum of their
// sizes. Cost is O(log n).
func (t Tree[T]) rank(key string) (count int, bytes int64) {
	n := t.root
	if n == nil {
		return 0, 0
	}
	for n.kids != nil {
		i := childIndex(n.seps, key)
		for _, k := range n.kids[:i] {
			count += k.count
			bytes += k.bytes
		}
		n = n.kids[i]
	}
	for _, it := range n.leaf.items[:search(n.leaf.items, key)] {
		count++
		bytes += it.Size()
	}
	return count, bytes
}

// Count returns the number of items with start <= key < end and the sum of their
// sizes. An empty end means no upper bound. Cost is O(log n).
func (t Tree[T]) Count(start, end string) (count int, bytes int64) {
	if end != "" && end <= start {
		return 0, 0
	}
	c0, b0 := t.rank(start)
	c1, b1 := t.Len(), t.Bytes()
	if end != "" {
		c1, b1 = t.rank(end)
	}
	return c1 - c0, b1 - b0
}

// Runs yields the items with start <= key < end in key order, leaf by leaf. An
// empty end means no upper bound. Cost is O(log n + leaves); nothing is locked
// while the caller iterates.
func (t Tree[T]) Runs(start, end string) iter.Seq[Run[T]] {
	return func(yield func(Run[T]) bool) {
		if t.root != nil && (end == "" || start < end) {
			t.root.runs(start, end, yield)
		}
	}
}

func (n *node[T]) runs(start, end string, yield func(Run[T]) bool) bool {
	if n.kids == nil {
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
		return yield(Run[T]{Leaf: n.leaf, From: from, To: to})
	}
	for kid, bounds := range n.within(start, end) {
		if !kid.runs(bounds.start, bounds.end, yield) {
			return false
		}
	}
	return true
}

// bounds are the bounds of a range of keys; an empty bound is open.
type bounds struct{ start, end string }

// within yields the children of an inner node that the range touches, and the remaining bounds for
// each: none for a child that is in the range as a whole.
func (n *node[T]) within(start, end string) iter.Seq2[*node[T], bounds] {
	return func(yield func(*node[T], bounds) bool) {
		first, last := 0, len(n.kids)-1
		if start != "" {
			first = childIndex(n.seps, start)
		}
		if end != "" {
			last = childIndex(n.seps, end)
		}
		for i := first; i <= last; i++ {
			var b bounds
			if i == first {
				b.start = start
			}
			if i == last {
				b.end = end
			}
			if !yield(n.kids[i], b) {
				return
			}
		}
	}
}

// All yields the items with start <= key < end in key order. An empty end means
// no upper bound.
func (t Tree[T]) All(start, end string) iter.Seq[T] {
	return func(yield func(T) bool) {
		for run := range t.Runs(start, end) {
			for _, it := range run.Items() {
				if !yield(it) {
					return
				}
			}
		}
	}
}

// Last returns the item with the greatest key in start <= key < end, false if there is none. An
// empty end means no upper bound. Cost is O(log n), no allocation. Safe for concurrent use.
func (t Tree[T]) Last(start, end string) (item T, ok bool) {
	if t.root == nil {
		return item, false
	}
	item, ok = t.root.last(end)
	if !ok || item.Key() < start {
		var zero T
		return zero, false
	}
	return item, true
}

// last returns the item with the greatest key below end. All keys of a child are below those of the
// next one, so it visits at most two paths.
func (n *node[T]) last(end string) (item T, ok bool) {
	if n.kids == nil {
		i := len(n.leaf.items)
		if end != "" {
			i = search(n.leaf.items, end)
		}
		if i == 0 {
			return item, false
		}
		return n.leaf.items[i-1], true
	}
	i := len(n.kids) - 1
	if end != "" {
		i = childIndex(n.seps, end)
	}
	if item, ok = n.kids[i].last(end); ok || i == 0 {
		return item, ok
	}
	return n.kids[i-1].last("")
}

// Measure adds up the results of measure for the runs with start <= key < end; an empty end means
// no upper bound. It returns false as soon as measure does, which means that the value of a run is
// not known. It caches the sums of whole subtrees as memos of the key of, which must have no other
// memos on inner nodes, so measure must always return the same value for a run. Cost is O(log n)
// once all sums are cached, otherwise O(leaves). Safe for concurrent use.
func (t Tree[T]) Measure(start, end string, of *memo.Key, measure func(Run[T]) (int64, bool)) (int64, bool) {
	if t.root == nil || end != "" && end <= start {
		return 0, true
	}
	return t.root.measure(start, end, of, measure)
}

func (n *node[T]) measure(start, end string, of *memo.Key, measure func(Run[T]) (int64, bool)) (total int64, known bool) {
	if n.kids == nil {
		known = true
		n.runs(start, end, func(r Run[T]) bool {
			total, known = measure(r)
			return known
		})
		return total, known
	}
	whole := start == "" && end == ""
	if whole {
		if s, ok := n.inner.Get(of).(sum); ok {
			return int64(s), true
		}
	}
	for kid, b := range n.within(start, end) {
		part, known := kid.measure(b.start, b.end, of, measure)
		if !known {
			return 0, false
		}
		total += part
	}
	if whole {
		n.inner.Swap(of, nil, sum(total))
	}
	return total, true
}

// childIndex returns the index of the child that contains key: the number of separators <= key.
func childIndex(seps []string, key string) int {
	return sort.Search(len(seps), func(i int) bool { return seps[i] > key })
}

// search returns the index of the first item whose key is at least key.
func search[T Item](items []T, key string) int {
	lo, hi := 0, len(items)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if items[mid].Key() < key {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// Build returns a tree of the items, which must be in ascending key order
// without duplicates; it panics if they are not. The slice may be reused
// afterwards. Cost is O(n).
func Build[T Item](items []T) Tree[T] {
	if len(items) == 0 {
		return Tree[T]{}
	}
	for i := 1; i < len(items); i++ {
		if items[i-1].Key() >= items[i].Key() {
			panic(fmt.Sprintf("btree: Build: key %q at %d is not above %q", items[i].Key(), i, items[i-1].Key()))
		}
	}
	// Leaves are three quarters full: capacity for inserts, little wasted memory.
	id := edits.Add(1)
	var level []*node[T]
	for _, part := range partition(len(items), maxItems*3/4) {
		n := &node[T]{edit: id, leaf: &Leaf[T]{items: append([]T(nil), items[part[0]:part[1]]...)}}
		n.recount()
		level = append(level, n)
	}
	for len(level) > 1 {
		var up []*node[T]
		for _, part := range partition(len(level), maxItems*3/4) {
			n := &node[T]{edit: id, kids: append([]*node[T](nil), level[part[0]:part[1]]...)}
			for _, k := range n.kids[1:] {
				// the item may be removed before the separator
				n.seps = append(n.seps, strings.Clone(k.minKey()))
			}
			n.recount()
			up = append(up, n)
		}
		level = up
	}
	return Tree[T]{root: level[0]}
}

// partition divides n elements into parts of about size each, none below half of size unless there
// is only one part.
func partition(n, size int) [][2]int {
	parts := (n + size - 1) / size
	out := make([][2]int, 0, parts)
	for i := range parts {
		out = append(out, [2]int{i * n / parts, (i + 1) * n / parts})
	}
	return out
}

func (n *node[T]) minKey() string {
	for n.kids != nil {
		n = n.kids[0]
	}
	return n.leaf.items[0].Key()
}

func (n *node[T]) recount() {
	n.count, n.bytes = 0, 0
	if n.kids == nil {
		n.count = len(n.leaf.items)
		for _, it := range n.leaf.items {
			n.bytes += it.Size()
		}
		return
	}
	for _, k := range n.kids {
		n.count += k.count
		n.bytes += k.bytes
	}
}
