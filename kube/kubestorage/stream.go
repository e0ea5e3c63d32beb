package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"
	"weak"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/running"
	"github.com/stratakube/strata/kube/internal/selected"
	"github.com/stratakube/strata/mirror"
)

const (
	// readAhead is how many events a stream hands out at once.
	readAhead = 64
	// initialAtOnce is how many entries of the initial events it hands out at once, and
	// so holds while a client takes its time; up to a leaf of the tree more.
	initialAtOnce = 256

	// bookmarkInterval is how often a watch that wants bookmarks gets one, with
	// up to a quarter more so that they do not come all at once (KEP-956).
	bookmarkInterval = time.Minute
	// progressInterval is that interval for a watch that asks for the storage's own
	// progress notifications, which no request from outside can do: 5 s, as Kubernetes
	// recommends to configure etcd's.
	progressInterval = 5 * time.Second
	// bookmarkTick divides those intervals: the bookmarks of one tick are sent together, which
	// spares the server from being woken for each.
	bookmarkTick = 500 * time.Millisecond
	// bookmarkLead is how long before the server ends a watch its last bookmark is sent.
	bookmarkLead = 2 * time.Second

	// initialSeatTime is how long a watch may keep the seat of priority and fairness that it has for its
	// initial events: as long as a list may take by default.
	initialSeatTime = time.Minute

	// undecodableFor bounds the time for which a watch waits for an event that
	// cannot be decrypted or converted, for example because a KMS is down.
	undecodableFor = 30 * time.Second
)

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

// idle is the value of Stream.reading that says that nothing is left to be read.
const idle = math.MaxInt64

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

// Bookmark tells the client that everything up to a revision was delivered before (I4).
type Bookmark struct {
	Revision mirror.Revision
	// InitialEventsEnd: the bookmark closes the initial events.
	InitialEventsEnd bool
}

// empty reports whether nothing is due.
func (b *batch) empty() bool {
	return len(b.runs) == 0 && len(b.entries) == 0 && len(b.events) == 0 && b.bookmark.Revision == 0
}

// OpenStream finds the place in history where a watch starts, waiting for it if it
// has to (KEP-2340, second table). The stream ends with ctx, and with the storage;
// its owner has to Close it. Errors: API errors for the client (400, 429). Those that
// upstream reports as an event of the watch, such as 410, are returned by Deliver.
func (s *Store) OpenStream(ctx context.Context, key string, opts storage.ListOptions) (*Stream, error) {
	prefix, err := s.keys.Prepare(key, opts.Recursive)
	if err != nil {
		return nil, err
	}
	if !utilfeature.DefaultFeatureGate.Enabled(features.WatchList) {
		opts.SendInitialEvents = nil
	}
	rev, err := s.parseRevision(opts.ResourceVersion)
	if err != nil {
		return nil, err
	}
	withoutDrain := isWithoutDrain(ctx)
	if s.cluster.watches.Refused() && !withoutDrain {
		return nil, running.ErrShuttingDown()
	}
	if s.ctx.Err() != nil {
		return nil, s.notReady()
	}
	if err := s.ready(ctx); err != nil {
		return nil, err
	}
	st := &Stream{
		store:        s,
		start:        prefix,
		end:          after(prefix),
		selector:     s.view.Now().Selector(opts.Predicate),
		withoutDrain: withoutDrain,
	}
	if !opts.Recursive {
		st.end = prefix + "\x00"
	}
	if s.bookmarks {
		st.bookmarkEvery = bookmarkEvery(&opts)
	}
	if !st.selector.All {
		s.view.WantAttributes()
	}
	if err := st.begin(ctx, rev, opts); err != nil {
		if errors.Is(err, mirror.ErrNotReady) {
			return nil, s.notReady()
		}
		if apierrors.IsTooManyRequests(err) && ctx.Err() == nil {
			return nil, err // nothing has begun, so the answer can carry Retry-After
		}
		if st.failed = expired(err); ctx.Err() != nil {
			st.failed = ErrStreamEnded // nobody is there to be told
		}
	}
	st.ctx, st.cancel = context.WithCancel(ctx)
	if st.listing {
		st.seat = time.AfterFunc(initialSeatTime, func() { utilflowcontrol.WatchInitialized(ctx) })
	}
	st.deadline, _ = ctx.Deadline()
	st.wake = make(chan struct{}, 1)
	st.began = s.mirror.Clock()
	if st.cursor != nil {
		st.startRev = st.began
		st.reading.Store(st.cursor.Position())
	}
	if !s.cluster.watches.Add((*runningStream)(st), withoutDrain) {
		st.cancel()
		st.stopTimers()
		return nil, running.ErrShuttingDown()
	}
	if st.cursor != nil {
		st.follow()
	}
	if s.ctx.Err() != nil {
		st.cut(running.ByStorage) // endStreams may have come too early
	}
	if st.bookmarkEvery > 0 {
		st.satisfied = s.mirror.WantProgress()
	}
	if st.failed == nil && (st.selector.Shard != nil || st.selector.NeedsObject) {
		st.sharded = s.streams.Sharded()
	}
	st.scheduleBookmark()
	return st, nil
}

