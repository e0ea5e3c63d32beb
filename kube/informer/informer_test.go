package informer_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/informer"
)

func TestHandler_GetsInitialObjectsThenEventsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("b/y", "1") // 2
		f.put("a/x", "1") // 3
		in := f.informer(0, nil)
		first, reg := in.add(t, "first", cache.HandlerOptions{})
		synctest.Wait()
		if in.HasSynced() || reg.HasSynced() || in.LastSyncResourceVersion() != "" {
			t.Error("synced before the start")
		}
		f.run(in)
		f.settle()
		if !in.HasSynced() || !reg.HasSynced() {
			t.Error("not synced")
		}
		first.want(t, "initial a/x=1@3", "initial b/y=1@2")

		f.put("a/x", "2")  // 4
		f.put("a/z", "1")  // 5
		f.delete("b/y")    // 6
		f.put("b/y", "2")  // 7
		f.delete("a/none") // no revision
		f.settle()
		events := []string{"update a/x=1@3 a/x=2@4", "add a/z=1@5", "delete b/y=1@6", "add b/y=2@7"}
		first.want(t, events...)
		if got := in.LastSyncResourceVersion(); got != "7" {
			t.Errorf("resource version is %s", got)
		}

		late, reg := in.add(t, "late", cache.HandlerOptions{})
		synctest.Wait()
		if !reg.HasSynced() {
			t.Error("late handler has not synced")
		}
		late.want(t, "initial a/x=2@4", "initial a/z=1@5", "initial b/y=2@7")
		f.put("a/x", "3") // 8
		f.settle()
		for _, r := range []*recorder{first, late} {
			r.want(t, "update a/x=2@4 a/x=3@8")
		}
	})
}

func TestHandler_InTransaction_SeesAllKeysInStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.run(f.informer(0, cache.Indexers{"value": byValue}))
		r := &recorder{name: "reader"}
		revision := 0
		r.during = func(call string) {
			if _, ok, err := in.GetStore().GetByKey("b/last"); !ok || err != nil {
				t.Errorf("%s: the last key is not in the store (%v)", call, err)
			}
			keys, err := in.GetIndexer().IndexKeys("value", "v")
			wantList(t, call, keys, err, "a/first", "b/last")
			revision++
		}
		in.addHandler(t, r, cache.HandlerOptions{})
		f.settle()
		for range 3 {
			f.etcd.Txn(memoryPut("a/first", "v"), memoryPut("b/last", "v"))
			f.settle()
		}
		if revision != 6 {
			t.Errorf("%d calls", revision)
		}
	})
}

func TestRemovedHandler_IsNotCalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.informer(0, nil)
		early, earlyReg := in.add(t, "early", cache.HandlerOptions{})
		testcheck.NoError(t, in.RemoveEventHandler(earlyReg))
		testcheck.NoError(t, shutDown(in, earlyReg))
		f.run(in)
		kept, _ := in.add(t, "kept", cache.HandlerOptions{})
		removed, reg := in.add(t, "removed", cache.HandlerOptions{})
		other := f.run(f.informer(0, nil))
		f.put("a/x", "1")
		f.settle()
		if err := other.RemoveEventHandler(reg); err != nil { // of another informer: no effect
			t.Fatal(err)
		}
		f.put("a/x", "2")
		f.settle()
		testcheck.NoError(t, in.RemoveEventHandler(reg))
		if err := in.RemoveEventHandler(reg); err != nil {
			t.Errorf("removed twice: %v", err)
		}
		if err := in.RemoveEventHandler(nil); err == nil {
			t.Error("no error for a registration of another type")
		}
		f.delete("a/x")
		f.settle()
		early.want(t)
		removed.want(t, "add a/x=1@2", "update a/x=1@2 a/x=2@3")
		kept.want(t, "add a/x=1@2", "update a/x=1@2 a/x=2@3", "delete a/x=2@4")
	})
}

// blocking returns a recorder whose calls wait until one value is received for each.
func blocking(name string) (r *recorder, next chan struct{}) {
	next = make(chan struct{})
	return &recorder{name: name, during: func(string) { <-next }}, next
}

// shutDown is cache.ShutDownEventHandler, which client-go v0.36 does not have.
func shutDown(in *running, reg cache.ResourceEventHandlerRegistration) error {
	if err := in.RemoveEventHandler(reg); err != nil {
		return err
	}
	<-reg.(interface{ ShutdownChan() <-chan struct{} }).ShutdownChan()
	return nil
}

func TestShutDownEventHandler_WaitsForRunningCallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.run(f.informer(0, nil))
		r, next := blocking("blocked")
		reg := in.addHandler(t, r, cache.HandlerOptions{})
		f.put("a/x", "1")
		f.put("a/x", "2")
		f.settle()
		var down bool
		go func() {
			if err := shutDown(in, reg); err != nil {
				t.Error(err)
			}
			down = true
		}()
		synctest.Wait()
		if down {
			t.Error("returned during a callback")
		}
		close(next)
		synctest.Wait()
		if !down {
			t.Error("did not return after the callback")
		}
		r.want(t, "add a/x=1@2")
	})
}

