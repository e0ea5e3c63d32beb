package mirror

import "fmt"

// Cursor is a position in a resource's log: the place after which its owner has
// not read yet. It holds no memory but its own few words; when the position leaves
// the window, Next says so, and nobody else notices. Not safe for concurrent use.
type Cursor struct {
	res        *Resource
	lin        *lineage
	seq        uint64
	after      Revision // where it started; nothing at or below is returned
	pos        Revision // everything selected up to here was returned
	start, end string
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
	lin := r.readable()
	if lin == nil {
		return nil, fmt.Errorf("%w: %s", ErrNotReady, r.prefix)
	}
	seq := lin.log.After(rev)
	if floor := lin.log.Floor(); rev < floor {
		return nil, fmt.Errorf("%w: asked %d, floor %d", ErrCompacted, rev, floor)
	}
	return &Cursor{res: r, lin: lin, seq: seq, after: rev, pos: rev, start: start, end: end}, nil
}

// Position returns the revision up to which every selected event was returned
// (I4). It is what a bookmark may carry.
func (c *Cursor) Position() Revision { return c.pos }

// Changed returns a channel that is closed at the next change of the resource.
// Take it before Next, or a change in between is missed.
func (c *Cursor) Changed() <-chan struct{} { return c.res.changed.next() }

// Next appends the events that are due to buf, at most limit, and returns it; none
// are due when the result is as short as buf was. Afterwards Position tells how
// far the cursor has come, which moves with the clock even when nothing selected
// happened. Errors: ErrCompacted if the position left the window or the resource
// was listed anew; the cursor is of no more use then.
func (c *Cursor) Next(buf []*Event, limit int) ([]*Event, error) {
	// The clock before the log's end: all events up to the clock are in it.
	now := c.res.m.clock.rev.Load()
	end := c.lin.log.End()
	if c.lin.log.Dead() {
		return buf, fmt.Errorf("%w: the resource was listed anew after %d", ErrCompacted, c.pos)
	}
	n := 0
	for ; c.seq < end; c.seq++ {
		e := c.lin.log.At(c.seq)
		if e == nil {
			return buf, fmt.Errorf("%w: at %d, floor %d", ErrCompacted, c.pos, c.lin.log.Floor())
		}
		if e.Rev > now {
			break // not published yet (I5)
		}
		if e.Rev <= c.after {
			continue // the cursor was asked to start at a future revision
		}
		if k := e.Key(); k < c.start || c.end != "" && k >= c.end {
			continue
		}
		if n == limit {
			return buf, nil
		}
		buf = append(buf, e)
		n++
		c.pos = max(c.pos, e.Rev-1) // the rest of this revision is still to come
	}
	c.pos = max(c.pos, now)
	return buf, nil
}
