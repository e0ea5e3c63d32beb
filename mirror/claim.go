package mirror

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/internal/btree"
	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// prefixEnd returns the smallest string above every string with the prefix, which
// ends with a slash.
func prefixEnd(prefix string) string {
	return prefix[:len(prefix)-1] + string(prefix[len(prefix)-1]+1)
}

// adopt gives a resource that was claimed what is held for it. Writer only.
func (m *Mirror) adopt(r *Resource, exclude bool) {
	fetch := r.excluded // nothing is held
	r.owned, r.excluded = true, exclude
	r.awaited = time.Time{}
	if r.readable() == nil {
		r.await()
	}
	known := m.byPrefix[r.prefix] == r
	parent := m.route(r.prefix)
	m.byPrefix[r.prefix] = r
	m.listExcluded()
	if !known {
		if m.clock.rev.Load() == 0 {
			return // the first list is on its way and will be divided among all resources
		}
		if parent.loading || parent.excluded {
			fetch = true
		} else {
			m.carve(parent, r)
		}
	}
	switch {
	case exclude:
		m.drop(r)
	case fetch || r.missing > 0:
		m.reload(r, 0, true)
	default:
		r.show()
	}
}

// listExcluded tells the lists that are on their way what they need not keep.
func (m *Mirror) listExcluded() {
	prefixes := []string{}
	for p, r := range m.byPrefix {
		// A resource inside needs the list to look.
		if r.excluded && !m.contains(p) {
			prefixes = append(prefixes, p)
		}
	}
	m.excluded.Store(&prefixes)
}

// contains reports whether a resource that is not excluded lies below prefix.
func (m *Mirror) contains(prefix string) bool {
	for p, r := range m.byPrefix {
		if !r.excluded && strings.HasPrefix(p, prefix) {
			return true
		}
	}
	return false
}

// show lets readers see what was kept for nobody so far.
func (r *Resource) show() {
	lin := r.cur.Load()
	if lin == nil || !lin.private {
		return
	}
	shown := newLineage(lin.first(), lin.log, false)
	shown.head.Store(lin.head.Load())
	shown.addCheckpoints(r.m.opts.CheckpointEvents)
	r.cur.Store(shown)
	r.loaded(time.Time{})
	r.changed.wake()
}

// drop empties a resource.
func (m *Mirror) drop(r *Resource) {
	r.end()
	r.reset()
}

// reset forgets what is counted for the resource, what waits for a list of it, and
// the list: it comes too late. Writer only.
func (r *Resource) reset() {
	if r.stopLoading != nil {
		r.stopLoading()
		r.stopLoading = nil
	}
	r.loading, r.pending, r.bytes, r.missing = false, nil, 0, 0
}

// end takes the resource's lineage away; cursors on it learn of it.
func (r *Resource) end() {
	if old := r.cur.Swap(nil); old != nil {
		old.log.Abandon()
		old.retire()
		r.forget()
	}
	r.changed.wake()
}

// abandon is the writer's half of the last Release.
func (m *Mirror) abandon(r *Resource) {
	m.mu.Lock()
	again := r.refs > 0
	m.mu.Unlock()
	if again {
		return
	}
	r.owned = false
	lin := r.cur.Load()
	if lin == nil {
		return
	}
	var entries []*Entry
	for e := range lin.head.Load().tree.All("", "") {
		entries = append(entries, e)
	}
	rev := m.clock.rev.Load()
	r.bytes = 0
	r.begin(newLineage(r.found(entries, rev), eventlog.New[Event](rev), true))
}

// carve moves the keys of r, with their history, out of the resource that has
// held them so far: each of the two gets a lineage of its own. Cost is
// O(events and entries moved + events of the parent). Writer only.
func (m *Mirror) carve(parent, r *Resource) {
	start, end := r.prefix, prefixEnd(r.prefix)
	from := parent.cur.Load()
	oldest, present := from.first(), from.head.Load()
	floor, since := from.log.Floor(), oldest
	if rev := parent.absorbed; rev > oldest.rev {
		floor, since = rev, from.since(rev)
	}
	was := parent.history

	var own, rest part
	own.begin(floor, since.rev, between(since.tree, start, end))
	rest.begin(from.log.Floor(), oldest.rev, without(oldest.tree, start, end))
	r.missing = 0
	for seq := from.log.First(); seq < from.log.End(); seq++ {
		e := from.log.At(seq)
		if k := e.Key(); k < start || k >= end {
			rest.add(e)
			continue
		}
		missing := 0
		if e.Prev != nil && !e.Prev.hasValue() {
			missing = 1
		}
		parent.missing -= missing
		if e.Rev > floor {
			own.add(e)
			r.missing += missing
		}
	}
	ownLin := own.end(between(present.tree, start, end), true) // shown when no value is missing
	restLin := rest.end(without(present.tree, start, end), !parent.owned)
	ownLin.suspect.Store(from.suspect.Load())
	restLin.suspect.Store(from.suspect.Load())
	for e := range ownLin.head.Load().tree.All("", "") {
		if e.hasValue() {
			r.bytes += e.Size()
		} else {
			r.missing++
			parent.missing--
		}
	}
	parent.bytes -= r.bytes

	parent.begin(restLin)
	r.loading = false
	r.begin(ownLin)
	parent.history = history{marks: was.marks, bytes: rest.bytes, fresh: was.fresh}
	r.history = history{marks: slices.Clone(was.marks), bytes: own.bytes, fresh: own.bytes}
	m.stats.historyBytes.Add(rest.bytes + own.bytes)
}

