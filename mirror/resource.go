package mirror

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/mirror/driver"
)

// Resource is one key prefix of a mirror, for example the ConfigMaps of a cluster. All methods may
// be called concurrently, Release once for each claim. The writer's half of it is a table.
type Resource struct {
	m      *shared
	prefix string

	lineage lineagePointer
	// last is the newest version of a lineage that ended without a next one, nil while there is one
	last    atomic.Pointer[Snapshot]
	changed changes // after each publication that touches the resource
	readers readerCounts

	versionBytes atomic.Int64 // see ResourceStats
	removed      atomic.Bool  // see Removed
	counts       resourceCounters

	// Guarded by registry.mu.
	refs    int
	exclude bool // the refs are exclusions
}

// Prefix returns the key prefix, which ends with a slash.
func (r *Resource) Prefix() string { return r.prefix }

// Removed reports whether the mirror has removed the resource, which had no claims and no keys.
// The next claim of its prefix creates another Resource.
func (r *Resource) Removed() bool { return r.removed.Load() }

// Closed returns a channel that is closed when the mirror is closed. The newest version stays
// readable; cursors return ErrCompacted.
func (r *Resource) Closed() <-chan struct{} { return r.m.ctx.Done() }

// Ready reports whether the resource can be read.
func (r *Resource) Ready() bool { return r.lineage.readable() != nil }

// WaitReady returns when the resource can be read. Errors: ErrClosed, ctx's.
func (r *Resource) WaitReady(ctx context.Context) error { return r.waitFor(ctx, r.Ready) }

// WaitHistory returns when no restore of history is running that may add the events after rev.
// CursorAfter then returns a cursor or ErrCompacted, At a snapshot or ErrCompacted. Errors:
// ErrClosed, ctx's.
func (r *Resource) WaitHistory(ctx context.Context, rev Revision) error {
	return r.waitFor(ctx, func() bool {
		lin := r.lineage.readable()
		return lin == nil || !lin.restoring(rev)
	})
}