func TestHandler_Removes_Itself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.run(f.informer(0, nil))
		f.settle()
		r := &recorder{name: "one"}
		var reg cache.ResourceEventHandlerRegistration
		r.during = func(string) {
			if err := in.RemoveEventHandler(reg); err != nil {
				t.Error(err)
			}
		}
		reg = in.addHandler(t, r, cache.HandlerOptions{})
		synctest.Wait()
		f.put("a/x", "1")
		f.put("a/x", "2")
		f.settle()
		r.want(t, "add a/x=1@2")
	})
}

func TestPanickingHandler_SkipsTheEventAndPauses(t *testing.T) {
	crash, handlers := utilruntime.ReallyCrash, utilruntime.PanicHandlers
	utilruntime.ReallyCrash, utilruntime.PanicHandlers = false, nil
	defer func() { utilruntime.ReallyCrash, utilruntime.PanicHandlers = crash, handlers }()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1")
		f.put("a/y", "1")
		in := f.run(f.informer(0, nil))
		r := &recorder{name: "panicking", during: func(call string) {
			if strings.Contains(call, "a/x=1") || strings.Contains(call, "a/y=2") {
				panic(call)
			}
		}}
		other, _ := in.add(t, "other", cache.HandlerOptions{})
		began := time.Now()
		reg := in.addHandler(t, r, cache.HandlerOptions{})
		f.settle()
		r.want(t)
		other.want(t, "initial a/x=1@2", "initial a/y=1@3")
		<-reg.HasSyncedChecker().Done()
		if took := time.Since(began); took != time.Second {
			t.Errorf("the call after a panic came after %v", took)
		}
		f.put("a/y", "2")
		f.put("a/z", "1")
		f.settle()
		time.Sleep(999 * time.Millisecond)
		synctest.Wait()
		if got := r.take(); !slices.Equal(got, []string{"initial a/y=1@3"}) {
			t.Errorf("calls %v", got)
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		r.want(t, "add a/z=1@5")
	})
}

func TestSlowHandler_DelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.run(f.informer(0, nil))
		slow, next := blocking("slow")
		in.addHandler(t, slow, cache.HandlerOptions{})
		quick, _ := in.add(t, "quick", cache.HandlerOptions{})
		var want []string
		f.put("a/x", "v")
		for i := range 300 { // more than it takes at once
			f.put("a/x", "v")
			want = append(want, describeUpdate(i+2))
		}
		f.settle()
		want = append([]string{"add a/x=v@2"}, want...)
		quick.want(t, want...)
		slow.want(t)
		close(next)
		synctest.Wait()
		slow.want(t, want...)
	})
}

func TestResync_HasPeriodsOfClientGo(t *testing.T) {
	for _, test := range []struct {
		name      string
		informer  time.Duration
		requested []time.Duration // before the start
		late      []time.Duration // after it
		resyncs   []int           // in 60 s
	}{
		{name: "none of the informer", informer: 0, requested: []time.Duration{0, time.Second}, late: []time.Duration{time.Second}, resyncs: []int{0, 0, 0}},
		{name: "the informer's", informer: 10 * time.Second, requested: []time.Duration{0, 10 * time.Second, 30 * time.Second}, late: []time.Duration{20 * time.Second}, resyncs: []int{0, 6, 2, 3}},
		{name: "shorter than the informer's", informer: 30 * time.Second, requested: []time.Duration{30 * time.Second, 5 * time.Second}, resyncs: []int{2, 12}},
		{name: "shorter, late", informer: 30 * time.Second, requested: []time.Duration{30 * time.Second}, late: []time.Duration{5 * time.Second}, resyncs: []int{2, 2}},
		{name: "below the minimum", informer: 30 * time.Second, requested: []time.Duration{time.Millisecond}, late: []time.Duration{time.Millisecond}, resyncs: []int{60, 60}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				f.put("a/x", "1")
				in := f.informer(test.informer, nil)
				var all []*recorder
				add := func(periods []time.Duration) {
					for _, period := range periods {
						r, _ := in.add(t, period.String(), cache.HandlerOptions{ResyncPeriod: &period})
						all = append(all, r)
					}
				}
				add(test.requested)
				f.run(in)
				f.settle()
				add(test.late)
				time.Sleep(time.Minute + time.Millisecond)
				synctest.Wait()
				for i, r := range all {
					calls := r.take()
					if len(calls) != 1+test.resyncs[i] {
						t.Errorf("handler %d (%s) has %d resyncs, want %d", i, r.name, len(calls)-1, test.resyncs[i])
					}
					for _, call := range calls[1:] {
						if call != "update a/x=1@2 a/x=1@2" {
							t.Errorf("resync is %s", call)
						}
					}
				}
			})
		})
	}
}

