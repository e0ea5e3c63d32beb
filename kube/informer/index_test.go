package informer_test

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"weak"

	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/mirror"
)

// values returns weak pointers to the memory of the values of the resource.
func (f *fixture) values() (values []weak.Pointer[byte]) {
	snap, err := f.resource.Latest()
	if err != nil {
		f.t.Fatal(err)
	}
	for e := range snap.All("", "") {
		values = append(values, weak.Make(&e.Value()[0]))
	}
	return values
}

func TestIndex_Idle_KeepsNoSupersededEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(o *mirror.Options) { o.Window.MaxBytes = 1 })
		const objects = 20
		write := func(value string) {
			for i := range objects {
				f.put(fmt.Sprintf("a/n%d", i), value)
			}
			f.settle()
		}
		write("1")
		f.put("a/undecodable", "!")
		f.put("a/deleted", "1")
		in := f.run(f.informer(0, cache.Indexers{"value": byValue, "letters": byLetters}))
		f.settle()
		for _, index := range []string{"value", "letters"} {
			keys, err := in.GetIndexer().IndexKeys(index, "1")
			if err != nil || len(keys) != objects+1 {
				t.Fatalf("index %s has %d keys, %v", index, len(keys), err)
			}
		}
		superseded := f.values()
		write("2")
		f.put("a/undecodable", "3")
		f.delete("a/deleted")
		write("2") // so that the window has no event of the first values
		inMemory := func() (n int) {
			for _, v := range superseded {
				if v.Value() != nil {
					n++
				}
			}
			return n
		}
		// A stack that is scanned conservatively, or a sync.Pool, may keep some for a cycle.
		for range 20 {
			if inMemory() > 0 {
				runtime.GC()
				synctest.Wait()
			}
		}
		if n := inMemory(); n > 0 {
			t.Errorf("%d of %d values are in memory", n, len(superseded))
		}
		for _, index := range []string{"value", "letters"} {
			keys, err := in.GetIndexer().IndexKeys(index, "2")
			if err != nil || len(keys) != objects {
				t.Errorf("index %s has %d keys, %v", index, len(keys), err)
			}
			wantList(t, index, in.GetIndexer().ListIndexFuncValues(index), nil, "2", "3")
		}
	})
}

func TestIndex_BeingBuilt_DelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "v")
		building, proceed := make(chan struct{}), make(chan struct{})
		slow := func(obj any) ([]string, error) {
			close(building)
			<-proceed
			return byValue(obj)
		}
		in := f.run(f.informer(0, cache.Indexers{"slow": slow, "built": byValue}))
		f.settle()
		store := in.GetIndexer()
		if _, err := store.ByIndex("built", "v"); err != nil {
			t.Fatal(err)
		}
		got := make(chan []string)
		go func() {
			objs, err := store.ByIndex("slow", "v")
			if err != nil {
				t.Error(err)
			}
			got <- describeAll(objs)
		}()
		<-building
		objs, err := store.ByIndex("built", "v")
		wantList(t, "built before", describeAll(objs), err, "a/x=v@2")
		if err := in.AddIndexers(cache.Indexers{"letters": byLetters}); err != nil {
			t.Fatal(err)
		}
		objs, err = store.ByIndex("letters", "v")
		wantList(t, "built meanwhile", describeAll(objs), err, "a/x=v@2")
		wantList(t, "values of an index", store.ListIndexFuncValues("built"), nil, "v")
		close(proceed)
		wantList(t, "slow", <-got, nil, "a/x=v@2")
	})
}

func TestIndexers_Added_BuildNoOtherAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "v")
		calls := 0
		in := f.run(f.informer(0, cache.Indexers{"counted": func(obj any) ([]string, error) { calls++; return byValue(obj) }}))
		f.settle()
		store := in.GetIndexer()
		for i := range 3 {
			if err := in.AddIndexers(cache.Indexers{fmt.Sprint(i): byLetters}); err != nil {
				t.Fatal(err)
			}
			objs, err := store.ByIndex("counted", "v")
			wantList(t, "counted", describeAll(objs), err, "a/x=v@2")
		}
		if calls != 1 {
			t.Errorf("%d calls of the index function, want 1", calls)
		}
	})
}