// waitFor returns when the condition is true, with ctx's error, or ErrClosed.
func (r *Resource) waitFor(ctx context.Context, condition func() bool) error {
	for {
		ch := r.changed.next()
		if condition() {
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

// latestPause is the pause of Latest between looks at a writer that does not continue: its thread
// was suspended, or it replaces the lineages of many resources. A guess.
const latestPause = 100 * time.Microsecond

// Latest returns a snapshot of the resource at the published revision. Cost is O(1), no lock.
// Errors: ErrNotReady.
func (r *Resource) Latest() (Snapshot, error) {
	for tries := 0; ; tries++ {
		if tries > 100 {
			time.Sleep(latestPause)
		} else if tries > 0 {
			runtime.Gosched()
		}
		lin := r.lineage.readable()
		if lin == nil {
			return Snapshot{}, fmt.Errorf("%w: %s", ErrNotReady, r.prefix)
		}
		// Load the published revision before the head: any head loaded afterwards contains all
		// events up to the published revision.
		now := r.m.published.Revision()
		if r.lineage.Load() != lin {
			continue // the published revision may belong to another cluster; see writer.installAll
		}
		v := lin.head.Load()
		if v == nil {
			continue // the lineage has ended meanwhile
		}
		if v.rev > now {
			// The writer has published the version but not yet advanced the published revision.
			// Until then the previous version is the latest one (I5).
			if v = v.prev.Load(); v == nil || v.rev > now {
				continue
			}
		}
		return Snapshot{Rev: now, tree: v.tree, seq: v.seq, lin: lin, res: r}, nil
	}
}

// Last is Latest, or while the resource is being relisted, the newest version before. false: the
// resource was never loaded, or is no longer claimed. For readers that prefer an old state to none;
// its revisions may be those of an etcd that was restored since.
func (r *Resource) Last() (Snapshot, bool) {
	for {
		if snap, err := r.Latest(); err == nil {
			return snap, true
		}
		if last := r.last.Load(); last != nil {
			return *last, true
		}
		if r.lineage.readable() == nil { // otherwise it was loaded meanwhile
			return Snapshot{}, false
		}
	}
}

// At returns a snapshot of the resource at exactly rev. Cost is O(log n) at the latest version, and
// at a past version that was read recently: the materialized version is cached, and later readers
// share its leaves. Otherwise it is O(e log n), where e is the number of events applied forward or
// backward from the nearest retained version: about a third of the events since rev, and at most
// 32,768 (twice that close to Oldest) with default options. Errors: ErrCompacted if rev is below
// Oldest, ErrFutureRevision if it is above the published revision, ErrNotReady.
func (r *Resource) At(rev Revision) (Snapshot, error) {
	for {
		now, err := latestCovering(r, rev)
		if err != nil || rev == now.Rev {
			return now, err
		}
		v := now.lin.head.Load()
		ok := v != nil
		if ok && rev < v.rev { // otherwise the head serves rev: there are no later events
			v, ok = now.lin.at(rev)
		}
		if ok {
			return Snapshot{Rev: rev, tree: v.tree, seq: v.seq, lin: now.lin, res: r}, nil
		}
		// The window moved past rev meanwhile, or the lineage has ended: retry.
	}
}

// NearestRetained returns the retained version nearest to rev, from which At would start, for
// estimates. Cost is O(log n). Errors: those of At.
func (r *Resource) NearestRetained(rev Revision) (Snapshot, error) {
	for {
		now, err := latestCovering(r, rev)
		if err != nil {
			return Snapshot{}, err
		}
		if v := now.lin.nearest(now.lin.log.After(rev)); v != nil {
			return Snapshot{Rev: v.rev, tree: v.tree, seq: v.seq, lin: now.lin, res: r}, nil
		}
	}
}

// latestCovering returns the latest snapshot of a lineage whose history includes rev. Errors: those
// of At.
func latestCovering(r *Resource, rev Revision) (Snapshot, error) {
	now, err := r.Latest()
	if err != nil {
		return Snapshot{}, err
	}
	switch oldest := now.lin.oldest(); {
	case rev > now.Rev:
		return Snapshot{}, fmt.Errorf("%w: requested %d, latest published %d", ErrFutureRevision, rev, now.Rev)
	case rev < oldest:
		return Snapshot{}, fmt.Errorf("%w: requested %d, oldest available %d", ErrCompacted, rev, oldest)
	}
	return now, nil
}

// TrackReader registers a read of the snapshot until release, which must be called exactly once.
// While the snapshot is a past one, ResourceStats.Readers and OldestRead include it. TrackReader
// keeps nothing alive beyond the snapshot itself: a version can be collected as soon as its last
// reader has dropped its snapshot. TrackReader takes a lock that only other calls of TrackReader
// for the same resource, and Stats, take. Use it for long reads.
func (r *Resource) TrackReader(s Snapshot) (release func()) {
	return r.readers.track(readVersion{s.lin, s.seq, s.Rev})
}

// Oldest returns the oldest revision that At can serve, and the floor of the log: cursors may start
// at any revision at or above it. Errors: ErrNotReady.
func (r *Resource) Oldest() (snapshot, floor Revision, err error) {
	lin := r.lineage.readable()
	if lin == nil {
		return 0, 0, fmt.Errorf("%w: %s", ErrNotReady, r.prefix)
	}
	return lin.oldest(), lin.log.Floor(), nil
}

// ListFromEtcd returns the entries with start <= key < end as listed from etcd now, in key order,
// and the revision of the list. Use it when the published revision must not be trusted. Entries
// that are also cached are shared with the cache. start begins with the resource's prefix. Cost is
// a list of the keys that begin with start. Errors: those of Source.List; ErrNotReady if the answer
// is from another etcd cluster.
func (r *Resource) ListFromEtcd(ctx context.Context, start, end string) ([]*Entry, Revision, error) {
	cached, _ := r.Latest() // empty if the resource is not ready
	var entries []*Entry
	header, err := r.m.opts.Source.List(ctx, start, 0, func(page []driver.KV) error {
		for i := range page {
			kv := &page[i]
			if string(kv.Key) >= end {
				continue
			}
			e, ok := cached.Get(string(kv.Key))
			if !ok || e.mod != kv.ModRevision || !e.hasValue() {
				e = newEntry(kv, true)
			}
			entries = append(entries, e)
		}
		return nil
	})
	if err == nil && header.ClusterID != r.m.cluster.Load() {
		err = fmt.Errorf("%w: response from cluster ID %x", ErrNotReady, header.ClusterID)
	}
	return entries, header.Revision, err
}
