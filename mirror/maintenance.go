package mirror

import (
	"time"

	"github.com/stratakube/strata/mirror/driver"
)

// age drops history older than the window, and versions cached for readers that are idle.
func (w *writer) age(now time.Time) {
	w.absorb()
	w.timeline.add(w.published.Revision(), now)
	w.timeline.trim(now.Add(-w.opts.Window.MaxAge))
	idle := driver.Now() - int64(cachedVersionIdle)
	for _, t := range w.tables {
		if lin := t.lineage.Load(); lin != nil && lin.dropCached(func(v *version) bool { return v.used.Load() < idle }) {
			t.countVersionBytes(lin)
		}
		h := &t.history
		h.mark(w.published.Revision(), now)
		n := 0
		for n < len(h.marks) && now.Sub(h.marks[n].at) > w.opts.Window.MaxAge {
			n++
		}
		if n > 0 {
			t.trim(h.marks[n-1].rev)
		}
	}
	w.weigh(now)
}

// absorb removes tables without a claim and without keys, such as those of deleted definitions; the
// table around them takes over their keys. Their history is dropped, so a later claim of the prefix
// has no history from before (table.absorbed). Cost is O(resources).
func (w *writer) absorb() {
	var empty []*table
	for prefix, t := range w.tables {
		lin := t.lineage.Load()
		if !t.owned && prefix != w.opts.Prefix && lin != nil && lin.head.Load().tree.Len() == 0 {
			empty = append(empty, t)
		}
	}
	for _, t := range empty {
		delete(w.tables, t.prefix)
		parent := w.route(t.prefix)
		// A list of the parent that is in flight may contain keys that were deleted since.
		if parent.loading || parent.lineage.Load() == nil || !w.registry.remove(t.Resource) {
			w.tables[t.prefix] = t
			continue
		}
		parent.absorbed = w.published.Revision()
		t.drop()
	}
}

// applyCompaction drops the versions below the compacted revision, or below the published revision
// if that is lower.
func (w *writer) applyCompaction() {
	rev := min(w.compacted.Load(), w.published.Revision())
	if rev <= w.stats.Compacted.Load() {
		return
	}
	for _, t := range w.tables {
		if lin := t.lineage.Load(); lin != nil {
			t.raise(lin, rev)
		}
	}
	w.stats.Compacted.Store(rev) // after the versions were dropped
}
