package kubestorage

import (
	"context"
	"errors"

	"github.com/stratakube/strata/kube/internal/representation"
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

// readAtOnce is the number of events per read of the log.
const readAtOnce = 256

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
		representation.DropClosed(run.Leaf)
		for _, e := range run.Items() {
			e.DropClosed()
		}
	}
	// The window may move above the cursor; the log then still has the events after its new floor.
	for ctx.Err() == nil && errors.Is(dropClosedEvents(ctx, r), mirror.ErrCompacted) {
	}
}

// dropClosedEvents is dropClosed for the events of the log. Error: mirror.ErrCompacted if the
// window has moved meanwhile; other errors of Resource.Oldest and CursorAfter.
func dropClosedEvents(ctx context.Context, r *mirror.Resource) error {
	_, floor, err := r.Oldest()
	if err != nil {
		return err
	}
	cursor, err := r.CursorAfter(floor, "", "")
	if err != nil {
		return err
	}
	defer cursor.Unfollow()
	for events := make([]*mirror.Event, 0, readAtOnce); ctx.Err() == nil; {
		if events, err = cursor.Next(events[:0], readAtOnce); err != nil || len(events) == 0 {
			return err
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
	return nil
}
