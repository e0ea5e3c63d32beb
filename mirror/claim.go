package mirror

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// claim adds a claim or an exclusion of the prefix. Errors: ErrClosed.
func (s *shared) claim(prefix string, exclude bool) (*Resource, error) {
	if !strings.HasPrefix(prefix, s.opts.Prefix) || !strings.HasSuffix(prefix, "/") || prefix == s.opts.Prefix {
		return nil, fmt.Errorf("mirror: prefix %q is not below %q or does not end with a slash", prefix, s.opts.Prefix)
	}
	g := &s.registry
	g.mu.Lock()
	defer g.mu.Unlock()
	if s.ctx.Err() != nil {
		return nil, ErrClosed
	}
	r := g.resources[prefix]
	if r == nil {
		r = &Resource{m: s, prefix: prefix}
		g.resources[prefix] = r
	}
	if r.refs > 0 && r.exclude != exclude {
		return nil, fmt.Errorf("mirror: prefix %q cannot be both claimed and excluded", prefix)
	}
	r.refs++
	if r.refs == 1 {
		r.exclude = exclude
		g.enqueueLocked(func(w *writer) { w.onClaim(r, exclude) })
	}
	return r, nil
}

// Release ends a claim; one more than the claims panics. The last Release drops the resource's
// history; its values then count against Options.UnclaimedBytes until the next claim.
func (r *Resource) Release() {
	g := &r.m.registry
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.refs == 0 {
		panic("mirror: Release of " + r.prefix + ", which is not claimed")
	}
	r.refs--
	if r.refs == 0 {
		g.enqueueLocked(func(w *writer) { w.onRelease(r) })
	}
}

// onClaim gives a newly claimed resource the state that is cached for it.
func (w *writer) onClaim(r *Resource, exclude bool) {
	t := w.tables[r.prefix]
	known := t != nil && t.Resource == r
	if !known {
		t = newTable(w, r)
	}
	fetch := t.excluded // nothing is cached
	t.own(true)
	t.excluded = exclude
	t.unreadableSince = time.Time{}
	if t.lineage.readable() == nil {
		t.startLoadTimer()
	}
	parent := w.route(r.prefix)
	w.tables[r.prefix] = t
	w.listExcluded()
	if !known {
		if w.published.Revision() == 0 {
			return // the first list is in flight and will be divided among all resources
		}
		if parent.loading || parent.excluded {
			fetch = true
		} else {
			w.splitOut(parent, t)
		}
	}
	switch {
	case exclude:
		t.drop()
	case fetch || t.missing > 0:
		w.reload(t, 0, true)
	default:
		t.publishUnclaimed()
	}
}

// listExcluded publishes the prefixes whose keys running lists may leave out.
func (w *writer) listExcluded() {
	prefixes := []string{}
	for p, t := range w.tables {
		// A resource inside the prefix needs its keys from the list.
		if t.excluded && !w.contains(p) {
			prefixes = append(prefixes, p)
		}
	}
	w.excluded.Store(&prefixes)
}

// contains reports whether a resource that is not excluded lies below prefix.
func (w *writer) contains(prefix string) bool {
	for p, t := range w.tables {
		if !t.excluded && strings.HasPrefix(p, prefix) {
			return true
		}
	}
	return false
}

// onRelease is the writer's part of the last Release: it drops the history of the resource.
func (w *writer) onRelease(r *Resource) {
	if w.registry.isClaimed(r) {
		return
	}
	t := w.tables[r.prefix]
	if t == nil || t.Resource != r {
		return
	}
	t.own(false)
	lin := t.lineage.Load()
	if lin == nil {
		return
	}
	var entries []*Entry
	for e := range lin.head.Load().tree.All("", "") {
		entries = append(entries, e)
	}
	rev := w.published.Revision()
	t.setLineage(newLineage(t.firstVersion(entries, rev), nil, nil, true), history{})
}

// splitOut moves the keys of t, with their history, out of the parent, which has contained them so
// far. Each of the two gets a new lineage. Cost is O(events and entries moved + events of the
// parent).
func (w *writer) splitOut(parent, t *table) {
	start, end := t.prefix, prefixEnd(t.prefix)
	from := parent.lineage.Load()
	oldest, newest := from.versionAt(from.oldest()), from.head.Load()
	// Up to parent.absorbed, the log and the versions of the parent lack the keys of removed
	// tables, and t may have been one of them (I3). A compaction raises the oldest version, but not
	// the floor of the log, so each of the two is compared.
	floor, since := max(from.log.Floor(), parent.absorbed), oldest
	if parent.absorbed > oldest.rev {
		since = from.versionAt(parent.absorbed)
	}
	was := parent.history

	var own, rest logBuilder
	own.setBase(floor, since.rev, between(since.tree, start, end))
	rest.setBase(from.log.Floor(), oldest.rev, without(oldest.tree, start, end))
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
			t.missing += missing
		}
	}
	// published when no value is missing
	ownLin := own.build(between(newest.tree, start, end), true)
	restLin := rest.build(without(newest.tree, start, end), !parent.owned)
	ownLin.restore.Store(from.restore.Load())
	restLin.restore.Store(from.restore.Load())
	ownLin.inconsistent.Store(from.inconsistent.Load())
	restLin.inconsistent.Store(from.inconsistent.Load())
	for e := range ownLin.head.Load().tree.All("", "") {
		parent.count(e, -1)
		t.count(e, 1)
	}
	parent.setLineage(restLin, history{marks: was.marks, bytes: rest.bytes, fresh: was.fresh})
	t.loading = false
	t.setLineage(ownLin, history{marks: slices.Clone(was.marks), bytes: own.bytes, fresh: own.bytes})
}

// between returns the part of t with start <= key < end.
func between(t tree, start, end string) tree {
	return btree.Build(slices.Collect(t.All(start, end)))
}

// without returns the part of t outside start <= key < end.
func without(t tree, start, end string) tree {
	edit := t.Edit()
	for e := range t.All(start, end) {
		edit.Delete(e.Key())
	}
	return edit.Tree()
}

// logBuilder builds a lineage from some of the keys of another one.
type logBuilder struct {
	base  *version // the oldest
	log   *eventLog
	last  Revision // of the events after base, 0 if there are none
	bytes int64    // of history
}

// setBase sets the keys at the oldest revision, and the floor of the log: there are no events at or
// below it.
func (p *logBuilder) setBase(floor, oldest Revision, base tree) {
	p.log = eventlog.New[Event](floor)
	p.base = &version{rev: oldest, tree: base, seq: p.log.First()}
}

func (p *logBuilder) add(e *Event) {
	p.log.Append(e)
	p.bytes += e.historyBytes()
	if e.Rev <= p.base.rev {
		p.base.seq = p.log.End()
	} else {
		p.last = e.Rev
	}
}

// build returns the lineage; latest is its newest tree.
func (p *logBuilder) build(latest tree, hasNoClaim bool) *lineage {
	var newest *version
	if p.last > 0 {
		newest = &version{rev: p.last, tree: latest, seq: p.log.End()}
	}
	return newLineage(p.base, newest, p.log, hasNoClaim)
}
