// Package index reads parts of a resource without examining all of it: by the values of fields and
// labels, with digests of the resource's own trees (Index, Plan) and with the keys of declared
// fields (keys), and by shards, each a tree of its own (Shard). All but keys of declared fields are
// made when they are first read, and are dropped when they have no readers.
// The package also limits the events that a watch reads to those of its part.
package index

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// readAtOnce is the number of events per read of the log.
const readAtOnce = 256

// Config is the resource of Selections, and its storage.
type Config struct {
	Resource *mirror.Resource
	View     *objects.View
	Blocks   *blockcache.Cache // charged with the bytes of indexes
	Context  context.Context   // ends with the storage
	Logger   *slog.Logger
	// Eager are the fields whose first use makes an index. They are few: those of Events, and the
	// selectable fields of a custom resource. The indexes that a registry has declared for a
	// request need not be among them; upstream's page tokens depend on those alone (DeclaredIndex).
	Eager map[string]bool
	// Start runs a goroutine that the storage waits for; false if the storage has ended.
	Start func(run func()) bool
	// Read counts objects of which a plan read the value of a label or field, from their stored
	// values and by decoding them.
	Read func(stored, decoded int)
	// Refused counts labels and fields that are not indexed because their digests are too large.
	Refused func()
	// Measured receives changes of the number of indexes, and of the bytes of their digests as they
	// were last counted.
	Measured func(indexes, bytes int64)
	// Unindexed counts watches of one value that read all events, because other labels and fields
	// have all indexes of watches.
	Unindexed func()
	// Filtered counts objects that a shard selector withholds from watches.
	Filtered func(n int)
}

// Selections are the indexes and shards of a resource. Safe for concurrent use.
type Selections struct {
	cfg     Config
	start   time.Time
	indexes indexes
	keyed   keyed
	shards  shards
	watches watches
}

// New returns the selections of a resource. Keys of the fields for which the registry has declared
// an index are kept from the start, as upstream's cache does: each has clients in every cluster
// that has objects. Other indexes are built on their first read.
func New(cfg Config) *Selections {
	s := &Selections{cfg: cfg, start: time.Now()}
	for _, field := range cfg.View.Kind().Declared {
		s.keep(field, true)
	}
	return s
}

// Version is a part of the resource at one revision; immutable.
type Version[I btree.Item] struct {
	gen    *objects.Generation // of the attributes from which it was made
	rev    mirror.Revision
	tree   btree.Tree[I]
	cursor mirror.Cursor // after rev; only copies of it move
}

// Revision returns the revision of the version.
func (v *Version[I]) Revision() mirror.Revision { return v.rev }

// Serves reports whether the version, which may be nil, can be used for reads at rev or later. It
// cannot if the resource was relisted since, perhaps from another etcd, or if the keys that decrypt
// values are not those of gen.
func (v *Version[I]) Serves(gen *objects.Generation, rev mirror.Revision) bool {
	if v == nil || v.gen != gen || v.rev < rev {
		return false
	}
	return v.Continues()
}

// Continues reports whether the resource was not relisted since.
func (v *Version[I]) Continues() bool {
	cursor := v.cursor
	_, err := cursor.Next(nil, 0)
	return err == nil
}

// Runs yields the items with start <= key < end, leaf by leaf.
func (v *Version[I]) Runs(start, end string) iter.Seq[btree.Run[I]] {
	return func(yield func(btree.Run[I]) bool) {
		for run := range v.tree.Runs(start, end) {
			run.Selected = true
			if !yield(run) {
				return
			}
		}
	}
}

// All yields the items with start <= key < end.
func (v *Version[I]) All(start, end string) iter.Seq[I] { return v.tree.All(start, end) }

// Count returns the number of items with start <= key < end, and their bytes.
func (v *Version[I]) Count(start, end string) (items int, bytes int64) {
	return v.tree.Count(start, end)
}

// Last returns the last item with start <= key < end. Cost is O(log n).
func (v *Version[I]) Last(start, end string) (item I, ok bool) { return v.tree.Last(start, end) }

