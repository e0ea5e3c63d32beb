package mirror

import (
	"slices"
	"time"

	"github.com/stratakube/strata/mirror/internal/btree"
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
	if m.byPrefix[r.prefix] != r {
		parent := m.route(r.prefix)
		m.byPrefix[r.prefix] = r
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
		m.reload(r)
	default:
		r.show()
	}
}

// show lets readers see what was kept for nobody so far.
func (r *Resource) show() {
	lin := r.cur.Load()
	if lin == nil || !lin.private {
		return
	}
	shown := newLineage(lin.head.Load(), lin.log, false)
	shown.checkpoints.Store(lin.checkpoints.Load())
	r.cur.Store(shown)
	r.changed.wake()
}

// drop empties an excluded resource.
func (m *Mirror) drop(r *Resource) {
	r.end()
	r.loading, r.pending, r.bytes, r.missing = false, nil, 0, 0
	r.generation++
}

// end takes the resource's lineage away; cursors on it learn of it.
func (r *Resource) end() {
	if old := r.cur.Swap(nil); old != nil {
		old.log.Abandon()
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
// held them so far. The past of the root, which nobody can read, still contains
// them until it leaves the window; any other parent loses its past. Writer only.
func (m *Mirror) carve(parent, r *Resource) {
	start, end := r.prefix, prefixEnd(r.prefix)
	from := parent.cur.Load()
	cut := func(t tree) tree {
		var entries []*Entry
		for e := range t.All(start, end) {
			// A resource below r, carved earlier, may still be in the parent's past.
			if m.route(e.Key()) == r {
				entries = append(entries, e)
			}
		}
		return btree.Build(entries)
	}

	oldest := (*from.checkpoints.Load())[0]
	base := &version{rev: oldest.rev, tree: cut(oldest.tree)}
	head := base
	log := eventlog.New[Event](from.log.Floor())
	for seq := from.log.First(); seq < from.log.End(); seq++ {
		e := from.log.At(seq)
		if k := e.Key(); k < start || k >= end || m.route(k) != r {
			continue
		}
		log.Append(e)
		m.window.taken += e.historyBytes() // it will be given back once more
		if e.Prev != nil && !e.Prev.hasValue() {
			r.missing++
		}
		if e.Rev <= base.rev {
			base.seq = log.End()
		} else {
			head = &version{rev: e.Rev}
		}
	}
	present := from.head.Load()
	if head != base {
		head.tree, head.seq = cut(present.tree), log.End()
	}

	edit := present.tree.Edit()
	for e := range head.tree.All("", "") {
		edit.Delete(e.Key())
		if e.hasValue() {
			r.bytes += e.Size()
			parent.bytes -= e.Size()
		} else {
			r.missing++
			parent.missing--
		}
	}
	rest := &version{rev: present.rev, tree: edit.Tree(), seq: present.seq}
	if parent.prefix == m.opts.Prefix {
		from.head.Store(rest)
	} else {
		rest.rev, rest.seq = m.clock.rev.Load(), 0
		parent.begin(newLineage(rest, eventlog.New[Event](rest.rev), !parent.owned))
		parent.missing = 0
		for e := range rest.tree.All("", "") {
			if !e.hasValue() {
				parent.missing++
			}
		}
	}

	r.loading = false
	r.generation++
	lin := newLineage(base, log, true) // shown when no value is missing
	lin.head.Store(head)
	r.begin(lin)
}

// diverged abandons a resource whose feed contradicts what is held, and lists it anew.
func (m *Mirror) diverged(r *Resource, err error) {
	m.opts.Logger.Error("an event was lost or came twice; the resource is listed anew", "prefix", r.prefix, "error", err)
	m.stats.divergences.Add(1)
	m.reload(r)
}

// reload lists one resource anew while the others go on: changes that arrive
// meanwhile wait, and are applied on top of the list as soon as the clock has
// reached the list's revision. Cursors on the resource learn of it. Writer only.
func (m *Mirror) reload(r *Resource) {
	r.end()
	r.loading, r.pending, r.bytes, r.missing = true, nil, 0, 0
	r.generation++
	generation := r.generation
	m.wg.Go(func() {
		for backoff := retryFirst; m.ctx.Err() == nil; backoff = min(2*backoff, retryLast) {
			l := m.list(m.ctx, r.prefix)
			if l.err == nil {
				// A snapshot at the list's revision may exist only once the clock
				// is there; asking for it makes etcd tell.
				l.err = m.Wait(m.ctx, l.header.Revision)
			}
			if l.err == nil {
				m.do(func() {
					if r.generation == generation {
						m.install(r, l)
					}
				})
				return
			}
			m.opts.Logger.Warn("listing a resource failed", "prefix", r.prefix, "error", l.err)
			select {
			case <-time.After(backoff):
			case <-m.ctx.Done():
			}
		}
	})
}

// install begins a lineage with a list and applies what has arrived since.
func (m *Mirror) install(r *Resource, l loadedList) {
	entries := slices.DeleteFunc(l.entries, func(e *Entry) bool { return m.route(e.Key()) != r })
	// What was claimed meanwhile lists for itself.
	pending := slices.DeleteFunc(r.pending, func(c Change) bool { return m.route(string(c.Key)) != r })
	v := r.found(entries, l.header.Revision)
	lin := newLineage(v, eventlog.New[Event](v.rev), !r.owned)
	t := &txn{r: r, lin: lin, edit: v.tree.Edit()}
	for i := range pending {
		c := &pending[i]
		if c.ModRevision <= v.rev {
			continue
		}
		if err := t.add(c); err != nil {
			m.diverged(r, err)
			return
		}
	}
	if len(t.events) > 0 {
		t.commit()
		m.account(t, m.clock.rev.Load())
	}
	// Only now: a reader takes the lineage for complete up to the clock (I8).
	r.begin(lin)
}
