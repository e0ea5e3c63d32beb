package mirror

import "fmt"

// Cursor is a position in a resource's log: the place after which its owner has
// not read yet. It holds no memory but its own few words; when the position leaves
// the window, Next says so, and nobody else notices. Not safe for concurrent use.
//
// A cursor reads the whole log and waits for any change, unless it is told to follow what
// it selects (Follow, FollowValue). Then its owner has to Close it.
type Cursor struct {
	res        *Resource
	lin        *lineage
	seq        uint64   // of the first event that is still to be looked at
	after      Revision // where it started; nothing at or below is returned
	pos        Revision // everything selected up to here was returned
	inside     uint64   // events of the log after pos that were looked at
	start, end string

	topic  *topic     // nil: it reads the whole log
	by     *Partition // of the topic, nil if that is a key or a directory
	awaits Revision   // see Await
}

// Cursor returns a cursor after the snapshot, over the keys start <= key < end; an
// empty end means no upper bound.
func (s Snapshot) Cursor(start, end string) *Cursor {
	return &Cursor{res: s.res, lin: s.lin, seq: s.seq, after: s.Rev, pos: s.Rev, start: start, end: end}
}

// CursorAfter returns a cursor over the events after rev of the keys
// start <= key < end; an empty end means no upper bound. A revision above the
// clock is not an error: nothing is returned until later events arrive.
// Errors: ErrCompacted if rev is below the floor, ErrNotReady.
func (r *Resource) CursorAfter(rev Revision, start, end string) (*Cursor, error) {
	lin := r.cur.readable()
	if lin == nil {
		return nil, fmt.Errorf("%w: %s", ErrNotReady, r.prefix)
	}
	c := &Cursor{res: r, after: rev, pos: rev, start: start, end: end}
	if err := c.bind(lin); err != nil {
		return nil, err
	}
	return c, nil
}

// bind places the cursor in a lineage, after what it has returned, and lets it follow there
// what it has followed. Errors: ErrCompacted if that is below the floor.
func (c *Cursor) bind(lin *lineage) error {
	seq := lin.log.After(c.pos)
	if floor := lin.log.Floor(); c.pos < floor {
		return fmt.Errorf("%w: asked %d, floor %d", ErrCompacted, c.pos, floor)
	}
	t, by := c.topic, c.by
	c.Close()
	c.lin, c.seq = lin, seq+c.inside
	if t != nil {
		t.changed.wake() // what Changed returned before is of this topic
	}
	switch {
	case by != nil:
		c.FollowValue(by, t.name)
	case t != nil:
		c.Follow()
	}
	return nil
}

// succeed lets the cursor of a lineage that has ended go on in the one that came after it, if
// that knows all that has happened after the cursor's position. Error: ErrCompacted.
//
// The cursor of one that lives joins what it follows again, whose feeder has ended.
func (c *Cursor) succeed() error {
	lin := c.lin
	for lin != nil && lin.log.Dead() {
		lin = lin.successor.Load()
	}
	if lin == nil || lin.private {
		return fmt.Errorf("%w: the resource was listed anew after %d", ErrCompacted, c.pos)
	}
	return c.bind(lin)
}

// Err returns ErrCompacted if the lineage that the cursor was placed in has ended: what else
// was read of the resource when it was placed may have nothing to do with what is read now.
func (c *Cursor) Err() error {
	if c.lin.log.Dead() {
		return fmt.Errorf("%w: the resource was listed anew after %d", ErrCompacted, c.pos)
	}
	return nil
}

// Follow has the cursor woken by, and read, the events of its keys only, if they are one
// key or one directory below the resource. Their number does not matter then, nor does
// that of the others: an event costs those who follow it.
func (c *Cursor) Follow() {
	c.Close()
	c.topic = c.res.changed.subscribe(c.res.prefix, c.lin, c.start, c.end)
}

// FollowValue has the cursor woken by, and read, events only that p finds to concern the
// value, or cannot tell of. Events that nobody has told p of when the cursor joins may be
// returned whatever they concern, so the caller has to select all the same. It has no effect
// if p has ended.
func (c *Cursor) FollowValue(p *Partition, value string) {
	c.Close()
	if c.topic = p.subscribe(c.lin, value); c.topic != nil {
		c.by = p
	}
}