// begin sets where the stream starts.
func (st *Stream) begin(ctx context.Context, rev mirror.Revision, opts storage.ListOptions) (err error) {
	s := st.store
	list := opts.SendInitialEvents != nil && *opts.SendInitialEvents
	stream := opts.SendInitialEvents != nil && !*opts.SendInitialEvents
	st.announce = true
	switch {
	case opts.ResourceVersion == "" && stream:
		// Only what happens from now on, as etcd counts now.
		if rev, err = s.current(ctx); err != nil {
			return err
		}
	case opts.ResourceVersion == "" && !s.present.lists, list && s.outOfReach(rev):
		return st.beginInEtcd(ctx, rev, opts)
	case opts.ResourceVersion == "":
		if err := s.consistent(ctx); err != nil {
			return err
		}
		list = true
	case rev > 0 && list:
		if err := s.waitFor(ctx, rev); err != nil {
			return err
		}
	case rev == 0 && !stream:
		list = true
	}
	if rev > 0 && !list {
		st.cursor, err = s.resource.CursorAfter(rev, st.start, st.end)
		if errors.Is(err, mirror.ErrCompacted) {
			if _, floor, _ := s.resource.Oldest(); floor > 0 { // in upstream's words
				return apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d (%d)", rev, floor))
			}
		}
		return err
	}
	snap, err := s.resource.Latest()
	if err != nil {
		return err
	}
	if list {
		r := &Reading{store: s, Rev: snap.Rev, Snapshot: snap, Start: st.start, End: st.end, selector: st.selector}
		r.useIndex(ctx)
		snap = r.Snapshot
		st.listing, st.from, st.at = true, st.start, snap.Rev
		if r.shard != nil {
			st.shard, st.counted = weak.Make(r.shard), true
			all, _ := snap.Count(st.start, st.end)
			s.streams.Filtered(all - r.Count())
		}
		if r.index != nil {
			st.found = slices.Collect(r.Candidates())
			st.listing = len(st.found) > 0
		}
		st.endOfList = opts.SendInitialEvents != nil && opts.Predicate.AllowWatchBookmarks
	}
	st.cursor = snap.Cursor(st.start, st.end)
	return nil
}

// beginInEtcd lists the present from etcd, where a gate or the clock forbids that memory
// tells it; what is later comes from memory all the same. The objects listed are held until
// they are handed out; most are those that memory holds.
func (st *Stream) beginInEtcd(ctx context.Context, atLeast mirror.Revision, opts storage.ListOptions) error {
	s := st.store
	entries, rev, err := s.resource.ListSource(ctx, st.start, st.end)
	if err != nil {
		return err
	}
	if rev < atLeast {
		return storage.NewTooLargeResourceVersionError(uint64(atLeast), uint64(rev), tooHighRetrySeconds)
	}
	st.found, st.at = entries, rev
	st.listing = len(entries) > 0
	st.endOfList = opts.SendInitialEvents != nil && opts.Predicate.AllowWatchBookmarks
	st.cursor, err = s.resource.CursorAfter(rev, st.start, st.end)
	return err
}

// follow has the stream's cursor woken by, and read, the events of one object, of one value of an index that the registry has
// declared, of one shard, or of one namespace. A watch of anything else reads every event of the resource.
func (st *Stream) follow() {
	if st.end == st.start+"\x00" {
		st.cursor.Follow()
		return
	}
	whole := st.start == st.store.resource.Prefix()
	st.unfollow = st.store.selections.Follow(st.cursor, &st.selector, whole)
}

// Listing reports whether initial events are still to be handed out.
func (st *Stream) Listing() bool { return st.listing }

// countReplayed tells the metrics what the start of the watch has cost.
func (st *Stream) countReplayed() {
	st.store.streams.Started(0, st.replayed)
	st.startRev, st.replayed = 0, 0
}