// Measure is mirror.Snapshot.Measure.
func (v *Version[I]) Measure(start, end string, of *memo.Key, measure func(btree.Run[I]) (int64, bool)) (int64, bool) {
	return v.tree.Measure(start, end, of, measure)
}

// leaves returns all leaves of the version.
func (v *Version[I]) leaves() []*btree.Leaf[I] {
	var leaves []*btree.Leaf[I]
	for run := range v.tree.Runs("", "") {
		leaves = append(leaves, run.Leaf)
	}
	return leaves
}

// kind is the part of a selection that depends on its items. The caller of its methods holds
// buildLock.
type kind[I btree.Item] interface {
	// items returns the items of a snapshot, in ascending order of their keys.
	items(ctx context.Context, gen *objects.Generation, snap mirror.Snapshot) ([]I, error)
	// apply applies an event.
	apply(ctx context.Context, gen *objects.Generation, edit *btree.Edit[I], ev *mirror.Event) error
	// install replaces the current version old, which may be nil, with next, which edit has made;
	// nil if it was built from a snapshot.
	install(old, next *Version[I], edit *btree.Edit[I])
	// dropEnded drops versions whose generation has ended.
	dropEnded()
}

// selection is the current version of an index or shard, which readers bring up to date. Safe for
// concurrent use.
type selection[I btree.Item] struct {
	resource *mirror.Resource
	view     *objects.View
	kind     kind[I]

	cur       atomic.Pointer[Version[I]]
	buildLock *semaphore.Weighted // of 1: taken by the reader that brings cur up to date
}

// Built reports whether there is a current version.
func (s *selection[I]) Built() bool { return s.cur.Load() != nil }

// At returns the version at rev or later. Errors: those of decoding an entry, mirror.ErrNotReady,
// and that of ctx. Cost: the events since its last read, or the whole resource on the first read
// and when the log does not reach back to the last one. It waits for a reader that is bringing it
// up to date.
func (s *selection[I]) At(ctx context.Context, rev mirror.Revision) (*Version[I], error) {
	if cur := s.cur.Load(); cur.Serves(s.view.CurrentGeneration(), rev) {
		return cur, nil
	}
	if err := s.buildLock.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer s.buildLock.Release(1)
	cur, gen := s.cur.Load(), s.view.CurrentGeneration()
	if cur.Serves(gen, rev) {
		return cur, nil
	}
	next, edit, err := s.next(ctx, gen, cur)
	if err != nil {
		return nil, err
	}
	s.kind.install(cur, next, edit)
	if gen.Ended() {
		s.kind.dropEnded() // the pass over all selections may have run before
	}
	return next, nil
}

// next returns the version of now: cur, which may be nil, with the events since, or one built from
// a snapshot, for which the edit is nil. The caller holds buildLock.
func (s *selection[I]) next(ctx context.Context, gen *objects.Generation, cur *Version[I]) (*Version[I], *btree.Edit[I], error) {
	if cur != nil && cur.gen == gen {
		next, edit, err := s.follow(ctx, cur)
		if !errors.Is(err, mirror.ErrCompacted) {
			return next, edit, err
		}
	}
	snap, err := s.resource.Latest()
	if err != nil {
		return nil, nil, err
	}
	items, err := s.kind.items(ctx, gen, snap)
	if err != nil {
		return nil, nil, err
	}
	return &Version[I]{gen: gen, rev: snap.Rev, tree: btree.Build(items), cursor: *snap.Cursor("", "")}, nil, nil
}

// follow applies the events since cur. The caller holds buildLock.
func (s *selection[I]) follow(ctx context.Context, cur *Version[I]) (*Version[I], *btree.Edit[I], error) {
	edit, cursor := cur.tree.Edit(), cur.cursor
	var events []*mirror.Event
	for {
		var err error
		if events, err = cursor.Next(events[:0], readAtOnce); err != nil {
			return nil, nil, err
		}
		for _, ev := range events {
			if err := s.kind.apply(ctx, cur.gen, edit, ev); err != nil {
				return nil, nil, err
			}
		}
		if len(events) < readAtOnce {
			return &Version[I]{gen: cur.gen, rev: cursor.Position(), tree: edit.Tree(), cursor: cursor}, edit, nil
		}
	}
}