func TestResync_WithoutPeriodOfHandler_HasThatOfInformer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1")
		in := f.run(f.informer(10*time.Second, nil))
		r, _ := in.add(t, "handler", cache.HandlerOptions{})
		f.settle()
		time.Sleep(10*time.Second + time.Millisecond)
		synctest.Wait()
		r.want(t, "initial a/x=1@2", "update a/x=1@2 a/x=1@2")
	})
}

func TestTransform_AppliesToStoreAndHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.informer(0, nil)
		if err := in.SetTransform(func(obj any) (any, error) {
			obj.(*object).Labels["value"] += "+"
			return obj, nil
		}); err != nil {
			t.Fatal(err)
		}
		f.run(in)
		r, _ := in.add(t, "handler", cache.HandlerOptions{})
		f.put("a/x", "1")
		f.settle()
		wantList(t, "List", describeAll(in.GetStore().List()), nil, "a/x=1+@2")
		f.put("a/x", "2")
		f.delete("a/x")
		f.settle()
		r.want(t, "add a/x=1+@2", "update a/x=1+@2 a/x=2+@3", "delete a/x=2+@4")
		if in.SetTransform(nil) == nil || in.SetWatchErrorHandler(nil) == nil {
			t.Error("settings are accepted after the start")
		}
	})
}

func TestStop_EndsHandlersAndRefusesNewOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // fails if a goroutine is left
		f := newFixture(t, nil)
		f.put("a/x", "1")
		in := f.run(f.informer(time.Second, cache.Indexers{"value": byValue}))
		blocked, next := blocking("blocked")
		reg := in.addHandler(t, blocked, cache.HandlerOptions{})
		f.settle()
		stopped := make(chan struct{})
		go func() {
			in.stop()
			close(stopped)
		}()
		synctest.Wait()
		select {
		case <-stopped:
			t.Error("stopped during a callback")
		default:
		}
		if !in.IsStopped() {
			t.Error("does not report that it is stopped")
		}
		close(next)
		<-stopped
		blocked.want(t, "initial a/x=1@2")
		if reg.HasSynced() {
			t.Error("a handler that was stopped has synced")
		}
		if err := shutDown(in, reg); err != nil {
			t.Error(err)
		}
		_, err := in.AddEventHandler(&recorder{})
		if err == nil || !strings.HasSuffix(err.Error(), "was not added to shared informer because it has stopped already") {
			t.Errorf("handler was added after the stop: %v", err)
		}
		if in.AddIndexers(cache.Indexers{"late": byValue}) == nil {
			t.Error("indexers were added after the stop")
		}
		in.RunWithContext(context.Background()) // returns, because it runs once
		wantList(t, "List after the stop", describeAll(in.GetStore().List()), nil, "a/x=1@2")
		objs, err := in.GetIndexer().ByIndex("value", "1")
		wantList(t, "ByIndex after the stop", describeAll(objs), err, "a/x=1@2")
	})
}

func TestStop_BeforeStorageOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.informer(0, nil)
		in.Informer = informer.New(&object{}, func(ctx context.Context, _ cache.TransformFunc) (informer.Source, error) {
			<-ctx.Done()
			return informer.Source{}, ctx.Err()
		}, 0, nil)
		f.run(in)
		r, reg := in.add(t, "handler", cache.HandlerOptions{})
		synctest.Wait()
		in.stop()
		if in.HasSynced() || reg.HasSynced() {
			t.Error("synced without storage")
		}
		r.want(t)
	})
}

func TestOpenerError_IsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.informer(0, nil)
		in.Informer = informer.New(&object{}, func(context.Context, cache.TransformFunc) (informer.Source, error) {
			return informer.Source{}, errors.New("no storage")
		}, 0, nil)
		reported := make(chan error, 1)
		if err := in.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) { reported <- err }); err != nil {
			t.Fatal(err)
		}
		f.run(in)
		if err := <-reported; err.Error() != "no storage" {
			t.Errorf("reported %v", err)
		}
	})
}

func TestMirrorClosed_InformerRunsUntilStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1")
		in := f.run(f.informer(0, nil))
		r, _ := in.add(t, "handler", cache.HandlerOptions{})
		f.settle()
		f.mirror.Close()
		time.Sleep(time.Hour)
		r.want(t, "initial a/x=1@2")
		late, reg := in.add(t, "late", cache.HandlerOptions{})
		synctest.Wait()
		late.want(t, "initial a/x=1@2")
		if !reg.HasSynced() {
			t.Error("late handler has not synced")
		}
		wantList(t, "List", describeAll(in.GetStore().List()), nil, "a/x=1@2")
	})
}
