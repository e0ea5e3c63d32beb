package kubestorage

import (
	"context"
	"slices"

	"github.com/stratakube/strata/mirror"
)

// useIndex narrows a list from memory to the entries of an index. For a list of the latest revision
// the index may be a little newer than the snapshot, which is then replaced by the index's
// revision: the request allows that revision or later. For one of old revisions useIndex takes the
// index of the latest revision and the keys changed since.
func (r *ListRead) useIndex(ctx context.Context) {
	if r.selector.Plain && r.selector.Shard != nil {
		r.useShard(ctx)
		return
	}
	x, value := r.store.selections.IndexFor(r.selector.Predicate)
	if x == nil {
		return
	}
	cur, err := x.At(ctx, r.Rev)
	if err != nil {
		return // the walk over all entries meets the same error and reports it
	}
	if r.request.exact == 0 {
		// Check the index last: if its lineage has ended meanwhile, the next lineage may have the
		// same revision with other entries.
		if snap, err := r.store.resource.At(cur.Revision()); err == nil && cur.Continues() {
			r.Snapshot, r.Rev, r.index, r.name, r.value = snap, cur.Revision(), cur, x.Name(), value
		}
		return
	}
	if changed, ok := changedSince(r.Snapshot.Cursor(r.Start, r.End)); ok {
		r.index, r.name, r.value, r.changedKeys = cur, x.Name(), value, changed
	}
}

// useShard narrows a list from memory to the entries of its shard. As with an index, the shard of
// the latest revision may be a little newer than the snapshot, which is then replaced by the
// shard's revision.
func (r *ListRead) useShard(ctx context.Context) {
	s := r.store
	x := s.selections.Shard(r.selector.Shard)
	if r.request.exact > 0 {
		if past, ok := x.OldVersion(s.view.CurrentGeneration(), r.Rev); ok {
			r.shard = past
			return
		}
	}
	built := !x.Built()
	cur, err := x.At(ctx, r.Rev)
	if err != nil {
		return // the walk over all entries meets the same error and reports it
	}
	if built {
		n, _ := r.Snapshot.Count("", "")
		s.selections.TrimShards(x, n)
	}
	if r.request.exact == 0 {
		if snap, err := s.resource.At(cur.Revision()); err == nil && cur.Continues() {
			r.Snapshot, r.Rev, r.shard = snap, cur.Revision(), cur
		}
		return
	}
	changed, ok := changedSince(r.Snapshot.Cursor("", ""))
	if !ok {
		return
	}
	if len(changed) == 0 {
		r.shard = cur
		return
	}
	if past, err := x.RolledTo(ctx, r.Snapshot, cur, changed); err == nil {
		r.shard = past
	}
}

// readAtOnce is the number of events per read of the log.
const readAtOnce = 256

// maxChanged bounds the changes between a revision and the latest state for which the index of the
// latest revision is used: more changes cost as much as reading some hundred objects.
const maxChanged = 4096

// changedSince returns the keys that have changed after the cursor, ascending; false if there are
// too many.
func changedSince(cursor *mirror.Cursor) (keys []string, ok bool) {
	for events := make([]*mirror.Event, 0, readAtOnce); ; {
		var err error
		if events, err = cursor.Next(events[:0], readAtOnce); err != nil || len(keys) > maxChanged {
			return nil, false
		}
		if len(events) == 0 {
			break
		}
		for _, ev := range events {
			keys = append(keys, ev.Key())
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys), true
}
