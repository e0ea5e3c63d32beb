package informer

import (
	"context"
	"fmt"
	"maps"
	"math"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"weak"

	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/mirror"
)

// indexes are the indexes of a view by name. Each has a lock of its own, so building one delays no
// reader of another.
type indexes struct {
	view   *view
	mu     sync.Mutex                        // held to replace byName
	byName atomic.Pointer[map[string]*index] // never written after it was stored
}

func (x *indexes) init(v *view, indexers cache.Indexers) {
	x.view = v
	x.byName.Store(&map[string]*index{})
	_ = x.add(indexers) // no name is in use
}

// get returns an index, or an error if there is none with the name.
func (x *indexes) get(name string) (*index, error) {
	if i := (*x.byName.Load())[name]; i != nil {
		return i, nil
	}
	return nil, fmt.Errorf("index with name %s does not exist", name)
}

func (x *indexes) all() cache.Indexers {
	indexers := cache.Indexers{}
	for name, i := range *x.byName.Load() {
		indexers[name] = i.f
	}
	return indexers
}

// add adds indexes, which are built at their first use.
func (x *indexes) add(indexers cache.Indexers) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	merged := maps.Clone(*x.byName.Load())
	for name, f := range indexers {
		if merged[name] != nil {
			return fmt.Errorf("indexer conflict: there is an index with name %s", name)
		}
		merged[name] = &index{
			view: x.view,
			name: name,
			f:    f,
			// client-go's index of namespaces
			ofNamespaces: reflect.ValueOf(f).Pointer() == reflect.ValueOf(cache.MetaNamespaceIndexFunc).Pointer(),
		}
	}
	x.byName.Store(&merged)
	return nil
}

// index finds objects by the values of an index function. There is no goroutine that keeps it: a
// use first applies the changes since the last one, so an index is as new as the published
// revision. Between uses it keeps keys and values, and no entry alive. The index of namespaces is
// the order of keys, and is not kept.
type index struct {
	view         *view
	name         string
	f            cache.IndexFunc
	ofNamespaces bool

	// mu is held to apply changes, during which objects are decoded, and to read. cursor is after
	// the applied changes; nil: all objects are compared. failed has the keys of objects that
	// cannot be decoded, which each use tries again.
	mu      sync.RWMutex
	cursor  *mirror.Cursor
	objects map[string]*indexed              // by key of etcd
	having  map[string]map[*indexed]struct{} // by value
	failed  map[string]bool
}

// indexed is an object of an index.
type indexed struct {
	key    string // of etcd, a copy: mirror.Entry.Key keeps the value alive
	entry  weak.Pointer[mirror.Entry]
	values []string
}

// find returns the entries of the objects that have one of the values, in no order.
func (x *index) find(values ...string) (entries []*mirror.Entry) {
	x.use(func() {
		found := x.having[values[0]]
		if len(values) > 1 {
			found = map[*indexed]struct{}{}
			for _, value := range values {
				maps.Copy(found, x.having[value])
			}
		}
		entries = make([]*mirror.Entry, 0, len(found))
		for o := range found {
			entries = append(entries, o.entry.Value())
		}
	})
	return entries
}

// keysOf returns the keys in the store of the objects that have the value, in no order.
func (x *index) keysOf(value string) (keys []string) {
	x.use(func() {
		keys = make([]string, 0, len(x.having[value]))
		for o := range x.having[value] {
			keys = append(keys, x.view.keyOf(o.key))
		}
	})
	return keys
}

// objectsOf returns the objects with one of the values, in no order.
func (x *index) objectsOf(values ...string) []any {
	if len(values) == 0 {
		return []any{}
	}
	entries := x.find(values...)
	if len(entries) == 0 {
		return []any{} // the informer may not have synced
	}
	return x.view.objects(make([]any, 0, len(entries)), slices.Values(entries))
}

// values returns the values in the index, sorted.
func (x *index) values() (values []string) {
	x.use(func() { values = slices.Sorted(maps.Keys(x.having)) })
	return values
}

// use calls f, which reads, while the index has the objects of the version that the store shows,
// and their entries are alive. It takes the lock exclusively to apply changes, and while an object
// cannot be decoded, which it then tries again. It reports errors after it. f is not called if the
// store shows no version.
func (x *index) use(f func()) {
	if x.useCurrent(f) {
		return
	}
	for _, err := range x.update(f) {
		x.view.report(context.Background(), err)
	}
}

