package watch

import (
	"context"
	"errors"
	"fmt"
	"time"
	"weak"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/list"
	"github.com/stratakube/strata/kube/internal/trace"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// Open resolves the start of a watch to a position in the history, and waits for it if necessary
// (KEP-2340, second table; see start). The stream ends with ctx, and with the storage; its owner
// must Close it. Errors: API errors for the client (400, 429). Errors that upstream reports as an
// event of the watch, such as 410, are returned by Deliver.
func (env *Env) Open(ctx context.Context, key string, opts storage.ListOptions) (*Stream, error) {
	ctx, cancel := context.WithCancel(ctx)
	return env.open(ctx, cancel, key, opts)
}

// OpenFor is Open for a stream that ends after timeout at the latest.
func (env *Env) OpenFor(ctx context.Context, timeout time.Duration, key string, opts storage.ListOptions) (*Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	return env.open(ctx, cancel, key, opts)
}

// open opens a stream with the context ctx, which it ends with cancel if it returns an error.
func (env *Env) open(ctx context.Context, cancel context.CancelFunc, key string, opts storage.ListOptions) (_ *Stream, err error) {
	defer func() {
		if err != nil {
			cancel()
		}
	}()
	prefix, err := env.Lists.Keys.Prepare(key, opts.Recursive)
	if err != nil {
		return nil, err
	}
	if !env.Gates.WatchList {
		opts.SendInitialEvents = nil
	}
	asked, err := env.Lists.Fresh.ParseRevision(opts.ResourceVersion)
	if err != nil {
		return nil, err
	}
	undrained := IsWithoutDrain(ctx)
	if err := env.admit(ctx, undrained); err != nil {
		return nil, err
	}
	_, span := trace.Start(ctx, trace.Watch, env.Lists.View.Kind().GroupResource)
	defer span.End()
	st := &Stream{
		env:   env,
		scope: scope{start: prefix, end: list.After(prefix), selector: env.Lists.View.CurrentGeneration().Selector(opts.Predicate)},
		life:  life{ctx: ctx, cancel: cancel, wake: make(chan struct{}, 1), undrained: undrained},
		phase: announcing,
	}
	if !opts.Recursive {
		st.scope.end = prefix + "\x00"
	}
	if env.Gates.Bookmarks {
		st.bookmarks.every = bookmarkEvery(&opts)
	}
	if !st.scope.selector.All {
		env.Lists.View.WantAttributes()
	}
	if err := st.begin(asked, opts, span); err != nil {
		if errors.Is(err, mirror.ErrNotReady) {
			return nil, env.Lists.Fresh.NotReady()
		}
		if apierrors.IsTooManyRequests(err) && ctx.Err() == nil {
			return nil, err // before the response starts, so that it can carry Retry-After
		}
		if st.failed = expired(err); ctx.Err() != nil {
			st.failed = ErrEnded // the request has ended
		}
	}
	if err := st.register(); err != nil {
		return nil, err
	}
	st.subscribe()
	return st, nil
}

// admit returns when watches of the resource can begin. Error: 429.
func (env *Env) admit(ctx context.Context, undrained bool) error {
	switch {
	case env.Running.Refused() && !undrained:
		return watchset.ErrShuttingDown()
	case env.Context.Err() != nil:
		return env.Lists.Fresh.NotReady()
	}
	return env.Lists.Fresh.Ready(ctx)
}

// register adds the stream to the running watches. Error: they are being drained.
func (st *Stream) register() error {
	ctx := st.life.ctx
	if st.phase == listing {
		st.life.seat = time.AfterFunc(initialSeatTime, func() { utilflowcontrol.WatchInitialized(ctx) })
	}
	st.life.deadline, _ = ctx.Deadline()
	st.log.publishedAtStart = st.env.Lists.Mirror.PublishedRevision()
	if st.log.cursor != nil {
		st.replay.until = st.log.publishedAtStart
		st.log.position.Store(st.log.cursor.Position())
	}
	if !st.env.Running.Add(st, st.life.undrained) {
		st.stopTimers()
		st.endInitial()
		return watchset.ErrShuttingDown()
	}
	return nil
}

// initialSeatTime is how long a watch may keep the seat of priority and fairness for its initial
// events: the default maximum of a list.
const initialSeatTime = time.Minute

// subscribe makes the registered stream wake for its events, its bookmarks and the end of the
// storage.
func (st *Stream) subscribe() {
	if st.log.cursor != nil {
		st.follow()
	}
	if st.env.Context.Err() != nil {
		st.Abort(watchset.ByStorage) // the streams of the storage may have been ended before
	}
	if st.bookmarks.every > 0 {
		st.atEnd(st.env.Lists.Mirror.WantProgress())
	}
	if selector := &st.scope.selector; st.failed == nil && (selector.Shard != nil || selector.NeedsObject) {
		st.atEnd(st.env.Metrics.Sharded())
	}
	st.scheduleBookmark()
	past := st.log.cursor != nil && st.phase != listing && !st.initial.marked && st.log.cursor.Position() < st.log.publishedAtStart
	st.bookmarks.catchUp = past && st.bookmarks.every > 0 && st.bookmarks.next.IsZero()
}

// atEnd makes Close call f, which may be nil.
func (st *Stream) atEnd(f func()) {
	if f != nil {
		st.life.releases = append(st.life.releases, f)
	}
}

// follow subscribes the stream's cursor to the events of one object, of one value of a field or
// label, of one shard, or of one namespace. A watch with another selector reads every event of the
// resource.
func (st *Stream) follow() {
	if st.scope.single() {
		st.log.cursor.Follow()
		return
	}
	whole := st.scope.start == st.env.Lists.Memory.Prefix()
	st.atEnd(st.env.Lists.Selections.Follow(st.log.cursor, &st.scope.selector, whole))
}

// start is where a watch begins, and what it waits for before.
type start int8

const (
	afterRevision  start = iota // that the client names, when its history is restored (KEP-1904)
	afterPresent                // etcd's revision now
	afterMemory                 // the latest revision in memory
	listConsistent              // initial events, when memory has reached etcd's revision
	listNotOlder                // initial events, when memory has reached the client's revision
	listMemory                  // initial events, of the latest revision in memory
	listEtcd                    // initial events that etcd lists
)

// startOf returns the start of a watch at the client's revision asked (KEP-2340, second table):
//
//	resource version   initial events    start
//	none               false             afterPresent
//	none               true, not set     listConsistent, or listEtcd without the gate
//	0                  false             afterMemory
//	0                  true, not set     listMemory
//	above 0            true              listNotOlder, or listEtcd if only etcd has the revision
//	above 0            false, not set    afterRevision
func (env *Env) startOf(asked uint64, opts *storage.ListOptions) start {
	rev := freshness.RevisionOf(asked)
	eventsOnly := opts.SendInitialEvents != nil && !*opts.SendInitialEvents
	wantsList := opts.SendInitialEvents != nil && *opts.SendInitialEvents
	switch {
	case opts.ResourceVersion == "" && eventsOnly:
		return afterPresent
	case opts.ResourceVersion == "" && env.Lists.Gates.Latest:
		return listConsistent
	case opts.ResourceVersion == "":
		return listEtcd
	case rev == 0 && eventsOnly:
		return afterMemory
	case rev == 0:
		return listMemory
	case wantsList && env.Lists.Fresh.OutOfReach(rev):
		return listEtcd
	case wantsList:
		return listNotOlder
	}
	return afterRevision
}

// begin sets the start position of the stream for the client's revision asked.
func (st *Stream) begin(asked uint64, opts storage.ListOptions, span *trace.Span) (err error) {
	ctx, lists, rev := st.life.ctx, st.env.Lists, freshness.RevisionOf(asked)
	from := st.env.startOf(asked, &opts)
	announced := opts.SendInitialEvents != nil && *opts.SendInitialEvents
	if announced {
		span.Event(trace.Waiting)
	}
	switch from {
	case listEtcd:
		return st.beginInEtcd(asked, opts)
	case afterPresent:
		rev, err = lists.Fresh.Present(ctx)
	case listConsistent:
		err = lists.Fresh.Consistent(ctx, nil)
	case listNotOlder:
		err = lists.Fresh.WaitFor(ctx, asked)
	default: // memory decides without a wait
	}
	if err != nil {
		return err
	}
	if announced {
		span.Event(trace.Fresh)
	}
	if from == afterRevision || from == afterPresent {
		return st.beginAfter(rev)
	}
	snap, err := lists.Memory.Latest()
	if err != nil {
		return err
	}
	if from != afterMemory {
		snap = st.beginList(snap, &opts)
	}
	st.log.cursor = snap.Cursor(st.scope.start, st.scope.end)
	return nil
}

// beginAfter begins after a revision, when the history since then is in memory.
func (st *Stream) beginAfter(rev mirror.Revision) error {
	memory := st.env.Lists.Memory
	if err := st.env.Lists.Fresh.WaitHistory(st.life.ctx, rev); err != nil {
		return err
	}
	var err error
	st.log.cursor, err = memory.CursorAfter(rev, st.scope.start, st.scope.end)
	if errors.Is(err, mirror.ErrCompacted) {
		if _, floor, _ := memory.Oldest(); floor > 0 { // upstream's error text
			return apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d (%d)", rev, floor))
		}
	}
	return err
}

// beginList begins with the objects of a snapshot, and returns the one that is listed: with a shard
// it may be a little newer.
func (st *Stream) beginList(snap mirror.Snapshot, opts *storage.ListOptions) mirror.Snapshot {
	r := st.env.Lists.Selected(st.life.ctx, snap, st.scope.start, st.scope.end, st.scope.selector)
	snap = r.Snapshot
	st.phase = listing
	st.initial.from, st.initial.at = st.scope.start, snap.Rev
	if shard := r.Shard(); shard != nil {
		st.initial.shard, st.initial.counted = weak.Make(shard), true
		all, _ := snap.Count(st.scope.start, st.scope.end)
		st.env.Metrics.Filtered(all - r.Count())
	}
	st.beginSelected(r)
	st.initial.marked = opts.SendInitialEvents != nil && opts.Predicate.AllowWatchBookmarks
	return snap
}

// beginInEtcd lists the latest state from etcd, where a gate or the published revision does not
// allow a list from memory; later events come from memory. The listed objects are held until they
// are delivered; most are shared with the cache.
func (st *Stream) beginInEtcd(asked uint64, opts storage.ListOptions) error {
	memory := st.env.Lists.Memory
	entries, rev, err := memory.ListFromEtcd(st.life.ctx, st.scope.start, st.scope.end)
	if err != nil {
		return err
	}
	if rev < freshness.RevisionOf(asked) {
		return storage.NewTooLargeResourceVersionError(asked, uint64(rev), freshness.RetrySeconds)
	}
	st.initial.found, st.initial.at = entries, rev
	if len(entries) > 0 {
		st.phase = listing
	}
	st.initial.marked = opts.SendInitialEvents != nil && opts.Predicate.AllowWatchBookmarks
	st.log.cursor, err = memory.CursorAfter(rev, st.scope.start, st.scope.end)
	return err
}
