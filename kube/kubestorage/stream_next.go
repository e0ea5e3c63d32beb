package kubestorage

import (
	"errors"
	"fmt"
	"weak"

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
		if !leaving && whole && (st.bookmarkRequested() || st.bookmarkDue()) {
			return st.bookmark(), nil
		}
	}
	if leaving {
		st.cursor.Await(st.lastRev)
	} else {
		st.awaitRequested()
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
	case st.bookmarkRequested(), st.bookmarkDue():
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

// nextInitial returns the next part of the initial events, an empty batch after the last or when
// the stream has failed.
func (st *Stream) nextInitial() delivery {
	if st.found != nil {
		n := min(len(st.found), initialAtOnce)
		b := delivery{entries: st.found[:n]}
		st.store.watchMetrics.Started(n, 0)
		if st.found = st.found[n:]; len(st.found) == 0 {
			st.found, st.listing = nil, false
		}
		return b
	}
	clear(st.runs)
	st.runs = st.runs[:0]
	snap, err := st.snapshot()
	if err != nil {
		st.failed = st.ending(err)
		return delivery{}
	}
	n := 0
	defer func() { st.store.watchMetrics.Started(n, 0) }()
	objects, selected := Objects(*snap), st.selector.All
	if shard := st.shard.Value(); shard != nil {
		objects, selected = shard, true
	}
	for run := range objects.Runs(st.from, st.end) {
		st.runs = append(st.runs, run)
		items := run.Items()
		if n += len(items); n >= initialAtOnce {
			st.from = items[len(items)-1].Key() + "\x00"
			return delivery{runs: st.runs, selected: selected}
		}
	}
	b := delivery{runs: st.runs, selected: selected}
	st.listing, st.runs = false, nil
	return b
}

// snapshot returns the version of the initial events. The stream does not keep it alive between two
// calls, so versions that leave the window are freed. A client that reads in time nearly always
// finds the version still cached, without another materialization.
func (st *Stream) snapshot() (*mirror.Snapshot, error) {
	// After a relist, the history that includes the version may still be being restored.
	if err := st.store.resource.WaitHistory(st.ctx, st.at); err != nil {
		return nil, err
	}
	oldest, _, err := st.store.resource.Oldest()
	if err == nil && oldest > st.at {
		err = fmt.Errorf("%w: initial events are at %d, oldest available %d", mirror.ErrCompacted, st.at, oldest)
	}
	if err != nil {
		return nil, err
	}
	if snap := st.version.Value(); snap != nil {
		return snap, nil
	}
	snap, err := st.store.resource.At(st.at)
	if err != nil {
		return nil, err
	}
	st.version = weak.Make(&snap)
	return &snap, nil
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

// initialAtOnce is the number of initial entries per batch, which the stream holds while its client
// reads slowly; up to a leaf of the tree more.
const initialAtOnce = 256
