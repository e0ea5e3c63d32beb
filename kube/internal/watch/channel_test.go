package watch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// TestWatch_Channel_HasObjects: the events, their objects and revisions, and a closed channel after
// Stop. Watches share the objects of live events, unless each decorates its own.
func TestWatch_Channel_HasObjects(t *testing.T) {
	channelHasObjects(t, nil)
	channelHasObjects(t, func(runtime.Object) {})
}

func channelHasObjects(t *testing.T, decorate func(runtime.Object)) {
	t.Helper()
	w := newFixture(t, func(o *podtest.Options) { o.Config.Decorate = decorate })
	a := w.Put(t, podtest.Pod("a"))
	w.CatchUp(t)
	opts := withBookmarks(everything())
	opts.SendInitialEvents = new(true)
	ch, err := w.env.Watch(podtest.Context(t), "/pods", opts)
	testcheck.NoError(t, err)
	expect := func(typ watch.EventType, name string, rev int64) {
		t.Helper()
		ev := <-ch.ResultChan()
		obj := ev.Object
		shared, ok := obj.(runtime.CacheableObject)
		if ok {
			obj = shared.GetObject()
		}
		if want := rev > a && decorate == nil; ok != want {
			t.Errorf("%s of %s is shared: %t, want %t", typ, name, ok, want)
		}
		pod, ok := obj.(*example.Pod)
		if !ok || ev.Type != typ || pod.Name != name || pod.ResourceVersion != fmt.Sprint(rev) {
			t.Fatalf("got %s %+v, want %s of %s at %d", ev.Type, ev.Object, typ, name, rev)
		}
	}
	expect(watch.Added, "a", a)
	expect(watch.Bookmark, "", a)
	expect(watch.Added, "b", w.Put(t, podtest.Pod("b")))
	expect(watch.Modified, "b", w.Put(t, withLabel(podtest.Pod("b"), "n", "2")))
	expect(watch.Deleted, "b", w.Etcd.Delete(podtest.Key(podtest.Pod("b"))))
	ch.Stop()
	if ev, ok := <-ch.ResultChan(); ok {
		t.Errorf("after Stop: %+v", ev)
	}
	podtest.Eventually(t, "the watch is removed", func() bool { return w.running.All() == 0 })
}

// TestWatch_Drained_RunsUntilStop: the client may not have read all events yet.
func TestWatch_Drained_RunsUntilStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		ch, err := w.env.Watch(t.Context(), "/pods", w.fromNow())
		testcheck.NoError(t, err)
		w.Put(t, podtest.Pod("a"))
		w.CatchUp(t)
		w.drain(t)
		if n := w.running.All(); n != 1 {
			t.Errorf("%d watches run before the client has read, want 1", n)
		}
		if ev := <-ch.ResultChan(); ev.Type != watch.Added {
			t.Errorf("got %+v, want the event", ev)
		}
		if ev, ok := <-ch.ResultChan(); ok {
			t.Errorf("after the drain: %+v", ev)
		}
		ch.Stop()
		synctest.Wait()
		if n := w.running.All(); n != 0 {
			t.Errorf("%d watches run after Stop", n)
		}
	})
}

// TestWatch_UnreadableObject_EndsWithError, which is its last event.
func TestWatch_UnreadableObject_EndsWithError(t *testing.T) {
	selected := everything()
	selected.Predicate = podtest.Selecting(t, "app in (yes, no)", "")
	for name, c := range map[string]struct {
		opts     storage.ListOptions
		fromEtcd bool
		asEvent  bool
	}{
		"initial event":                     {opts: everything()},
		"initial event, selector":           {opts: selected},
		"initial event from etcd":           {opts: everything(), fromEtcd: true},
		"initial event from etcd, selector": {opts: selected, fromEtcd: true},
		"event":                             {opts: everything(), asEvent: true},
		"event, selector":                   {opts: selected, asEvent: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				w.env.Lists.Gates.Latest = !c.fromEtcd
				if c.asEvent {
					c.opts.ResourceVersion = w.fromNow().ResourceVersion
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				write := func() {
					w.Put(t, podtest.Labelled("a", "app", "yes"))
					w.Etcd.Put(podtest.Key(podtest.Pod("b")), "garbage")
					w.Put(t, podtest.Labelled("c", "app", "yes"))
					w.CatchUp(t)
				}
				if !c.asEvent {
					write()
				}
				ch, err := w.env.Watch(ctx, "/pods", c.opts)
				testcheck.NoError(t, err)
				if c.asEvent {
					write()
				}
				var got []watch.EventType
				for ev := range ch.ResultChan() {
					got = append(got, ev.Type)
				}
				if !slices.Equal(got, []watch.EventType{watch.Added, watch.Error}) || ctx.Err() != nil {
					t.Errorf("got %v, %v; want the first object and an error", got, ctx.Err())
				}
			})
		})
	}
}

