package mirror

import (
	"context"
	"errors"
	"iter"

	"github.com/stratakube/strata/mirror/memo"
)

// Memos yields the memos of the newest version, of its nodes and entries, and those of the log: of
// its events and their entries. Versions of old revisions may have others on their nodes. An entry
// may come more than once. Cost is O(entries + events of the log), without a lock that readers
// take. It ends early with ctx, and yields nothing while the resource is relisted.
func (r *Resource) Memos(ctx context.Context) iter.Seq[*memo.List] {
	return func(yield func(*memo.List) bool) {
		stopped := false
		each := func(l *memo.List) bool {
			stopped = stopped || ctx.Err() != nil || !yield(l)
			return !stopped
		}
		snap, err := r.Latest()
		if err != nil {
			return
		}
		for l := range snap.Memos() {
			if !each(l) {
				return
			}
		}
		for e := range snap.All("", "") {
			if !each(&e.memos) {
				return
			}
		}
		// The window may move above the cursor; the log then still has the events after its new
		// floor.
		for !stopped && errors.Is(r.memosOfLog(each), ErrCompacted) {
		}
	}
}

// memosOfLog yields the memos of the log. Error: ErrCompacted if the window has moved meanwhile;
// other errors of Resource.Oldest and CursorAfter.
func (r *Resource) memosOfLog(yield func(*memo.List) bool) error {
	const atOnce = 256
	_, floor, err := r.Oldest()
	if err != nil {
		return err
	}
	cursor, err := r.CursorAfter(floor, "", "")
	if err != nil {
		return err
	}
	defer cursor.Unfollow()
	for events := make([]*Event, 0, atOnce); ; {
		if events, err = cursor.Next(events[:0], atOnce); err != nil || len(events) == 0 {
			return err
		}
		for _, ev := range events {
			if !yield(&ev.memos) || ev.Prev != nil && !yield(&ev.Prev.memos) || ev.Entry != nil && !yield(&ev.Entry.memos) {
				return nil
			}
		}
	}
}
