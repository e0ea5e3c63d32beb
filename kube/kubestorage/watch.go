package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/mirror"
)

const (
	// resultBuffer is the capacity of a watch's channel: enough that a consumer on
	// another processor is not woken for each event, small because every watch has one.
	resultBuffer = 10
	// readAhead is how many events a watcher takes from the log at once.
	readAhead = 64

	// bookmarkInterval is how often a watcher that wants bookmarks gets one, with
	// up to a quarter more so that they do not come all at once (KEP-956).
	bookmarkInterval = time.Minute
	// progressInterval is that interval for a watcher that asks for the storage's own
	// progress notifications, which no request from outside can do: 5 s, as Kubernetes
	// recommends to configure etcd's.
	progressInterval = 5 * time.Second
	// bookmarkLead is how long before the server ends a watch its last bookmark is sent.
	bookmarkLead = 2 * time.Second

	// undecodableFor bounds the time for which a watcher waits for an event that
	// cannot be decrypted or converted, for example because a KMS is down.
	undecodableFor = 30 * time.Second
)

// Watch implements storage.Interface. Initial events are a snapshot, everything
// after it a cursor on the resource's log: there is no queue, and a slow watcher
// holds nobody up. It may fall behind as far as the window reaches, then it gets
// 410. Errors that upstream reports as an event are events here.
func (s *Store) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	prefix, err := s.prepareKey(key, opts.Recursive)
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
	if !s.resource.Ready() {
		return nil, s.notReady()
	}
	w := &watcher{
		store:    s,
		start:    prefix,
		end:      after(prefix),
		selector: s.view.selector(opts.Predicate),
		result:   make(chan watch.Event, resultBuffer),
	}
	if !opts.Recursive {
		w.end = prefix + "\x00"
	}
	switch {
	case opts.ProgressNotify:
		w.bookmarkEvery = progressInterval
	case opts.Predicate.AllowWatchBookmarks:
		w.bookmarkEvery = bookmarkInterval
	}
	if err := w.begin(ctx, rev, opts); err != nil {
		if errors.Is(err, mirror.ErrNotReady) {
			return nil, s.notReady()
		}
		if ctx.Err() != nil {
			return endedWatch(), nil // nobody is there to be told
		}
		return errorWatch(s.expired(err)), nil
	}
	w.ctx, w.cancel = context.WithCancel(ctx)
	stop := context.AfterFunc(s.ctx, w.cancel)
	if !s.watches.start(func() {
		defer stop()
		w.run()
	}) {
		w.cancel()
		stop()
		return nil, s.notReady()
	}
	return w, nil
}

// watches are the goroutines of a store's watches. The zero value has none.
type watches struct {
	mu    sync.Mutex // leaf
	ended bool
	wg    sync.WaitGroup
}

// start runs the watch, or reports that the store has ended.
func (w *watches) start(run func()) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.wg.Go(run)
	}
	return !w.ended
}

// end lets none start any more and returns when the last has ended.
func (w *watches) end() {
	w.mu.Lock()
	w.ended = true
	w.mu.Unlock()
	w.wg.Wait()
}

// expired words the error of a cursor that has left the window.
func (s *Store) expired(err error) error {
	if errors.Is(err, mirror.ErrCompacted) {
		return apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %v", err))
	}
	return err
}

// watcher is one watch: a snapshot to send first, if any, and a cursor.
type watcher struct {
	store      *Store
	start, end string // the keys watched
	selector   selector

	bookmarkEvery time.Duration // 0: never

	initial   *Reading // to be sent first
	endOfList bool     // a bookmark closes the initial events
	cursor    *mirror.Cursor
	ctx       context.Context
	cancel    context.CancelFunc
	result    chan watch.Event
	deadline  time.Time // of the request, zero if it has none
	nextMark  time.Time // when a bookmark is due, zero if none will be
}

