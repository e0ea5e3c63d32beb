package informer_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/kube/informer"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// diverge makes the mirror lose the given writes, and relist because of a further one. Lists fail
// until the returned function is called.
func (f *fixture) diverge(writes func(), further func()) (relist func()) {
	f.etcd.FailLists(errors.New("no lists"))
	f.etcd.DropIf(func(driver.Change) bool { return true })
	writes()
	f.settle()
	f.etcd.DropIf(nil)
	further()
	f.settle()
	return func() {
		f.etcd.FailLists(nil)
		time.Sleep(5 * time.Minute) // longer than the pauses between lists
		f.settle()
	}
}

func TestRelist_AfterLostEvents_DeliversDifferences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/changed", "1") // 2
		f.put("a/deleted", "1") // 3
		f.put("a/kept", "1")    // 4
		in := f.run(f.informer(0, cache.Indexers{"value": byValue}))
		r, _ := in.add(t, "handler", cache.HandlerOptions{})
		f.settle()
		r.want(t, "initial a/changed=1@2", "initial a/deleted=1@3", "initial a/kept=1@4")
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "1")
		f.put("a/kept", "2") // 5, not in the index before the relist
		f.settle()
		r.want(t, "update a/kept=1@4 a/kept=2@5")

		relist := f.diverge(func() {
			f.put("a/changed", "2") // 6
			f.delete("a/deleted")   // 7
			f.put("a/new", "2")     // 8
		}, func() {
			f.put("a/changed", "3") // 9
		})
		if _, err := f.resource.Latest(); err == nil {
			t.Fatal("the resource has not diverged")
		}
		// Store, indexes and new handlers have the last version before.
		before := []string{"a/changed=1@2", "a/deleted=1@3", "a/kept=2@5"}
		for range 2 {
			wantList(t, "List", describeAll(in.GetStore().List()), nil, before...)
			objs, err := in.GetIndexer().ByIndex("value", "1")
			wantList(t, "index", describeAll(objs), err, before[:2]...)
			objs, err = in.GetIndexer().ByIndex("value", "2")
			wantList(t, "index", describeAll(objs), err, before[2])
		}
		late, reg := in.add(t, "late", cache.HandlerOptions{})
		synctest.Wait()
		if !reg.HasSynced() {
			t.Error("a handler does not sync during a relist")
		}
		late.want(t, "initial a/changed=1@2", "initial a/deleted=1@3", "initial a/kept=2@5")
		r.want(t)

		relist()
		for _, r := range []*recorder{r, late} {
			r.want(t, "update a/changed=1@2 a/changed=3@9", "add a/new=2@8", "gone a/deleted=1@3")
		}
		wantList(t, "List", describeAll(in.GetStore().List()), nil, "a/changed=3@9", "a/kept=2@5", "a/new=2@8")
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "2", "3")
		if errs := in.reported(); len(errs) != 2 || !strings.Contains(errs[0], "relisted") {
			t.Errorf("reported %q", errs)
		}
		f.delete("a/new") // 10
		f.settle()
		r.want(t, "delete a/new=2@10")
		late.want(t, "delete a/new=2@10")
	})
}

func TestRelist_AfterRestoreOfEtcd_DeliversDifferences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/kept", "1")    // 2
		f.put("a/changed", "1") // 3
		f.put("a/gone", "1")    // 4
		f.put("a/gone", "2")    // 5
		in := f.run(f.informer(0, cache.Indexers{"value": byValue}))
		r, _ := in.add(t, "handler", cache.HandlerOptions{})
		f.settle()
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "1", "2")
		r.take()

		// All keys have the revision of the restored store, which that of a/changed was before too.
		f.etcd.Restore(3, map[string]string{prefix + "a/changed": "other", prefix + "a/kept": "1"})
		time.Sleep(5 * time.Minute)
		f.settle()
		r.want(t, "update a/changed=1@3 a/changed=other@3", "update a/kept=1@2 a/kept=1@3", "gone a/gone=2@5")
		wantList(t, "List", describeAll(in.GetStore().List()), nil, "a/changed=other@3", "a/kept=1@3")
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "1", "other")
		f.put("a/kept", "2") // 4
		f.settle()
		r.want(t, "update a/kept=1@3 a/kept=2@4")
	})
}

func TestSlowHandler_BehindTheWindow_GetsDifferences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(o *mirror.Options) { o.Window.MaxBytes = 1 << 10 })
		f.put("a/deleted", "1") // 2
		f.put("a/kept", "1")    // 3
		in := f.run(f.informer(0, nil))
		slow, next := blocking("slow")
		in.addHandler(t, slow, cache.HandlerOptions{})
		f.settle()
		next <- struct{}{}
		next <- struct{}{}
		synctest.Wait()
		f.put("a/x", "1") // 4: the handler is blocked in it, and has read one of the next
		f.put("a/y", "1") // 5
		f.settle()
		f.delete("a/deleted") // 6
		for range 100 {
			f.put("a/x", "2") // to 106
		}
		f.delete("a/y") // 107
		f.settle()
		f.etcd.Compact(f.etcd.Revision())
		f.mirror.Compact(f.etcd.Revision())
		f.settle()
		if errs := in.reported(); len(errs) > 0 {
			t.Errorf("reported %q", errs)
		}
		slow.want(t, "initial a/deleted=1@2", "initial a/kept=1@3")
		close(next)
		synctest.Wait()
		calls := slow.take()
		if errs := in.reported(); len(errs) != 1 {
			t.Errorf("reported %q", errs)
		}
		if n := len(calls); n < 3 || n > 10 || calls[0] != "add a/x=1@4" || !slices.Contains(calls, "gone a/deleted=1@2") ||
			slow.state["a/x"] != "2@106" || len(slow.state) != 2 {
			t.Errorf("slow handler has the calls %q, state %v", calls, slow.state)
		}
		slow.want(t)
	})
}

