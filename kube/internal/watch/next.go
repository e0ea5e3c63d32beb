package watch

import (
	"errors"

	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/stratakube/strata/mirror"
)

// next returns the pending batch, or an empty one; it never waits. The caller has delivered the
// previous batch. Errors: ErrEnded, and those to report to the client before the watch ends (410
// when it is too far behind).
func (st *Stream) next() (b delivery, err error) {
	if st.life.ctx.Err() != nil {
		return delivery{}, ErrEnded
	}
	if st.failed != nil {
		return delivery{}, st.failed
	}
	st.scope.selector.Generation = st.env.Lists.View.CurrentGeneration()
	for {
		was := st.phase
		switch was {
		case listing:
			b, err = st.nextInitial()
		case announcing:
			b, err = st.announce()
		case live:
			b, err = st.nextEvents()
		case draining:
			b, err = st.lastEvents()
		case ended:
			err = ErrEnded
		}
		if err != nil || !b.empty() || st.phase == was {
			return b, err
		}
	}
}

// announce ends the initial events: a bookmark closes them if the client has requested them.
func (st *Stream) announce() (delivery, error) {
	if st.initial.marked {
		if err := st.oneLineage(); err != nil {
			return delivery{}, err
		}
	}
	st.phase = live
	st.endInitial()
	utilflowcontrol.WatchInitialized(st.life.ctx)
	if !st.initial.marked {
		return delivery{}, nil
	}
	b := st.bookmark()
	b.bookmark.InitialEventsEnd = true
	return b, nil
}

// oneLineage returns an error if the events are no longer those after the list: etcd may have been
// restored meanwhile.
func (st *Stream) oneLineage() error {
	if err := st.log.cursor.Err(); err != nil {
		return st.fail(err)
	}
	return nil
}

// nextEvents returns the next events of a live watch, or a bookmark that is due.
func (st *Stream) nextEvents() (delivery, error) {
	if st.leaving() {
		st.phase = draining
		return delivery{}, nil
	}
	if st.log.behind {
		// A watch that is always behind, or that selects none of the events, gets bookmarks too.
		st.log.behind = false
		if st.log.whole() && st.bookmarkDue() {
			return st.bookmark(), nil
		}
	}
	b, err := st.read()
	if err != nil || !b.empty() {
		return b, err
	}
	return st.dueBookmark(), nil
}

// lastEvents returns the events before the end of the server, a last bookmark, and then the end.
func (st *Stream) lastEvents() (delivery, error) {
	if st.log.whole() && st.log.cursor.Position() >= st.life.until {
		return st.lastBookmark()
	}
	st.log.behind = false
	st.log.cursor.Await(st.life.until)
	b, err := st.read()
	switch {
	case err != nil || !b.empty():
		return b, err
	case st.log.cursor.Position() >= st.life.until:
		return st.lastBookmark()
	}
	return st.dueBookmark(), nil
}

// read returns the next events of the log, if there are any.
func (st *Stream) read() (delivery, error) {
	l := &st.log
	l.changed = l.cursor.Changed()
	var err error
	l.due, err = l.cursor.Next(l.due[:0], readAhead)
	if err != nil {
		if errors.Is(err, mirror.ErrCompacted) && l.cursor.Err() == nil {
			st.env.Metrics.Terminated() // too slow: its position has left the window
		}
		err = st.fail(err)
	}
	if st.replay.until != 0 {
		st.noteReplayed()
	}
	if len(l.due) > 0 { // the error, if there is one, follows them
		l.behind = true
		l.last = l.due[len(l.due)-1].Rev
		l.position.Store(l.cursor.Position())
		return delivery{events: l.due}, nil
	}
	if err == nil {
		clear(l.due[:cap(l.due)])
	}
	return delivery{}, err
}

// noteReplayed counts the pending events that are older than the watch.
func (st *Stream) noteReplayed() {
	for _, ev := range st.log.due {
		if ev.Rev > st.replay.until {
			st.countReplayed()
			return
		}
		st.replay.events++
	}
	if st.log.cursor.Position() >= st.replay.until {
		st.countReplayed()
	}
}

// countReplayed records the cost of the start of the watch in the metrics.
func (st *Stream) countReplayed() {
	st.env.Metrics.Started(0, st.replay.events)
	st.replay = replay{}
}

// wait returns when there may be a pending batch. It returns ErrEnded when the stream has ended or
// stop, which may be nil, is closed. Call it after next returned an empty batch.
func (st *Stream) wait(stop <-chan struct{}) error {
	st.log.position.Store(idle)
	select {
	case <-st.log.changed:
	case <-st.life.wake:
	case <-st.life.ctx.Done():
		return ErrEnded
	case <-stop:
		return st.drained()
	}
	return nil
}

// readAhead is the number of events per batch.
const readAhead = 64
