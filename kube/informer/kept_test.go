package informer_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"
)

// keeping is a fixture whose informers keep objects as they were last decoded.
func keeping(t testing.TB) *fixture {
	f := newFixture(t, nil)
	f.keep = true
	return f
}

// TestKept_UndecodableAtStart_InformerHasNotSynced, as an informer of client-go whose list fails.
func TestKept_UndecodableAtStart_InformerHasNotSynced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := keeping(t)
		f.put("a/x", "!")
		f.put("a/y", "1")
		in := f.run(f.informer(0, nil))
		r, _ := in.add(t, "handler", cache.HandlerOptions{})
		time.Sleep(time.Minute)
		f.settle()
		if in.HasSynced() || len(in.GetStore().List()) != 0 {
			t.Errorf("synced: %t, with %v", in.HasSynced(), describeAll(in.GetStore().List()))
		}
		if got := in.reported(); len(got) == 0 {
			t.Error("the object that cannot be decoded was not reported")
		}
		f.readable.Store(true)
		time.Sleep(time.Minute)
		f.settle()
		if !in.HasSynced() {
			t.Error("not synced when all objects can be decoded")
		}
		r.want(t, "initial a/x=!@2", "initial a/y=1@3")
	})
}

// TestKept_UndecodableLater_StoreShowsLastObject: after a change that cannot be decoded, and after
// the key of an unchanged object was removed. An object that was never decoded is missing.
func TestKept_UndecodableLater_StoreShowsLastObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := keeping(t)
		f.readable.Store(true)
		f.put("a/unchanged", "!1")
		f.put("a/changed", "1")
		in := f.run(f.informer(0, cache.Indexers{"value": byValue}))
		<-in.HasSyncedChecker().Done()
		wantList(t, "List", describeAll(in.GetStore().List()), nil, "a/changed=1@3", "a/unchanged=!1@2")
		f.readable.Store(false)
		f.put("a/changed", "!2")
		f.put("a/new", "!3")
		f.settle()
		shows := func() {
			t.Helper()
			wantList(t, "List", describeAll(in.GetStore().List()), nil, "a/changed=1@3", "a/unchanged=!1@2")
			for value, name := range map[string]string{"1": "a/changed=1@3", "!1": "a/unchanged=!1@2"} {
				indexed, err := in.GetIndexer().ByIndex("value", value)
				wantList(t, "ByIndex", describeAll(indexed), err, name)
			}
			if obj, found, err := in.GetStore().GetByKey("a/changed"); !found || err != nil || describe(obj) != "a/changed=1@3" {
				t.Errorf("GetByKey: %v, %t, %v", obj, found, err)
			}
			if obj, found, err := in.GetStore().GetByKey("a/new"); found || err == nil {
				t.Errorf("GetByKey of an object that was never decoded: %v, %t, %v; want an error", obj, found, err)
			}
		}
		shows()
		f.etcd.Restore(1000, map[string]string{prefix + "a/unchanged": "!1", prefix + "a/changed": "!2", prefix + "a/new": "!3"})
		time.Sleep(time.Minute)
		f.settle()
		shows()
		f.readable.Store(true)
		time.Sleep(time.Minute)
		f.settle()
		wantList(t, "List", values(in.GetStore().List()), nil, "!2", "!3", "!1")
		f.delete("a/changed")
		f.settle()
		wantList(t, "List", values(in.GetStore().List()), nil, "!3", "!1")
		indexed, err := in.GetIndexer().ByIndex("value", "1")
		wantList(t, "ByIndex", describeAll(indexed), err)
	})
}

// TestKept_Resync_DecodesNoObject: the objects of a resync are those that are kept.
func TestKept_Resync_DecodesNoObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := keeping(t)
		for i := range 100 {
			f.put(fmt.Sprintf("a/%03d", i), "1")
		}
		in := f.run(f.informer(time.Minute, nil))
		r, reg := in.add(t, "handler", cache.HandlerOptions{})
		<-reg.HasSyncedChecker().Done()
		before := f.decoded.Load()
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if calls := len(r.take()); calls != 200 || f.decoded.Load() != before {
			t.Errorf("%d calls, %d objects were decoded, want 200 and 0", calls, f.decoded.Load()-before)
		}
	})
}

// TestEvents_ManyHandlers_DecodeOnce: handlers that wake together share the object of an event.
func TestEvents_ManyHandlers_DecodeOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.run(f.informer(0, nil))
		for i := range 20 {
			in.add(t, fmt.Sprint("handler ", i), cache.HandlerOptions{})
		}
		f.settle()
		before := f.decoded.Load()
		for i := range 50 {
			f.put("a/x", fmt.Sprint(i))
			f.settle()
		}
		if n := f.decoded.Load() - before; n != 50 {
			t.Errorf("50 events were decoded %d times", n)
		}
	})
}

// TestTransformError_ObjectIsSkipped: later events are delivered, as by client-go.
func TestTransformError_ObjectIsSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		in := f.informer(0, nil)
		if err := in.SetTransform(func(obj any) (any, error) {
			if obj.(*object).Labels["value"] == "bad" {
				return nil, errors.New("no")
			}
			return obj, nil
		}); err != nil {
			t.Fatal(err)
		}
		f.run(in)
		r, _ := in.add(t, "handler", cache.HandlerOptions{})
		f.settle()
		f.put("a/x", "bad")
		f.settle()
		f.put("a/y", "1")
		f.put("a/x", "2")
		f.settle()
		r.want(t, "add a/y=1@3", "add a/x=2@4")
		if got := in.reported(); len(got) != 1 || got[0] != "decode a/x: transform: no" {
			t.Errorf("reported %q, want the error once", got)
		}
	})
}

// values returns the values of objects.
func values(objs []any) (all []string) {
	for _, obj := range objs {
		all = append(all, obj.(*object).Labels["value"])
	}
	return all
}
