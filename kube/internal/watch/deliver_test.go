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
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// recorder is a Sink that records its calls, and fails those for which fail returns an error.
type recorder struct {
	st    *Stream
	calls []string
	fail  func(call string) error
}

func (r *recorder) call(format string, args ...any) error {
	call := fmt.Sprintf(format, args...)
	r.calls = append(r.calls, call)
	if r.fail != nil {
		return r.fail(call)
	}
	return nil
}

func (r *recorder) Refresh() error { return r.call("refresh") }
func (r *recorder) Flush() error   { return r.call("flush") }
func (r *recorder) Listed()        { _ = r.call("listed") }

func (r *recorder) Runs(runs []mirror.Run) error {
	n := 0
	for _, run := range runs {
		n += len(run.Items())
	}
	return r.call("runs %d", n)
}

func (r *recorder) Added(e *mirror.Entry) error {
	return r.call("added %s", strings.TrimPrefix(e.Key(), podtest.Root))
}

func (r *recorder) Event(t watch.EventType, ev *mirror.Event) error {
	if err := r.call("event %s %s", t, strings.TrimPrefix(ev.Key(), podtest.Root)); err != nil {
		return err
	}
	if t == watch.Deleted {
		_, err := r.st.scope.selector.Generation.ObjectBefore(r.st.EventContext(), ev)
		return err
	}
	_, err := r.st.scope.selector.Generation.ObjectAfter(r.st.EventContext(), ev)
	return err
}

func (r *recorder) Bookmark(b Bookmark) error { return r.call("bookmark %t", b.InitialEventsEnd) }

// initialThenOne returns a stream with the initial events a and b, the bookmark that closes them,
// the event of c after a second, and a bookmark 28 s after its start.
func initialThenOne(t *testing.T, w *fixture, ctx context.Context, change ...func(*storage.ListOptions)) *recorder {
	w.Put(t, podtest.Pod("a"), podtest.Pod("b"))
	w.CatchUp(t)
	opts := withBookmarks(everything())
	opts.SendInitialEvents = new(true)
	for _, f := range change {
		f(&opts)
	}
	r := &recorder{st: w.open(t, ctx, opts)}
	time.AfterFunc(time.Second, func() { w.Put(t, podtest.Pod("c")) })
	return r
}

// TestDeliver_Sink_IsCalledInOrder: each batch is preceded by a refresh, each wait by a flush.
func TestDeliver_Sink_IsCalledInOrder(t *testing.T) {
	const live = "flush, refresh, event ADDED ns/c, flush, refresh, bookmark false, flush"
	for name, c := range map[string]struct {
		change func(*storage.ListOptions)
		want   string
	}{
		"all":      {func(*storage.ListOptions) {}, "refresh, runs 2, listed, refresh, bookmark true, " + live},
		"no list":  {func(o *storage.ListOptions) { o.SendInitialEvents, o.ResourceVersion = new(false), "0" }, live},
		"selector": {func(o *storage.ListOptions) { o.Predicate = podtest.Selecting(t, "", "metadata.name=b") }, "refresh, added ns/b, listed, flush"},
		"unmarked": {func(o *storage.ListOptions) { o.Predicate.AllowWatchBookmarks = false }, "refresh, runs 2, listed, flush, refresh, event ADDED ns/c, flush"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				r := initialThenOne(t, newFixture(t), ctx, c.change)
				err := r.st.Deliver(nil, r)
				// a wait may end without an event
				calls := slices.CompactFunc(r.calls, func(a, b string) bool { return a == "flush" && b == a })
				if err != nil || strings.Join(calls, ", ") != c.want {
					t.Errorf("the calls are %q, %v; want %s", r.calls, err, c.want)
				}
			})
		})
	}
}