func TestUndecodableObject_HandlerWaitsUntilDecodable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "!")
		f.put("a/y", "1")
		in := f.run(f.informer(0, cache.Indexers{"value": byValue}))
		r, reg := in.add(t, "handler", cache.HandlerOptions{})
		f.settle()
		f.put("a/y", "2")
		f.settle()
		r.want(t)
		if reg.HasSynced() {
			t.Error("handler has synced without an object")
		}
		if !in.HasSynced() {
			t.Error("informer has not synced")
		}
		reports := len(in.reported())
		if reports == 0 || in.reported()[0] != "decode a/x: cannot be decoded" {
			t.Errorf("reported %q", in.reported())
		}
		wantList(t, "List", describeAll(in.GetStore().List()), nil, "a/y=2@4")
		if got := len(in.reported()); got != reports+1 {
			t.Errorf("List reported %d errors", got-reports)
		}
		if _, _, err := in.GetStore().GetByKey("a/x"); err == nil {
			t.Error("GetByKey has no error")
		}
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "2")
		f.readable.Store(true)
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "!", "2")
		time.Sleep(30 * time.Second)
		synctest.Wait()
		r.want(t, "initial a/x=!@2", "initial a/y=1@3", "update a/y=1@3 a/y=2@4")
		if !reg.HasSynced() {
			t.Error("handler has not synced")
		}
	})
}

func TestUndecodableObject_Replaced_IsSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/initial", "!")      // 2
		f.put("a/initial-gone", "!") // 3
		in := f.run(f.informer(0, nil))
		r, _ := in.add(t, "handler", cache.HandlerOptions{})
		f.settle()
		f.put("a/initial", "1")    // 4
		f.delete("a/initial-gone") // 5
		time.Sleep(30 * time.Second)
		f.settle()
		r.want(t, "add a/initial=1@4")

		f.put("a/added", "!") // 6
		f.put("a/gone", "!")  // 7
		f.settle()
		f.put("a/added", "1") // 8
		f.delete("a/gone")    // 9
		time.Sleep(time.Minute)
		f.settle()
		r.want(t, "add a/added=1@8")

		f.put("a/added", "!")   // 10
		f.put("a/initial", "!") // 11
		f.settle()
		f.put("a/added", "2") // 12
		f.delete("a/initial") // 13
		time.Sleep(time.Minute)
		f.settle()
		r.want(t, "update a/added=1@8 a/added=2@12", "gone a/initial=1@4")
	})
}

func TestUndecodableObject_Stop_EndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "!")
		in := f.run(f.informer(0, nil))
		r, reg := in.add(t, "handler", cache.HandlerOptions{})
		f.settle()
		in.stop()
		r.want(t)
		if reg.HasSynced() {
			t.Error("handler has synced")
		}
	})
}

func TestUndecodableObject_DeletedDuringRelist_LeavesTheIndex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "!")
		f.put("a/y", "1")
		in := f.run(f.informer(0, cache.Indexers{"value": byValue}))
		f.settle()
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "1")
		f.diverge(func() {
			f.delete("a/x")
			f.put("a/y", "2")
		}, func() { f.put("a/y", "3") })()
		f.readable.Store(true)
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "3")
	})
}

func TestResync_DuringRelist_HasTheObjectsOfTheHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1") // 2
		f.put("a/y", "1") // 3
		in := f.run(f.informer(time.Hour, nil))
		r, next := blocking("handler")
		in.addHandler(t, r, cache.HandlerOptions{})
		f.settle()
		next <- struct{}{}
		next <- struct{}{}
		synctest.Wait()
		r.take()
		// The handler gets these, and finds that the resource is being relisted afterwards.
		f.put("a/x", "2") // 4
		f.delete("a/y")   // 5
		f.settle()
		relist := f.diverge(func() { f.put("a/z", "1") }, func() { f.put("a/z", "2") })
		close(next)
		synctest.Wait()
		r.want(t, "update a/x=1@2 a/x=2@4", "delete a/y=1@5")
		relist()
		r.want(t, "add a/z=2@7")
		time.Sleep(time.Hour)
		synctest.Wait()
		r.want(t, "update a/x=2@4 a/x=2@4", "update a/z=2@7 a/z=2@7")
	})
}

// A feed that was down for longer than etcd keeps its history relists, and restores the history in
// between for cursors. A handler waits for it; the store does not.
func TestFeedGap_HandlerThatWaitsForHistoryLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1") // 2
		f.put("a/y", "1") // 3
		in := f.run(f.informer(10*time.Second, cache.Indexers{"value": byValue}))
		r, _ := in.add(t, "handler", cache.HandlerOptions{})
		f.settle()
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "1")
		r.take()
		f.etcd.Stall(true)
		f.put("a/x", "2") // 4
		f.delete("a/y")   // 5
		f.put("a/z", "1") // 6
		f.etcd.Compact(f.etcd.Revision())
		f.put("a/x", "3") // 7
		f.etcd.Break()
		f.etcd.Stall(false)
		time.Sleep(5 * time.Second)
		f.settle()
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "1", "3")
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, call := range r.take() {
			if strings.HasPrefix(call, "delete") {
				t.Errorf("%s, although the deletion was compacted", call)
			}
		}
		r.want(t)
		if r.state["a/x"] != "3@7" || r.state["a/z"] != "1@6" || len(r.state) != 2 {
			t.Errorf("handler has %v", r.state)
		}
	})
}

var _ cache.SharedIndexInformer = (*informer.Informer)(nil)
