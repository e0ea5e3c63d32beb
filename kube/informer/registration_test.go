package informer_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2/textlogger"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/informer"
)

func TestInformer_States_AreThoseOfClientGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.informer(0, nil)
		if in.IsStopped() || in.HasSynced() || in.GetController().HasSynced() {
			t.Error("stopped or synced before the start")
		}
		checker := in.HasSyncedChecker()
		if name := checker.Name(); !strings.Contains(name, "PartialObjectMetadata") {
			t.Errorf("the checker's name is %q, without the type", name)
		}
		f.run(in)
		f.settle()
		<-checker.Done()
		if in.IsStopped() || !in.HasSynced() || !in.GetController().HasSynced() {
			t.Error("stopped or not synced after the start")
		}
		if _, err := in.AddEventHandlerWithOptions(&recorder{}, cache.HandlerOptions{}); err != nil {
			t.Error(err)
		}
		in.stop()
		if !in.IsStopped() || !in.HasSynced() {
			t.Error("not stopped, or no longer synced, after the stop")
		}
	})
}

// TestInformer_SettingsDuringStart_HaveNoRace: settings and handlers are accepted before the start,
// and either take effect or are refused.
func TestInformer_SettingsDuringStart_HaveNoRace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1")
		f.settle()
		in := f.informer(0, nil)
		r := &recorder{name: "handler"}
		var others sync.WaitGroup
		others.Go(func() {
			for in.SetTransform(func(obj any) (any, error) { return obj, nil }) == nil {
				runtime.Gosched() // until it has started
			}
		})
		others.Go(func() {
			for in.SetWatchErrorHandler(func(*cache.Reflector, error) {}) == nil {
				runtime.Gosched()
			}
		})
		others.Go(func() {
			if _, err := in.AddEventHandler(r); err != nil {
				t.Error(err)
			}
		})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			in.RunWithContext(ctx)
		}()
		others.Wait()
		f.settle()
		r.want(t, "initial a/x=1@2")
		cancel()
		<-done
	})
}

func TestWatchErrorHandler_Nil_IsTheDefault(t *testing.T) {
	handlers := utilruntime.ErrorHandlers
	var logged []error
	utilruntime.ErrorHandlers = []utilruntime.ErrorHandler{func(_ context.Context, err error, _ string, _ ...any) { logged = append(logged, err) }}
	defer func() { utilruntime.ErrorHandlers = handlers }()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := &running{Informer: informer.New(&object{}, func(context.Context, cache.TransformFunc) (informer.Source, error) {
			return informer.Source{}, errors.New("no storage")
		}, 0, nil)}
		testcheck.NoError(t, in.SetWatchErrorHandlerWithContext(nil))
		f.run(in)
		if len(logged) != 1 || logged[0].Error() != "no storage" {
			t.Errorf("logged %v", logged)
		}
	})
}

func TestHandler_AddedTwice_HasTwoRegistrations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.run(f.informer(0, nil))
		f.settle()
		var mu sync.Mutex
		var added []string
		h := cache.ResourceEventHandlerFuncs{AddFunc: func(obj any) {
			mu.Lock()
			defer mu.Unlock()
			added = append(added, describe(obj))
		}}
		want := func(calls ...string) {
			t.Helper()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(added, calls) {
				t.Errorf("calls %v, want %v", added, calls)
			}
			added = nil
		}
		first, second := in.addHandler(t, h, cache.HandlerOptions{}), in.addHandler(t, h, cache.HandlerOptions{})
		f.put("a/x", "1")
		f.settle()
		want("a/x=1@2", "a/x=1@2")
		testcheck.NoError(t, in.RemoveEventHandler(first))
		f.put("a/y", "1")
		f.settle()
		want("a/y=1@3")
		testcheck.NoError(t, in.RemoveEventHandler(second))
		f.put("a/z", "1")
		f.settle()
		want()
	})
}

// TestHandler_AddedDuringWrites_GetsSnapshotThenEvents: events during the initial objects follow
// them, from the revision of the snapshot on.
func TestHandler_AddedDuringWrites_GetsSnapshotThenEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1") // 2
		f.put("a/y", "1") // 3
		f.put("a/z", "1") // 4
		in := f.run(f.informer(0, nil))
		f.settle()
		r, next := blocking("late")
		reg := in.addHandler(t, r, cache.HandlerOptions{})
		f.delete("a/z")   // 5
		f.put("a/y", "2") // 6
		f.put("a/w", "1") // 7
		f.settle()
		checker := reg.HasSyncedChecker()
		if name := checker.Name(); !strings.HasPrefix(name, in.HasSyncedChecker().Name()) || !strings.Contains(name, "recorder") {
			t.Errorf("the checker's name is %q, without those of the informer and the handler", name)
		}
		for range 2 {
			next <- struct{}{}
			synctest.Wait()
		}
		if reg.HasSynced() || cache.IsDone(checker) {
			t.Error("synced during the last initial object")
		}
		next <- struct{}{}
		<-checker.Done()
		close(next)
		f.settle()
		r.want(t, "initial a/x=1@2", "initial a/y=1@3", "initial a/z=1@4", "delete a/z=1@5", "update a/y=1@3 a/y=2@6", "add a/w=1@7")
	})
}

func TestRemoveEventHandler_DuringCallback_ReturnsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.informer(0, nil)
		r, next := blocking("blocked")
		reg := in.addHandler(t, r, cache.HandlerOptions{}) // before the start
		f.run(in)
		f.put("a/x", "1")
		f.put("a/y", "1")
		f.settle()
		testcheck.NoError(t, in.RemoveEventHandler(reg))
		r.want(t) // the callback has not returned
		close(next)
		testcheck.NoError(t, shutDown(in, reg))
		r.want(t, "add a/x=1@2")
	})
}

// TestHandlers_AddedAndRemovedDuringWrites_SeeSequences: each has a sequence of calls that
// client-go may make, whatever happens meanwhile.
func TestHandlers_AddedAndRemovedDuringWrites_SeeSequences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.run(f.informer(0, nil))
		f.settle()
		var workers sync.WaitGroup
		for range 8 {
			workers.Go(func() {
				for range 50 {
					r := &recorder{name: "handler"}
					reg, err := in.AddEventHandler(r)
					if err == nil {
						err = shutDown(in, reg)
					}
					if err != nil {
						t.Error(err)
					}
					for _, wrong := range r.wrong {
						t.Error(wrong)
					}
				}
			})
		}
		for i := range 500 {
			if name := "a/" + string(rune('a'+i%7)); i%3 == 0 {
				f.delete(name)
			} else {
				f.put(name, "v")
			}
		}
		workers.Wait()
		f.settle()
	})
}

func TestHandler_WithLogger_LogsPanicsThere(t *testing.T) {
	crash := utilruntime.ReallyCrash
	utilruntime.ReallyCrash = false
	defer func() { utilruntime.ReallyCrash = crash }()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1")
		in := f.run(f.informer(0, nil))
		f.settle()
		var logged bytes.Buffer
		logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&logged)))
		in.addHandler(t, &recorder{during: func(string) { panic("broken") }}, cache.HandlerOptions{Logger: &logger})
		if !strings.Contains(logged.String(), "broken") {
			t.Errorf("logged %q", logged.String())
		}
	})
}
