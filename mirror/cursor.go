package mirror

import (
	"errors"
	"fmt"
)

// Cursor is a position in a resource's log: its owner has read all events up to there. A cursor
// keeps no events alive. When its position leaves the window, Next returns ErrCompacted; the writer
// and other cursors are not affected. Not safe for concurrent use.
//
// By default a cursor reads the whole log and is woken by any change. Follow and FollowIndex limit
// it to the events of its keys or of one value; the owner then has to call Unfollow.
type Cursor struct {
	res               *Resource
	lin               *lineage
	seq               uint64   // number of the next event to visit
	after             Revision // the start position; no event at or below it is returned
	pos               Revision // all selected events up to here were returned
	visitedInRevision uint64   // events of the log after pos that were visited
	start, end        string

	topic  *topic      // nil: the cursor reads the whole log
	by     *WatchIndex // of the topic, nil if it is of a key or a directory
	awaits Revision    // see Await
}

// Cursor returns a cursor after the snapshot, over the keys start <= key < end; an
// empty end means no upper bound.
func (s Snapshot) Cursor(start, end string) *Cursor {
	return &Cursor{res: s.res, lin: s.lin, seq: s.seq, after: s.Rev, pos: s.Rev, start: start, end: end}
}

// CursorAfter returns a cursor over the events after rev of the keys start <= key < end; an empty
// end means no upper bound. A revision above the published revision is not an error: the cursor
// returns events once there are some after rev. Errors: ErrCompacted if rev is below the floor,
// ErrNotReady if the resource, or its history since rev, is being loaded; see WaitHistory.
func (r *Resource) CursorAfter(rev Revision, start, end string) (*Cursor, error) {
	lin := r.lineage.readable()
	if lin == nil {
		return nil, fmt.Errorf("%w: %s", ErrNotReady, r.prefix)
	}
	c := &Cursor{res: r, after: rev, pos: rev, start: start, end: end}
	if err := c.bind(lin); err != nil {
		return nil, err
	}
	return c, nil
}

// bind places the cursor in a lineage, after its last returned event, and subscribes it there to
// the topic that it has followed. Errors: ErrCompacted if its position is below the floor, unless
// the history since then is being restored: ErrNotReady.
func (c *Cursor) bind(lin *lineage) error {
	// In this order: history may be joined, or dropped, meanwhile.
	restoring, before := lin.restoring(c.pos), lin.log.Floor()
	seq := lin.log.After(c.pos)
	if floor := max(before, lin.log.Floor()); c.pos < floor {
		if restoring {
			return fmt.Errorf("%w: history of %s since revision %d is being restored", ErrNotReady, c.res.prefix, c.pos)
		}
		return fmt.Errorf("%w: requested %d, oldest available %d", ErrCompacted, c.pos, floor)
	}
	t, by := c.topic, c.by
	c.Unfollow()
	c.lin, c.seq = lin, seq+c.visitedInRevision
	if t != nil {
		t.changed.wake() // the channel that Changed returned before belongs to this topic
	}
	switch {
	case by != nil:
		c.FollowIndex(by, t.name)
	case t != nil:
		c.Follow()
	}
	return nil
}

// moveToSuccessor moves the cursor of an ended lineage to the lineage that succeeded it, if that
// one has all events after the cursor's position. Errors: those of bind.
//
// In a lineage that has not ended, it subscribes the cursor again, because its topic's poster has
// ended.
func (c *Cursor) moveToSuccessor() error {
	lin := c.lin
	for lin != nil && lin.log.Dead() {
		lin = lin.successor.Load()
	}
	if lin == nil || lin.hasNoClaim {
		return fmt.Errorf("%w: resource was relisted after revision %d", ErrCompacted, c.pos)
	}
	return c.bind(lin)
}

// Err returns ErrCompacted if the lineage in which the cursor was placed has ended. State that was
// read together with the cursor's position may then differ from later reads.
func (c *Cursor) Err() error {
	if c.lin.log.Dead() {
		return fmt.Errorf("%w: resource was relisted after revision %d", ErrCompacted, c.pos)
	}
	return nil
}

