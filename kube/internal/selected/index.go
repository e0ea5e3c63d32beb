package selected

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// Index finds the entries of a resource by the values of one label or field. It consists of digests on the leaves of the resource's
// trees and on the nodes above them, so it belongs to every version: two versions share the digests of the leaves that they share,
// and a list at an old revision uses those of its own tree. Readers make missing digests: of all leaves at first, later those of
// leaves that have changed. The digests of an index are dropped when it had no reader for IndexIdle. Safe for concurrent use.
type Index struct {
	name   string
	label  bool // not a field
	gen    *objects.Generation
	lookup lookup

	of     *memo.Key // names the digests; closed when they are dropped
	blocks *blockcache.Cache
	bytes  atomic.Int64 // of digests, as last counted, and of those made since
	used   time.Time    // of the last plan; guarded by indexes.mu
}

// lookup returns the value of a field or label, and whether the object has it.
type lookup = func(*objects.Attributes) (value string, ok bool)

// declared reports whether a registry has declared the field or label (SelectionPredicate.IndexFields, IndexLabels), for example
// spec.nodeName of pods. Others are chosen by clients.
func (x *Index) declared(pred *storage.SelectionPredicate) bool {
	names, of := pred.IndexFields, storage.FieldIndex
	if x.label {
		names, of = pred.IndexLabels, storage.LabelIndex
	}
	return slices.ContainsFunc(names, func(n string) bool { return of(n) == x.name })
}

// fieldIndex describes the index of a field. An object without it has the value "", as field selectors have it.
func fieldIndex(field string) *Index {
	return &Index{name: storage.FieldIndex(field), lookup: func(a *objects.Attributes) (string, bool) { return a.Fields.Get(field), true }}
}

// labelIndex describes the index of a label.
func labelIndex(label string) *Index {
	return &Index{name: storage.LabelIndex(label), label: true, lookup: func(a *objects.Attributes) (string, bool) { return a.Labels.Lookup(label) }}
}

// newLeaf makes and caches the digest of a leaf. The entries of unknown cannot be decoded now; the digest is then not cached, and the
// caller reports the errors. It is nil if ctx has ended.
func (x *Index) newLeaf(ctx context.Context, items []*mirror.Entry, in *btree.Digests) (d *digest, unknown uint64) {
	var values [64]string
	var found [64]pair
	var present uint64
	n := 0
	for i, e := range items {
		a, err := x.gen.Attributes(ctx, e)
		if err != nil {
			if ctx.Err() != nil {
				return nil, 0
			}
			unknown |= 1 << i
			continue
		}
		v, ok := x.lookup(a)
		if !ok {
			continue
		}
		present |= 1 << i
		values[i] = v
		found[n] = newPair(hashOf(v), i)
		n++
	}
	all := ^uint64(0) >> (64 - len(items))
	d = newDigest(found[:n], present, all&^present&^unknown)
	for i := 1; i < n; i++ { // sorted now
		if p, q := found[i-1], found[i]; p.hash() == q.hash() && values[p.bit()] != values[q.bit()] {
			d.shared = true
		}
	}
	if unknown == 0 {
		x.cache(in, nil, d)
	}
	return d, unknown
}

// parent returns the digest of a parent of leaves, nil if it has none yet.
func (x *Index) parent(leaves btree.DigestsOfLeaves, in *btree.Digests) *digest {
	cur := in.Get(x.of)
	switch c := cur.(type) {
	case *digest:
		return c
	case *visits:
		if c.n.Add(1) < parentVisits {
			return nil
		}
		c.n.Store(0) // a later reader tries again if a leaf lacks its digest
	default:
		in.Swap(x.of, nil, &visits{})
		return nil
	}
	d := joinDigests(leaves, x.of)
	if d != nil {
		x.cache(in, cur, d)
	}
	return d
}

// cache puts a digest on its node in place of old.
func (x *Index) cache(in *btree.Digests, old any, d *digest) {
	if !x.of.Closed() && in.Swap(x.of, old, d) {
		x.bytes.Add(d.size())
		x.blocks.Charge(d.size())
	}
}

// setBytes records the counted bytes of the digests; before is the value of bytes before they were counted.
func (x *Index) setBytes(before, counted int64) {
	x.bytes.Add(counted - before)
	x.blocks.Charge(counted - before)
}

// close ends the index. Its digests are dropped by a walk (Selections.DropIndexes, DropClosed).
func (x *Index) close() {
	x.of.Close()
	x.blocks.Charge(-x.bytes.Swap(0))
}