// TestWatch_Batch_IsObservedOnce in the metric of the latency.
func TestWatch_Batch_IsObservedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		observed := func() int {
			return w.series(t, "apiserver_watch_events_dispatch_duration_seconds", "stage", "total")
		}
		before, opts := observed(), w.fromNow()
		w.Put(t, podtest.Pod("a"), podtest.Pod("b"), podtest.Pod("c"))
		w.CatchUp(t)
		ch, err := w.env.Watch(t.Context(), "/pods", opts)
		testcheck.NoError(t, err)
		synctest.Wait()
		w.Put(t, podtest.Pod("d"))
		synctest.Wait()
		if n := observed() - before; n != 2 || len(ch.ResultChan()) != 4 {
			t.Errorf("%d batches are observed, of %d events; want 2 of 4", n, len(ch.ResultChan()))
		}
	})
}

// TestWatcher_StreamEnds_ReturnsErrEnded from each method that sends to a client that does not.
func TestWatcher_StreamEnds_ReturnsErrEnded(t *testing.T) {
	w := newFixture(t)
	opts := w.fromNow()
	w.Put(t, podtest.Pod("a"))
	st := w.open(t, podtest.Context(t), opts)
	ev := take(t, st).events[0]
	st.life.cancel()
	full := &watcher{stream: st, result: make(chan watch.Event)}
	for name, send := range map[string]func() error{
		"initial event":    func() error { return full.Added(ev.Entry) },
		"first of a batch": func() error { full.observed = st.batches - 1; return full.Event(watch.Added, ev) },
		"next event":       func() error { full.observed = st.batches; return full.Event(watch.Added, ev) },
		"bookmark":         func() error { return full.Bookmark(Bookmark{Revision: ev.Rev}) },
	} {
		if err := send(); !errors.Is(err, ErrEnded) {
			t.Errorf("%s: %v, want ErrEnded", name, err)
		}
	}
}

// TestWatch_FailedStart_IsEvent: 410 comes as an event; a watch whose request or storage has ended
// has none.
func TestWatch_FailedStart_IsEvent(t *testing.T) {
	etcd := memory.New()
	for i := range 10 {
		etcd.Put(podtest.Prefix+"other", fmt.Sprint(i))
	}
	etcd.Compact(etcd.Revision())
	w := newFixture(t, func(o *podtest.Options) { o.Etcd = etcd })
	ch, err := w.env.Watch(podtest.Context(t), "/pods", after(1))
	testcheck.NoError(t, err)
	ev := <-ch.ResultChan()
	status, ok := ev.Object.(*metav1.Status)
	if !ok || ev.Type != watch.Error || status.Reason != metav1.StatusReasonExpired || !strings.HasPrefix(status.Message, "too old resource version: 1 (") {
		t.Errorf("got %+v, want 410 in upstream's words", ev)
	}
	if ev, ok := <-ch.ResultChan(); ok {
		t.Errorf("after the error: %+v", ev)
	}
	ended, cancel := context.WithCancel(podtest.Context(t))
	cancel()
	if ch, err := w.env.Watch(ended, "/pods", after(w.Etcd.Revision()+1)); err == nil {
		if ev, ok := <-ch.ResultChan(); ok {
			t.Errorf("the request has ended: %+v", ev)
		}
	}
	w.goroutines.End()
	if _, err := w.env.Watch(podtest.Context(t), "/pods", w.fromNow()); !apierrors.IsTooManyRequests(err) {
		t.Errorf("the storage has ended: %v, want 429", err)
	}
	if n := w.running.All(); n > 0 {
		t.Errorf("%d watches run", n)
	}
}

