package kubestorage

import (
	"context"
	"iter"
	"slices"

	"github.com/stratakube/strata/kube/internal/selected"
	"github.com/stratakube/strata/mirror"
)

// Objects are entries in key order: those of a snapshot, or the part of them that a shard selector
// selects. They are immutable.
type Objects interface {
	// Runs yields the entries with start <= key < end, leaf by leaf.
	Runs(start, end string) iter.Seq[mirror.Run]
	// All yields the entries with start <= key < end.
	All(start, end string) iter.Seq[*mirror.Entry]
	// Count returns the number of entries with start <= key < end, and their stored bytes.
	Count(start, end string) (entries int, bytes int64)
	// Last returns the last entry with start <= key < end. Cost is O(log n).
	Last(start, end string) (e *mirror.Entry, ok bool)
	// Measure is mirror.Snapshot.Measure.
	Measure(start, end string, of any, measure func(mirror.Run) (int64, bool)) (int64, bool)
}

// useIndex narrows a reading of memory to the entries of an index. For a list of the present the
// index may be a little newer than the snapshot, which then follows it: the request asked for
// a revision or later. For one of the past it is the index of the present, and the keys that
// have changed since.
func (r *Reading) useIndex(ctx context.Context) {
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
		return // the walk over everything meets the same error and words it
	}
	if r.request.exact == 0 {
		// The index is asked last: one of a lineage that has ended meanwhile, whose revision
		// the next one may have too, may not have the entries of that.
		if snap, err := r.store.resource.At(cur.Revision()); err == nil && cur.Continues() {
			r.Snapshot, r.Rev, r.index, r.name, r.value = snap, cur.Revision(), cur, x.Name(), value
		}
		return
	}
	if changed, ok := changedSince(r.Snapshot.Cursor(r.Start, r.End)); ok {
		r.index, r.name, r.value, r.changed = cur, x.Name(), value, changed
	}
}

// useShard narrows a reading of memory to the entries of its shard. As with an index, that of the
// present may be a little newer than the snapshot, which then follows it.
func (r *Reading) useShard(ctx context.Context) {
	s := r.store
	x := s.selections.Shard(r.selector.Shard)
	if r.request.exact > 0 {
		if past, ok := x.Past(s.view.Now(), r.Rev); ok {
			r.shard = past
			return
		}
	}
	built := !x.Built()
	cur, err := x.At(ctx, r.Rev)
	if err != nil {
		return // the walk over everything meets the same error and words it
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

// indexed yields the entries of the index, but for the keys that have changed since: of those,
// the entries of the snapshot.
func (r *Reading) indexed(yield func(*mirror.Entry) bool) {
	changed := r.changed
	before := func(key string) bool { // those of changed that come before key
		for ; len(changed) > 0 && changed[0] < key; changed = changed[1:] {
			if e, ok := r.Snapshot.Get(changed[0]); ok && !yield(e) {
				return false
			}
		}
		return true
	}
	for e := range selected.Entries(r.index, r.value, r.Start, r.End) {
		if !before(e.Key()) {
			return
		}
		if len(changed) > 0 && changed[0] == e.Key() {
			continue // it comes with the changed
		}
		if !yield(e) {
			return
		}
	}
	before(r.End)
}

// readAtOnce is how many events are taken from the log at once.
const readAtOnce = 256

// maxChanged is how many changes may lie between a revision and the present for the index of
// the present to be of use for it: more cost as much as looking at some hundred objects.
const maxChanged = 4096

// changedSince returns the keys that have changed after the cursor, ascending; false if there are
// many.
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