// fragile is an index function that can be made to panic.
type fragile bool

func (f *fragile) byValue(obj any) ([]string, error) {
	if *f {
		panic("broken")
	}
	return byValue(obj)
}

// panicOnce fails the test unless use panics while the function does.
func (f *fragile) panicOnce(t *testing.T, use func()) {
	t.Helper()
	*f = true
	defer func() {
		*f = false
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	use()
}

// TestIndex_PanicOfFunction_LosesNoChange: the panic reaches the reader, as in client-go, and the
// next one has the changes.
func TestIndex_PanicOfFunction_LosesNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1")
		var broken fragile
		in := f.run(f.informer(0, cache.Indexers{"value": broken.byValue}))
		f.settle()
		store := in.GetIndexer()
		wantList(t, "values", store.ListIndexFuncValues("value"), nil, "1")
		f.put("a/x", "2")
		f.put("a/y", "3")
		f.settle()
		broken.panicOnce(t, func() { store.ListIndexFuncValues("value") })
		wantList(t, "values", store.ListIndexFuncValues("value"), nil, "2", "3")
	})
}

// TestIndex_PanicForObjectOnceUndecodable_LosesNoChange: the entry is the one of before.
func TestIndex_PanicForObjectOnceUndecodable_LosesNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.keep = true
		f.put("a/x", "1")
		var broken fragile
		in := f.run(f.informer(0, cache.Indexers{"value": broken.byValue}))
		f.settle()
		store := in.GetIndexer()
		f.put("a/x", "!2")
		f.settle()
		wantList(t, "values while it cannot be decoded", store.ListIndexFuncValues("value"), nil, "1")
		f.readable.Store(true)
		broken.panicOnce(t, func() { store.ListIndexFuncValues("value") })
		wantList(t, "values", store.ListIndexFuncValues("value"), nil, "!2")
	})
}

// TestIndex_ConcurrentWritesAndReaders_ObjectsHaveTheValue: what a reader finds has the value that
// it asked for, and keys that swap values in one transaction are found once.
func TestIndex_ConcurrentWritesAndReaders_ObjectsHaveTheValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(o *mirror.Options) { o.Window.MaxBytes = 4 << 10 })
		f.etcd.Txn(memoryPut("a/x", "1"), memoryPut("a/y", "2"))
		in := f.run(f.informer(0, cache.Indexers{"value": byValue, "letters": byLetters}))
		f.settle()
		store := in.GetIndexer()
		var readers sync.WaitGroup
		written := make(chan struct{})
		for _, index := range []string{"value", "value", "letters", "letters"} {
			readers.Go(func() {
				for done := false; !done; {
					select {
					case <-written:
						done = true
					default:
					}
					for _, value := range []string{"1", "2"} {
						objs, err := store.ByIndex(index, value)
						if err != nil || len(objs) != 1 || objs[0].(*object).Labels["value"] != value {
							t.Errorf("%s %s: %v, %v", index, value, describeAll(objs), err)
						}
					}
					if got := store.ListIndexFuncValues(index); !slices.Equal(got, []string{"1", "2"}) {
						t.Errorf("values of %s: %v", index, got)
					}
				}
			})
		}
		for i := range 500 {
			f.etcd.Txn(memoryPut("a/x", fmt.Sprint(2-i%2)), memoryPut("a/y", fmt.Sprint(1+i%2)))
			if i%100 == 0 {
				if err := in.AddIndexers(cache.Indexers{fmt.Sprint(i): byLetters}); err != nil {
					t.Error(err)
				}
				runtime.GC()
			}
		}
		close(written)
		readers.Wait()
	})
}
