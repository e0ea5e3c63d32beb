package watch

import (
	"context"
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// resultBuffer is the capacity of a watch's channel: large enough that a consumer on another
// processor is not woken for each event, small because every watch has one.
const resultBuffer = 10

// slowSend bounds the wait of an initial event for the client. A guess, well above the time that a
// live, busy client needs.
const slowSend = 10 * time.Second

type slowClientKey struct{}

// WithSlowClient returns a context for a Watch, which calls slow when the client has not read an
// initial event in time: the watch has ended, with SlowClient as its last event. The writer of the
// response may still be blocked on the client; slow must end it. slow is called on a goroutine of
// the watch, possibly after the response has ended.
func WithSlowClient(ctx context.Context, slow func()) context.Context {
	return context.WithValue(ctx, slowClientKey{}, slow)
}

// Watch is the watch of storage.Interface. Initial events are a snapshot, later events a cursor on
// the resource's log: there is no queue, and a slow watcher delays no other. It may fall behind as
// far as the window reaches, then it gets 410. Errors that upstream reports as an event are events
// here.
func (env *Env) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := env.Open(ctx, key, opts)
	if err != nil {
		cancel()
		return nil, err
	}
	if stream.failed != nil {
		stream.Close()
		cancel()
		if errors.Is(stream.failed, ErrEnded) {
			return watch.NewEmptyWatch(), nil
		}
		events := make(chan watch.Event, 1)
		events <- errorEvent(stream.failed)
		close(events)
		return watch.NewProxyWatcher(events), nil
	}
	w := &watcher{stream: stream, ctx: ctx, cancel: cancel, result: make(chan watch.Event, resultBuffer)}
	if !env.Goroutines.Start(w.run) {
		stream.Close()
		cancel()
		return nil, env.Lists.Fresh.NotReady()
	}
	return w, nil
}

// errorEvent is the event by which a watch reports an error.
func errorEvent(err error) watch.Event {
	return watch.Event{Type: watch.Error, Object: ErrorStatus(err)}
}

// watcher is a Sink that sends objects to a channel.
type watcher struct {
	stream   *Stream
	ctx      context.Context // of the request, until Stop
	cancel   context.CancelFunc
	result   chan watch.Event
	observed int // the batch of the last observed event
}

// ResultChan implements watch.Interface.
func (w *watcher) ResultChan() <-chan watch.Event { return w.result }

// Stop implements watch.Interface.
func (w *watcher) Stop() { w.cancel() }

// run feeds the channel until the watch ends.
func (w *watcher) run() {
	defer w.cancel()
	defer w.stream.Close()
	defer func() {
		close(w.result)
		if w.stream.leaving() {
			<-w.stream.life.ctx.Done() // the channel may still have undelivered events; see Drain
		}
	}()
	if err := w.stream.Deliver(nil, w); err != nil {
		_ = w.send(errorEvent(err))
	}
}

// send returns when the event was received, or ErrEnded if it will not be.
func (w *watcher) send(e watch.Event) error {
	select {
	case w.result <- e:
		return nil
	default:
	}
	var slow <-chan time.Time // fires if the client does not read its initial events
	if w.stream.phase <= announcing {
		timer := time.NewTimer(slowSend)
		defer timer.Stop()
		slow = timer.C
	}
	select {
	case w.result <- e:
		return nil
	case <-w.stream.life.ctx.Done():
		return ErrEnded
	case <-slow:
		w.endSlow()
		return ErrEnded
	}
}

// endSlow ends a watch whose client does not read its initial events. The client gets the status if
// it starts to read.
func (w *watcher) endSlow() {
	w.stream.EndSlow()
	if slow, ok := w.ctx.Value(slowClientKey{}).(func()); ok {
		slow()
	}
	w.stream.Close() // only the status is held for the client
	select {
	case w.result <- watch.Event{Type: watch.Error, Object: SlowClient()}:
	case <-w.ctx.Done():
	case <-w.stream.env.Context.Done():
	}
}

// Refresh implements Sink.
func (w *watcher) Refresh() error { return nil }

// Runs implements Sink.
func (w *watcher) Runs(runs []mirror.Run) error {
	for _, run := range runs {
		for _, e := range run.Items() {
			if err := w.Added(e); err != nil {
				return err
			}
		}
	}
	return nil
}

// Added implements Sink. The client owns the object of the event.
func (w *watcher) Added(e *mirror.Entry) error {
	g := w.stream.scope.selector.Generation
	obj, err := g.Object(w.stream.life.ctx, e, g.Blocks().Now())
	if err != nil {
		return err
	}
	return w.send(watch.Event{Type: watch.Added, Object: obj.DeepCopyObject()})
}

// Listed implements Sink.
func (w *watcher) Listed() {}

// Event implements Sink. The first event of each batch is observed in the metrics.
func (w *watcher) Event(t watch.EventType, ev *mirror.Event) error {
	obj, err := w.object(t, ev)
	if err != nil {
		return err
	}
	if w.observed == w.stream.batches || ev.Arrived == 0 {
		return w.send(watch.Event{Type: t, Object: obj})
	}
	ready := driver.Now()
	if err := w.send(watch.Event{Type: t, Object: obj}); err != nil {
		return err
	}
	w.observed = w.stream.batches
	w.stream.env.Metrics.Dispatched(ev.Arrived, ready)
	return nil
}

// object returns the object of an event that the watch sends as the type.
func (w *watcher) object(t watch.EventType, ev *mirror.Event) (obj runtime.Object, err error) {
	if t == watch.Deleted {
		obj, err = w.stream.scope.selector.Generation.ObjectBefore(w.stream.EventContext(), ev)
	} else {
		obj, err = w.stream.scope.selector.Generation.ObjectAfter(w.stream.EventContext(), ev)
	}
	if shared, ok := obj.(*objects.CachingObject); ok && w.stream.env.Lists.View.Kind().Decorate != nil {
		obj = shared.GetObject()
	}
	return obj, err
}

// Bookmark implements Sink.
func (w *watcher) Bookmark(b Bookmark) error {
	obj, err := w.stream.BookmarkObject(b)
	if err != nil {
		return err
	}
	return w.send(watch.Event{Type: watch.Bookmark, Object: obj})
}

// Flush implements Sink.
func (w *watcher) Flush() error { return nil }