// Close ends what Follow and FollowValue have begun. The cursor then reads the whole log.
func (c *Cursor) Close() {
	if c.topic != nil {
		// What happened since the topic's last event need not be looked at.
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

// Position returns the revision up to which every selected event was returned
// (I4). It is what a bookmark may carry.
func (c *Cursor) Position() Revision { return c.pos }

// Changed returns a channel that is closed at the next change of the resource, of what
// the cursor follows if it does. Take it before Next, or a change in between is missed.
func (c *Cursor) Changed() <-chan struct{} {
	if c.topic != nil {
		return c.topic.changed.next()
	}
	return c.res.changed.next()
}

// Await has the channel of Changed closed also when Position can come to rev, which the clock
// has reached: a cursor that follows something may learn a moment later than others that
// nothing of its own has happened. Call it before Changed.
func (c *Cursor) Await(rev Revision) {
	if c.topic != nil && c.pos < rev && c.awaits != rev {
		c.awaits = rev
		c.topic.of.await(c.topic, c.lin.log.After(rev))
	}
}

// Next appends the events that are due to buf, at most limit, and returns it; none
// are due when the result is as short as buf was. Afterwards Position tells how
// far the cursor has come, which moves with the clock even when nothing selected
// happened. Errors: ErrCompacted if an event that the cursor may have to return has left
// the window, or the resource was listed anew, unless that was because etcd was compacted and
// the cursor is not behind (D5); the cursor is of no more use then.
func (c *Cursor) Next(buf []*Event, limit int) ([]*Event, error) {
	for had := len(buf); ; buf = buf[:had] {
		// The clock before the log's end: all events up to the clock are in it.
		now := c.res.m.clock.Revision()
		if c.lin.log.Dead() || c.topic != nil && c.topic.of.ended.Load() {
			if err := c.succeed(); err != nil {
				return buf, err
			}
		}
		seq, pos, inside := c.seq, c.pos, c.inside
		end := c.lin.log.End()
		r := reading{Cursor: c, buf: buf, room: limit, now: now}
		var o outcome
		if c.topic == nil {
			o = r.log(end)
		} else if o = r.log(c.topic.from); o == passed {
			o = r.postings(end)
		}
		var err error
		if buf, err = r.stop(o); !c.lin.log.Dead() {
			return buf, err
		}
		// It may have been released while it was read: what came after it tells.
		c.seq, c.pos, c.inside = seq, pos, inside
	}
}

// reading is one call of Next.
type reading struct {
	*Cursor
	buf  []*Event
	room int
	now  Revision // later events are not due
}

// outcome is what has become of an event that a reading has come to.
type outcome int

const (
	passed  outcome = iota // it was returned, or is not selected
	noRoom                 // it has to wait for the next call
	notDue                 // it is not published yet (I5)
	dropped                // by the log
)

// take returns the event with the number if it is selected and due.
func (r *reading) take(seq uint64) outcome {
	e := r.lin.log.At(seq)
	switch {
	case e == nil:
		return dropped
	case e.Rev > r.now:
		return notDue
	case e.Rev <= r.after: // the cursor was asked to start at a future revision
		return passed
	}
	if k := e.Key(); k < r.start || r.end != "" && k >= r.end {
		return passed
	}
	if r.room == 0 {
		r.pos = max(r.pos, e.Rev-1) // everything before it was looked at
		return noRoom
	}
	r.buf = append(r.buf, e)
	r.room--
	r.pos = max(r.pos, e.Rev-1) // the rest of this revision is still to come
	return passed
}

// log reads every event up to the number end, or to the first that does not pass.
func (r *reading) log(end uint64) outcome {
	for ; r.seq < end; r.seq++ {
		if o := r.take(r.seq); o != passed {
			return o
		}
	}
	return passed
}

// postings reads the events of the topic likewise; end is the log's.
func (r *reading) postings(end uint64) outcome {
	t := r.topic
	if posted := max(t.of.posted.Load(), t.from); posted < end {
		// What the feeder has not come to yet may concern the cursor.
		if e := r.lin.log.At(posted); e != nil {
			r.now = min(r.now, e.Rev-1)
		} else {
			r.now = 0 // the log has dropped it, as the feeder will find
		}
	}
	seqs, whole := t.postings.From(r.seq)
	if !whole {
		return dropped
	}
	for _, seq := range seqs {
		if o := r.take(seq); o != passed {
			return o
		}
		r.seq = seq + 1
	}
	return passed
}

// stop ends the call: nothing is left to be read, or an event did not pass.
func (r *reading) stop(o outcome) ([]*Event, error) {
	switch o {
	case dropped:
		return r.buf, fmt.Errorf("%w: at %d, floor %d", ErrCompacted, r.pos, r.lin.log.Floor())
	case noRoom:
		if first := r.lin.log.After(r.pos); first < r.seq {
			r.inside = r.seq - first
		} else {
			r.inside = 0
		}
	default:
		r.pos, r.inside = max(r.pos, r.now), 0
	}
	return r.buf, nil
}
