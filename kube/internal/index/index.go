package index

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror/memo"
)

// Index finds the entries of a resource by the values of one label or field. It consists of digests
// on the leaves of the resource's trees and on the nodes above them, so it belongs to every
// version: two versions share the digests of the leaves that they share, and a list at an old
// revision uses those of its own tree. Readers make missing digests: of all leaves at first, later
// those of leaves that have changed. The digests of an index are dropped when it had no reader for
// indexIdle. Safe for concurrent use.
type Index struct {
	name   string
	label  bool   // not a field
	key    string // of the label, or the name of the field
	gen    *objects.Generation
	lookup lookup
	finder *objects.Finder // finds values without decoding; nil if there is none

	of     *memo.Key // names the digests; closed when they are dropped
	blocks *blockcache.Cache
	// its bytes have reached the bound: no digest is cached until they are counted
	full atomic.Bool

	mu    sync.Mutex // leaf
	bytes int64      // of digests, as last counted, and of those made since

	used atomic.Int64 // time of the last plan, in nanoseconds since Selections.start
	// a registry has declared the label or field, or it is eager: others are dropped first
	kept atomic.Bool
}

// lookup returns the value of a field or label, and whether the object has it.
type lookup = func(*objects.Attributes) (value string, ok bool)

// declared reports whether a registry has declared the field or label
// (SelectionPredicate.IndexFields, IndexLabels), for example spec.nodeName of pods. Others are
// chosen by clients.
func (x *Index) declared(pred *storage.SelectionPredicate) bool {
	names, of := pred.IndexFields, storage.FieldIndex
	if x.label {
		names, of = pred.IndexLabels, storage.LabelIndex
	}
	return slices.ContainsFunc(names, func(n string) bool { return of(n) == x.name })
}

// fieldIndex describes the index of a field. An object without it has the value "", as field
// selectors have it.
func fieldIndex(field string) *Index {
	return &Index{name: storage.FieldIndex(field), key: field, lookup: func(a *objects.Attributes) (string, bool) { return a.Fields.Get(field), true }}
}

// labelIndex describes the index of a label.
func labelIndex(label string) *Index {
	return &Index{name: storage.LabelIndex(label), label: true, key: label, lookup: func(a *objects.Attributes) (string, bool) { return a.Labels.Lookup(label) }}
}

// parent returns the digest of a parent of leaves, nil if it has none yet. With known it is not
// made.
func (x *Index) parent(leaves btree.MemosOfLeaves, in *memo.List, known bool) *digest {
	cur := in.Get(x.of)
	switch c := cur.(type) {
	case *digest:
		return c
	case *visits:
		if known || c.n.Add(1) < parentVisits {
			return nil
		}
		c.n.Store(0) // a later reader tries again if a leaf lacks its digest
	default:
		if !known && !x.of.Closed() {
			in.Swap(x.of, nil, &visits{})
		}
		return nil
	}
	d := joinDigests(leaves, x.of)
	if d != nil {
		x.cache(in, cur, d)
	}
	return d
}

// cache puts a digest on its node in place of old, if there is room for it.
func (x *Index) cache(in *memo.List, old any, d *digest) {
	if x.full.Load() {
		return
	}
	if !x.fits(d.Size()) {
		x.full.Store(true)
		return
	}
	if !in.Swap(x.of, old, d) {
		return
	}
	if !x.charge(d.Size()) {
		in.Swap(x.of, d, nil) // the walk that drops the digests may have passed the node
	}
}

// unlessFull returns nil if the index has no room: a list would make the digests of changed leaves,
// and later ones would make them again. The next count of the bytes makes room or refuses the
// index.
func (x *Index) unlessFull() *Index {
	if x.full.Load() {
		return nil
	}
	return x
}

// fits reports whether there is room for further bytes of digests: of the resource, and of all
// resources of the process.
func (x *Index) fits(bytes int64) bool {
	limit := x.blocks.Stats().Limit
	return x.size()+bytes <= limit/indexShare && x.blocks.Charged()+bytes <= x.allLimit(limit)
}

// allLimit returns the bound of the bytes of all indexes of the process.
func (x *Index) allLimit(limit int64) int64 {
	if x.kept.Load() {
		return limit / 4 * 3
	}
	return limit / 2
}

// charge adds bytes of digests, or reports that the index is closed.
func (x *Index) charge(bytes int64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.of.Closed() {
		return false
	}
	x.bytes += bytes
	x.blocks.Charge(bytes)
	return true
}

// counted records the bytes of the digests of the newest version: before are those that were known
// before they were counted. Replaced digests are no longer among them.
func (x *Index) counted(before, bytes int64) { x.charge(bytes - before) }

// size returns the bytes of the digests as last counted, and of those made since.
func (x *Index) size() int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.bytes
}

