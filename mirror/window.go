package mirror

import "time"

// remember accounts for events added to the resource's log and enforces the window: when all
// histories together exceed its bytes, the resource with the largest history loses its oldest part.
// So a busy resource does not evict the history of quiet ones (I7, I9).
func (w *writer) remember(t *table, through Revision, events []*Event) {
	var bytes int64
	for _, e := range events {
		bytes += e.historyBytes()
	}
	h := &t.history
	h.bytes += bytes
	h.fresh += bytes
	w.stats.HistoryBytes.Add(bytes)
	h.mark(through, time.Now())
	w.bound()
}

// totalHistoryBytes returns the bytes that the window bounds.
func (w *writer) totalHistoryBytes() int64 {
	return w.stats.HistoryBytes.Load() + w.stats.VersionBytes.Load()
}

// dropMade drops the least recently used version made for readers, over all resources, and reports
// whether there was one. Such a version can be rebuilt in milliseconds; events cannot.
func (w *writer) dropMade() bool {
	var owner *table
	var idle *version
	for _, t := range w.tables {
		if lin := t.lineage.Load(); lin != nil {
			for _, v := range *lin.cachedVersions.Load() {
				if idle == nil || v.used.Load() < idle.used.Load() {
					owner, idle = t, v
				}
			}
		}
	}
	if idle == nil {
		return false
	}
	lin := owner.lineage.Load()
	lin.dropCached(func(v *version) bool { return v == idle })
	owner.countVersionBytes(lin)
	return true
}

// bound drops history in excess of the window.
func (w *writer) bound() {
	for w.totalHistoryBytes() > w.opts.Window.MaxBytes && (w.dropMade() || w.shed()) {
	}
}

// shed drops the oldest history of the resource with the largest history, and reports whether there
// was any.
func (w *writer) shed() bool {
	var most *table
	for _, t := range w.tables {
		if most == nil || t.historyBytes() > most.historyBytes() {
			most = t
		}
	}
	if most.lineage.Load() == nil {
		return false
	}
	rev, before, marks := w.published.Revision(), w.totalHistoryBytes(), most.history.marks
	if len(marks) > 0 {
		rev = marks[0].rev
	}
	most.trim(rev)
	return len(marks) > 0 || w.totalHistoryBytes() < before
}

// historyBytes is the memory of the resource's history: superseded values and past versions.
func (t *table) historyBytes() int64 { return t.history.bytes + t.versionBytes.Load() }

// trim raises the floor of the resource's log, and its oldest readable version, to rev.
func (t *table) trim(rev Revision) {
	h := &t.history
	for len(h.marks) > 0 && h.marks[0].rev <= rev {
		h.marks = h.marks[1:]
	}
	lin := t.lineage.Load()
	t.raise(lin, rev)
	lin.log.Drop(rev, func(e *Event) {
		h.bytes -= e.historyBytes()
		t.w.stats.HistoryBytes.Add(-e.historyBytes())
		if e.Prev == nil {
			return
		}
		// memos for the deletion, or of past readers; a watch that still has to send the event
		// rebuilds them
		e.Prev.memos.Supersede(false)
		if !e.Prev.hasValue() {
			t.missing--
		}
	})
}
