package kubestorage

import (
	"context"
	"math"
	"sync/atomic"
	"time"
	"weak"

	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// initialSeatTime is how long a watch may keep the seat of priority and fairness for its initial
// events: the default maximum of a list.
const initialSeatTime = time.Minute

// Stream is one watch without its form of delivery: its start position, its pending events and the
// time of its next bookmark. Deliver writes it to a Sink on the goroutine of its caller. The stream
// has no goroutine and no queue, and decodes only objects that a selector needs.
//
// Undelivered events cost no memory: a stream has a position, and while it delivers initial events
// a few hundred entries, not a version (I7). Not safe for concurrent use.
type Stream struct {
	store      *Store
	start, end string // the keys watched
	selector   objects.Selector

	ctx    context.Context // ends with the request, the storage, and Close
	cancel context.CancelFunc
	closed bool
	// withoutDrain: the stream does not end when the server's watches are drained.
	withoutDrain bool

	failed error // returned by next, after the batches before it are delivered
	reason watchset.Ended
	// undelivered is the error of DeliverPending.
	undelivered error

	releaseProgress func() // withdraws the request for progress; nil if there is none
	// counts the end of a watch with a shard selector; nil if there is none
	countShardEnd func()
	unfollow      func() // stops following a shard; nil if the stream does not follow one
	// the revision of its position in the log; idle while the stream waits
	logPosition atomic.Int64

	lastRev           mirror.Revision // the watch ends at this revision; 0: not known yet
	finalBookmarkSent bool            // the bookmark before the end was delivered

	// the published revision at the start; events up to here are history
	publishedAtStart mirror.Revision

	// For the metric of the cost of a start.
	startRev mirror.Revision // events up to here are replayed; 0: all of them were
	replayed int

	// Initial events of a watch that starts at the latest state.
	listing  bool                             // there are more initial events
	announce bool                             // their end has not been announced yet
	found    []*mirror.Entry                  // the first ones: from an index, or all from etcd
	initial  *initialRead                     // nil without a selector, and after the last one
	shard    weak.Pointer[index.ShardVersion] // the selected part, while it is cached
	counted  bool                             // entries of other shards are counted
	// releases the seat of priority and fairness; nil if there is none
	seat      *time.Timer
	from      string // the key to continue at
	at        mirror.Revision
	version   weak.Pointer[mirror.Snapshot] // at that revision, until it is collected
	runs      []mirror.Run
	endOfList bool // a bookmark closes the initial events

	cursor        *mirror.Cursor
	logChanged    <-chan struct{} // closed at the first change after the last delivered event
	due           []*mirror.Event
	batches       int             // delivered, including the current one
	behind        bool            // events were delivered since the last check of the schedule
	lastDelivered mirror.Revision // revision of the last delivered event

	bookmarkEvery time.Duration // 0: never
	deadline      time.Time     // of the request, zero if there is none
	nextBookmark  time.Time     // time of the next bookmark, zero if there is none
	// a bookmark is due at publishedAtStart: the watch ends before the time of a later one
	catchUp bool
	timer   *time.Timer   // wakes wait at nextBookmark; nil without bookmarks
	wake    chan struct{} // an event is not the only reason for a wake-up
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

// Bookmark reports to the client that everything up to a revision was delivered before (I4).
type Bookmark struct {
	Revision mirror.Revision
	// InitialEventsEnd: the bookmark closes the initial events.
	InitialEventsEnd bool
}

// bookmark returns a bookmark at the position of the stream.
func (st *Stream) bookmark() delivery {
	st.store.watchMetrics.Bookmark()
	return delivery{bookmark: Bookmark{Revision: st.cursor.Position()}}
}

// idle is the value of Stream.logPosition while the stream reads no history.
const idle = math.MaxInt64

// Listing reports whether there are more initial events.
func (st *Stream) Listing() bool { return st.listing }

// countReplayed records the cost of the start of the watch in the metrics.
func (st *Stream) countReplayed() {
	st.store.watchMetrics.Started(0, st.replayed)
	st.startRev, st.replayed = 0, 0
}

// Context ends when the stream does: with the request, the storage, or Close.
func (st *Stream) Context() context.Context { return st.ctx }

// EventContext returns the context in which objects of live events are decoded. Unless conversions
// may block, it does not end with the stream: decoding takes a bounded time, and a watch that ended
// within a revision would lose its other events, because the client resumes after it.
func (st *Stream) EventContext() context.Context {
	if st.store.conversions == nil {
		return context.Background()
	}
	return st.ctx
}

type withoutDrainKey struct{}

// WithoutDrain returns a context for a watch that Engine.Drain does not end: that of a client that
// stops with the server, such as an informer in its process. If its watch ended first, the client
// would restart it, in vain.
func WithoutDrain(ctx context.Context) context.Context {
	return context.WithValue(ctx, withoutDrainKey{}, true)
}

func isWithoutDrain(ctx context.Context) bool { return ctx.Value(withoutDrainKey{}) != nil }