// close ends the index. Its digests are dropped by a walk (Selections.DropIndexes, or that of the
// store when keys are replaced).
func (x *Index) close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.of.Closed() {
		x.of.Close()
		x.blocks.Charge(-x.bytes)
		x.bytes = 0
	}
}

// indexes are the indexes of a resource by name. Readers of an index that exists take no lock. The
// zero value is empty.
type indexes struct {
	published atomic.Pointer[map[string]*Index] // a copy of byName
	// time of the next comparison of the digests' bytes, in nanoseconds since Selections.start
	nextCount atomic.Int64

	dropping sync.Mutex // held by DropIndexes, which a timer and a full index start; before mu

	mu     sync.Mutex // before Index.mu
	byName map[string]*Index
	// once has the labels and fields that a list has named once, until it is dropped: unless their
	// first use makes the index, their second one does.
	once map[string]time.Time
	// refused has the labels and fields whose digests were too large, until they are tried again.
	refused  map[string]time.Time
	timer    *time.Timer // runs DropIndexes; nil if there is no index
	soon     bool        // the timer was set to count digests soon
	counted  int64       // bytes of all indexes when they were last counted
	lastTime time.Time   // of that count
	reported [2]int64    // indexes and bytes that cfg.Measured has received
}

const (
	// indexIdle is how long an index without readers is kept. Making it again costs a tenth of a
	// microsecond to some microseconds for each object.
	indexIdle = 10 * time.Minute
	// maxIndexes bounds the indexes of a resource: clients choose the labels of their selectors.
	maxIndexes = 64
	// indexShare is the inverse of the part of the block cache that the indexes of one resource may
	// take. Those of all resources may take half of it, and three quarters if they are declared
	// (Index.allLimit).
	indexShare = 4
	// secondUse is how soon after the first use of a label or field, unless it is declared or
	// eager, its second use makes the index. A pause beyond it would drop the index again.
	secondUse = indexIdle
	// largeValue is the mean size of stored values from which the first use makes the index, if
	// values are found in them. Reading the values costs up to 1 ns for each byte, the index 0.05
	// µs and 26 bytes for each object more (BenchmarkFirstUse).
	largeValue = 4 << 10
	// maxOnce bounds the labels and fields whose first use is remembered.
	maxOnce = 1024
	// Digests are counted when they have grown by countGrowth and a quarter since the last count,
	// at most every countInterval.
	countGrowth   = 1 << 20
	countInterval = time.Second
)

