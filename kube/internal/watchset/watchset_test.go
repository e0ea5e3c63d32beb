package watchset

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// fakeWatch ends when it is drained, unless it hangs.
type fakeWatch struct {
	set             *Watches
	hangs           bool
	drained, broken bool
	reason          Reason
}

func (w *fakeWatch) Drain() {
	w.drained = true
	if !w.hangs {
		go w.set.Remove(w)
	}
}

func (w *fakeWatch) Abort(why Reason) { w.broken, w.reason = true, why }

// add adds a watch, which must not be rejected.
func add(t *testing.T, r *Watches, hangs, undrained bool) *fakeWatch {
	t.Helper()
	w := &fakeWatch{set: r, hangs: hangs}
	if !r.Add(w, undrained) {
		t.Fatal("the watch was rejected")
	}
	return w
}

// TestDrain_WatchesEnd_ReturnsAtOnce: undrained watches continue, and may start, others are
// rejected.
func TestDrain_WatchesEnd_ReturnsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Watches
		if r.Draining() || r.Refused() {
			t.Error("the zero value is draining")
		}
		a, b, undrained := add(t, &r, false, false), add(t, &r, false, false), add(t, &r, false, true)
		if r.Len() != 2 || r.All() != 3 {
			t.Errorf("%d watches of %d, want 2 of 3", r.Len(), r.All())
		}
		began := time.Now()
		if err := r.Drain(t.Context()); err != nil || time.Since(began) != 0 {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		if !a.drained || !b.drained || a.broken || undrained.drained || r.Len() != 0 || r.All() != 1 || !r.Draining() {
			t.Errorf("drained %t, %t, and one that must continue %t; %d are left", a.drained, b.drained, undrained.drained, r.All())
		}
		if r.Add(&fakeWatch{}, false) || !apierrors.IsTooManyRequests(ErrShuttingDown()) {
			t.Error("a watch is accepted during the drain")
		}
		late := add(t, &r, false, true)
		var all []Watch
		r.Every(func(w Watch) { all = append(all, w) })
		if len(all) != 2 {
			t.Errorf("%d running watches, want 2", len(all))
		}
		r.Remove(late)
		r.Remove(undrained)
		if err := r.Drain(t.Context()); err != nil || r.All() != 0 {
			t.Errorf("a second drain: %v", err)
		}
	})
}

// TestDrain_WatchHangs_IsAborted when the context ends, and is counted in the error.
func TestDrain_WatchHangs_IsAborted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Watches
		hangs, ends := add(t, &r, true, false), add(t, &r, false, false)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began := time.Now()
		err := r.Drain(ctx)
		if time.Since(began) != 5*time.Second || !errors.Is(err, context.DeadlineExceeded) || err.Error() != "1 watches were aborted: context deadline exceeded" {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		if !hangs.broken || hangs.reason != ByShutdown || ends.broken {
			t.Errorf("the watch that hangs is aborted %t by %s, the other one %t", hangs.broken, hangs.reason, ends.broken)
		}
	})
}

// directStore is an etcd3 store whose watches end with their context, or an error.
type directStore struct {
	storage.Interface
	err error
	ctx context.Context
}

func (s *directStore) Watch(ctx context.Context, _ string, _ storage.ListOptions) (watch.Interface, error) {
	s.ctx = ctx
	return watch.NewFake(), s.err
}

// TestDirect_DrainAbortOrStop_EndsWatch of etcd, which is counted until it is stopped.
func TestDirect_DrainAbortOrStop_EndsWatch(t *testing.T) {
	for name, end := range map[string]func(*Watches, watch.Interface){
		"drain": func(r *Watches, _ watch.Interface) { r.EachDrainable(Watch.Drain) },
		"abort": func(r *Watches, _ watch.Interface) { r.EachDrainable(func(w Watch) { w.Abort(ByStorage) }) },
		"stop":  func(_ *Watches, w watch.Interface) { w.Stop() },
	} {
		var r Watches
		etcd := &directStore{}
		w, err := r.Direct(t.Context(), etcd, "/a", storage.ListOptions{}, false)
		if err != nil || r.Len() != 1 || etcd.ctx.Err() != nil {
			t.Fatalf("%s: %d watches, %v", name, r.Len(), err)
		}
		if end(&r, w); etcd.ctx.Err() == nil {
			t.Errorf("%s: the watch of etcd goes on", name)
		}
		if w.Stop(); r.Len() != 0 {
			t.Errorf("%s: a stopped watch is counted", name)
		}
	}
	var r Watches
	failed := &directStore{err: errors.New("failed")}
	if _, err := r.Direct(t.Context(), failed, "/a", storage.ListOptions{}, false); err != failed.err || r.Len() != 0 || failed.ctx.Err() == nil {
		t.Errorf("a watch that etcd rejects: %v, %d are counted", err, r.Len())
	}
	r.Refuse()
	if _, err := r.Direct(t.Context(), &directStore{}, "/a", storage.ListOptions{}, false); !apierrors.IsTooManyRequests(err) {
		t.Errorf("during the shutdown: %v", err)
	}
}

// TestGroup_End_WaitsForGoroutines and starts no further one.
func TestGroup_End_WaitsForGoroutines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group
		done := false
		if !g.Start(func() { time.Sleep(time.Minute); done = true }) {
			t.Error("not started")
		}
		if g.End(); !done || g.Start(func() { t.Error("started after the end") }) {
			t.Errorf("the goroutine has ended: %t", done)
		}
	})
}

// TestEnded_FirstReason_Stays, and has a label of a metric.
func TestEnded_FirstReason_Stays(t *testing.T) {
	var e Ended
	if e.Get() != NotEnded {
		t.Error("ended without a reason")
	}
	e.Set(BySlowness)
	e.Set(ByClient)
	if e.Get() != BySlowness || e.Get().String() != "slow_client" || ByTimeout.String() != "timeout" {
		t.Errorf("ended by %s", e.Get())
	}
}
