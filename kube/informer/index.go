package informer

import (
	"context"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"

	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/mirror"
)

// indexes are the indexes of a view. There is no goroutine that keeps them: each use first reads
// the events since the last one, so an index is as new as the published revision. The index of
// namespaces is the order of keys and is not kept.
type indexes struct {
	view *view
	// indexers is replaced when some are added.
	indexers atomic.Pointer[cache.Indexers]

	mu      sync.Mutex // guards the fields below; held while objects are decoded
	cursor  *mirror.Cursor
	entries map[string]*indexed       // by key of the store
	having  map[string]map[string]set // by index and value
	failed  map[string]*mirror.Entry  // could not be decoded; tried again at each use
	errs    []error                   // to report when mu is unlocked
}

// set is the entries of objects, by key of the store.
type set map[string]*mirror.Entry

// indexed is an object as the indexes have it.
type indexed struct {
	entry  *mirror.Entry
	values map[string][]string // by index
}

func (x *indexes) init(v *view, indexers cache.Indexers) {
	x.view = v
	indexers = maps.Clone(indexers)
	x.indexers.Store(&indexers)
}

// isNamespace reports whether the index is client-go's index of namespaces.
func (x *indexes) isNamespace(name string) bool {
	f, ok := (*x.indexers.Load())[name]
	return ok && reflect.ValueOf(f).Pointer() == reflect.ValueOf(cache.MetaNamespaceIndexFunc).Pointer()
}

// known returns an error if there is no index with the name.
func (x *indexes) known(name string) error {
	if (*x.indexers.Load())[name] == nil {
		return fmt.Errorf("index with name %s does not exist", name)
	}
	return nil
}

func (x *indexes) all() cache.Indexers { return maps.Clone(*x.indexers.Load()) }

// add adds indexes. The objects get their values at the next use.
func (x *indexes) add(indexers cache.Indexers) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	merged := x.all()
	for name, f := range indexers {
		if merged[name] != nil {
			return fmt.Errorf("indexer conflict: there is an index with name %s", name)
		}
		if merged == nil {
			merged = cache.Indexers{}
		}
		merged[name] = f
	}
	x.indexers.Store(&merged)
	x.cursor, x.entries, x.having, x.failed = nil, nil, nil, nil
	return nil
}

// valuesOf returns the values of an object in an index.
func (x *indexes) valuesOf(name string, obj any) ([]string, error) {
	if err := x.known(name); err != nil {
		return nil, err
	}
	return (*x.indexers.Load())[name](obj)
}

// find returns the entries of the objects that have one of the values, in no order.
func (x *indexes) find(name string, values ...string) (entries []*mirror.Entry) {
	x.use(func() {
		found := set{}
		if len(values) == 1 {
			found = x.having[name][values[0]]
		} else {
			for _, value := range values {
				maps.Copy(found, x.having[name][value])
			}
		}
		entries = slices.AppendSeq(make([]*mirror.Entry, 0, len(found)), maps.Values(found))
	})
	return entries
}

// keys returns the keys of the objects that have the value, in no order.
func (x *indexes) keys(name, value string) []string {
	entries := x.find(name, value)
	keys := make([]string, len(entries))
	for i, e := range entries {
		keys[i] = x.view.keyOf(e.Key())
	}
	return keys
}

// objects returns the objects with one of the values, in no order.
func (x *indexes) objects(name string, values ...string) ([]any, error) {
	if err := x.known(name); err != nil {
		return nil, err
	}
	entries := x.find(name, values...)
	if len(entries) == 0 {
		return []any{}, nil // the informer may not have synced
	}
	return x.view.objects(make([]any, 0, len(entries)), slices.Values(entries)), nil
}

// values returns the values in an index, sorted.
func (x *indexes) values(name string) (values []string) {
	x.use(func() { values = slices.Sorted(maps.Keys(x.having[name])) })
	return values
}

// use calls f with mu locked and the indexes up to date, then reports errors.
func (x *indexes) use(f func()) {
	for _, err := range func() []error {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.catchUp()
		f()
		errs := x.errs
		x.errs = nil
		return errs
	}() {
		x.view.report(context.Background(), err)
	}
}

// catchUp applies the events since the last call. The first call, and one after a relist, compares
// all objects with the version that the store shows. mu is held.
func (x *indexes) catchUp() {
	snap, ok := x.view.snapshot()
	if !ok {
		return
	}
	for key, e := range maps.Clone(x.failed) {
		x.set(key, e)
	}
	if x.cursor != nil {
		events, err := x.cursor.Next(nil, math.MaxInt)
		for _, ev := range events {
			x.set(x.view.keyOf(ev.Key()), ev.Entry)
		}
		// While history is restored the cursor waits below snap.
		if err == nil && x.cursor.Position() >= snap.Rev {
			return
		}
	}
	x.failed = nil
	gone := maps.Clone(x.entries)
	for e := range snap.All("", "") {
		key := x.view.keyOf(e.Key())
		delete(gone, key)
		if was := x.entries[key]; was == nil || was.entry != e {
			x.set(key, e)
		}
	}
	for key := range gone {
		x.set(key, nil)
	}
	x.cursor = snap.Cursor("", "")
}

// set makes e the entry with the key, nil if it was deleted. mu is held.
func (x *indexes) set(key string, e *mirror.Entry) {
	delete(x.failed, key)
	if was := x.entries[key]; was != nil {
		for name, values := range was.values {
			for _, value := range values {
				having := x.having[name][value]
				if delete(having, key); len(having) == 0 {
					delete(x.having[name], value)
				}
			}
		}
		delete(x.entries, key)
	}
	if e == nil {
		return
	}
	obj, err := x.view.source.Load().Shared(context.Background(), e)
	if err != nil {
		if x.failed == nil {
			x.failed = map[string]*mirror.Entry{}
		}
		x.failed[key] = e
		last, ok := x.view.kept.last(e.Key())
		if !ok {
			x.errs = append(x.errs, fmt.Errorf("decode %s for an index: %w", key, err))
			return
		}
		obj = last.obj // which readers get too
	}
	if x.entries == nil {
		x.entries, x.having = map[string]*indexed{}, map[string]map[string]set{}
	}
	i := &indexed{entry: e, values: map[string][]string{}}
	x.entries[key] = i
	for name, f := range *x.indexers.Load() {
		if x.isNamespace(name) {
			continue
		}
		values, err := f(obj)
		if err != nil {
			x.errs = append(x.errs, fmt.Errorf("values of %s in index %s: %w", key, name, err))
			continue
		}
		i.values[name] = values
		for _, value := range values {
			if x.having[name] == nil {
				x.having[name] = map[string]set{}
			}
			if x.having[name][value] == nil {
				x.having[name][value] = set{}
			}
			x.having[name][value][key] = e
		}
	}
}
