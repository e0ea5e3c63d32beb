package kubestorage

import (
	"errors"

	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/stratakube/strata/mirror"
)

// next returns the pending batch, or an empty one; it never waits. The caller has delivered the
// previous batch. Errors: ErrStreamEnded, and those to report to the client before the watch ends
// (410 when it is too far behind).
func (st *Stream) next() (delivery, error) {
	if st.ctx.Err() != nil {
		return delivery{}, ErrStreamEnded
	}
	if st.failed != nil {
		return delivery{}, st.failed
	}
	st.selector.Generation = st.store.view.CurrentGeneration()
	leaving := st.draining()
	if st.listing || st.announce && st.endOfList {
		// The list and the events must be of one lineage: etcd may have been restored meanwhile.
		if err := st.cursor.Err(); err != nil {
			st.failed = st.ending(err)
			return delivery{}, st.failed
		}
	}
	if st.listing {
		if leaving { // a bookmark would claim that the list is complete
			return delivery{}, st.drained()
		}
		if b := st.nextInitial(); st.failed != nil || !b.empty() {
			return b, st.failed
		}
	}
	if st.announce {
		st.announce = false
		st.endInitial()
		utilflowcontrol.WatchInitialized(st.ctx)
		if st.endOfList {
			b := st.bookmark()
			b.bookmark.InitialEventsEnd = true
			return b, nil
		}
	}
	// Within a revision a bookmark would be below the delivered events, and ending there would omit
	// the rest of the revision.
	whole := st.lastDelivered <= st.cursor.Position()
	if leaving && whole && st.cursor.Position() >= st.lastRev {
		return st.drain()
	}
	if st.behind {
		// A watch that is always behind, or that selects none of the events, gets bookmarks too.
		st.behind = false
		if !leaving && whole && st.bookmarkDue() {
			return st.bookmark(), nil
		}
	}
	if leaving {
		st.cursor.Await(st.lastRev)
	}
	st.logChanged = st.cursor.Changed()
	var err error
	st.due, err = st.cursor.Next(st.due[:0], readAhead)
	if err != nil {
		if errors.Is(err, mirror.ErrCompacted) && st.cursor.Err() == nil {
			st.store.watchMetrics.Terminated() // too slow: its position has left the window
		}
		st.failed = st.ending(err)
	}
	if st.startRev != 0 {
		st.noteReplayed()
	}
	switch {
	case len(st.due) > 0:
		st.behind = true
		st.lastDelivered = st.due[len(st.due)-1].Rev
		st.logPosition.Store(st.cursor.Position())
		return delivery{events: st.due}, nil
	case err != nil:
		return delivery{}, st.failed
	}
	clear(st.due[:cap(st.due)])
	switch {
	case leaving && st.cursor.Position() >= st.lastRev:
		return st.drain()
	case st.catchUp && st.cursor.Position() >= st.publishedAtStart:
		st.catchUp = false
		return st.bookmark(), nil
	case st.bookmarkDue():
		return st.bookmark(), nil
	}
	return delivery{}, nil
}

// noteReplayed counts the pending events that are older than the watch.
func (st *Stream) noteReplayed() {
	for _, ev := range st.due {
		if ev.Rev > st.startRev {
			st.countReplayed()
			return
		}
		st.replayed++
	}
	if st.cursor.Position() >= st.startRev {
		st.countReplayed()
	}
}

// wait returns when there may be a pending batch. It returns ErrStreamEnded when the stream has
// ended or stop, which may be nil, is closed. Call it after next returned an empty batch.
func (st *Stream) wait(stop <-chan struct{}) error {
	st.logPosition.Store(idle)
	select {
	case <-st.logChanged:
	case <-st.wake:
	case <-st.ctx.Done():
		return ErrStreamEnded
	case <-stop:
		return st.drained()
	}
	return nil
}

// readAhead is the number of events per batch.
const readAhead = 64
