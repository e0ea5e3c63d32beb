package kubestorage

import (
	"context"
	"math"
	"sync/atomic"
	"time"
	"weak"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/running"
	"github.com/stratakube/strata/kube/internal/selected"
	"github.com/stratakube/strata/mirror"
)

// initialSeatTime is how long a watch may keep the seat of priority and fairness that it has for its
// initial events: as long as a list may take by default.
const initialSeatTime = time.Minute

// Stream is one watch without its form of delivery: where it starts, which events are due, when a
// bookmark is. Deliver writes it to a Sink on the goroutine of its caller; the stream has no goroutine and
// no queue, and decodes only the objects that a selector needs.
//
// Undelivered events cost nothing: a stream holds a position, and while it delivers
// initial events a few hundred entries, not a version (I7). Not safe for concurrent
// use.
type Stream struct {
	store      *Store
	start, end string // the keys watched
	selector   objects.Selector

	ctx    context.Context // ends with the request, the storage, and Close
	cancel context.CancelFunc
	closed bool
	// withoutDrain: the stream does not end when the server's watches are drained.
	withoutDrain bool

	failed error // returned by next, once everything handed out is delivered
	reason running.Ended

	satisfied func()       // gives up the wish for progress; nil if there is none
	sharded   func()       // counts the end of a watch with a shard selector; nil if there is none
	unfollow  func()       // the end of following a shard; nil if the stream does not
	reading   atomic.Int64 // the revision up to which the log was read; idle while the stream waits

	lastRev mirror.Revision // the watch ends when it has come to here; 0: not known yet
	marked  bool            // the bookmark before the end was handed out

	began mirror.Revision // the clock then; events up to here are history

	// Of the metric of what a start costs.
	startRev mirror.Revision // events up to here are replayed; 0: all of them were
	replayed int

	// Initial events: from the present when the stream began.
	listing   bool                                // some are still to be handed out
	announce  bool                                // that they are out
	found     []*mirror.Entry                     // by an index, or in etcd; nil if the keys are walked
	shard     weak.Pointer[selected.ShardVersion] // the part that is selected, while it is kept
	counted   bool                                // entries of other shards are counted
	seat      *time.Timer                         // gives back the seat of priority and fairness; nil if there are none
	from      string                              // the key to go on at
	at        mirror.Revision
	version   weak.Pointer[mirror.Snapshot] // at that revision, while the collector leaves it
	runs      []mirror.Run
	endOfList bool // a bookmark closes the initial events

	cursor  *mirror.Cursor
	changed <-chan struct{} // closed at the next change after what was handed out
	due     []*mirror.Event
	batches int             // delivered, the one under way included
	behind  bool            // events were handed out since the last look at the schedule
	handed  mirror.Revision // of the last event that was

	bookmarkEvery time.Duration // 0: never
	deadline      time.Time     // of the request, zero if it has none
	nextMark      time.Time     // when a bookmark is due, zero if none will be
	timer         *time.Timer   // wakes wait at nextMark; nil if none ever will be
	wake          chan struct{} // something else than an event may be due
}

// batch is the part of a stream that is delivered next: initial events, events or a bookmark. Its
// slices belong to the stream and are valid until the next call of next.
type batch struct {
	// runs, or entries if they come from an index or from etcd, are initial events in key order, to be
	// sent as ADDED if the watch selects them.
	runs    []mirror.Run
	entries []*mirror.Entry
	// selected: the watch selects all entries of runs.
	selected bool
	// events are in revision order; translate returns what each means to the watch.
	events []*mirror.Event
	// bookmark has revision 0 if this is not a bookmark.
	bookmark Bookmark
}

// empty reports whether nothing is due.
func (b *batch) empty() bool {
	return len(b.runs) == 0 && len(b.entries) == 0 && len(b.events) == 0 && b.bookmark.Revision == 0
}

// Bookmark tells the client that everything up to a revision was delivered before (I4).
type Bookmark struct {
	Revision mirror.Revision
	// InitialEventsEnd: the bookmark closes the initial events.
	InitialEventsEnd bool
}

// bookmark returns one at the position of the stream.
func (st *Stream) bookmark() batch {
	st.store.watchMetrics.Bookmark()
	return batch{bookmark: Bookmark{Revision: st.cursor.Position()}}
}

// idle is the value of Stream.reading that says that nothing is left to be read.
const idle = math.MaxInt64

// Listing reports whether initial events are still to be handed out.
func (st *Stream) Listing() bool { return st.listing }

// countReplayed tells the metrics what the start of the watch has cost.
func (st *Stream) countReplayed() {
	st.store.watchMetrics.Started(0, st.replayed)
	st.startRev, st.replayed = 0, 0
}

// Context ends when the stream does: with the request, the storage, or Close.
func (st *Stream) Context() context.Context { return st.ctx }

type withoutDrainKey struct{}

// WithoutDrain returns a context for a watch that Engine.Drain is to leave alone: one of a client
// that stops with the server, such as an informer in its process. If it ended before its client
// stops, the client would start it again, in vain.
func WithoutDrain(ctx context.Context) context.Context {
	return context.WithValue(ctx, withoutDrainKey{}, true)
}

func isWithoutDrain(ctx context.Context) bool { return ctx.Value(withoutDrainKey{}) != nil }
