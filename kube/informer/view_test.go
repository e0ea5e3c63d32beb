package informer_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

// byValue is an index function: the value.
func byValue(obj any) ([]string, error) { return []string{obj.(*object).Labels["value"]}, nil }

// byLetters is an index function with several values: the letters of the value.
func byLetters(obj any) (letters []string, _ error) {
	for _, letter := range obj.(*object).Labels["value"] {
		letters = append(letters, string(letter))
	}
	return letters, nil
}

func memoryPut(name, value string) memory.Op { return memory.Op{Key: prefix + name, Value: value} }

func describeUpdate(rev int) string {
	return fmt.Sprintf("update a/x=v@%d a/x=v@%d", rev, rev+1)
}

func TestStore_BeforeSync_IsEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1")
		in := f.informer(0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc, "value": byValue})
		f.settle()
		store := in.GetIndexer()
		if got := store.List(); got == nil || len(got) != 0 {
			t.Errorf("List is %#v", got)
		}
		if got := store.ListKeys(); len(got) != 0 {
			t.Errorf("ListKeys is %v", got)
		}
		if _, ok, err := store.GetByKey("a/x"); ok || err != nil {
			t.Errorf("GetByKey: %v, %v", ok, err)
		}
		for index, value := range map[string]string{cache.NamespaceIndex: "a", "value": "1"} {
			objs, err := store.ByIndex(index, value)
			wantList(t, index, objs, err)
			keys, err := store.IndexKeys(index, value)
			wantList(t, index, keys, err)
			wantList(t, index, store.ListIndexFuncValues(index), nil)
		}
		f.run(in)
		f.settle()
		wantList(t, "List", describeAll(store.List()), nil, "a/x=1@2")
	})
}

func TestStore_IsAViewOfTheNewestVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		for _, name := range []string{"a/y", "a-b/x", "a/x", "b/x", "cluster"} {
			f.put(name, "v"+name[:1])
		}
		in := f.run(f.informer(0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc, "letters": byLetters}))
		f.settle()
		store := in.GetIndexer()
		wantList(t, "List", describeAll(store.List()), nil, "a-b/x=va@3", "a/x=va@4", "a/y=va@2", "b/x=vb@5", "cluster=vc@6")
		wantList(t, "ListKeys", store.ListKeys(), nil, "a-b/x", "a/x", "a/y", "b/x", "cluster")
		obj, ok, err := store.GetByKey("a/x")
		if !ok || err != nil || describe(obj) != "a/x=va@4" {
			t.Errorf("GetByKey: %v, %v, %v", obj, ok, err)
		}
		if obj, ok, err := store.Get(obj); !ok || err != nil || describe(obj) != "a/x=va@4" {
			t.Errorf("Get: %v, %v, %v", obj, ok, err)
		}
		for _, key := range []string{"", "a", "a/", "none/x", "a/x/y"} {
			if _, ok, err := store.GetByKey(key); ok || err != nil {
				t.Errorf("GetByKey(%q): %v, %v", key, ok, err)
			}
		}
		if _, _, err := store.Get("no object"); !errors.As(err, &cache.KeyError{}) {
			t.Errorf("Get: %v", err)
		}

		for namespace, want := range map[string][]string{"a": {"a/x=va@4", "a/y=va@2"}, "a-b": {"a-b/x=va@3"}, "": {"cluster=vc@6"}, "none": {}} {
			objs, err := store.ByIndex(cache.NamespaceIndex, namespace)
			wantList(t, "namespace "+namespace, describeAll(objs), err, want...)
			keys, err := store.IndexKeys(cache.NamespaceIndex, namespace)
			for i := range want {
				want[i] = want[i][:len(keys[i])]
			}
			wantList(t, "keys of namespace "+namespace, keys, err, want...)
		}
		objs, err := store.Index(cache.NamespaceIndex, obj)
		wantList(t, "Index", describeAll(objs), err, "a/x=va@4", "a/y=va@2")
		wantList(t, "values", store.ListIndexFuncValues(cache.NamespaceIndex), nil, "", "a", "a-b", "b")

		objs, err = store.ByIndex("letters", "b")
		wantList(t, "ByIndex", describeAll(objs), err, "b/x=vb@5")
		objs, err = store.Index("letters", &object{ObjectMeta: objectMeta("bc")})
		wantList(t, "Index of several values", describeAll(objs), err, "b/x=vb@5", "cluster=vc@6")
		wantList(t, "values", store.ListIndexFuncValues("letters"), nil, "a", "b", "c", "v")

		// The index of namespaces lists through client-go's helpers.
		n := 0
		if err := cache.ListAllByNamespace(store, "a", labels.Everything(), func(any) { n++ }); err != nil || n != 2 {
			t.Errorf("lister has %d objects, %v", n, err)
		}

		f.put("b/x", "c")
		f.delete("cluster")
		f.settle()
		objs, err = store.ByIndex("letters", "c")
		wantList(t, "ByIndex", describeAll(objs), err, "b/x=c@7")
		wantList(t, "values", store.ListIndexFuncValues("letters"), nil, "a", "c", "v")
		wantList(t, "values", store.ListIndexFuncValues(cache.NamespaceIndex), nil, "a", "a-b", "b")
		if got := in.LastSyncResourceVersion(); got != "8" {
			t.Errorf("resource version %s", got)
		}

		for what, err := range map[string]error{
			"Add": store.Add(obj), "Update": store.Update(obj), "Delete": store.Delete(obj), "Replace": store.Replace(nil, ""),
		} {
			if err == nil {
				t.Errorf("%s has no error", what)
			}
		}
	})
}

