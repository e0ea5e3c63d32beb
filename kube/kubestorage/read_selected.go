package kubestorage

import (
	"context"
	"slices"

	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/mirror"
)

// useIndex narrows a list from memory to the candidates of its selector, if examining all objects
// of the range costs more.
func (r *ListRead) useIndex(ctx context.Context) {
	switch {
	case r.selector.All:
	case r.selector.Plain:
		r.useShard(ctx)
	default:
		if r.request.exact == 0 && r.request.opts.Predicate.Continue == "" {
			r.declared = index.DeclaredIndex(&r.selector.Predicate)
		}
		r.plan = r.store.selections.Plan(ctx, &r.selector, r.Snapshot, r.Start, r.End)
	}
}

// useShard narrows a list from memory to the entries of its shard. The shard of the latest revision
// may be a little newer than the snapshot, which is then replaced by the shard's revision: the
// request allows that revision or later.
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

// maxChanged bounds the changes between a revision and the latest state for which the shard of the
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