// TestWatch_ClientSlow_EndsOnlyDuringInitialEvents: after slowSend it gets 429 as its last event. A
// live watch waits for its client.
func TestWatch_ClientSlow_EndsOnlyDuringInitialEvents(t *testing.T) {
	for _, initial := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			w := newFixture(t)
			begin := w.Etcd.Revision()
			const n = 2 * resultBuffer
			for i := range n {
				w.Put(t, podtest.Pod(fmt.Sprintf("pod-%02d", i)))
			}
			w.CatchUp(t)
			opts := after(begin)
			if initial {
				opts = everything()
			}
			var slow time.Duration
			started := time.Now()
			ctx := WithSlowClient(t.Context(), func() { slow = time.Since(started) })
			ch, err := w.env.Watch(ctx, "/pods", opts)
			testcheck.NoError(t, err)
			time.Sleep(time.Minute)
			synctest.Wait()
			got := 0
			var last watch.Event
			for got < n {
				ev, ok := <-ch.ResultChan()
				if !ok {
					break
				}
				got++
				last = ev
			}
			if status, ok := last.Object.(*metav1.Status); initial != (ok && status.Code == 429) || initial && (slow != slowSend || got != resultBuffer+1) || !initial && slow != 0 {
				t.Errorf("initial events: %t: %d events, the last is %+v; slow after %s", initial, got, last, slow)
			}
			ch.Stop()
		})
	}
}

// TestStream_Seat_IsReleased at the end of the initial events, when a client reads them slowly, and
// after initialSeatTime.
func TestStream_Seat_IsReleased(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(t *testing.T, st *Stream)
		want time.Duration
	}{
		"delivered": {func(t *testing.T, st *Stream) { take(t, st); take(t, st) }, 0},
		"slow":      {func(_ *testing.T, st *Stream) { st.EndSlow() }, 0},
		"late":      {func(*testing.T, *Stream) {}, initialSeatTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				w.Put(t, podtest.Pod("a"))
				w.CatchUp(t)
				opts := withBookmarks(everything())
				opts.SendInitialEvents = new(true)
				signal := utilflowcontrol.NewInitializationSignal()
				st := w.open(t, utilflowcontrol.WithInitializationSignal(t.Context(), signal), opts)
				begin := time.Now()
				c.end(t, st)
				signal.Wait()
				if took := time.Since(begin); took != c.want {
					t.Errorf("released after %s, want %s", took, c.want)
				}
			})
		})
	}
}

// TestStream_EndReason_NamesTheEnd.
func TestStream_EndReason_NamesTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(w *fixture, st *Stream, cancel func())
		want watchset.Reason
	}{
		"client":        {func(_ *fixture, _ *Stream, cancel func()) { cancel() }, watchset.ByClient},
		"timeout":       {func(_ *fixture, st *Stream, _ func()) { <-st.Context().Done() }, watchset.ByTimeout},
		"storage":       {func(w *fixture, st *Stream, _ func()) { w.cancel(); <-st.Context().Done() }, watchset.ByStorage},
		"mirror":        {func(w *fixture, st *Stream, _ func()) { w.Mirror.Close(); _, _ = endOf(st) }, watchset.ByStorage},
		"slow":          {func(_ *fixture, st *Stream, _ func()) { st.EndSlow() }, watchset.BySlowness},
		"expired":       {func(_ *fixture, st *Stream, _ func()) { st.failed = apierrors.NewResourceExpired("old") }, watchset.Expired},
		"another error": {func(_ *fixture, st *Stream, _ func()) { st.failed = errors.New("broken") }, watchset.ByError},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				st := w.open(t, ctx, w.fromNow())
				c.end(w, st, cancel)
				if got := st.endReason(); got != c.want {
					t.Errorf("the stream ended by %s, want %s", got, c.want)
				}
			})
		})
	}
}

// TestStream_Ending_IsExpired if the position was lost, also while the resource is being relisted.
func TestStream_Ending_IsExpired(t *testing.T) {
	w := newFixture(t)
	st := w.open(t, podtest.Context(t), w.fromNow())
	for err, want := range map[error]bool{mirror.ErrCompacted: true, mirror.ErrNotReady: true, mirror.ErrFutureRevision: false} {
		if got := st.ending(err); apierrors.IsResourceExpired(got) != want {
			t.Errorf("%v ends the stream with %v, want 410: %t", err, got, want)
		}
	}
}

