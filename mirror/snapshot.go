package mirror

import (
	"iter"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/memo"
)

// Snapshot is one revision of a resource. It is immutable, may be read
// concurrently, and keeps its entries alive for as long as it is held.
type Snapshot struct {
	// Rev is the revision of the snapshot: the published revision for Latest, the requested
	// revision for At.
	Rev  Revision
	tree tree
	seq  uint64
	lin  *lineage
	res  *Resource
}

// IsLatest reports whether the resource has not changed since the snapshot. Cost is O(1).
func (s Snapshot) IsLatest() bool {
	if s.lin == nil {
		return false
	}
	head := s.lin.head.Load()
	return head != nil && head.seq == s.seq
}

// Get returns the entry with the key. Cost is O(log n), no allocation.
func (s Snapshot) Get(key string) (*Entry, bool) { return s.tree.Get(key) }

// Runs yields the entries with start <= key < end in key order, leaf by leaf; an empty end means no
// upper bound. The entries and leaves are shared: do not write to them, except to their memos
// (Entry.Memos, Leaf.Memos).
func (s Snapshot) Runs(start, end string) iter.Seq[Run] { return s.tree.Runs(start, end) }

// All yields the entries with start <= key < end in key order; an empty end means
// no upper bound.
func (s Snapshot) All(start, end string) iter.Seq[*Entry] { return s.tree.All(start, end) }

// Count returns the number of entries with start <= key < end and their stored
// bytes; an empty end means no upper bound. Cost is O(log n).
func (s Snapshot) Count(start, end string) (entries int, bytes int64) {
	return s.tree.Count(start, end)
}

// Last returns the entry with the greatest key in start <= key < end, false if there is none; an
// empty end means no upper bound. Cost is O(log n), no allocation.
func (s Snapshot) Last(start, end string) (*Entry, bool) { return s.tree.Last(start, end) }

// Measure adds up the results of measure for the runs with start <= key < end, and caches the sums
// of subtrees as memos of the key of; see Tree.Measure.
func (s Snapshot) Measure(start, end string, of *memo.Key, measure func(Run) (int64, bool)) (int64, bool) {
	return s.tree.Measure(start, end, of, measure)
}

// Sieve selects entries by digests of leaves; see btree.Sieve.
type Sieve = btree.Sieve[*Entry]

// Sift yields the entries with start <= key < end that the sieve selects, in key order; an empty
// end means no upper bound. Snapshots share digests as they share leaves. See Tree.Sift.
func (s Snapshot) Sift(start, end string, by Sieve) iter.Seq[*Entry] {
	return s.tree.Sift(start, end, by)
}

// Memos yields the memos of all nodes of the snapshot. Cost is O(nodes).
func (s Snapshot) Memos() iter.Seq[*memo.List] { return s.tree.Memos() }

// DetachedRun returns a run of keys that were read from the source at another revision, in
// ascending order, for readers of runs. A key with the same mod revision in the snapshot is
// represented by the snapshot's entry, with its memos; bytes is the memory of the other entries.
// Cost is O(k log n) for k keys.
func (s Snapshot) DetachedRun(kvs []driver.KV) (run Run, bytes int64) {
	entries := make([]*Entry, len(kvs))
	for i := range kvs {
		kv := &kvs[i]
		e, ok := s.Get(string(kv.Key))
		if !ok || e.mod != kv.ModRevision || !e.hasValue() {
			e = newEntry(kv, true)
			e.keyLen |= isDetached
			bytes += e.footprint()
		}
		entries[i] = e
	}
	return btree.NewRun(entries), bytes
}