// begin finds the place in history where the watch starts, waiting for it if it has
// to (KEP-2340, second table).
func (w *watcher) begin(ctx context.Context, rev mirror.Revision, opts storage.ListOptions) (err error) {
	s := w.store
	list := opts.SendInitialEvents != nil && *opts.SendInitialEvents
	stream := opts.SendInitialEvents != nil && !*opts.SendInitialEvents
	switch {
	case opts.ResourceVersion == "" && stream:
		// Only what happens from now on, as etcd counts now.
		if rev, err = s.current(ctx); err != nil {
			return err
		}
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
		w.cursor, err = s.resource.CursorAfter(rev, w.start, w.end)
		return err
	}
	snap, err := s.resource.Latest()
	if err != nil {
		return err
	}
	if list {
		w.initial = &Reading{Snapshot: snap, Start: w.start, End: w.end, selector: w.selector}
		s.useIndex(ctx, w.initial)
		snap = w.initial.Snapshot
		w.endOfList = opts.SendInitialEvents != nil && opts.Predicate.AllowWatchBookmarks
	}
	w.cursor = snap.Cursor(w.start, w.end)
	return nil
}

// ResultChan implements watch.Interface.
func (w *watcher) ResultChan() <-chan watch.Event { return w.result }

// Stop implements watch.Interface.
func (w *watcher) Stop() { w.cancel() }

// run feeds the channel until the watch ends.
func (w *watcher) run() {
	defer close(w.result)
	defer w.cancel()
	w.deadline, _ = w.ctx.Deadline()
	w.scheduleBookmark()
	if !w.sendInitial() {
		return
	}
	utilflowcontrol.WatchInitialized(w.ctx)
	if w.endOfList && !w.sendBookmark(true) {
		return
	}
	var due []*mirror.Event
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		changed := w.cursor.Changed()
		var err error
		due, err = w.cursor.Next(due[:0], readAhead)
		for _, ev := range due {
			if !w.sendEvent(ev) {
				return
			}
		}
		if err != nil {
			select {
			case <-w.store.mirror.Done():
				// Nothing is wrong with the position; the client resumes elsewhere.
			default:
				w.send(errorEvent(w.store.expired(err)))
			}
			return
		}
		if len(due) == readAhead {
			continue
		}
		clear(due[:cap(due)])
		if !w.nextMark.IsZero() {
			// Everything up to the cursor's position was sent (I4).
			if wait := time.Until(w.nextMark); wait > 0 {
				timer.Reset(wait)
			} else {
				w.scheduleBookmark()
				// A watch at a future revision has nothing to tell before that.
				if w.cursor.Position() <= w.store.mirror.Clock() && !w.sendBookmark(false) {
					return
				}
				continue
			}
		}
		select {
		case <-changed:
		case <-timer.C:
		case <-w.ctx.Done():
			return
		}
	}
}

// send reports whether the event was taken.
func (w *watcher) send(e watch.Event) bool {
	select {
	case w.result <- e:
		return true
	default:
	}
	select {
	case w.result <- e:
		return true
	case <-w.ctx.Done():
		return false
	}
}

// initialAtOnce is how many entries a watcher holds while a client takes its time.
const initialAtOnce = 256

// sendInitial sends the present state as ADDED events. While the client reads, it
// holds a few entries, not a version: a client that does not read keeps nothing
// alive, and gets 410 when the window has moved past what it has begun to list (I7).
func (w *watcher) sendInitial() bool {
	if w.initial == nil {
		return true
	}
	r := w.initial
	w.initial = nil
	if r.index != nil {
		return w.sendAdded(slices.Collect(r.Candidates()))
	}
	snap, start, rev := r.Snapshot, r.Start, r.Snapshot.Rev
	for {
		var batch []*mirror.Entry
		for e := range snap.All(start, w.end) {
			if batch = append(batch, e); len(batch) == initialAtOnce {
				break
			}
		}
		snap = mirror.Snapshot{}
		if !w.sendAdded(batch) {
			return false
		}
		if len(batch) < initialAtOnce {
			return true
		}
		start = batch[len(batch)-1].Key() + "\x00"
		var err error
		if snap, err = w.store.resource.At(rev); err != nil {
			w.send(errorEvent(w.store.expired(err)))
			return false
		}
	}
}