// TestOpen_ServerRefuses_AdmitsOnlyUndrained watches, and their Drain does not end them.
func TestOpen_ServerRefuses_AdmitsOnlyUndrained(t *testing.T) {
	w := newFixture(t)
	undrained, err := w.env.Open(WithoutDrain(podtest.Context(t)), "/pods", w.fromNow())
	testcheck.NoError(t, err)
	defer undrained.Close()
	w.running.Refuse()
	if _, err := w.env.Open(podtest.Context(t), "/pods", w.fromNow()); !apierrors.IsTooManyRequests(err) {
		t.Errorf("a watch begins: %v", err)
	}
	testcheck.NoError(t, w.running.Drain(podtest.Context(t)))
	w.Put(t, podtest.Pod("a"))
	if b := take(t, undrained); len(b.events) != 1 {
		t.Errorf("got %+v, want an event", b)
	}
	if undrained.Position() != w.Etcd.Revision() {
		t.Errorf("the position is %d, want %d", undrained.Position(), w.Etcd.Revision())
	}
	late, err := w.env.Open(WithoutDrain(podtest.Context(t)), "/pods", w.fromNow())
	testcheck.NoError(t, err)
	late.Close()
}

// TestOpen_GateLatestOff_ListsFromEtcd: the initial events are those of etcd, and later events
// follow; a revision above etcd's is refused with an event.
func TestOpen_GateLatestOff_ListsFromEtcd(t *testing.T) {
	w := newFixture(t)
	w.env.Lists.Gates.Latest = false
	none := w.open(t, podtest.Context(t), withBookmarks(everything()))
	if none.phase != announcing || none.initial.marked {
		t.Errorf("without objects the phase is %d, marked: %t", none.phase, none.initial.marked)
	}
	w.Put(t, podtest.Pod("a"))
	opts := withBookmarks(everything())
	opts.SendInitialEvents = new(true)
	st := w.open(t, podtest.Context(t), opts)
	if b := take(t, st); len(b.entries) != 1 || b.entries[0].Key() != podtest.Key(podtest.Pod("a")) {
		t.Errorf("got %+v, want the pod", b)
	}
	if b := take(t, st); !b.bookmark.InitialEventsEnd || b.bookmark.Revision != w.Etcd.Revision() {
		t.Errorf("got %+v, want the bookmark", b)
	}
	rev := w.Put(t, podtest.Pod("b"))
	if b := take(t, st); len(b.events) != 1 || b.events[0].Rev != rev {
		t.Errorf("got %+v, want the event", b)
	}
	if err := st.beginInEtcd(uint64(rev)+1, opts); err == nil {
		t.Error("a list from etcd below the requested revision succeeds")
	}
	testcheck.NoError(t, st.beginInEtcd(uint64(rev), opts))
}

// TestOpen_GateWatchListOff_IgnoresSendInitialEvents.
func TestOpen_GateWatchListOff_IgnoresSendInitialEvents(t *testing.T) {
	w := newFixture(t)
	w.env.Gates.WatchList = false
	w.Put(t, podtest.Pod("a"))
	w.CatchUp(t)
	opts := withBookmarks(after(0))
	opts.SendInitialEvents = new(false)
	st := w.open(t, podtest.Context(t), opts)
	if st.phase != listing || st.initial.marked || !st.Listing() {
		t.Errorf("phase %d, marked: %t; want initial events without a bookmark", st.phase, st.initial.marked)
	}
}

// TestOpen_Fails_WithStatus: an invalid revision and a drain at once, others as the stream's error.
func TestOpen_Fails_WithStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		opts := everything()
		opts.ResourceVersion = "x"
		if st, err := w.env.Open(t.Context(), "/pods", opts); !apierrors.IsBadRequest(err) || st != nil {
			t.Errorf("an invalid revision: %v, want 400", err)
		}
		if _, err := w.env.Open(t.Context(), "/nodes", everything()); err == nil {
			t.Error("a key of another resource is watched")
		}
		future := after(w.Etcd.Revision() + 1000)
		future.SendInitialEvents = new(true)
		st := w.open(t, t.Context(), future)
		if _, err := endOf(st); !storage.IsTooLargeResourceVersion(err) {
			t.Errorf("a list in the future: %v", err)
		}
		w.env.Lists.Gates.Latest = false
		w.Etcd.FailLists(errors.New("broken"))
		st = w.open(t, t.Context(), everything())
		if events, err := endOf(st); err == nil || errors.Is(err, ErrEnded) {
			t.Errorf("a list from etcd that fails: %d events, %v", events, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		live := w.open(t, ctx, w.fromNow())
		cancel()
		if b, err := live.next(); !errors.Is(err, ErrEnded) || !b.empty() {
			t.Errorf("the request has ended: %+v, %v", b, err)
		}
		if err := live.wait(nil); !errors.Is(err, ErrEnded) {
			t.Errorf("the request has ended: wait returns %v", err)
		}
	})
}