// absorb removes resources that nobody claims and that hold no key, such as those of definitions
// that were deleted: the resource around them takes over their keys. Their history is dropped, so
// one that is claimed again has none from before (Resource.absorbed). Cost is O(resources). Writer
// only.
func (m *Mirror) absorb() {
	var empty []*Resource
	for prefix, r := range m.byPrefix {
		lin := r.cur.Load()
		if !r.owned && prefix != m.opts.Prefix && lin != nil && lin.head.Load().tree.Len() == 0 {
			empty = append(empty, r)
		}
	}
	for _, r := range empty {
		delete(m.byPrefix, r.prefix)
		parent := m.route(r.prefix)
		// A list of the parent that is on its way may hold keys that were deleted since.
		if parent.loading || parent.cur.Load() == nil || !m.disown(r) {
			m.byPrefix[r.prefix] = r
			continue
		}
		parent.absorbed = m.clock.rev.Load()
		m.drop(r)
	}
}

// disown removes a resource from those that can be claimed, unless it is claimed already.
func (m *Mirror) disown(r *Resource) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	// A command that is on its way may be of a claim that came and went; it must find the resource.
	if r.refs > 0 || len(m.mu.commands) > 0 || m.mu.resources[r.prefix] != r {
		return false
	}
	delete(m.mu.resources, r.prefix)
	r.forgotten.Store(true)
	return true
}

// between returns the part of t with start <= key < end.
func between(t tree, start, end string) tree {
	return btree.Build(slices.Collect(t.All(start, end)))
}

// without returns the rest of t.
func without(t tree, start, end string) tree {
	edit := t.Edit()
	for e := range t.All(start, end) {
		edit.Delete(e.Key())
	}
	return edit.Tree()
}

// part is a lineage made of some of the keys of another one.
type part struct {
	base  *version // the oldest
	log   *eventLog
	last  Revision // of the events after base, 0 if there are none
	bytes int64    // of history
}

// begin begins with the keys at the oldest revision, and no event at or below the floor.
func (p *part) begin(floor, oldest Revision, base tree) {
	p.base = &version{rev: oldest, tree: base}
	p.log = eventlog.New[Event](floor)
}

func (p *part) add(e *Event) {
	p.log.Append(e)
	p.bytes += e.historyBytes()
	if e.Rev <= p.base.rev {
		p.base.seq = p.log.End()
	} else {
		p.last = e.Rev
	}
}

// end returns the lineage, given its keys at present.
func (p *part) end(present tree, private bool) *lineage {
	lin := newLineage(p.base, p.log, private)
	if p.last > 0 {
		lin.head.Store(&version{rev: p.last, tree: present, seq: p.log.End()})
	}
	return lin
}

// diverged abandons a resource whose feed contradicts what is held, and lists it
// anew: at once, but not again and again if the feed goes on like this.
func (m *Mirror) diverged(r *Resource, err error) {
	delay := r.distrust.next(time.Now())
	m.opts.Logger.Error("memory contradicts etcd: an event was lost or came twice; the resource is listed anew", "prefix", r.prefix, "in", delay, "error", err)
	m.stats.divergences.Add(1)
	// A history that is restored must not reach back to where clients were told otherwise.
	m.since.Store(max(m.clock.rev.Load(), m.since.Load()))
	m.reload(r, delay, false)
	m.doubt(r)
}

// doubt takes note that a resource was found not to be what etcd has.
func (m *Mirror) doubt(r *Resource) {
	if now := time.Now(); m.doubted != nil && m.doubted != r && now.Sub(m.doubtedAt) < doubtFor {
		// One lost event concerns one resource. Two resources at odds with the feed
		// mean that it is not the continuation of what is held, for example because
		// etcd was restored and written to since; then nothing is certain.
		m.contradiction = fmt.Errorf("%w: of %s and of %s", ErrDiverged, m.doubted.prefix, r.prefix)
	} else {
		m.doubted, m.doubtedAt = r, now
	}
}

// doubtFor is how long a contradiction is taken for the sign of a wider one: a
// guess, long enough for quiet resources to show theirs.
const doubtFor = 10 * time.Minute

// backoff spaces what should not happen often. The zero value is ready.
type backoff struct {
	last  time.Time
	delay time.Duration
}

// next returns how long to wait this time: nothing if the last time is long ago.
func (b *backoff) next(now time.Time) time.Duration {
	if now.Sub(b.last) > 10*retryLast {
		b.delay = 0
	} else {
		b.delay = min(max(2*b.delay, retryFirst), retryLast)
	}
	b.last = now
	return b.delay
}