// TestDeliver_SinkFails_ReturnsItsError, except ErrEnded, and calls the sink no more.
func TestDeliver_SinkFails_ReturnsItsError(t *testing.T) {
	broken := errors.New("broken")
	for _, at := range []string{"refresh", "runs 2", "bookmark true", "flush", "event ADDED ns/c"} {
		for _, failure := range []error{broken, ErrEnded} {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				r := initialThenOne(t, newFixture(t), ctx)
				r.fail = func(call string) error {
					if call == at {
						return failure
					}
					return nil
				}
				err := r.st.Deliver(nil, r)
				if want := failure; failure == ErrEnded && err != nil || failure == broken && !errors.Is(err, want) || ctx.Err() != nil {
					t.Errorf("%s fails with %v: Deliver returns %v", at, failure, err)
				}
				if i := slices.Index(r.calls, at); slices.ContainsFunc(r.calls[i+1:], func(call string) bool { return call != "flush" || failure == ErrEnded }) {
					t.Errorf("%s fails: calls %q", at, r.calls)
				}
			})
		}
	}
}

// TestDeliver_EventFails_IsRetried with growing pauses until RetryFor is over, or the stream ends.
// Later events wait for it.
func TestDeliver_EventFails_IsRetried(t *testing.T) {
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		call  string // that fails
		times int
		after time.Duration // of the first failure: something ends the stream
		ends  func(w *fixture, cancel func())
		took  time.Duration // from the first failure
		want  error
		next  bool // the next event is delivered
	}{
		"three times": {"event ADDED ns/c", 3, 0, nil, 700 * time.Millisecond, nil, true},
		"always":      {"event ADDED ns/c", 1000, 0, nil, 56300 * time.Millisecond, broken, false},
		"the request ends": {"event ADDED ns/c", 1000, 50 * time.Millisecond, func(_ *fixture, cancel func()) { cancel() },
			50 * time.Millisecond, nil, false},
		"the server ends": {"event ADDED ns/c", 1000, 50 * time.Millisecond, func(w *fixture, _ func()) { _ = w.running.Drain(context.Background()) },
			50 * time.Millisecond, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				w.env.RetryFor = time.Minute
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				r := initialThenOne(t, w, ctx)
				var first time.Time
				failed, delivered := 0, false
				r.fail = func(call string) error {
					switch call {
					case c.call:
						if failed++; failed == 1 {
							first = time.Now()
							w.Put(t, podtest.Pod("d"))
							if c.ends != nil {
								time.AfterFunc(c.after, func() { c.ends(w, cancel) })
							}
						}
						if failed <= c.times {
							return broken
						}
					case "event ADDED ns/d":
						delivered = true
						return ErrEnded
					}
					return nil
				}
				err := r.st.Deliver(nil, r)
				if took := time.Since(first); !errors.Is(err, c.want) || c.want == nil && err != nil || took != c.took || delivered != c.next {
					t.Errorf("Deliver returned %v after %s, the next event delivered: %t", err, took, delivered)
				}
				r.st.Close()
			})
		})
	}
}

// TestDeliver_RequestEndsInRetry_OmitsRestOfBatch: later events of the batch do not overtake the
// one that was not written.
func TestDeliver_RequestEndsInRetry_OmitsRestOfBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		w.env.RetryFor = time.Minute
		ctx, cancel := context.WithCancel(t.Context())
		r := &recorder{st: w.open(t, ctx, w.fromNow())}
		r.fail = func(call string) error {
			if call != "event ADDED ns/a" {
				return nil
			}
			time.AfterFunc(50*time.Millisecond, cancel)
			return errors.New("broken")
		}
		a, b := podtest.Pod("a"), podtest.Pod("b")
		w.Etcd.Txn(memory.Op{Key: podtest.Key(a), Value: podtest.Stored(t, a)}, memory.Op{Key: podtest.Key(b), Value: podtest.Stored(t, b)})
		if err := r.st.Deliver(nil, r); err != nil || slices.Contains(r.calls, "event ADDED ns/b") {
			t.Errorf("calls %q, %v", r.calls, err)
		}
	})
}

