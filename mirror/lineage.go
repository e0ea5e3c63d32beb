package mirror

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// Tree and Run are the engine's view of an ordered set of entries; see the
// methods of Snapshot.
type (
	tree = btree.Tree[*Entry]
	// Run is a part of one leaf of a version's tree: neighbouring entries, and a
	// place on the leaf to keep what a reader derives from all of them.
	Run = btree.Run[*Entry]
	// Leaf is the leaf of a Run.
	Leaf = btree.Leaf[*Entry]
)

type eventLog = eventlog.Log[Event, *Event]

// version is a resource at one revision, and at every later one until the next
// event: the tree and the place in the log where its future begins.
type version struct {
	rev  Revision
	tree tree
	seq  uint64 // number of the first event after rev
	// prev is the version before, for a reader that meets a version before the
	// clock has reached it. It is cut when the clock has, so that versions do not
	// hold each other alive.
	prev atomic.Pointer[version]

	used  atomic.Int64 // when a reader was given it, as Now counts; of one made for readers
	bytes int64        // of its nodes that no newer version has, as weighed last; the writer's
}

// lineage is the unbroken life of a resource since it was last listed. A resource
// that has to be listed anew gets a new lineage; the old one's log is dead.
type lineage struct {
	// successor goes on where this lineage has ended, but for a gap between its last
	// event and the successor's floor; nil if there is none.
	successor atomic.Pointer[lineage]
	// private: nobody has claimed the resource. Values may be missing and no reader
	// is shown the lineage; see current.readable.
	private bool
	log     *eventLog
	head    atomic.Pointer[version] // newest; may be ahead of the clock for a moment; nil when the lineage has ended
	// suspect: a check has found what came before to differ from etcd, and none has found that
	// this does not.
	suspect atomic.Bool
	// readable is the oldest revision that can be read. The log reaches back to it.
	readable atomic.Int64
	// checkpoints are versions kept so that the past can be read, from one of them or from
	// the head, over the log. Ascending; there may be none. Replaced by the writer.
	checkpoints atomic.Pointer[[]*version]
	// made are versions that were made for readers, in no order. Replaced by readers, who
	// add to them, and by the writer, with compare-and-swap.
	made atomic.Pointer[[]*version]
}

// newLineage returns a lineage from its oldest version to its newest, nil if that is the same. The
// log leads from one to the other; nil means a new one. Every lineage begins here.
func newLineage(oldest, newest *version, log *eventLog, private bool) *lineage {
	if newest == nil {
		newest = oldest
	}
	if log == nil {
		log = eventlog.New[Event](oldest.rev)
	}
	lin := &lineage{log: log, private: private}
	lin.head.Store(newest)
	lin.readable.Store(oldest.rev)
	lin.checkpoints.Store(&[]*version{oldest})
	lin.made.Store(&[]*version{})
	return lin
}

// versions returns how many versions of the past are kept.
func (l *lineage) versions() int { return len(*l.checkpoints.Load()) + len(*l.made.Load()) }

// oldest returns the oldest revision that can be read.
func (l *lineage) oldest() Revision { return l.readable.Load() }

// at returns the version whose future begins where that of rev does: the one that is kept if
// there is one, or else one that it makes and keeps. All readers of revisions between the
// same two events get the same tree for as long as it is kept. It reports false
// if the window has moved past rev, or the lineage has ended. The clock has reached rev.
func (l *lineage) at(rev Revision) (*version, bool) {
	seq := l.log.After(rev)
	if rev < l.oldest() { // what the log has dropped may be missing in seq
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
	tree, ok := l.roll(v, seq)
	if !ok {
		return nil, false
	}
	v = l.keep(&version{rev: rev, tree: tree, seq: seq})
	switch {
	case l.log.Dead():
		l.forget(func(*version) bool { return true })
	case rev < l.oldest(): // whoever moved it has not seen v
		seq := l.log.After(l.oldest())
		l.forget(func(v *version) bool { return v.seq < seq })
	}
	return v, true
}

// nearest returns the version that has the fewest events between it and the number, nil if the
// lineage has ended.
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
	for _, v := range *l.made.Load() {
		if away(v) < away(best) {
			best = v
		}
	}
	return best
}

func bySeq(v *version, seq uint64) int { return cmp.Compare(v.seq, seq) }

