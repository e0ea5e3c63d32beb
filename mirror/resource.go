package mirror

import (
	"context"
	"fmt"
	"runtime"
)

// Prefix returns the key prefix, which ends with a slash.
func (r *Resource) Prefix() string { return r.prefix }

// Forgotten reports whether the mirror has let go of the resource: nobody claims it, and it had no keys.
// The next claim of its prefix is another resource.
func (r *Resource) Forgotten() bool { return r.forgotten.Load() }

// Ready reports whether the resource can be read.
func (r *Resource) Ready() bool { return r.cur.readable() != nil }

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

// Near returns the version that is kept nearest to rev, which At would begin with, for those
// who only estimate. Cost is O(log n). Errors: those of At.
func (r *Resource) Near(rev Revision) (Snapshot, error) {
	for {
		now, err := holding(r, rev)
		if err != nil {
			return Snapshot{}, err
		}
		if v := now.lin.nearest(now.lin.log.After(rev)); v != nil {
			return Snapshot{Rev: v.rev, tree: v.tree, seq: v.seq, lin: now.lin, res: r}, nil
		}
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

// Hold tells that a snapshot is being read, until release, which is to be called once. When it
// is, or has become, one of the past, ResourceStats.Readers and OldestRead tell of it.
// It keeps nothing alive that the snapshot does not: what a version holds is free as soon as the
// last reader has let go of its snapshot. It takes a lock that only other calls for the
// same resource, and Stats, take: for reads that last.
func (r *Resource) Hold(s Snapshot) (release func()) {
	return r.holds.hold(held{s.lin, s.seq, s.Rev})
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
