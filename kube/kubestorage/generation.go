package kubestorage

import (
	"context"

	"github.com/stratakube/strata/kube/internal/encoded"
	"github.com/stratakube/strata/mirror"
)

// dropReplaced drops derived data of retired keys, concurrently with readers. The view's mutex is
// held.
func dropReplaced(s *Store) {
	s.selections.KeysReplaced()
	s.goroutines.Start(func() {
		s.selections.DropEnded()
		dropClosed(s.ctx, s.resource)
	})
}

// dropClosed drops the derived data that entries, leaves and events of the resource reference under
// closed keys, so that data decrypted with removed keys does not stay in memory until its entry is
// replaced. Versions of old revisions may contain the positions of items, but no items. Cost is
// O(entries + events of the log), without a lock that readers take. It ends early with ctx.
func dropClosed(ctx context.Context, r *mirror.Resource) {
	snap, err := r.Latest()
	if err != nil {
		return // being relisted
	}
	for d := range snap.Digests() {
		d.DropClosed()
	}
	for run := range snap.Runs("", "") {
		if ctx.Err() != nil {
			return
		}
		encoded.DropClosed(run.Leaf)
		for _, e := range run.Items() {
			e.DropClosed()
		}
	}
	_, floor, err := r.Oldest()
	if err != nil {
		return
	}
	cursor, err := r.CursorAfter(floor, "", "")
	if err != nil {
		return
	}
	defer cursor.Unfollow()
	for events := make([]*mirror.Event, 0, readAtOnce); ctx.Err() == nil; {
		if events, err = cursor.Next(events[:0], readAtOnce); err != nil || len(events) == 0 {
			return // the rest has left the window
		}
		for _, ev := range events {
			ev.DropClosed()
			if ev.Prev != nil {
				ev.Prev.DropClosed()
			}
			if ev.Entry != nil {
				ev.Entry.DropClosed()
			}
		}
	}
}