// SameLineage reports whether both cursors are placed in one lineage. Next may have moved one of
// them to the next lineage, in which the same keys have other entries.
func (c *Cursor) SameLineage(o *Cursor) bool { return c.lin == o.lin }

// Since appends the events after the snapshot that a cursor on the whole resource has visited. It
// reports false if the cursor has not reached the snapshot, if there are more events than most, if
// the log has dropped one, or if the snapshot belongs to another list of the resource. Cost is O(1)
// without events.
func (c *Cursor) Since(s Snapshot, buf []*Event, most int) ([]*Event, bool) {
	if c.lin != s.lin || c.seq < s.seq || c.seq-s.seq > uint64(most) {
		return buf, false
	}
	for seq := s.seq; seq < c.seq; seq++ {
		e := c.lin.log.At(seq)
		if e == nil {
			return buf, false
		}
		buf = append(buf, e)
	}
	return buf, true
}

// Follow limits the cursor to the events of its keys, if they are one key or one directory below
// the resource: only those wake it and are read by it. The cost of an event then depends on the
// cursors that follow its key, not on the number of cursors or events.
func (c *Cursor) Follow() {
	c.Unfollow()
	c.topic = c.res.changed.subscribe(c.res.prefix, c.lin, c.start, c.end)
}

// FollowIndex limits the cursor to events that p assigns to the value, or cannot assign: only those
// wake it and are read by it. Events that p has not sorted when the cursor joins may be returned
// whichever value they concern, so the caller still has to filter. It has no effect if p has ended.
func (c *Cursor) FollowIndex(p *WatchIndex, value string) {
	c.Unfollow()
	if c.topic = p.subscribe(c.lin, value); c.topic != nil {
		c.by = p
	}
}

// Unfollow ends Follow and FollowIndex. The cursor then reads the whole log.
func (c *Cursor) Unfollow() {
	if c.topic != nil {
		// The events since the topic's last event need no visit.
		if seq := c.lin.log.After(c.pos); c.pos >= c.lin.log.Floor() {
			c.seq = max(c.seq, seq)
		}
	}
	switch {
	case c.topic == nil:
	case c.by != nil:
		c.by.unsubscribe(c.topic)
	default:
		c.res.changed.unsubscribe(c.lin, c.topic)
	}
	c.topic, c.by, c.awaits = nil, nil, 0
}

// Position returns the revision up to which every selected event was returned (I4). A bookmark may
// carry it.
func (c *Cursor) Position() Revision { return c.pos }

// Changed returns a channel that is closed at the next change of the resource, or of the followed
// topic. Call it before Next, or a change in between is missed.
func (c *Cursor) Changed() <-chan struct{} {
	if c.topic != nil {
		// In this order: the end of a lineage wakes its topics once.
		if ch := c.topic.changed.next(); !c.lin.log.Dead() {
			return ch
		}
	}
	return c.res.changed.next() // the cursor may wait for a successor
}

// Await makes the channel of Changed close also when Position can advance to rev, which the
// published revision has reached. A cursor on a topic may learn later than others that its topic
// has no events up to rev. Call Await before Changed.
func (c *Cursor) Await(rev Revision) {
	if c.topic != nil && c.pos < rev && c.awaits != rev {
		c.awaits = rev
		c.topic.owner.await(c.topic, c.lin.log.After(rev))
	}
}

