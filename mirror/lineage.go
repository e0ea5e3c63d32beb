package mirror

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// lineagePointer points to the lineage of a resource, nil while the resource is being loaded. The
// writer stores it.
type lineagePointer struct{ atomic.Pointer[lineage] }

// readable returns the lineage that readers may see, nil if there is none.
func (c *lineagePointer) readable() *lineage {
	if lin := c.Load(); lin != nil && !lin.hasNoClaim {
		return lin
	}
	return nil
}

// Tree and Run are the mirror's view of an ordered set of entries; see the methods of Snapshot.
type (
	tree = btree.Tree[*Entry]
	// Run is a part of one leaf of a version's tree: neighbouring entries, and a memo on the leaf
	// for values that readers derive from all of them.
	Run  = btree.Run[*Entry]
	leaf = btree.Leaf[*Entry]
)

type eventLog = eventlog.Log[Event, *Event]

// version is the state of a resource at one revision and up to the next event: the tree, and the
// number of the next event in the log.
type version struct {
	rev  Revision
	tree tree
	seq  uint64 // number of the first event after rev
	// prev is the previous version, for a reader that loads a version above the published revision.
	// The writer clears it once the published revision has reached the version, so that versions do
	// not keep each other alive.
	prev atomic.Pointer[version]

	// when it was last returned to a reader, as Now counts; for versions cached for readers
	used atomic.Int64
	// bytes of its nodes that no newer version shares, as last weighed; owned by the writer
	bytes int64
}

// lineage is the continuous state of a resource since it was last listed. A relist gives the
// resource a new lineage and marks the log of the old one dead.
type lineage struct {
	// successor continues this lineage after its end, except for a gap between its last event and
	// the successor's floor; nil if there is none.
	successor atomic.Pointer[lineage]
	// hasNoClaim: the resource has no claim. Values may be missing, and readers do not see the
	// lineage; see lineagePointer.readable.
	hasNoClaim bool
	// restore is the restore of the history before the list with which the lineage began; nil if
	// there is none, or its events were joined. They may have been dropped since.
	restore atomic.Pointer[restore]
	log     *eventLog
	// newest; above the published revision between two steps of the writer; nil when the lineage
	// has ended
	head atomic.Pointer[version]
	// inconsistent: a check found an earlier state of the resource to differ from etcd, and no
	// later check has found this lineage equal to etcd.
	inconsistent atomic.Bool
	// oldestReadable is the oldest revision that can be read. The log reaches back to it.
	oldestReadable atomic.Int64
	// checkpoints are retained versions, ascending by revision; there may be none. Reads of old
	// revisions start from one of them or from the head and apply the log. Replaced by the writer.
	checkpoints atomic.Pointer[[]*version]
	// cachedVersions are versions cached for readers, in no order. Replaced with compare-and-swap
	// by readers, which add to them, and by the writer.
	cachedVersions atomic.Pointer[[]*version]
}

// newLineage returns a lineage from its oldest version to its newest; a nil newest means that both
// are the same. The log connects the two; a nil log means an empty one. Every lineage is created
// here.
func newLineage(oldest, newest *version, log *eventLog, hasNoClaim bool) *lineage {
	if newest == nil {
		newest = oldest
	}
	if log == nil {
		log = eventlog.New[Event](oldest.rev)
		oldest.seq = log.First()
	}
	lin := &lineage{log: log, hasNoClaim: hasNoClaim}
	lin.head.Store(newest)
	lin.oldestReadable.Store(oldest.rev)
	lin.checkpoints.Store(&[]*version{oldest})
	lin.cachedVersions.Store(&[]*version{})
	return lin
}

// versions returns the number of retained past versions.
func (l *lineage) versions() int { return len(*l.checkpoints.Load()) + len(*l.cachedVersions.Load()) }

// oldest returns the oldest revision that can be read.
func (l *lineage) oldest() Revision { return l.oldestReadable.Load() }

