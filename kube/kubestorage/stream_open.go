package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"time"
	"weak"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// OpenStream resolves the start of a watch to a position in the history, and waits for it if
// necessary (KEP-2340, second table). The stream ends with ctx, and with the storage; its owner
// must Close it. Errors: API errors for the client (400, 429). Errors that upstream reports as an
// event of the watch, such as 410, are returned by Deliver.
func (s *Store) OpenStream(ctx context.Context, key string, opts storage.ListOptions) (*Stream, error) {
	ctx, cancel := context.WithCancel(ctx)
	return s.openStream(ctx, cancel, key, opts)
}

// OpenStreamFor is OpenStream for a stream that ends after timeout at the latest.
func (s *Store) OpenStreamFor(ctx context.Context, timeout time.Duration, key string, opts storage.ListOptions) (*Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	return s.openStream(ctx, cancel, key, opts)
}

// openStream opens a stream with the context ctx, which it ends with cancel if it returns an error.
func (s *Store) openStream(ctx context.Context, cancel context.CancelFunc, key string, opts storage.ListOptions) (_ *Stream, err error) {
	defer func() {
		if err != nil {
			cancel()
		}
	}()
	prefix, err := s.keys.Prepare(key, opts.Recursive)
	if err != nil {
		return nil, err
	}
	if !s.watchList {
		opts.SendInitialEvents = nil
	}
	asked, err := s.parseRevision(opts.ResourceVersion)
	if err != nil {
		return nil, err
	}
	withoutDrain := isWithoutDrain(ctx)
	if s.cluster.watches.Refused() && !withoutDrain {
		return nil, watchset.ErrShuttingDown()
	}
	if s.ctx.Err() != nil {
		return nil, s.notReady()
	}
	if err := s.ready(ctx); err != nil {
		return nil, err
	}
	_, span := traceGroup(ctx, spanWatch, s.group)
	defer span.end()
	st := &Stream{
		store:        s,
		start:        prefix,
		end:          after(prefix),
		selector:     s.view.CurrentGeneration().Selector(opts.Predicate),
		withoutDrain: withoutDrain,
		ctx:          ctx,
		cancel:       cancel,
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
	if err := st.begin(ctx, asked, opts, span); err != nil {
		if errors.Is(err, mirror.ErrNotReady) {
			return nil, s.notReady()
		}
		if apierrors.IsTooManyRequests(err) && ctx.Err() == nil {
			return nil, err // before the response starts, so that it can carry Retry-After
		}
		if st.failed = expired(err); ctx.Err() != nil {
			st.failed = ErrStreamEnded // the request has ended
		}
	}
	if st.listing {
		st.seat = time.AfterFunc(initialSeatTime, func() { utilflowcontrol.WatchInitialized(ctx) })
	}
	st.deadline, _ = ctx.Deadline()
	st.wake = make(chan struct{}, 1)
	st.publishedAtStart = s.mirror.PublishedRevision()
	if st.cursor != nil {
		st.startRev = st.publishedAtStart
		st.logPosition.Store(st.cursor.Position())
	}
	if !s.cluster.watches.Add((*runningStream)(st), withoutDrain) {
		st.stopTimers()
		st.endInitial()
		return nil, watchset.ErrShuttingDown()
	}
	st.subscribe()
	return st, nil
}

// subscribe makes the registered stream wake for its events, its bookmarks and the end of the
// storage.
func (st *Stream) subscribe() {
	if st.cursor != nil {
		st.follow()
	}
	if st.store.ctx.Err() != nil {
		st.abort(watchset.ByStorage) // endStreams may have run before
	}
	if st.bookmarkEvery > 0 {
		st.releaseProgress = st.store.mirror.WantProgress()
	}
	if st.failed == nil && (st.selector.Shard != nil || st.selector.NeedsObject) {
		st.countShardEnd = st.store.watchMetrics.Sharded()
	}
	st.scheduleBookmark()
	past := st.cursor != nil && !st.listing && !st.endOfList && st.cursor.Position() < st.publishedAtStart
	st.catchUp = past && st.bookmarkEvery > 0 && st.nextBookmark.IsZero()
}

// begin sets the start position of the stream for the client's revision asked.
func (st *Stream) begin(ctx context.Context, asked uint64, opts storage.ListOptions, span *readSpan) (err error) {
	s, rev := st.store, revisionOf(asked)
	list := opts.SendInitialEvents != nil && *opts.SendInitialEvents
	stream := opts.SendInitialEvents != nil && !*opts.SendInitialEvents
	st.announce = true
	announced := list
	if announced {
		span.event(eventWaiting)
	}
	switch {
	case opts.ResourceVersion == "" && stream:
		// Only events after etcd's current revision.
		if rev, err = s.readRevision(ctx); err != nil {
			return err
		}
	case opts.ResourceVersion == "" && !s.latestReads.lists, list && s.outOfReach(rev):
		return st.beginInEtcd(ctx, asked, opts)
	case opts.ResourceVersion == "":
		if err := s.consistent(ctx, nil); err != nil {
			return err
		}
		list = true
	case rev > 0 && list:
		if err := s.waitFor(ctx, asked); err != nil {
			return err
		}
	case rev == 0 && !stream:
		list = true
	}
	if announced {
		span.event(eventFresh)
	}
	if rev > 0 && !list {
		if err := s.waitHistory(ctx, rev); err != nil {
			return err
		}
		st.cursor, err = s.resource.CursorAfter(rev, st.start, st.end)
		if errors.Is(err, mirror.ErrCompacted) {
			if _, floor, _ := s.resource.Oldest(); floor > 0 { // upstream's error text
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
		r := &ListRead{store: s, Rev: snap.Rev, Snapshot: snap, Start: st.start, End: st.end, selector: st.selector}
		r.useIndex(ctx)
		snap = r.Snapshot
		st.listing, st.from, st.at = true, st.start, snap.Rev
		if r.shard != nil {
			st.shard, st.counted = weak.Make(r.shard), true
			all, _ := snap.Count(st.start, st.end)
			s.watchMetrics.Filtered(all - r.Count())
		}
		st.beginInitial(ctx, r)
		st.endOfList = opts.SendInitialEvents != nil && opts.Predicate.AllowWatchBookmarks
	}
	st.cursor = snap.Cursor(st.start, st.end)
	return nil
}

// beginInEtcd lists the latest state from etcd, where a gate or the published revision does not
// allow a list from memory; later events come from memory. The listed objects are held until they
// are delivered; most are shared with the cache.
func (st *Stream) beginInEtcd(ctx context.Context, asked uint64, opts storage.ListOptions) error {
	s := st.store
	entries, rev, err := s.resource.ListFromEtcd(ctx, st.start, st.end)
	if err != nil {
		return err
	}
	if rev < revisionOf(asked) {
		return storage.NewTooLargeResourceVersionError(asked, uint64(rev), tooHighRetrySeconds)
	}
	st.found, st.at = entries, rev
	st.listing = len(entries) > 0
	st.endOfList = opts.SendInitialEvents != nil && opts.Predicate.AllowWatchBookmarks
	st.cursor, err = s.resource.CursorAfter(rev, st.start, st.end)
	return err
}

// follow subscribes the stream's cursor to the events of one object, of one value of a field or
// label, of one shard, or of one namespace. A watch with another selector reads every event of the
// resource.
func (st *Stream) follow() {
	if st.end == st.start+"\x00" {
		st.cursor.Follow()
		return
	}
	whole := st.start == st.store.resource.Prefix()
	st.unfollow = st.store.selections.Follow(st.cursor, &st.selector, whole)
}
