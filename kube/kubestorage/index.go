package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/btree"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// index finds the entries of a resource by the value of one field or label that a
// registry has declared (SelectionPredicate.IndexFields, IndexLabels), for example
// the pods of a node. A read brings it up to date, from the log,
// so that a resource nobody selects by this value pays nothing; a reader decodes
// only what no reader has decoded before. It is dropped when nobody has read it for indexIdle, and
// within that time of when its resource is listed anew: its entries are those of its last read. Its
// bytes are charged to the block cache. Safe for concurrent use.
type index struct {
	name     string
	resource *mirror.Resource
	view     *objects.View
	blocks   *blockcache.Cache // its bytes are charged to it
	value    func(*objects.Attributes) string

	cur  atomic.Pointer[indexed]
	turn *semaphore.Weighted // of 1: taken by the reader that brings cur up to date
	used time.Time           // when it was read last; guarded by Store.indexMu

	watched *mirror.Partition // for watches of one value
}

// indexed is the index at one revision; immutable.
type indexed struct {
	gen    *objects.Generation // of the attributes from which it was made
	rev    mirror.Revision
	tree   btree.Tree[*indexItem]
	cursor mirror.Cursor // after rev; only copies of it move
}

// itemOverhead is what an item of an index costs beside its key: its struct (24 bytes), its place in
// a leaf, and about what the allocator adds to those by rounding up.
const itemOverhead = 56

// bytes returns about what the index takes, beside the entries; nil takes nothing.
func (i *indexed) bytes() int64 {
	if i == nil {
		return 0
	}
	return i.tree.Bytes() + int64(i.tree.Len())*itemOverhead
}

// serves reports whether the index, which may be nil, answers at rev or later: it
// does not if the resource was relisted since, perhaps from another etcd, or if the keys
// that decrypt values were replaced.
func (i *indexed) serves(gen *objects.Generation, rev mirror.Revision) bool {
	if i == nil || i.gen != gen || i.rev < rev {
		return false
	}
	cursor := i.cursor
	_, err := cursor.Next(nil, 0)
	return err == nil
}

// indexItem is one entry under its value. Items of equal value are neighbours, in
// key order.
type indexItem struct {
	key   string // value, a zero byte, the etcd key
	entry *mirror.Entry
}

// Key implements btree.Item.
func (i *indexItem) Key() string { return i.key }

// Size implements btree.Item.
func (i *indexItem) Size() int64 { return int64(len(i.key)) }

func indexKey(value, key string) string { return value + "\x00" + key }

// readAtOnce is how many events are taken from the log at once.
const readAtOnce = 256

// at returns the index at rev or later. Errors: those of decoding an entry,
// mirror.ErrNotReady, and that of ctx. Cost: the events since it was asked last; the whole
// resource the first time, and when the log does not reach back to the last time. It waits
// for a reader that is bringing the index up to date.
func (x *index) at(ctx context.Context, rev mirror.Revision) (*indexed, error) {
	if cur := x.cur.Load(); cur.serves(x.view.Now(), rev) {
		return cur, nil
	}
	if err := x.turn.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer x.turn.Release(1)
	cur, gen := x.cur.Load(), x.view.Now()
	if cur.serves(gen, rev) {
		return cur, nil
	}
	if cur != nil && cur.gen != gen {
		cur = nil
	}
	next, err := x.follow(ctx, cur)
	if errors.Is(err, mirror.ErrCompacted) {
		next, err = x.build(ctx, gen)
	}
	if err != nil {
		return nil, err
	}
	x.set(next)
	if gen.Ended() { // end may have come too early
		x.drop()
	}
	return next, nil
}

// set replaces what the index has, and counts its bytes.
func (x *index) set(next *indexed) {
	x.blocks.Charge(next.bytes() - x.cur.Swap(next).bytes())
}

// drop lets the index be built anew by its next reader.
func (x *index) drop() { x.set(nil) }