// at returns the version that is current at rev: a retained one if one matches, otherwise one
// materialized from the log, which is then cached. All readers of revisions between the same two
// events get the same tree while it is cached. It reports false if the window has moved past rev,
// or the lineage has ended. The published revision has reached rev.
func (l *lineage) at(rev Revision) (*version, bool) {
	if rev < l.oldest() {
		// before After: the log is then complete, even if history is joined meanwhile
		return nil, false
	}
	seq := l.log.After(rev)
	if rev < l.oldest() { // seq may lack events that the log has dropped
		return nil, false
	}
	v := l.nearest(seq)
	if v == nil {
		return nil, false
	}
	if v.seq == seq {
		v.touch()
		return v, true
	}
	tree, ok := l.rebuild(v, seq)
	if !ok {
		return nil, false
	}
	v = l.cacheVersion(&version{rev: rev, tree: tree, seq: seq})
	switch {
	case l.log.Dead():
		l.dropCached(func(*version) bool { return true })
	case rev < l.oldest(): // the goroutine that raised it has not seen v
		seq := l.log.After(l.oldest())
		l.dropCached(func(v *version) bool { return v.seq < seq })
	}
	return v, true
}

// nearest returns the version with the fewest events between it and the number, nil if the lineage
// has ended.
func (l *lineage) nearest(seq uint64) *version {
	away := func(v *version) uint64 { return max(v.seq, seq) - min(v.seq, seq) }
	best := l.head.Load()
	if best == nil {
		return nil
	}
	cps := *l.checkpoints.Load()
	i, _ := slices.BinarySearchFunc(cps, seq, bySeq)
	for _, v := range cps[max(i-1, 0):min(i+1, len(cps))] {
		if away(v) < away(best) {
			best = v
		}
	}
	for _, v := range *l.cachedVersions.Load() {
		if away(v) < away(best) {
			best = v
		}
	}
	return best
}

func bySeq(v *version, seq uint64) int { return cmp.Compare(v.seq, seq) }

// rebuild returns the tree after the events below the number. It applies the events from v on, or
// reverts the events up to v. Cost is about a microsecond for each event. It reports false if the
// log has dropped one of them.
func (l *lineage) rebuild(v *version, seq uint64) (tree, bool) {
	if v.seq == seq {
		return v.tree, true
	}
	edit := v.tree.Edit()
	for at := v.seq; at < seq; at++ {
		e := l.log.At(at)
		if e == nil {
			return tree{}, false
		}
		replace(edit, e.Prev, e.Entry)
	}
	for at := v.seq; at > seq; at-- {
		e := l.log.At(at - 1)
		if e == nil {
			return tree{}, false
		}
		replace(edit, e.Entry, e.Prev)
	}
	return edit.Tree(), true
}

// replace replaces an entry by another one with the same key; one of them may be nil.
func replace(edit *btree.Edit[*Entry], old, new *Entry) {
	if new != nil {
		edit.Set(new)
	} else {
		edit.Delete(old.Key())
	}
}

const (
	// maxCachedVersions is the number of versions of a resource cached for readers in addition to
	// the checkpoints: enough that paged lists at a few revisions materialize each version once. A
	// guess.
	maxCachedVersions = 16
	// cachedVersionIdle is how long an unused version stays cached: longer than a client that reads
	// page by page needs for one page. A guess.
	cachedVersionIdle = 30 * time.Second
)

// touch records that the version was returned to a reader.
func (v *version) touch() {
	if now := driver.Now(); now-v.used.Load() > int64(time.Millisecond) {
		v.used.Store(now)
	}
}

// cacheVersion caches a version that was made for a reader, or returns the one that another reader
// has cached meanwhile. It evicts the least recently used one if the cache is full.
func (l *lineage) cacheVersion(v *version) *version {
	v.used.Store(driver.Now())
	for {
		cur := l.cachedVersions.Load()
		if i := slices.IndexFunc(*cur, func(o *version) bool { return o.seq == v.seq }); i >= 0 {
			(*cur)[i].touch()
			return (*cur)[i]
		}
		next := slices.Clone(*cur)
		if len(next) == maxCachedVersions {
			oldest := slices.MinFunc(next, func(a, b *version) int { return cmp.Compare(a.used.Load(), b.used.Load()) })
			next = slices.DeleteFunc(next, func(o *version) bool { return o == oldest })
		}
		next = append(next, v)
		if l.cachedVersions.CompareAndSwap(cur, &next) {
			return v
		}
	}
}

// dropCached drops the versions cached for readers that which selects, and reports whether it
// dropped any.
func (l *lineage) dropCached(which func(*version) bool) bool {
	for {
		cur := l.cachedVersions.Load()
		next := slices.DeleteFunc(slices.Clone(*cur), which)
		if len(next) == len(*cur) {
			return false
		}
		if l.cachedVersions.CompareAndSwap(cur, &next) {
			return true
		}
	}
}