// TestDeliver_RefreshFailsInRetry_IsRetried: the keys are not read, and the event is not written.
func TestDeliver_RefreshFailsInRetry_IsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		w.env.RetryFor = time.Minute
		r := initialThenOne(t, w, t.Context())
		events, refreshes := 0, 0
		r.fail = func(call string) error {
			switch {
			case call == "event ADDED ns/c":
				if events++; events == 1 {
					return errors.New("unreadable")
				}
				return ErrEnded
			case call == "refresh" && events == 1:
				if refreshes++; refreshes < 3 {
					return errors.New("no keys")
				}
			}
			return nil
		}
		if err := r.st.Deliver(nil, r); err != nil || events != 2 || refreshes != 3 {
			t.Errorf("%d events, %d refreshes, %v", events, refreshes, err)
		}
	})
}

// TestDeliver_FlushFailsInRetry_ReturnsItsError: the client has not got the events before.
func TestDeliver_FlushFailsInRetry_ReturnsItsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		w.env.RetryFor = time.Minute
		r := initialThenOne(t, w, t.Context())
		broken, gone := errors.New("broken"), errors.New("gone")
		r.fail = func(call string) error {
			switch {
			case call == "event ADDED ns/c":
				return broken
			case call == "flush" && slices.Contains(r.calls, "event ADDED ns/c"):
				return gone
			}
			return nil
		}
		err := r.st.Deliver(nil, r)
		if calls := strings.Join(r.calls, ", "); !errors.Is(err, gone) || !strings.HasSuffix(calls, "event ADDED ns/c, flush") {
			t.Errorf("the calls are %s, %v", calls, err)
		}
	})
}

// TestDeliver_StopClosed_EndsBeforeNextBatch, also after DeliverPending.
func TestDeliver_StopClosed_EndsBeforeNextBatch(t *testing.T) {
	w := newFixture(t)
	for range 2 {
		r := initialThenOne(t, w, podtest.Context(t))
		stop := make(chan struct{})
		close(stop)
		r.st.DeliverPending(stop, r)
		if err := r.st.Deliver(nil, r); err != nil || len(r.calls) > 0 {
			t.Errorf("calls %q, %v", r.calls, err)
		}
	}
}

// TestDeliver_PastEventUnreadable_Returns410 if the latest state of the object can be decoded, and
// the error of the decoding if nothing can.
func TestDeliver_PastEventUnreadable_Returns410(t *testing.T) {
	older, newer := podtest.Encryption(t, "1"), podtest.Encryption(t, "2")
	for name, c := range map[string]struct {
		replaced, removed, other, want bool
		deletion                       bool // the watch begins after the first write
		selects                        bool // the watch has a selector
		unreadable                     int  // objects before b now
	}{
		"deletion":                 {removed: true, deletion: true, want: true},
		"replaced, selector":       {replaced: true, selects: true, want: true},
		"replaced":                 {replaced: true, want: true},
		"removed":                  {removed: true, want: true},
		"removed, others readable": {removed: true, other: true, want: true},
		"few others unreadable":    {removed: true, other: true, unreadable: lostProbes - 1, want: true},
		"many others unreadable":   {removed: true, other: true, unreadable: lostProbes, want: false},
		"still present":            {other: true, want: false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				keys := podtest.NewSwappable(newer)
				w := newFixture(t, keys.With)
				w.env.RetryFor = time.Second
				for i := range c.unreadable {
					w.Seal(t, older, podtest.Pod(fmt.Sprintf("a-%02d", i)))
				}
				begin := w.Etcd.Revision()
				first := w.Seal(t, older, podtest.Pod("a"))
				if c.deletion {
					begin = first
				}
				if c.replaced {
					w.Seal(t, newer, podtest.Pod("a"))
				}
				if c.removed {
					w.Etcd.Delete(podtest.Key(podtest.Pod("a")))
				}
				if c.other {
					w.Seal(t, newer, podtest.Pod("b"))
				}
				w.CatchUp(t)
				opts := after(begin)
				if c.selects {
					opts.Predicate = podtest.Selecting(t, "app in (yes, no)", "")
				}
				r := &recorder{st: w.open(t, t.Context(), opts)}
				if err := r.st.Deliver(nil, r); err == nil || apierrors.IsResourceExpired(err) != c.want {
					t.Errorf("Deliver returns %v, want 410: %t", err, c.want)
				}
			})
		})
	}
	t.Run("new", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			keys := podtest.NewSwappable(newer)
			w := newFixture(t, keys.With)
			r := &recorder{st: w.open(t, t.Context(), w.fromNow())}
			w.Seal(t, older, podtest.Pod("a"))
			w.Seal(t, newer, podtest.Pod("a"))
			if err := r.st.Deliver(nil, r); err == nil || apierrors.IsResourceExpired(err) {
				t.Errorf("an event after the start: Deliver returns %v, want an error that is not 410", err)
			}
		})
	})
}