// build makes the index from the present. The caller has the turn.
func (x *index) build(ctx context.Context, gen *objects.Generation) (*indexed, error) {
	snap, err := x.resource.Latest()
	if err != nil {
		return nil, err
	}
	n, _ := snap.Count("", "")
	items := make([]*indexItem, 0, n)
	for e := range snap.All("", "") {
		item, err := x.item(ctx, gen, e)
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
	slices.SortFunc(items, func(a, b *indexItem) int { return strings.Compare(a.key, b.key) })
	return &indexed{gen: gen, rev: snap.Rev, tree: btree.Build(items), cursor: *snap.Cursor("", "")}, nil
}

// follow applies the events since cur. The caller has the turn.
func (x *index) follow(ctx context.Context, cur *indexed) (*indexed, error) {
	if cur == nil {
		return nil, fmt.Errorf("%w: not built yet", mirror.ErrCompacted)
	}
	edit, cursor := cur.tree.Edit(), cur.cursor
	var events []*mirror.Event
	for {
		var err error
		if events, err = cursor.Next(events[:0], readAtOnce); err != nil {
			return nil, err
		}
		for _, ev := range events {
			if ev.Prev != nil {
				old, err := x.item(ctx, cur.gen, ev.Prev)
				if err != nil {
					return nil, err
				}
				edit.Delete(old.key)
			}
			if ev.Entry != nil {
				item, err := x.item(ctx, cur.gen, ev.Entry)
				if err != nil {
					return nil, err
				}
				edit.Set(item)
			}
		}
		if len(events) < readAtOnce {
			return &indexed{gen: cur.gen, rev: cursor.Position(), tree: edit.Tree(), cursor: cursor}, nil
		}
	}
}

func (x *index) item(ctx context.Context, gen *objects.Generation, e *mirror.Entry) (*indexItem, error) {
	a, err := gen.Attributes(ctx, e)
	if err != nil {
		return nil, err
	}
	return &indexItem{key: indexKey(x.value(a), e.Key()), entry: e}, nil
}

// entries yields the entries with the value and start <= key < end in key order.
func (i *indexed) entries(value, start, end string) iter.Seq[*mirror.Entry] {
	return func(yield func(*mirror.Entry) bool) {
		for item := range i.tree.All(indexKey(value, start), indexKey(value, end)) {
			if !yield(item.entry) {
				return
			}
		}
	}
}

// count returns the number of entries with the value and start <= key < end.
func (i *indexed) count(value, start, end string) int {
	n, _ := i.tree.Count(indexKey(value, start), indexKey(value, end))
	return n
}

// indexFor returns the index that helps with the selection, and the value to look
// up; nil if there is none. Namespace and name are no indexes: they are key ranges.
func (s *Store) indexFor(pred storage.SelectionPredicate) (*index, string) {
	if pred.Field != nil {
		for _, field := range pred.IndexFields {
			if field == "metadata.namespace" || field == "metadata.name" {
				continue
			}
			if value, ok := pred.Field.RequiresExactMatch(field); ok {
				return s.index(storage.FieldIndex(field), func(a *objects.Attributes) string { return a.Fields.Get(field) }), value
			}
		}
	}
	if pred.Label != nil {
		for _, label := range pred.IndexLabels {
			if value, ok := pred.Label.RequiresExactMatch(label); ok && value != "" {
				return s.index(storage.LabelIndex(label), func(a *objects.Attributes) string { return a.Labels.Get(label) }), value
			}
		}
	}
	return nil, ""
}

// index returns the store's index of the name, which it makes when it is first
// asked for. Names are declared by the registry, so there are few.
func (s *Store) index(name string, value func(*objects.Attributes) string) *index {
	s.indexMu.Lock()
	defer s.indexMu.Unlock()
	x := s.indexes[name]
	if x == nil {
		x = &index{name: name, resource: s.resource, view: s.view, blocks: s.cluster.blocks, value: value, turn: semaphore.NewWeighted(1)}
		x.watched = mirror.NewPartition(s.ctx, s.resource, s.watches.start, func(ev *mirror.Event) (before, now string, known bool) {
			return x.values(s.ctx, ev)
		})
		if s.indexes == nil {
			s.indexes = map[string]*index{}
		}
		s.indexes[name] = x
	}
	x.used = time.Now()
	if s.indexTimer == nil && s.ctx.Err() == nil {
		s.indexTimer = time.AfterFunc(indexIdle/2, s.dropIndexes)
	}
	return x
}

// indexIdle is how long an index is kept that nobody reads. Clients that list by a value, such as
// kubelets, watch afterwards; building it anew costs less than a microsecond for each object.
const indexIdle = time.Minute

// dropIndexes drops the indexes that are not read any more, or that are of a resource that was listed
// anew, and all of a store that has ended.
func (s *Store) dropIndexes() {
	s.indexMu.Lock()
	defer s.indexMu.Unlock()
	left := false
	for _, x := range s.indexes {
		cur, idle := x.cur.Load(), time.Since(x.used) >= indexIdle
		if cur != nil && (s.ctx.Err() != nil || idle || !cur.serves(s.view.Now(), 0)) {
			x.drop()
		}
		left = left || !idle // it may be being built
	}
	if s.indexTimer = nil; left && s.ctx.Err() == nil {
		s.indexTimer = time.AfterFunc(indexIdle/2, s.dropIndexes)
	}
}
