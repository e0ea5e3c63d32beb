package watch

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// Stream is one watch without its form of delivery: its start position, its pending events and the
// time of its next bookmark. Deliver writes it to a Sink on the goroutine of its caller. The stream
// has no goroutine and no queue, and decodes only objects that a selector needs.
//
// Undelivered events cost no memory: a stream has a position, and while it delivers initial events
// a few hundred entries, not a version (I7). Not safe for concurrent use, but for its methods as a
// watchset.Watch, Env, Context, Position and EndSlow.
type Stream struct {
	env   *Env
	scope scope
	life  life
	phase phase

	failed      error // returned by next, after the batches before it are delivered
	undelivered error // of DeliverPending
	batches     int   // delivered, including the current one

	initial   initial
	log       log
	replay    replay
	bookmarks schedule
}

// phase is what a stream delivers next.
type phase int8

const (
	listing    phase = iota // initial events
	announcing              // the end of the initial events
	live                    // events
	draining                // the events before the end of the server
	ended                   // nothing: the stream is closed
)

// scope is what a stream watches.
type scope struct {
	start, end string // keys
	selector   objects.Selector
}

// single reports whether the stream watches one key.
func (s *scope) single() bool { return s.end == s.start+"\x00" }

// life is how long a stream lasts, and what wakes it.
type life struct {
	ctx      context.Context // ends with the request, the storage, and Close
	cancel   context.CancelFunc
	deadline time.Time // of the request, zero if there is none
	reason   watchset.Ended
	wake     chan struct{} // an event is not the only reason for a wake-up
	// releases the seat of priority and fairness; nil if there is none
	seat     *time.Timer
	releases []func() // called once, at the end
	// undrained: the stream does not end when the server's watches are drained.
	undrained bool
	until     mirror.Revision // when it is drained, it ends at this revision; 0: not known yet
}

// log is the position of a stream among the events.
type log struct {
	cursor  *mirror.Cursor
	changed <-chan struct{} // closed at the first change after the last delivered event
	due     []*mirror.Event
	last    mirror.Revision // of the last delivered event
	behind  bool            // events were delivered since the last check of the schedule
	// the revision of the cursor; idle while the stream waits
	position atomic.Int64
	// the published revision at the start; events up to here are history
	publishedAtStart mirror.Revision
}

// idle is the value of log.position while the stream reads no history.
const idle = math.MaxInt64

// whole reports whether the events of the last delivered revision are complete. Within a revision a
// bookmark would be below the delivered events, and an end would omit the rest of the revision.
func (l *log) whole() bool { return l.last <= l.cursor.Position() }

// replay counts the events that are older than the watch, for the metric of the cost of a start.
type replay struct {
	until  mirror.Revision // events up to here are replayed; 0: all of them were
	events int
}

// delivery is the next part of a stream to deliver: initial events, events or a bookmark. Its
// slices are owned by the stream and valid until the next call of next.
type delivery struct {
	// runs, or entries if they come from an index or from etcd, are initial events in key order, to
	// be sent as ADDED if the watch selects them.
	runs    []mirror.Run
	entries []*mirror.Entry
	// selected: the watch selects all entries of runs.
	selected bool
	// events are in revision order; translate returns the type of each for the watch.
	events []*mirror.Event
	// bookmark has revision 0 if this is not a bookmark.
	bookmark Bookmark
}

// empty reports whether the batch has nothing to deliver.
func (b *delivery) empty() bool {
	return len(b.runs) == 0 && len(b.entries) == 0 && len(b.events) == 0 && b.bookmark.Revision == 0
}

// Env returns the surroundings of the stream.
func (st *Stream) Env() *Env { return st.env }

// Position returns the revision up to which the stream has examined the events, or the highest one
// while it waits for events.
func (st *Stream) Position() mirror.Revision { return st.log.position.Load() }

// Listing reports whether there are more initial events.
func (st *Stream) Listing() bool { return st.phase == listing }

// Context ends when the stream does: with the request, the storage, or Close.
func (st *Stream) Context() context.Context { return st.life.ctx }

// EventContext returns the context in which objects of live events are decoded. Unless conversions
// may block, it does not end with the stream: decoding takes a bounded time, and a watch that ended
// within a revision would lose its other events, because the client resumes after it.
func (st *Stream) EventContext() context.Context {
	if st.env.Conversions == nil {
		return context.Background()
	}
	return st.life.ctx
}

// Delivered records in the metrics that events have been written to the client now. arrived and
// ready are the times at which the oldest of them arrived (mirror.Event.Arrived) and was ready to
// be written, on the clock of driver.Now.
func (st *Stream) Delivered(arrived, ready int64) { st.env.Metrics.Delivered(arrived, ready) }

type withoutDrainKey struct{}

// WithoutDrain returns a context for a watch that watchset.Watches.Drain does not end: that of a
// client that stops with the server, such as an informer in its process. If its watch ended first,
// the client would restart it, in vain.
func WithoutDrain(ctx context.Context) context.Context {
	return context.WithValue(ctx, withoutDrainKey{}, true)
}

// IsWithoutDrain reports whether the context is of WithoutDrain.
func IsWithoutDrain(ctx context.Context) bool { return ctx.Value(withoutDrainKey{}) != nil }