// roll returns the tree after the events below the number: those from v on are applied, or
// those up to v taken back. Cost is about a microsecond for each. It reports false if the log
// has dropped one of them.
func (l *lineage) roll(v *version, seq uint64) (tree, bool) {
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

// replace puts an entry in the place of another one with its key; one of them may be nil.
func replace(edit *btree.Edit[*Entry], old, new *Entry) {
	if new != nil {
		edit.Set(new)
	} else {
		edit.Delete(old.Key())
	}
}

const (
	// maxMade is how many versions of a resource are kept for readers beside the
	// checkpoints: enough that lists in pages of a few revisions roll once each. A guess.
	maxMade = 16
	// madeIdle is how long one is kept that nobody asks for: longer than a client that
	// reads page by page needs for one of them. A guess.
	madeIdle = 30 * time.Second
)

// touch takes note that a reader has been given the version.
func (v *version) touch() {
	if now := Now(); now-v.used.Load() > int64(time.Millisecond) {
		v.used.Store(now)
	}
}

// keep keeps a version that was made for a reader, or returns the one that another reader
// has kept in the meantime. The one that was not asked for the longest makes room.
func (l *lineage) keep(v *version) *version {
	v.used.Store(Now())
	for {
		cur := l.made.Load()
		if i := slices.IndexFunc(*cur, func(o *version) bool { return o.seq == v.seq }); i >= 0 {
			(*cur)[i].touch()
			return (*cur)[i]
		}
		next := slices.Clone(*cur)
		if len(next) == maxMade {
			oldest := slices.MinFunc(next, func(a, b *version) int { return cmp.Compare(a.used.Load(), b.used.Load()) })
			next = slices.DeleteFunc(next, func(o *version) bool { return o == oldest })
		}
		next = append(next, v)
		if l.made.CompareAndSwap(cur, &next) {
			return v
		}
	}
}

// forget drops the versions made for readers that which selects, and reports whether
// there were any.
func (l *lineage) forget(which func(*version) bool) bool {
	for {
		cur := l.made.Load()
		next := slices.DeleteFunc(slices.Clone(*cur), which)
		if len(next) == len(*cur) {
			return false
		}
		if l.made.CompareAndSwap(cur, &next) {
			return true
		}
	}
}

// retire releases every version and event of a lineage whose log has been abandoned, and which is
// not Resource.cur any more: cursors may hold it for as long as their clients please (I7).
func (l *lineage) retire() {
	l.head.Store(nil)
	l.checkpoints.Store(&[]*version{})
	l.forget(func(*version) bool { return true })
	l.log.Release()
}

// past returns the versions of the past that are kept, newest first.
func (l *lineage) past() []*version {
	all := slices.Concat(*l.checkpoints.Load(), *l.made.Load())
	slices.SortFunc(all, func(a, b *version) int { return cmp.Compare(b.seq, a.seq) })
	return all
}

// addCheckpoints keeps the versions of a lineage that is not published yet which table.checkpoint
// would have kept from the beginning.
func (l *lineage) addCheckpoints(events int) {
	end, last := l.log.End(), l.since(l.oldest())
	cps := []*version{last}
	for {
		left := end - last.seq
		d := uint64(distance(left/2, events))
		if d >= left {
			break
		}
		rev := l.log.At(last.seq + d - 1).Rev
		seq := l.log.After(rev) // whole revisions
		t, _ := l.roll(last, seq)
		last = &version{rev: rev, tree: t, seq: seq}
		cps = append(cps, last)
	}
	l.checkpoints.Store(&cps)
}

// since returns the version at a revision that can be read, and does not keep it. The oldest
// readable revision must not move meanwhile.
func (l *lineage) since(rev Revision) *version {
	seq := l.log.After(rev)
	t, ok := l.roll(l.nearest(seq), seq)
	if !ok {
		// I3: the log reaches back to the oldest revision, which only the writer moves.
		panic("mirror: the log ends above the oldest version")
	}
	return &version{rev: rev, tree: t, seq: seq}
}

// Two versions of the past are as far apart as the newer one is old, counted in events, but
// neither closer than Options.CheckpointEvents nor further apart than that
// times 1<<thinLimit. A version shares the less with its neighbour the more events lie between,
// so it is the distance that saves memory: with 150,000 objects and 300,000 events, versions
// cost less than 100 bytes for each event (TestMemoryOfHistory). A read rolls at most half the distance,
// 32,768 events by default, and twice that before the oldest version.
const thinLimit = 9

// distance returns how many events may lie between two versions if so many have happened
// since the newer one.
func distance(age uint64, events int) int {
	return int(min(max(uint64(events), age), uint64(events)<<thinLimit))
}

// thin drops versions that are closer to their neighbours than their age asks for,
// never the first or the last; events is the distance between new ones. It may
// write to cps.
func thin(cps []*version, events int) []*version {
	end := cps[len(cps)-1].seq
	kept := len(cps) - 1 // cps[kept:] are the ones that stay
	for i := len(cps) - 2; i >= 0; i-- {
		if newer := cps[kept].seq; i > 0 && newer-cps[i-1].seq <= uint64(distance(end-newer, events)) {
			continue
		}
		kept--
		cps[kept] = cps[i]
	}
	return slices.Clip(slices.Delete(cps, 0, kept))
}
