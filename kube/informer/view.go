package informer

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/mirror"
)

// view is the store of an informer: the newest version of its resource. It is empty before the
// informer has synced. Objects are shared: do not write to them. Reading takes no lock, except for
// indexes other than that of namespaces, which readers share until there are changes to apply.
type view struct {
	source  atomic.Pointer[Source] // set once, when the informer has synced
	recent  recent
	kept    kept
	indexes indexes
	// report is called with each error of decoding.
	report func(context.Context, error)
}

var _ cache.Indexer = (*view)(nil)

var errReadOnly = errors.New("the store of this informer is a view of the storage, and cannot be written")

func (v *view) init(report func(context.Context, error), indexers cache.Indexers) {
	v.report = report
	v.indexes.init(v, indexers)
}

// snapshot returns the newest version; while the resource is relisted, the last one before. false:
// the informer has not synced.
func (v *view) snapshot() (mirror.Snapshot, bool) {
	s := v.source.Load()
	if s == nil {
		return mirror.Snapshot{}, false
	}
	return s.Resource.Last()
}

// keyOf returns the key of an entry in the store: namespace/name, or name.
func (v *view) keyOf(etcdKey string) string {
	return strings.TrimPrefix(etcdKey, v.source.Load().Resource.Prefix())
}

// objects appends the objects of the entries to list. Objects that cannot be decoded, and are not
// kept, are reported and omitted.
func (v *view) objects(list []any, entries iter.Seq[*mirror.Entry]) []any {
	source := v.source.Load()
	shared := source.Shared
	if source.Loop != nil {
		shared = source.Loop()
	}
	for e := range entries {
		obj, err := v.object(shared, e)
		if err != nil {
			v.report(context.Background(), fmt.Errorf("decode %s: %w", v.keyOf(e.Key()), err))
			continue
		}
		list = append(list, obj)
	}
	return list
}

// Get implements cache.Store. Cost is that of GetByKey.
func (v *view) Get(obj any) (any, bool, error) {
	key, err := cache.MetaNamespaceKeyFunc(obj)
	if err != nil {
		return nil, false, cache.KeyError{Obj: obj, Err: err}
	}
	return v.GetByKey(key)
}

// GetByKey implements cache.Store. Cost is O(log n), and decoding unless the object is cached.
// Errors: those of decoding.
func (v *view) GetByKey(key string) (any, bool, error) {
	snap, ok := v.snapshot()
	if !ok {
		return nil, false, nil
	}
	source := v.source.Load()
	e, ok := snap.Get(source.Resource.Prefix() + key)
	if !ok {
		return nil, false, nil
	}
	obj, err := v.object(source.Shared, e)
	if err != nil {
		return nil, false, err
	}
	return obj, true, nil
}

// object returns the object of an entry with a function of the source. If that cannot decode it,
// the object is as it was last decoded, if the source keeps it.
func (v *view) object(shared func(context.Context, *mirror.Entry) (any, error), e *mirror.Entry) (any, error) {
	obj, err := shared(context.Background(), e)
	if err != nil {
		if last, ok := v.kept.last(e.Key()); ok {
			return last.obj, nil
		}
	}
	return obj, err
}

// List implements cache.Store. Objects are in the order of their keys. Cost is O(n), and decoding
// of objects that are not cached.
func (v *view) List() []any {
	snap, ok := v.snapshot()
	if !ok {
		return []any{}
	}
	return v.between(snap, "", "")
}

// between returns the objects with start <= key < end of etcd.
func (v *view) between(snap mirror.Snapshot, start, end string) []any {
	n, _ := snap.Count(start, end)
	return v.objects(make([]any, 0, n), snap.All(start, end))
}

// ListKeys implements cache.Store.
func (v *view) ListKeys() []string {
	snap, ok := v.snapshot()
	if !ok {
		return []string{}
	}
	n, _ := snap.Count("", "")
	keys := make([]string, 0, n)
	for e := range snap.All("", "") {
		keys = append(keys, v.keyOf(e.Key()))
	}
	return keys
}

// namespaceRange returns the range of the keys of a namespace.
func (v *view) namespaceRange(namespace string) (start, end string) {
	start = v.source.Load().Resource.Prefix() + namespace
	return start + "/", start + "0" // '0' follows '/'
}