// TestDeliver_InitialEventsTimeOut_EndsWithRequest: the error of a decoding that has waited for the
// whole time of the request is not reported, any other is.
func TestDeliver_InitialEventsTimeOut_EndsWithRequest(t *testing.T) {
	timeout := apierrors.NewTimeoutError("decoding", 1)
	for name, c := range map[string]struct {
		deadline time.Duration
		failure  error
		reported bool
	}{
		"short":         {time.Second / 2, timeout, false},
		"a second":      {time.Second, timeout, true},
		"long":          {time.Minute, timeout, true},
		"another error": {time.Second / 2, errors.New("broken"), true},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), c.deadline)
			defer cancel()
			r := initialThenOne(t, newFixture(t), ctx)
			r.fail = func(call string) error {
				if call == "runs 2" {
					return c.failure
				}
				return nil
			}
			if err := r.st.Deliver(nil, r); (err != nil) != c.reported || c.reported == (ctx.Err() != nil) || slices.Contains(r.calls, "listed") {
				t.Errorf("%s: Deliver returns %v, the request: %v; calls %q", name, err, ctx.Err(), r.calls)
			}
			time.Sleep(time.Second) // until c is written
		})
	}
}

// TestDeliver_CorruptDeletion_IsReportedAtOnce with the reason of upstream, if the gate permits to
// delete unreadable objects.
func TestDeliver_CorruptDeletion_IsReportedAtOnce(t *testing.T) {
	for _, gate := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			w := newFixture(t)
			w.env.RetryFor, w.env.Lists.Gates.UnsafeDelete = time.Minute, gate
			r := initialThenOne(t, w, t.Context())
			r.fail = func(call string) error {
				switch call {
				case "event ADDED ns/c":
					w.Etcd.Delete(podtest.Key(podtest.Pod("a")))
				case "event DELETED ns/a":
					return errors.New("unreadable")
				}
				return nil
			}
			began := time.Now()
			err := r.st.Deliver(nil, r)
			var status apierrors.APIStatus
			corrupt := errors.As(err, &status) && status.Status().Code == 500 && status.Status().Reason == metav1.StatusReasonStoreReadError
			if err == nil || corrupt != gate || (time.Since(began) == time.Second) != gate {
				t.Errorf("with the gate: %t: %v after %s", gate, err, time.Since(began))
			}
		})
	}
}

// TestFew_Candidates_AreBounded by maxFound and by the request.
func TestFew_Candidates_AreBounded(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		ctx     context.Context
		n, want int
		more    bool
	}{
		{t.Context(), 0, 0, false},
		{t.Context(), maxFound - 1, maxFound - 1, false},
		{t.Context(), 2 * maxFound, maxFound, true},
		{ended, 63, 63, false},
		{ended, 1000, 64, true},
	} {
		found, more := few(c.ctx, slices.Values(make([]*mirror.Entry, c.n)))
		if len(found) != c.want || more != c.more {
			t.Errorf("%d candidates, %v: %d found, more: %t; want %d, %t", c.n, c.ctx.Err(), len(found), more, c.want, c.more)
		}
	}
}