// Context ends when the stream does: with the request, the storage, or Close.
func (st *Stream) Context() context.Context { return st.ctx }

// next returns the batch that is due now, an empty one if none is; it never waits. The
// caller has delivered the batch before. Errors: ErrStreamEnded, and
// those that are reported to the client before the watch ends (410 when it is too far behind).
func (st *Stream) next() (batch, error) {
	if st.ctx.Err() != nil {
		return batch{}, ErrStreamEnded
	}
	if st.failed != nil {
		return batch{}, st.failed
	}
	st.selector.Generation = st.store.view.Now()
	leaving := st.leaving()
	if st.listing || st.announce && st.endOfList {
		// What was listed must be what goes on: etcd may have been restored meanwhile.
		if err := st.cursor.Err(); err != nil {
			st.failed = st.ending(err)
			return batch{}, st.failed
		}
	}
	if st.listing {
		if leaving { // a bookmark would say that the list is complete
			return batch{}, st.left()
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
	// Within a revision a bookmark would be below what was handed out, and the end would
	// leave the rest of the revision out.
	whole := st.handed <= st.cursor.Position()
	if leaving && whole && st.cursor.Position() >= st.lastRev {
		return st.depart()
	}
	if st.behind {
		// A watch that is always behind, or that selects nothing of what happens, gets
		// bookmarks too.
		st.behind = false
		if !leaving && whole && st.bookmarkDue() {
			return st.bookmark(), nil
		}
	}
	if leaving {
		st.cursor.Await(st.lastRev)
	}
	st.changed = st.cursor.Changed()
	var err error
	st.due, err = st.cursor.Next(st.due[:0], readAhead)
	if err != nil {
		if errors.Is(err, mirror.ErrCompacted) && st.cursor.Err() == nil {
			st.store.streams.Terminated() // too slow: history has left it behind
		}
		st.failed = st.ending(err)
	}
	if st.startRev != 0 {
		st.noteReplayed()
	}
	switch {
	case len(st.due) > 0:
		st.behind = true
		st.handed = st.due[len(st.due)-1].Rev
		st.reading.Store(st.cursor.Position())
		return batch{events: st.due}, nil
	case err != nil:
		return batch{}, st.failed
	}
	clear(st.due[:cap(st.due)])
	switch {
	case leaving && st.cursor.Position() >= st.lastRev:
		return st.depart()
	case st.bookmarkDue():
		return st.bookmark(), nil
	}
	return batch{}, nil
}

// noteReplayed counts those of the events that are due which had happened before the watch
// began.
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

// nextInitial returns the next part of the initial events, none when all are out or
// when the stream has failed.
func (st *Stream) nextInitial() batch {
	if st.found != nil {
		n := min(len(st.found), initialAtOnce)
		b := batch{entries: st.found[:n]}
		st.store.streams.Started(n, 0)
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
		return batch{}
	}
	n := 0
	defer func() { st.store.streams.Started(n, 0) }()
	objects, selected := Objects(*snap), st.selector.All
	if shard := st.shard.Value(); shard != nil {
		objects, selected = shard, true
	}
	for run := range objects.Runs(st.from, st.end) {
		st.runs = append(st.runs, run)
		items := run.Items()
		if n += len(items); n >= initialAtOnce {
			st.from = items[len(items)-1].Key() + "\x00"
			return batch{runs: st.runs, selected: selected}
		}
	}
	b := batch{runs: st.runs, selected: selected}
	st.listing, st.runs = false, nil
	return b
}

// snapshot returns the version that the initial events are of. Between two calls the
// stream does not keep it alive: what the window drops meanwhile is gone. A client
// that reads in time nearly always finds it as it was left, without rolling it
// forward again.
func (st *Stream) snapshot() (*mirror.Snapshot, error) {
	oldest, _, err := st.store.resource.Oldest()
	if err == nil && oldest > st.at {
		err = fmt.Errorf("%w: the list is of %d, oldest %d", mirror.ErrCompacted, st.at, oldest)
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

// wait returns when next may have something, and ErrStreamEnded when the stream has
// ended or stop, which may be nil, is closed. Call it after next returned an empty batch.
func (st *Stream) wait(stop <-chan struct{}) error {
	st.reading.Store(idle)
	select {
	case <-st.changed:
	case <-st.wake:
	case <-st.ctx.Done():
		return ErrStreamEnded
	case <-stop:
		return st.left()
	}
	return nil
}