// Next appends the due events to buf, at most limit, and returns it; the result has the length of
// buf if no event is due. Afterwards Position is the cursor's new position, which advances with the
// published revision even without selected events. Errors: ErrCompacted if an event that the cursor
// may have to return has left the window, or if the resource was relisted, unless a compaction of
// etcd was the reason and the cursor is not behind (D5). The cursor cannot be used after that.
func (c *Cursor) Next(buf []*Event, limit int) ([]*Event, error) {
	for had := len(buf); ; buf = buf[:had] {
		// Load the published revision before the log's end: all events up to the published revision
		// are in the log.
		now := c.res.m.published.Revision()
		if c.lin.log.Dead() || c.topic != nil && c.topic.owner.ended.Load() {
			if err := c.moveToSuccessor(); errors.Is(err, ErrNotReady) {
				return buf, nil // the history in between is being restored; Changed reports its end
			} else if err != nil {
				return buf, err
			}
		}
		seq, pos, inside := c.seq, c.pos, c.visitedInRevision
		end := c.lin.log.End()
		r := nextCall{Cursor: c, buf: buf, room: limit, now: now}
		var o outcome
		if c.topic == nil {
			o = r.log(end)
		} else if o = r.log(c.topic.from); o == visited {
			o = r.postings(end)
		}
		if o == dropped && c.skipBeforeStart() {
			continue
		}
		var err error
		if buf, err = r.stop(o); !c.lin.log.Dead() {
			return buf, err
		}
		// The lineage may have been released during the read: continue in its successor.
		c.seq, c.pos, c.visitedInRevision = seq, pos, inside
	}
}

// skipBeforeStart moves a cursor that started at a future revision past the events up to there, if
// the log has dropped them and no later one. It reports whether the cursor has moved.
func (c *Cursor) skipBeforeStart() bool {
	first := c.lin.log.After(c.after)
	if first <= c.seq || c.lin.log.Floor() > c.after || c.lin.log.Dead() {
		return false
	}
	c.seq, c.visitedInRevision = first, 0
	return true
}

// nextCall is one call of Next.
type nextCall struct {
	*Cursor
	buf  []*Event
	room int
	now  Revision // later events are not due
}

// outcome is the result of visiting one event.
type outcome int

const (
	visited outcome = iota // it was returned, or is not selected
	noRoom                 // it waits for the next call
	notDue                 // it is not published yet (I5)
	dropped                // the log has dropped it
)

// take appends the event with the number if it is selected and due.
func (r *nextCall) take(seq uint64) outcome {
	e := r.lin.log.At(seq)
	switch {
	case e == nil:
		return dropped
	case e.Rev > r.now:
		return notDue
	case e.Rev <= r.after: // the cursor started at a future revision
		return visited
	}
	if k := e.Key(); k < r.start || r.end != "" && k >= r.end {
		return visited
	}
	if r.room == 0 {
		r.pos = max(r.pos, e.Rev-1) // all events before it were visited
		return noRoom
	}
	r.buf = append(r.buf, e)
	r.room--
	r.pos = max(r.pos, e.Rev-1) // more events of this revision may follow
	return visited
}

// log reads every event up to the number end, or to the first event that does not pass.
func (r *nextCall) log(end uint64) outcome {
	for ; r.seq < end; r.seq++ {
		if o := r.take(r.seq); o != visited {
			return o
		}
	}
	return visited
}

// postings reads the events of the topic in the same way; end is the log's end.
func (r *nextCall) postings(end uint64) outcome {
	t := r.topic
	if posted := max(t.owner.posted.Load(), t.from); posted < end {
		// Events that the poster has not posted yet may concern the cursor.
		if e := r.lin.log.At(posted); e != nil {
			r.now = min(r.now, e.Rev-1)
		} else {
			r.now = 0 // the log has dropped it, and the poster will end
		}
	}
	seqs, whole := t.postings.From(r.seq)
	if !whole {
		return dropped
	}
	for _, seq := range seqs {
		if o := r.take(seq); o != visited {
			return o
		}
		r.seq = seq + 1
	}
	return visited
}

// stop ends the call: all events were read, or an event did not pass.
func (r *nextCall) stop(o outcome) ([]*Event, error) {
	switch o {
	case dropped:
		return r.buf, fmt.Errorf("%w: watch is at %d, oldest available %d", ErrCompacted, r.pos, r.lin.log.Floor())
	case noRoom:
		if first := r.lin.log.After(r.pos); first < r.seq {
			r.visitedInRevision = r.seq - first
		} else {
			r.visitedInRevision = 0
		}
	default:
		r.pos, r.visitedInRevision = max(r.pos, r.now), 0
	}
	return r.buf, nil
}