// inNamespace returns the objects of a namespace; of none: those of a resource without namespaces.
func (v *view) inNamespace(namespace string) []any {
	snap, ok := v.snapshot()
	if !ok {
		return []any{}
	}
	if namespace != "" {
		start, end := v.namespaceRange(namespace)
		return v.between(snap, start, end)
	}
	return v.objects([]any{}, func(yield func(*mirror.Entry) bool) {
		for e := range snap.All("", "") {
			if !strings.Contains(v.keyOf(e.Key()), "/") && !yield(e) {
				return
			}
		}
	})
}

// keysInNamespace returns the keys of the objects that inNamespace returns.
func (v *view) keysInNamespace(namespace string) []string {
	return slices.DeleteFunc(v.ListKeys(), func(key string) bool { return namespaceOf(key) != namespace })
}

// namespaces returns the namespaces that have objects, sorted.
func (v *view) namespaces() []string {
	keys := v.ListKeys()
	for i, key := range keys {
		keys[i] = namespaceOf(key)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// namespaceOf returns the namespace in a key, empty if there is none.
func namespaceOf(key string) string {
	namespace, _, found := strings.Cut(key, "/")
	if !found {
		return ""
	}
	return namespace
}

// LastStoreSyncResourceVersion implements cache.Store: the revision that the store shows, empty
// before the informer has synced (KEP-5647).
func (v *view) LastStoreSyncResourceVersion() string {
	snap, ok := v.snapshot()
	if !ok {
		return ""
	}
	return strconv.FormatInt(snap.Rev, 10)
}

// Bookmark implements cache.Store. It has no effect.
func (v *view) Bookmark(string) {}

// Add implements cache.Store. It returns an error.
func (v *view) Add(any) error { return errReadOnly }

// Update implements cache.Store. It returns an error.
func (v *view) Update(any) error { return errReadOnly }

// Delete implements cache.Store. It returns an error.
func (v *view) Delete(any) error { return errReadOnly }

// Replace implements cache.Store. It returns an error.
func (v *view) Replace([]any, string) error { return errReadOnly }

// Resync implements cache.Store. It has no effect.
func (v *view) Resync() error { return nil }

// Index implements cache.Indexer. Errors: those of the index function, and an unknown index.
func (v *view) Index(name string, obj any) ([]any, error) {
	x, err := v.indexes.get(name)
	if err != nil {
		return nil, err
	}
	values, err := x.f(obj)
	if err != nil {
		return nil, err
	}
	if x.ofNamespaces { // it has one value
		return v.inNamespace(values[0]), nil
	}
	return x.objectsOf(values...), nil
}

// ByIndex implements cache.Indexer. The index of namespaces is the order of keys. Another index is
// brought up to date by the call, which decodes the objects that have changed since the last one;
// meanwhile readers of this index wait. Error: an unknown index.
func (v *view) ByIndex(name, value string) ([]any, error) {
	x, err := v.indexes.get(name)
	if err != nil {
		return nil, err
	}
	if x.ofNamespaces {
		return v.inNamespace(value), nil
	}
	return x.objectsOf(value), nil
}

// IndexKeys implements cache.Indexer. Cost is that of ByIndex without the objects. Error: an
// unknown index.
func (v *view) IndexKeys(name, value string) ([]string, error) {
	x, err := v.indexes.get(name)
	if err != nil {
		return nil, err
	}
	if x.ofNamespaces {
		return v.keysInNamespace(value), nil
	}
	return x.keysOf(value), nil
}

// ListIndexFuncValues implements cache.Indexer. It is empty for an unknown index.
func (v *view) ListIndexFuncValues(name string) []string {
	x, err := v.indexes.get(name)
	if err != nil {
		return []string{}
	}
	if x.ofNamespaces {
		return v.namespaces()
	}
	return x.values()
}

// GetIndexers implements cache.Indexer.
func (v *view) GetIndexers() cache.Indexers { return v.indexes.all() }

// AddIndexers implements cache.Indexer. Error: there is an index with one of the names; none is
// added.
func (v *view) AddIndexers(indexers cache.Indexers) error { return v.indexes.add(indexers) }