func TestIndexers_CanBeAddedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "xy")
		in := f.run(f.informer(0, nil))
		f.settle()
		store := in.GetIndexer()
		for what, err := range map[string]error{
			"ByIndex":   second(store.ByIndex("value", "")),
			"IndexKeys": second(store.IndexKeys("value", "")),
			"Index":     second(store.Index("value", &object{})),
			"namespace": second(store.ByIndex(cache.NamespaceIndex, "a")),
		} {
			if err == nil {
				t.Errorf("%s of an unknown index has no error", what)
			}
		}
		wantList(t, "values of an unknown index", store.ListIndexFuncValues("value"), nil)
		if err := in.AddIndexers(cache.Indexers{"value": byValue}); err != nil {
			t.Fatal(err)
		}
		objs, err := store.ByIndex("value", "xy")
		wantList(t, "value", describeAll(objs), err, "a/x=xy@2")
		if err := in.AddIndexers(cache.Indexers{"letters": byLetters, "value": byValue}); err == nil {
			t.Error("an index was replaced")
		}
		if err := in.AddIndexers(cache.Indexers{"letters": byLetters, cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}); err != nil {
			t.Fatal(err)
		}
		objs, err = store.ByIndex("letters", "y")
		wantList(t, "letters", describeAll(objs), err, "a/x=xy@2")
		objs, err = store.ByIndex(cache.NamespaceIndex, "a")
		wantList(t, "namespace", describeAll(objs), err, "a/x=xy@2")
		wantList(t, "indexers", slices.Sorted(maps.Keys(store.GetIndexers())), nil, "letters", cache.NamespaceIndex, "value")
	})
}

func TestIndexFunctionError_IsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.put("a/x", "1")
		f.put("a/y", "2")
		in := f.informer(0, cache.Indexers{"picky": func(obj any) ([]string, error) {
			if obj.(*object).Name == "x" {
				return nil, errors.New("no value")
			}
			return []string{"v"}, nil
		}})
		var keys []string
		// The handler may use the index.
		if err := in.Informer.SetWatchErrorHandler(func(_ *cache.Reflector, err error) {
			keys, _ = in.GetIndexer().IndexKeys("picky", "v")
			in.errs = append(in.errs, err.Error())
		}); err != nil {
			t.Fatal(err)
		}
		f.run(in)
		f.settle()
		objs, err := in.GetIndexer().ByIndex("picky", "v")
		wantList(t, "ByIndex", describeAll(objs), err, "a/y=2@3")
		wantList(t, "errors", in.reported(), nil, "values of a/x in index picky: no value")
		wantList(t, "keys", keys, nil, "a/y")
	})
}

func TestIndex_BehindTheWindow_ComparesAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(o *mirror.Options) { o.Window.MaxBytes = 1 })
		f.put("a/kept", "k")
		f.put("a/deleted", "d")
		f.put("a/changed", "c")
		in := f.run(f.informer(0, cache.Indexers{"value": byValue}))
		f.settle()
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "c", "d", "k")
		f.delete("a/deleted")
		f.put("a/changed", "C")
		for range 100 {
			f.put("a/other", "o")
		}
		f.settle()
		f.mirror.Compact(f.etcd.Revision())
		f.settle()
		wantList(t, "values", in.GetIndexer().ListIndexFuncValues("value"), nil, "C", "k", "o")
	})
}

func second[T any](_ T, err error) error { return err }