// release releases every version and event of a lineage whose log has been abandoned, that is no
// longer the resource's lineage: the cursors of slow clients may reference it for a long time (I7).
func (l *lineage) release() {
	l.head.Store(nil)
	l.checkpoints.Store(&[]*version{})
	l.dropCached(func(*version) bool { return true })
	l.log.Release()
}

// pastVersions returns the retained past versions, newest first.
func (l *lineage) pastVersions() []*version {
	all := slices.Concat(*l.checkpoints.Load(), *l.cachedVersions.Load())
	slices.SortFunc(all, func(a, b *version) int { return cmp.Compare(b.seq, a.seq) })
	return all
}

// addCheckpoints gives a lineage that is not published yet the checkpoints that table.checkpoint
// would have created for its events.
func (l *lineage) addCheckpoints(events int) {
	end, last := l.log.End(), l.versionAt(l.oldest())
	cps := []*version{last}
	for {
		left := end - last.seq
		d := uint64(distance(left/2, events))
		if d >= left {
			break
		}
		rev := l.log.At(last.seq + d - 1).Rev
		seq := l.log.After(rev) // whole revisions
		t, _ := l.rebuild(last, seq)
		last = &version{rev: rev, tree: t, seq: seq}
		cps = append(cps, last)
	}
	l.checkpoints.Store(&cps)
}

// versionAt returns the version at a readable revision, without caching it. The oldest readable
// revision must not move meanwhile.
func (l *lineage) versionAt(rev Revision) *version {
	seq := l.log.After(rev)
	t, ok := l.rebuild(l.nearest(seq), seq)
	if !ok {
		// I3: the log reaches back to the oldest revision, which only the writer moves.
		panic("mirror: the log ends above the oldest version")
	}
	return &version{rev: rev, tree: t, seq: seq}
}

// thinLimit bounds the distance between two past versions. The distance, in events, is the age of
// the newer version, but at least Options.CheckpointEvents and at most that times 1<<thinLimit. The
// more events lie between two versions, the fewer nodes they share, so larger distances save
// memory: with 150,000 objects and 300,000 events, versions cost less than 100 bytes for each event
// (TestHistory_MemoryPerRevision_IsBounded). A read applies at most the events of half the
// distance, 32,768 by default, and twice that before the oldest version.
const thinLimit = 9

// distance returns the maximum number of events between two versions if age events have happened
// since the newer one.
func distance(age uint64, events int) int {
	return int(min(max(uint64(events), age), uint64(events)<<thinLimit))
}

// thinCheckpoints drops versions that are closer to their neighbours than their age requires, but
// neither the first nor the last; events is the distance between new ones. It may write to cps.
func thinCheckpoints(cps []*version, events int) []*version {
	end := cps[len(cps)-1].seq
	kept := len(cps) - 1 // cps[kept:] are the retained ones
	for i := len(cps) - 2; i >= 0; i-- {
		if newer := cps[kept].seq; i > 0 && newer-cps[i-1].seq <= uint64(distance(end-newer, events)) {
			continue
		}
		kept--
		cps[kept] = cps[i]
	}
	return slices.Clip(slices.Delete(cps, 0, kept))
}

// restore is the restore of the history before a load (D5). It runs in the background after the
// load was installed, and joins the events to the lineages that began with the load. All of them
// share it. Its methods may be called concurrently.
type restore struct {
	cluster uint64
	through Revision     // of the list
	after   atomic.Int64 // history will reach back to it; 0 while that is unknown
	ended   atomic.Bool
}

// restoring reports whether the events after rev are not in the log yet, and may still be joined to
// it.
func (l *lineage) restoring(rev Revision) bool {
	r := l.restore.Load()
	if r == nil || r.ended.Load() { // before the floor: history may be joined meanwhile
		return false
	}
	return r.after.Load() <= rev && rev < r.through && l.log.Floor() <= r.through
}

// awaitsHistory reports whether the restore has not been joined to the lineage, and still can be:
// the log has every event after the list. Only the writer may call it.
func (l *lineage) awaitsHistory(r *restore) bool {
	return l.restore.Load() == r && l.log.Floor() == r.through
}