// sendAdded sends the entries that the watch selects.
func (w *watcher) sendAdded(entries []*mirror.Entry) bool {
	for _, e := range entries {
		ok, err := w.selector.matches(w.ctx, e)
		if err == nil && !ok {
			continue
		}
		if err == nil {
			obj, decodeErr := w.store.view.decode(w.ctx, e, e.ModRevision())
			if decodeErr == nil {
				if !w.send(watch.Event{Type: watch.Added, Object: obj}) {
					return false
				}
				continue
			}
			err = decodeErr
		}
		w.send(errorEvent(cause(err)))
		return false
	}
	return true
}

// sendEvent sends what the event means to this watcher, nothing if it selects the
// object neither before nor after it. It returns false if the watch is over.
func (w *watcher) sendEvent(ev *mirror.Event) bool {
	backoff := 100 * time.Millisecond
	for giveUp := time.Now().Add(w.store.view.retryFor); ; backoff = min(2*backoff, 5*time.Second) {
		e, ok, err := w.translate(ev)
		if err == nil {
			return !ok || w.send(e)
		}
		// Sending later events first would break the order that a watch promises;
		// other watchers, and watchers of other objects, go on.
		if time.Now().Add(backoff).After(giveUp) || ev.Entry == nil && w.store.view.unsafeDelete {
			if ev.Entry == nil && w.store.view.unsafeDelete {
				err = corruptDeletion(err)
			}
			klog.FromContext(w.ctx).Error(err, "Watch ends at an object that cannot be decoded", "key", ev.Key(), "revision", ev.Rev)
			w.send(errorEvent(cause(err)))
			return false
		}
		select {
		case <-time.After(backoff):
		case <-w.ctx.Done():
			return false
		}
	}
}

// corruptDeletion words the error for the deletion of an object whose last state
// cannot be read, as upstream's store does with AllowUnsafeMalformedObjectDeletion.
func corruptDeletion(err error) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusInternalServerError,
		Reason:  metav1.StatusReasonStoreReadError,
		Message: fmt.Sprintf("saw a DELETED event, but object data is corrupt - %v", cause(err)),
	}}
}

func (w *watcher) translate(ev *mirror.Event) (e watch.Event, ok bool, err error) {
	before, now, err := w.selector.matchesEvent(ev)
	if err != nil {
		return e, false, err
	}
	switch {
	case now && before:
		e.Type = watch.Modified
	case now:
		e.Type = watch.Added
	case before:
		e.Type = watch.Deleted
		e.Object, err = w.store.view.deleted(ev)
		return e, true, err
	default:
		return e, false, nil
	}
	e.Object, err = w.store.view.added(ev)
	return e, true, err
}

// scheduleBookmark sets when the next bookmark is due: after bookmarkEvery, or shortly
// before the server ends the watch, whichever comes first.
func (w *watcher) scheduleBookmark() {
	w.nextMark = time.Time{}
	if w.bookmarkEvery == 0 {
		return
	}
	now := time.Now()
	next := now.Add(w.bookmarkEvery + rand.N(w.bookmarkEvery/4))
	if !w.deadline.IsZero() {
		if last := w.deadline.Add(-bookmarkLead); last.Before(next) {
			if next = last; !next.After(now) {
				return
			}
		}
	}
	w.nextMark = next
}

// sendBookmark sends the cursor's position, up to which everything was sent (I4).
func (w *watcher) sendBookmark(endOfList bool) bool {
	obj := w.store.newFunc()
	if err := w.store.versioner.UpdateObject(obj, uint64(w.cursor.Position())); err != nil {
		w.send(errorEvent(err))
		return false
	}
	if endOfList {
		if err := storage.AnnotateInitialEventsEndBookmark(obj); err != nil {
			w.send(errorEvent(err))
			return false
		}
	}
	return w.send(watch.Event{Type: watch.Bookmark, Object: obj})
}
