package informer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/mirror"
)

const (
	// readAhead is the number of events that a handler takes from the log at once.
	readAhead = 64
	// firstRetry and lastRetry bound the pauses before an object is decoded again; client-go's
	// reflector waits as long before it lists again.
	firstRetry = 800 * time.Millisecond
	lastRetry  = 30 * time.Second
	// panicPause is the pause after a callback that panicked, as in client-go.
	panicPause = time.Second
)

// registration delivers to one handler, on a goroutine of its own.
type registration struct {
	in       *Informer
	handler  cache.ResourceEventHandler
	logger   klog.Logger
	resync   time.Duration // 0: never; set before run
	cancel   func()        // nil before the start; guarded by Informer.mu
	synced   chan struct{} // closed when the initial objects were delivered
	finished chan struct{} // closed when no further callback runs
	panicked bool

	// The handler has seen base, and of the events after it those of seen: the entry of each key,
	// nil if it was deleted. Entries that were replaced before they could be decoded were skipped:
	// skipped has their keys, with the entry that the handler has seen before, nil if none.
	base    mirror.Snapshot
	seen    map[string]*mirror.Entry
	skipped map[string]*mirror.Entry
}

var _ cache.ResourceEventHandlerRegistration = (*registration)(nil)

func newRegistration(in *Informer, h cache.ResourceEventHandler, resync time.Duration) *registration {
	return &registration{
		in:       in,
		handler:  h,
		logger:   klog.Background(),
		resync:   resync,
		synced:   make(chan struct{}),
		finished: make(chan struct{}),
		seen:     map[string]*mirror.Entry{},
		skipped:  map[string]*mirror.Entry{},
	}
}

// HasSynced implements cache.ResourceEventHandlerRegistration.
func (r *registration) HasSynced() bool { return cache.IsDone(r.HasSyncedChecker()) }

// HasSyncedChecker implements cache.ResourceEventHandlerRegistration.
func (r *registration) HasSyncedChecker() cache.DoneChecker {
	return done{name: fmt.Sprintf("informer of %s + event handler %T", r.in.name(), r.handler), ch: r.synced}
}

// ShutdownChan returns a channel that is closed when the handler is called no more, for
// cache.ShutDownEventHandler.
func (r *registration) ShutdownChan() <-chan struct{} { return r.finished }

// run delivers until ctx ends: the objects of the newest version, then the events after it.
func (r *registration) run(ctx context.Context) {
	// a handle may be retained
	defer func() { r.base, r.seen, r.skipped = mirror.Snapshot{}, nil, nil }()
	select {
	case <-r.in.synced:
	case <-ctx.Done():
		return
	}
	r.base, _ = r.in.view.snapshot()
	for e := range r.base.All("", "") {
		if obj := r.decode(ctx, e); obj != nil {
			r.call(ctx, func() { r.handler.OnAdd(obj, true) })
		} else {
			r.skipped[e.Key()] = nil
		}
		if ctx.Err() != nil {
			return
		}
	}
	close(r.synced)
	var resync <-chan time.Time
	if r.resync > 0 {
		ticker := time.NewTicker(r.resync)
		defer ticker.Stop()
		resync = ticker.C
	}
	cursor := r.base.Cursor("", "")
	for ctx.Err() == nil {
		changed, more, err := r.deliver(ctx, cursor)
		switch {
		case err != nil:
			if cursor = r.relist(ctx, err); cursor == nil {
				return
			}
		case !more:
			select {
			case <-changed:
			case <-resync:
				r.resyncAll(ctx)
			case <-ctx.Done():
			}
		}
	}
}

// deliver delivers due events. Without any, base is brought up to the newest version, and changed
// is closed when there may be more.
func (r *registration) deliver(ctx context.Context, cursor *mirror.Cursor) (changed <-chan struct{}, more bool, err error) {
	changed = cursor.Changed()
	snap, latestErr := r.in.view.source.Load().Resource.Latest()
	events, err := cursor.Next(nil, readAhead)
	if err != nil {
		return nil, false, err
	}
	for _, ev := range events {
		r.event(ctx, ev)
		if ctx.Err() != nil {
			return nil, false, nil
		}
		r.seen[ev.Key()] = ev.Entry
	}
	// Without events since the last call, snap has the events that were delivered, and no more.
	// While history is restored the cursor waits below snap.
	if len(events) == 0 && latestErr == nil && cursor.Position() >= snap.Rev {
		r.base = snap
		clear(r.seen)
	}
	return changed, len(events) > 0, nil
}

// event delivers one event. A deletion has the last state, at the revision of the deletion.
func (r *registration) event(ctx context.Context, ev *mirror.Event) {
	key, prev := ev.Key(), ev.Prev
	if before, ok := r.skipped[key]; ok {
		prev = before
	}
	if ev.Entry == nil {
		delete(r.skipped, key)
		if prev != nil {
			r.deleted(ctx, ev, prev)
		}
		return
	}
	obj := r.decode(ctx, ev.Entry)
	if obj == nil {
		r.skipped[key] = prev
		return
	}
	delete(r.skipped, key)
	if prev == nil {
		r.call(ctx, func() { r.handler.OnAdd(obj, false) })
		return
	}
	old, err := r.lookup(ctx, prev)
	if err != nil {
		old = obj // it can no longer be decoded
	}
	r.call(ctx, func() { r.handler.OnUpdate(old, obj) })
}