// useCurrent is use without changes to apply. It reports false if there are any.
func (x *index) useCurrent(f func()) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	snap, ok := x.view.snapshot()
	if !ok {
		return true
	}
	if len(x.failed) > 0 || !x.at(snap) {
		return false
	}
	f()
	runtime.KeepAlive(snap) // and thereby the entries
	return true
}

// update applies the changes up to the newest version, and calls f. It returns errors of single
// objects.
func (x *index) update(f func()) (errs []error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	snap, changed, ok := x.changes()
	if !ok {
		return nil
	}
	cursor := x.cursor
	x.cursor = nil // until all were applied: the index function may panic
	for key := range changed {
		e, _ := snap.Get(key)
		if err := x.set(key, e); err != nil {
			errs = append(errs, err)
		}
	}
	x.cursor = cursor
	f()
	runtime.KeepAlive(snap)
	return errs
}

// at reports whether all changes up to the version were applied, and none after it. mu is held.
func (x *index) at(snap mirror.Snapshot) bool {
	if x.cursor == nil {
		return false
	}
	_, at := x.cursor.Since(snap, nil, 0)
	return at
}

// changes returns the newest version, and the keys that have changed since the last call, or cannot
// be decoded. Afterwards cursor is at the version. The first call, and one after a relist, compares
// all objects. false: the store shows no version. mu is held.
func (x *index) changes() (snap mirror.Snapshot, changed map[string]struct{}, ok bool) {
	changed = map[string]struct{}{}
	for key := range x.failed {
		changed[key] = struct{}{}
	}
	var events []*mirror.Event
	for {
		if snap, ok = x.view.snapshot(); !ok {
			return snap, nil, false
		}
		if x.at(snap) {
			break
		}
		if had := len(events); x.cursor != nil {
			was := *x.cursor
			var err error
			// The cursor is never after a version that is read later. Without events it cannot
			// reach the version: that is one before a relist, or history is being restored. In
			// another lineage all entries are others.
			if events, err = x.cursor.Next(events, math.MaxInt); err == nil && len(events) > had && x.cursor.SameLineage(&was) {
				continue
			}
		}
		x.compare(snap, changed)
		x.cursor = snap.Cursor("", "")
		return snap, changed, true
	}
	for _, ev := range events {
		changed[ev.Key()] = struct{}{}
	}
	return snap, changed, true
}

// compare adds the keys whose entries in the version are not those of the index. mu is held.
func (x *index) compare(snap mirror.Snapshot, changed map[string]struct{}) {
	for e := range snap.All("", "") {
		if o := x.objects[e.Key()]; o == nil || o.entry != weak.Make(e) {
			changed[e.Key()] = struct{}{}
		}
	}
	for key := range x.objects {
		if _, ok := snap.Get(key); !ok {
			changed[key] = struct{}{}
		}
	}
}

// set makes e the entry with the key, nil if it was deleted. mu is held.
func (x *index) set(key string, e *mirror.Entry) error {
	delete(x.failed, key)
	o := x.objects[key]
	if o != nil {
		for _, value := range o.values {
			if delete(x.having[value], o); len(x.having[value]) == 0 {
				delete(x.having, value)
			}
		}
		o.values, o.entry = nil, weak.Pointer[mirror.Entry]{}
	}
	if e == nil {
		delete(x.objects, key)
		return nil
	}
	if x.objects == nil {
		x.objects, x.having, x.failed = map[string]*indexed{}, map[string]map[*indexed]struct{}{}, map[string]bool{}
	}
	if o == nil {
		o = &indexed{key: strings.Clone(key)}
		x.objects[o.key] = o
	}
	obj, err := x.view.source.Load().Shared(context.Background(), e)
	if err != nil {
		x.failed[o.key] = true
		last, ok := x.view.kept.last(key)
		if !ok {
			return fmt.Errorf("decode %s for an index: %w", x.view.keyOf(o.key), err)
		}
		obj = last.obj // which readers get too
	}
	values, err := x.f(obj)
	o.entry = weak.Make(e) // not before: the function may panic
	if err != nil {
		return fmt.Errorf("values of %s in index %s: %w", x.view.keyOf(o.key), x.name, err)
	}
	o.values = values
	for _, value := range values {
		if x.having[value] == nil {
			x.having[value] = map[*indexed]struct{}{}
		}
		x.having[value][o] = struct{}{}
	}
	return nil
}