// get returns the index that x describes; nil if it is refused or full, or has no index yet. With
// eager the first use makes it, and with large, of stored values, if x has a finder.
func (t *indexes) get(s *Selections, gen *objects.Generation, x *Index, eager, large bool) *Index {
	if gen.Ended() {
		return nil
	}
	now := time.Now()
	since := int64(now.Sub(s.start))
	if published := t.published.Load(); published != nil {
		if cur := (*published)[x.name]; cur != nil && cur.gen == gen && (cur.kept.Load() || !eager) {
			cur.used.Store(since)
			if next := t.nextCount.Load(); since >= next && t.nextCount.CompareAndSwap(next, since+int64(countInterval)) {
				t.countSoon(now)
			}
			return cur.unlessFull()
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if cur := t.byName[x.name]; cur != nil {
		if cur.gen == gen {
			cur.used.Store(since)
			if eager {
				cur.kept.Store(true)
			}
			return cur.unlessFull()
		}
		t.removeLocked(cur)
	}
	if s.cfg.Context.Err() != nil || now.Before(t.refused[x.name]) {
		return nil
	}
	x.useValues(gen)
	if large = large && x.finder != nil; !eager && !large && !t.secondLocked(x.name, now) {
		return nil
	}
	x.of, x.blocks = &memo.Key{}, s.cfg.Blocks
	x.used.Store(since)
	x.kept.Store(eager)
	if t.byName == nil {
		t.byName, t.refused = map[string]*Index{}, map[string]time.Time{}
	}
	t.byName[x.name] = x
	if t.timer == nil {
		t.timer = time.AfterFunc(indexIdle/10, s.DropIndexes)
	}
	if len(t.byName) > maxIndexes {
		t.removeLocked(t.oldestLocked(x))
		t.timer.Reset(countInterval) // drops the digests
	}
	t.publishLocked()
	t.reportLocked(s)
	return x
}

// has reports whether there is an index of the name.
func (t *indexes) has(name string) bool {
	published := t.published.Load()
	return published != nil && (*published)[name] != nil
}

// publishLocked gives the indexes to readers.
func (t *indexes) publishLocked() {
	published := maps.Clone(t.byName)
	t.published.Store(&published)
}

// secondLocked records the use of a name, and reports whether it is not the first one.
func (t *indexes) secondLocked(name string, now time.Time) bool {
	if last, ok := t.once[name]; ok && now.Sub(last) < secondUse {
		delete(t.once, name)
		return true
	}
	if t.once == nil || len(t.once) >= maxOnce {
		t.once = map[string]time.Time{}
	}
	t.once[name] = now
	return false
}

// oldestLocked returns the least recently used index except x, one that clients have chosen if
// there is one.
func (t *indexes) oldestLocked(x *Index) (oldest *Index) {
	for _, o := range t.byName {
		if o != x && (oldest == nil || oldest.kept.Load() && !o.kept.Load() || oldest.kept.Load() == o.kept.Load() && o.used.Load() < oldest.used.Load()) {
			oldest = o
		}
	}
	return oldest
}

// countSoon lets digests be counted if many were made since the last count, or if an index is full.
func (t *indexes) countSoon(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.soon || t.timer == nil || now.Sub(t.lastTime) < countInterval {
		return
	}
	if total := t.totalLocked(); total-t.counted > countGrowth+t.counted/4 || t.fullLocked() {
		t.soon = true
		t.timer.Reset(0)
	}
}

func (t *indexes) totalLocked() (bytes int64) {
	for _, x := range t.byName {
		bytes += x.size()
	}
	return bytes
}

// fullLocked reports whether an index has no room.
func (t *indexes) fullLocked() bool {
	for _, x := range t.byName {
		if x.full.Load() {
			return true
		}
	}
	return false
}

func (t *indexes) removeLocked(x *Index) {
	delete(t.byName, x.name)
	t.publishLocked()
	x.close()
}

// reportLocked reports the changes of the number of indexes and of their bytes.
func (t *indexes) reportLocked(s *Selections) {
	now := [2]int64{int64(len(t.byName)), t.totalLocked()}
	s.cfg.Measured(now[0]-t.reported[0], now[1]-t.reported[1])
	t.reported = now
}

// DropIndexes drops the indexes that have no readers any more, or all if the storage has ended. It
// counts the bytes of the others, and drops those beyond the bound: first an index that alone
// exceeds it, or that has no room among those of all resources, which is then refused for
// indexIdle, then the least recently used ones.
func (s *Selections) DropIndexes() {
	t := &s.indexes
	t.dropping.Lock()
	defer t.dropping.Unlock()
	t.mu.Lock()
	before := map[*Index]int64{}
	for _, x := range t.byName {
		if s.cfg.Context.Err() != nil || time.Since(s.start)-time.Duration(x.used.Load()) >= indexIdle || x.gen.Ended() {
			t.removeLocked(x)
		} else {
			before[x] = x.size()
		}
	}
	t.mu.Unlock()
	s.countDigests(before)

	t.mu.Lock()
	defer t.mu.Unlock()
	limit, dropped := s.cfg.Blocks.Stats().Limit/indexShare, false
	for _, x := range t.byName {
		if x.full.Swap(false) && (x.size() > limit/2 || s.cfg.Blocks.Charged() > x.allLimit(s.cfg.Blocks.Stats().Limit)/8*7) {
			t.removeLocked(x)
			t.refused[x.name] = time.Now().Add(indexIdle)
			s.cfg.Refused()
			dropped = true
		}
	}
	total := t.totalLocked()
	for ; total > limit; dropped = true {
		oldest := t.oldestLocked(nil)
		total -= oldest.size()
		t.removeLocked(oldest)
	}
	for name, until := range t.refused {
		if time.Now().After(until) {
			delete(t.refused, name)
		}
	}
	t.counted, t.lastTime, t.soon = total, time.Now(), false
	t.reportLocked(s)
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	switch {
	case s.cfg.Context.Err() != nil:
	case dropped:
		t.timer = time.AfterFunc(countInterval, s.DropIndexes) // which drops the digests
	case len(t.byName) > 0:
		t.timer = time.AfterFunc(indexIdle/10, s.DropIndexes)
	}
}

// countDigests drops the digests of closed indexes from the newest version, and counts the bytes of
// the others; before has their bytes so far. Digests of older versions count as memory of these
// (btree.Weigh).
func (s *Selections) countDigests(before map[*Index]int64) {
	snap, err := s.cfg.Resource.Latest()
	if err != nil {
		return // being relisted
	}
	bytes := map[*memo.Key]int64{}
	for l := range snap.Memos() {
		l.DropClosed()
		for of, value := range l.All() {
			if d, ok := value.(*digest); ok {
				bytes[of] += d.Size()
			}
		}
	}
	for x, was := range before {
		x.counted(was, bytes[x.of])
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
	s.indexes.reportLocked(s)
	for _, k := range s.keyed.load() {
		k.interrupt()
	}
}