// deleted delivers a deletion of the object of prev.
func (r *registration) deleted(ctx context.Context, ev *mirror.Event, prev *mirror.Entry) {
	obj, err := r.in.view.source.Load().Decode(ctx, ev.Prev, ev.Rev)
	if err != nil {
		obj = r.unknown(ctx, prev)
	}
	r.call(ctx, func() { r.handler.OnDelete(obj) })
}

// unknown returns the object of a deletion whose final state is not known.
func (r *registration) unknown(ctx context.Context, prev *mirror.Entry) cache.DeletedFinalStateUnknown {
	gone := cache.DeletedFinalStateUnknown{Key: r.in.view.keyOf(prev.Key())}
	if obj, err := r.lookup(ctx, prev); err == nil {
		gone.Obj = obj
	}
	return gone
}

// known returns the entries that the handler has seen, by key.
func (r *registration) known() map[string]*mirror.Entry {
	known := map[string]*mirror.Entry{}
	for e := range r.base.All("", "") {
		known[e.Key()] = e
	}
	maps.Copy(known, r.seen)
	maps.Copy(known, r.skipped)
	maps.DeleteFunc(known, func(_ string, e *mirror.Entry) bool { return e == nil })
	return known
}

// lookup returns the object of an entry, which handlers share.
func (r *registration) lookup(ctx context.Context, e *mirror.Entry) (any, error) {
	v := &r.in.view
	if last, ok := v.kept.last(e.Key()); ok && last.entry == e {
		return last.obj, nil
	}
	return v.recent.get(e, func() (any, error) { return v.source.Load().Decode(ctx, e, e.ModRevision()) })
}

// decode is lookup, repeated until it succeeds. nil: the entry was replaced or deleted meanwhile,
// its transform failed, or ctx has ended.
func (r *registration) decode(ctx context.Context, e *mirror.Entry) any {
	for pause := firstRetry; ; pause = min(2*pause, lastRetry) {
		obj, err := r.lookup(ctx, e)
		if err == nil || ctx.Err() != nil {
			return obj
		}
		if snap, ok := r.in.view.snapshot(); ok {
			if now, ok := snap.Get(e.Key()); !ok || now != e {
				return nil
			}
		}
		r.in.report(ctx, fmt.Errorf("decode %s: %w", r.in.view.keyOf(e.Key()), err))
		if transform := (*TransformError)(nil); errors.As(err, &transform) || !sleep(ctx, pause) {
			return nil
		}
	}
}

// relist delivers the differences between what the handler has seen and the newest version, after
// the cursor was lost, and returns a cursor after that version; nil if ctx has ended.
func (r *registration) relist(ctx context.Context, lost error) *mirror.Cursor {
	resource := r.in.view.source.Load().Resource
	select {
	case <-resource.Closed():
		<-ctx.Done()
		return nil
	default:
	}
	r.in.report(ctx, apierrors.NewResourceExpired(lost.Error()))
	var snap mirror.Snapshot
	for {
		if err := resource.WaitReady(ctx); err != nil {
			<-ctx.Done() // the mirror may have closed before
			return nil
		}
		var err error
		if snap, err = resource.Latest(); err == nil {
			break
		}
	}
	was := r.known()
	clear(r.skipped)
	for e := range snap.All("", "") {
		prev := was[e.Key()]
		delete(was, e.Key())
		if prev != nil && same(prev, e) {
			continue
		}
		r.event(ctx, &mirror.Event{Rev: e.ModRevision(), Entry: e, Prev: prev})
		if ctx.Err() != nil {
			return nil
		}
	}
	for _, key := range slices.Sorted(maps.Keys(was)) {
		gone := r.unknown(ctx, was[key])
		r.call(ctx, func() { r.handler.OnDelete(gone) })
	}
	r.base = snap
	clear(r.seen)
	return snap.Cursor("", "")
}

// same reports whether two entries of a key have the same object. After etcd was restored, entries
// with the same revision may differ.
func same(a, b *mirror.Entry) bool {
	return a == b || a.ModRevision() == b.ModRevision() && bytes.Equal(a.Value(), b.Value())
}

// resyncAll delivers an update of every object that the handler has seen, to itself. Objects that
// cannot be decoded are omitted.
func (r *registration) resyncAll(ctx context.Context) {
	known := r.known()
	for _, key := range slices.Sorted(maps.Keys(known)) {
		// not Shared or recent: they would fill with objects that have no other reader
		e := known[key]
		last, ok := r.in.view.kept.last(e.Key())
		obj, err := last.obj, error(nil)
		if !ok || last.entry != e {
			obj, err = r.in.view.source.Load().Decode(ctx, e, e.ModRevision())
		}
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			r.call(ctx, func() { r.handler.OnUpdate(obj, obj) })
		}
	}
}

// call calls the handler. After a panic, which is logged and by default ends the process, it
// pauses, and the event is skipped.
func (r *registration) call(ctx context.Context, f func()) {
	if ctx.Err() != nil || r.panicked && !sleep(ctx, panicPause) {
		return
	}
	r.panicked = true
	func() {
		defer utilruntime.HandleCrashWithLogger(r.logger)
		f()
		r.panicked = false
	}()
}

// sleep reports false if ctx ended during the pause.
func sleep(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
