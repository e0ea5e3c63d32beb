package selected

import (
	"context"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Index finds the entries of a resource by the value of one field or label that a registry has declared
// (SelectionPredicate.IndexFields, IndexLabels), for example the pods of a node. A reader brings it up to date and decodes only
// entries that no reader has decoded before. Its version is dropped when it had no reader for IndexIdle, and within that time after
// a relist of its resource. Its entries are those of its last read. Its bytes are charged to the block cache. Safe for concurrent
// use.
type Index struct {
	selection[*IndexItem]
	name   string
	blocks *blockcache.Cache
	value  func(*objects.Attributes) string

	used    time.Time          // of the last read; guarded by indexes.mu
	watched *mirror.WatchIndex // for watches of one value
}

// IndexVersion is an index at one revision.
type IndexVersion = Version[*IndexItem]

// ItemOverhead is the cost of an item of an index beside its key: its struct (24 bytes), its place
// in a leaf, and the approximate rounding of the allocator.
const ItemOverhead = 56

// IndexItem is one entry under its value. Items of equal value are neighbours, in
// key order.
type IndexItem struct {
	key   string // value, a zero byte, the etcd key
	entry *mirror.Entry
}

// Key implements btree.Item.
func (i *IndexItem) Key() string { return i.key }

// Size implements btree.Item.
func (i *IndexItem) Size() int64 { return int64(len(i.key)) }

func indexKey(value, key string) string { return value + "\x00" + key }

// Entries yields the entries of an index with the value and start <= key < end in key order.
func Entries(v *IndexVersion, value, start, end string) iter.Seq[*mirror.Entry] {
	return func(yield func(*mirror.Entry) bool) {
		for item := range v.tree.All(indexKey(value, start), indexKey(value, end)) {
			if !yield(item.entry) {
				return
			}
		}
	}
}

// CountEntries returns the number of Entries. Cost is O(log n).
func CountEntries(v *IndexVersion, value, start, end string) int {
	n, _ := v.tree.Count(indexKey(value, start), indexKey(value, end))
	return n
}

// Name returns the name of the index.
func (x *Index) Name() string { return x.name }

// items implements kind.
func (x *Index) items(ctx context.Context, gen *objects.Generation, snap mirror.Snapshot) ([]*IndexItem, error) {
	n, _ := snap.Count("", "")
	items := make([]*IndexItem, 0, n)
	for e := range snap.All("", "") {
		item, err := x.item(ctx, gen, e)
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
	slices.SortFunc(items, func(a, b *IndexItem) int { return strings.Compare(a.key, b.key) })
	return items, nil
}

// apply implements kind.
func (x *Index) apply(ctx context.Context, gen *objects.Generation, edit *btree.Edit[*IndexItem], ev *mirror.Event) error {
	if ev.Prev != nil {
		old, err := x.item(ctx, gen, ev.Prev)
		if err != nil {
			return err
		}
		edit.Delete(old.key)
	}
	if ev.Entry != nil {
		item, err := x.item(ctx, gen, ev.Entry)
		if err != nil {
			return err
		}
		edit.Set(item)
	}
	return nil
}

func (x *Index) item(ctx context.Context, gen *objects.Generation, e *mirror.Entry) (*IndexItem, error) {
	a, err := gen.Attributes(ctx, e)
	if err != nil {
		return nil, err
	}
	return &IndexItem{key: indexKey(x.value(a), e.Key()), entry: e}, nil
}

// install implements kind.
func (x *Index) install(_, next *IndexVersion, _ *btree.Edit[*IndexItem]) { x.set(next) }

// dropEnded implements kind.
func (x *Index) dropEnded() { x.drop() }

// set replaces the current version and charges the difference in bytes.
func (x *Index) set(next *IndexVersion) {
	x.blocks.Charge(indexBytes(next) - indexBytes(x.cur.Swap(next)))
}

// drop removes the current version, so that the next reader builds the index. The caller need not
// have the turn.
func (x *Index) drop() { x.set(nil) }

// indexBytes returns the approximate memory of an index beside the entries; 0 for nil.
func indexBytes(v *IndexVersion) int64 {
	if v == nil {
		return 0
	}
	return v.tree.Bytes() + int64(v.tree.Len())*ItemOverhead
}

// indexes are the indexes of a resource by name. The zero value is empty.
type indexes struct {
	mu     sync.Mutex // leaf
	byName map[string]*Index
	timer  *time.Timer // drops indexes without readers; nil if there is no index
}

// IndexFor returns an index for the selection, and the value to look up; nil if there is none.
// Namespace and name are no indexes: they are key ranges.
func (s *Selections) IndexFor(pred storage.SelectionPredicate) (*Index, string) {
	if pred.Field != nil {
		for _, field := range pred.IndexFields {
			if field == "metadata.namespace" || field == "metadata.name" {
				continue
			}
			if value, ok := pred.Field.RequiresExactMatch(field); ok {
				return s.Index(storage.FieldIndex(field), func(a *objects.Attributes) string { return a.Fields.Get(field) }), value
			}
		}
	}
	if pred.Label != nil {
		for _, label := range pred.IndexLabels {
			if value, ok := pred.Label.RequiresExactMatch(label); ok && value != "" {
				return s.Index(storage.LabelIndex(label), func(a *objects.Attributes) string { return a.Labels.Get(label) }), value
			}
		}
	}
	return nil, ""
}

// Index returns the index of the name, which the first call makes. Names are declared by the
// registry, so there are few.
func (s *Selections) Index(name string, value func(*objects.Attributes) string) *Index {
	t := &s.indexes
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.byName[name]
	if x == nil {
		x = &Index{name: name, blocks: s.cfg.Blocks, value: value}
		x.selection = selection[*IndexItem]{resource: s.cfg.Resource, view: s.cfg.View, kind: x, buildLock: semaphore.NewWeighted(1)}
		x.watched = mirror.NewWatchIndex(s.cfg.Context, s.cfg.Resource, s.cfg.Start, func(ev *mirror.Event) (before, now string, known bool) {
			return s.values(ev, value, "value")
		}, nil)
		if t.byName == nil {
			t.byName = map[string]*Index{}
		}
		t.byName[name] = x
	}
	x.used = time.Now()
	if t.timer == nil && s.cfg.Context.Err() == nil {
		t.timer = time.AfterFunc(IndexIdle/2, s.DropIndexes)
	}
	return x
}

// IndexIdle is how long an index without readers is kept. Clients that list by a value, such as
// kubelets, watch afterwards; rebuilding the index costs less than a microsecond for each object.
const IndexIdle = time.Minute

// DropIndexes drops the indexes that have no readers any more, or whose resource was relisted, and
// all if the storage has ended.
func (s *Selections) DropIndexes() {
	t := &s.indexes
	t.mu.Lock()
	defer t.mu.Unlock()
	ended, left := s.cfg.Context.Err() != nil, false
	for _, x := range t.byName {
		cur, idle := x.cur.Load(), time.Since(x.used) >= IndexIdle
		if cur != nil && (ended || idle || !cur.Serves(s.cfg.View.CurrentGeneration(), 0)) {
			x.drop()
		}
		left = left || !idle // a reader may be building it
	}
	if t.timer = nil; left && !ended {
		t.timer = time.AfterFunc(IndexIdle/2, s.DropIndexes)
	}
}

// KeysReplaced drops the current versions of all indexes, because the keys that decrypt values were replaced. It may be
// called with the view's mutex held. For shards see DropEnded.
func (s *Selections) KeysReplaced() {
	s.indexes.mu.Lock()
	defer s.indexes.mu.Unlock()
	for _, x := range s.indexes.byName {
		x.drop()
	}
}
