package list

import (
	"context"
	"slices"

	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Selected returns the part of a range of a snapshot that a selector may select, for the initial
// events of a watch. With a shard selector, the revision of the list may be a little newer than the
// snapshot. The list has no request: NextPage, Served and Unreadable are not for it.
func (env *Env) Selected(ctx context.Context, snap mirror.Snapshot, start, end string, selector objects.Selector) *Read {
	r := &Read{env: env, Rev: snap.Rev, Snapshot: snap, Start: start, End: end, selector: selector}
	r.useIndex(ctx)
	return r
}

// useIndex narrows a list from memory to the candidates of its selector, if examining all objects
// of the range costs more.
func (r *Read) useIndex(ctx context.Context) {
	switch {
	case r.selector.All:
	case r.selector.Plain:
		r.useShard(ctx)
	default:
		if r.request.exact == 0 && r.request.opts.Predicate.Continue == "" {
			r.narrowed.declared = index.DeclaredIndex(&r.selector.Predicate)
		}
		r.narrowed.plan = r.env.Selections.Plan(ctx, &r.selector, r.Snapshot, r.Start, r.End)
	}
}

// useShard narrows a list from memory to the entries of its shard. The shard of the latest revision
// may be a little newer than the snapshot, which is then replaced by the shard's revision: the
// request allows that revision or later.
func (r *Read) useShard(ctx context.Context) {
	env := r.env
	x := env.Selections.Shard(r.selector.Shard)
	if r.request.exact > 0 {
		if past, ok := x.OldVersion(env.View.CurrentGeneration(), r.Rev); ok {
			r.narrowed.shard = past
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
		env.Selections.TrimShards(x, n)
	}
	if r.request.exact == 0 {
		if snap, err := env.Memory.At(cur.Revision()); err == nil && cur.Continues() {
			r.Snapshot, r.Rev, r.narrowed.shard = snap, cur.Revision(), cur
		}
		return
	}
	changed, ok := changedSince(r.Snapshot.Cursor("", ""))
	if !ok {
		return
	}
	if len(changed) == 0 {
		r.narrowed.shard = cur
		return
	}
	if past, err := x.RolledTo(ctx, r.Snapshot, cur, changed); err == nil {
		r.narrowed.shard = past
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
