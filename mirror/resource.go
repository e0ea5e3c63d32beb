package mirror

import (
	"context"
	"fmt"
	"iter"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/internal/btree"
	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// Tree and Run are the engine's view of an ordered set of entries; see the
// methods of Snapshot.
type (
	tree = btree.Tree[*Entry]
	// Run is a part of one leaf of a version's tree: neighbouring entries, and a
	// place on the leaf to keep what a reader derives from all of them.
	Run = btree.Run[*Entry]
	// Leaf is the leaf of a Run.
	Leaf = btree.Leaf[*Entry]
)

type eventLog = eventlog.Log[Event, *Event]

// version is a resource at one revision, and at every later one until the next
// event: the tree and the place in the log where its future begins.
type version struct {
	rev  Revision
	tree tree
	seq  uint64 // number of the first event after rev
	// prev is the version before, for a reader that meets a version before the
	// clock has reached it. It is cut when the clock has, so that versions do not
	// hold each other alive.
	prev atomic.Pointer[version]

	used  atomic.Int64 // when a reader was given it, as Now counts; of one made for readers
	bytes int64        // of its nodes that no newer version has, as weighed last; the writer's
}

// lineage is the unbroken life of a resource since it was last listed. A resource
// that has to be listed anew gets a new lineage; the old one's log is dead.
type lineage struct {
	// successor goes on where this lineage has ended, but for a gap between its last
	// event and the successor's floor; nil if there is none.
	successor atomic.Pointer[lineage]
	// private: nobody has claimed the resource. Values may be missing and no reader
	// is shown the lineage; see current.readable.
	private bool
	log     *eventLog
	head    atomic.Pointer[version] // newest; may be ahead of the clock for a moment; nil when the lineage has ended
	// suspect: a check has found what came before to differ from etcd, and none has found that
	// this does not.
	suspect atomic.Bool
	// readable is the oldest revision that can be read. The log reaches back to it.
	readable atomic.Int64
	// checkpoints are versions kept so that the past can be read, from one of them or from
	// the head, over the log. Ascending; there may be none. Replaced by the writer.
	checkpoints atomic.Pointer[[]*version]
	// made are versions that were made for readers, in no order. Replaced by readers, who
	// add to them, and by the writer, with compare-and-swap.
	made atomic.Pointer[[]*version]
}

// versions returns how many versions of the past are kept.
func (l *lineage) versions() int { return len(*l.checkpoints.Load()) + len(*l.made.Load()) }

// oldest returns the oldest revision that can be read.
func (l *lineage) oldest() Revision { return l.readable.Load() }

// Resource is one key prefix of a mirror, for example the ConfigMaps of a cluster.
// All methods may be called concurrently, Release once for each claim. The writer's half of it is a table.
type Resource struct {
	m      *shared
	prefix string

	cur     current
	changed changes // after each publication that touches the resource
	holds   holds

	versionBytes atomic.Int64 // see ResourceStats
	forgotten    atomic.Bool  // see Forgotten
	counts       resourceCounters

	// Guarded by registry.mu.
	refs    int
	exclude bool // what the refs are for
}

// Prefix returns the key prefix, which ends with a slash.
func (r *Resource) Prefix() string { return r.prefix }

// Forgotten reports whether the mirror has let go of the resource: nobody claims it, and it had no keys.
// The next claim of its prefix is another resource.
func (r *Resource) Forgotten() bool { return r.forgotten.Load() }

// Ready reports whether the resource can be read.
func (r *Resource) Ready() bool { return r.cur.readable() != nil }

// current points to the lineage of a resource, nil while the resource is being loaded. The writer
// stores it.
type current struct{ atomic.Pointer[lineage] }

// readable returns the lineage that readers may see, nil if there is none.
func (c *current) readable() *lineage {
	if lin := c.Load(); lin != nil && !lin.private {
		return lin
	}
	return nil
}

// Snapshot is one revision of a resource. It is immutable, may be read
// concurrently, and keeps its entries alive for as long as it is held.
type Snapshot struct {
	// Rev is the revision of the snapshot: the clock for Latest, what was asked
	// for At.
	Rev  Revision
	tree tree
	seq  uint64
	lin  *lineage
	res  *Resource
}

// Latest returns the resource at the clock. Cost is O(1), no lock.
// Errors: ErrNotReady.
func (r *Resource) Latest() (Snapshot, error) {
	for ; ; runtime.Gosched() {
		lin := r.cur.readable()
		if lin == nil {
			return Snapshot{}, fmt.Errorf("%w: %s", ErrNotReady, r.prefix)
		}
		// The clock before the head: all events up to the clock are in any head
		// that is loaded afterwards.
		now := r.m.clock.Revision()
		if r.cur.Load() != lin {
			continue // the clock may be another cluster's; see writer.installAll
		}
		v := lin.head.Load()
		if v == nil {
			continue // the lineage has ended since
		}
		if v.rev > now {
			// The writer is between publishing the version and moving the clock;
			// until it has, the version before is the present (I5).
			if v = v.prev.Load(); v == nil || v.rev > now {
				continue
			}
		}
		return Snapshot{Rev: now, tree: v.tree, seq: v.seq, lin: lin, res: r}, nil
	}
}

// At returns the resource at exactly rev. Cost is O(log n) for the present and for a past
// that has been read shortly before: the version that was made then is kept for the next reader,
// who is given the same leaves. Else it is O(e log n), where e events are rolled, forward or
// backward, from the nearest version that is kept: about a third as many as have happened since
// rev, and at most 32,768 (twice that close to Oldest) with default options. Errors:
// ErrCompacted if rev is below Oldest, ErrFutureRevision if it is above the clock, ErrNotReady.
func (r *Resource) At(rev Revision) (Snapshot, error) {
	for {
		now, err := holding(r, rev)
		if err != nil || rev == now.Rev {
			return now, err
		}
		v := now.lin.head.Load()
		ok := v != nil
		if ok && rev < v.rev { // else the head serves it: nothing has happened since
			v, ok = now.lin.at(rev)
		}
		if ok {
			return Snapshot{Rev: rev, tree: v.tree, seq: v.seq, lin: now.lin, res: r}, nil
		}
		// The window moved past rev meanwhile, or the lineage has ended: look again.
	}
}

// holding returns the present of a lineage that holds the revision. Errors: those of At.
func holding(r *Resource, rev Revision) (Snapshot, error) {
	now, err := r.Latest()
	if err != nil {
		return Snapshot{}, err
	}
	switch oldest := now.lin.oldest(); {
	case rev > now.Rev:
		return Snapshot{}, fmt.Errorf("%w: asked %d, clock %d", ErrFutureRevision, rev, now.Rev)
	case rev < oldest:
		return Snapshot{}, fmt.Errorf("%w: asked %d, oldest %d", ErrCompacted, rev, oldest)
	}
	return now, nil
}

// Oldest returns the oldest revision that At can serve, and the floor of the log:
// cursors may start at any revision at or above it. Errors: ErrNotReady.
func (r *Resource) Oldest() (snapshot, floor Revision, err error) {
	lin := r.cur.readable()
	if lin == nil {
		return 0, 0, fmt.Errorf("%w: %s", ErrNotReady, r.prefix)
	}
	return lin.oldest(), lin.log.Floor(), nil
}

// ListSource returns the entries with start <= key < end as etcd has them now, in key order,
// and the revision of that: for those who must not rely on the clock. Entries that memory
// holds too are memory's. start begins with the resource's prefix. Cost is a list of the keys
// that begin with start. Errors: those of Source.List; ErrNotReady if etcd is another one.
func (r *Resource) ListSource(ctx context.Context, start, end string) ([]*Entry, Revision, error) {
	held, _ := r.Latest() // empty if there is none
	var entries []*Entry
	header, err := r.m.opts.Source.List(ctx, start, 0, func(page []KV) error {
		for i := range page {
			kv := &page[i]
			if string(kv.Key) >= end {
				continue
			}
			e, ok := held.Get(string(kv.Key))
			if !ok || e.mod != kv.ModRevision || !e.hasValue() {
				e = newEntry(kv, true)
			}
			entries = append(entries, e)
		}
		return nil
	})
	if err == nil && header.ClusterID != r.m.cluster.Load() {
		err = fmt.Errorf("%w: cluster %x", ErrNotReady, header.ClusterID)
	}
	return entries, header.Revision, err
}

// Present reports whether nothing has changed since the snapshot. Cost is O(1).
func (s Snapshot) Present() bool {
	if s.lin == nil {
		return false
	}
	head := s.lin.head.Load()
	return head != nil && head.seq == s.seq
}

// Get returns the entry with the key. Cost is O(log n), no allocation.
func (s Snapshot) Get(key string) (*Entry, bool) { return s.tree.Get(key) }

// Runs yields the entries with start <= key < end in key order, leaf by leaf; an
// empty end means no upper bound. The entries and leaves are shared: do not write
// to them, except to what is made for readers (Slot, Leaf.Memo).
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

// Measure adds up what measure returns for the runs with start <= key < end, and
// keeps the sums of subtrees under the name of; see Tree.Measure.
func (s Snapshot) Measure(start, end string, of any, measure func(Run) (int64, bool)) (int64, bool) {
	return s.tree.Measure(start, end, of, measure)
}

// notifier wakes everybody who waits for the next change, at once.
type notifier struct {
	mu sync.Mutex // leaf
	ch chan struct{}
}

// next returns a channel that is closed at the next change. Take it before
// looking for news, or news may be missed.
func (n *notifier) next() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

func (n *notifier) wake() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
		n.ch = nil
	}
}

// WaitReady returns when the resource can be read, or with ctx's error.
func (r *Resource) WaitReady(ctx context.Context) error {
	for {
		ch := r.changed.next()
		if r.Ready() {
			return nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return ctx.Err()
		case <-r.m.ctx.Done():
			return ErrClosed
		}
	}
}