// indexes are the indexes of a resource by name. The zero value is empty.
type indexes struct {
	mu      sync.Mutex // leaf
	byName  map[string]*Index
	refused map[string]time.Time // until when a label or field is not indexed, because its digests were too large
	timer   *time.Timer          // runs DropIndexes; nil if there is no index
}

const (
	// IndexIdle is how long an index without readers is kept. Making it anew costs about a microsecond for each object.
	IndexIdle = 10 * time.Minute
	// maxIndexes bounds the indexes of a resource: clients choose the labels of their selectors.
	maxIndexes = 64
	// indexShare is the inverse of the part of the block cache that the indexes of one resource may take.
	indexShare = 4
)

// get returns the index that x describes, which the first call makes; nil if it is refused.
func (t *indexes) get(s *Selections, gen *objects.Generation, x *Index) *Index {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if cur := t.byName[x.name]; cur != nil {
		if cur.gen == gen {
			cur.used = now
			t.trimLocked(s, cur)
			return t.byName[x.name]
		}
		t.removeLocked(cur)
	}
	if s.cfg.Context.Err() != nil || gen.Ended() || now.Before(t.refused[x.name]) {
		return nil
	}
	x.gen, x.of, x.blocks, x.used = gen, &memo.Key{}, s.cfg.Blocks, now
	if t.byName == nil {
		t.byName, t.refused = map[string]*Index{}, map[string]time.Time{}
	}
	t.byName[x.name] = x
	t.trimLocked(s, x)
	if t.timer == nil {
		t.timer = time.AfterFunc(IndexIdle/10, s.DropIndexes)
	}
	return x
}

// trimLocked reports the indexes and their bytes. It removes indexes, except x, least recently used first, until the others are within the bounds. If x alone is not, it is
// removed too, and refused for IndexIdle.
func (t *indexes) trimLocked(s *Selections, x *Index) {
	limit, total := s.cfg.Blocks.Stats().Limit/indexShare, int64(0)
	for _, o := range t.byName {
		total += o.bytes.Load()
	}
	for total > limit || len(t.byName) > maxIndexes {
		var oldest *Index
		for _, o := range t.byName {
			if o != x && (oldest == nil || o.used.Before(oldest.used)) {
				oldest = o
			}
		}
		if oldest == nil {
			s.cfg.Refused()
			t.refused[x.name] = time.Now().Add(IndexIdle)
			oldest = x
		}
		total -= oldest.bytes.Load()
		t.removeLocked(oldest)
		if oldest == x {
			break
		}
	}
	s.cfg.Measured(len(t.byName), total)
}

func (t *indexes) removeLocked(x *Index) {
	delete(t.byName, x.name)
	x.close()
}

// DropIndexes drops the indexes that have no readers any more, or all if the storage has ended, and counts the bytes of the others.
func (s *Selections) DropIndexes() {
	t := &s.indexes
	t.mu.Lock()
	ended := s.cfg.Context.Err() != nil
	before := map[*Index]int64{}
	for _, x := range t.byName {
		if ended || time.Since(x.used) >= IndexIdle || x.gen.Ended() {
			t.removeLocked(x)
		} else {
			before[x] = x.bytes.Load()
		}
	}
	for name, until := range t.refused {
		if time.Now().After(until) {
			delete(t.refused, name)
		}
	}
	if t.timer = nil; len(t.byName) > 0 && !ended {
		t.timer = time.AfterFunc(IndexIdle/10, s.DropIndexes)
	}
	t.mu.Unlock()
	if !ended {
		s.countDigests(before)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	total := int64(0)
	for _, x := range t.byName {
		total += x.bytes.Load()
	}
	s.cfg.Measured(len(t.byName), total)
}

// countDigests drops digests of closed indexes, and counts the bytes of the others; before has their bytes so far.
func (s *Selections) countDigests(before map[*Index]int64) {
	snap, err := s.cfg.Resource.Latest()
	if err != nil {
		return // being relisted
	}
	bytes := map[any]int64{}
	for d := range snap.Digests() {
		d.DropClosed()
		d.Each(func(of, value any) {
			if v, ok := value.(*digest); ok {
				bytes[of] += v.size()
			}
		})
	}
	for x, was := range before {
		x.setBytes(was, bytes[x.of])
	}
}

// KeysReplaced closes all indexes, because the keys that decrypt values were replaced. It may be
// called with the view's mutex held. For shards see DropEnded.
func (s *Selections) KeysReplaced() {
	s.indexes.mu.Lock()
	defer s.indexes.mu.Unlock()
	for _, x := range s.indexes.byName {
		s.indexes.removeLocked(x)
	}
}
