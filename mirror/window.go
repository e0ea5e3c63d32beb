package mirror

import "time"

// history is the part of a resource beside its present, as its table counts it.
type history struct {
	// marks are revisions with the time by which everything up to them had been
	// applied, ascending; history is cut at marks only.
	marks []mark
	bytes int64 // held by the log; what versions take is counted by itself
	fresh int64 // of them, taken in since the last mark
}

type mark struct {
	rev Revision
	at  time.Time
}

// A resource sets a mark at most every markInterval or markBytes, whichever comes
// first: the window is as exact as that.
const (
	markInterval = time.Second
	markBytes    = 1 << 20
)

// remember counts the events that were put into the resource's log, and makes room for it:
// when all histories together exceed the window's bytes, the resource that holds
// the most loses its oldest part, so that a busy one does not take the history of
// the quiet ones (I7, I9).
func (w *writer) remember(t *table, through Revision, events []*Event) {
	var bytes int64
	for _, e := range events {
		bytes += e.historyBytes()
	}
	h := &t.history
	h.bytes += bytes
	h.fresh += bytes
	w.stats.historyBytes.Add(bytes)
	h.mark(through, time.Now())
	w.bound()
}

// held returns the bytes that the window bounds.
func (w *writer) held() int64 { return w.stats.historyBytes.Load() + w.stats.versionBytes.Load() }

// dropMade drops the least recently used version that was made for readers, of all resources, and
// reports whether there was one: it can be made again in milliseconds, while events cannot.
func (w *writer) dropMade() bool {
	var owner *table
	var idle *version
	for _, t := range w.tables {
		if lin := t.cur.Load(); lin != nil {
			for _, v := range *lin.made.Load() {
				if idle == nil || v.used.Load() < idle.used.Load() {
					owner, idle = t, v
				}
			}
		}
	}
	if idle == nil {
		return false
	}
	lin := owner.cur.Load()
	lin.forget(func(v *version) bool { return v == idle })
	owner.countVersionBytes(lin)
	return true
}

// bound drops history in excess of the window.
func (w *writer) bound() {
	for w.held() > w.opts.Window.MaxBytes && (w.dropMade() || w.shed()) {
	}
}

// historyOf returns the history that a new lineage begins with. Its age counts from now: only clocks
// of other machines know when its events happened, and no answer may depend on the time of day.
func historyOf(log *eventLog) (h history) {
	now := time.Now()
	for seq := log.First(); seq < log.End(); seq++ {
		e := log.At(seq)
		n := e.historyBytes()
		h.bytes += n
		h.fresh += n
		h.mark(e.Rev, now)
	}
	return h
}

// mark sets a mark if one is due.
func (h *history) mark(rev Revision, now time.Time) {
	if h.fresh == 0 {
		return
	}
	if n := len(h.marks); n == 0 || now.Sub(h.marks[n-1].at) >= markInterval || h.fresh >= markBytes {
		h.marks = append(h.marks, mark{rev, now})
		h.fresh = 0
	}
}

// shed drops the oldest history of the resource that holds the most, and reports whether
// there was any.
func (w *writer) shed() bool {
	var most *table
	for _, t := range w.tables {
		if most == nil || t.historyBytes() > most.historyBytes() {
			most = t
		}
	}
	if most.cur.Load() == nil {
		return false
	}
	rev, before, marks := w.clock.Revision(), w.held(), most.history.marks
	if len(marks) > 0 {
		rev = marks[0].rev
	}
	most.trim(rev)
	return len(marks) > 0 || w.held() < before
}

// historyBytes is the memory of the resource beside its present: values and versions.
func (t *table) historyBytes() int64 { return t.history.bytes + t.versionBytes.Load() }

// age drops history that is too old, and versions made for readers that were not used for a while.
func (w *writer) age(now time.Time) {
	w.absorb()
	idle := Now() - int64(madeIdle)
	for _, t := range w.tables {
		if lin := t.cur.Load(); lin != nil && lin.forget(func(v *version) bool { return v.used.Load() < idle }) {
			t.countVersionBytes(lin)
		}
		h := &t.history
		h.mark(w.clock.Revision(), now)
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

// trim raises the floor of the resource's log, and its oldest readable version, to
// rev.
func (t *table) trim(rev Revision) {
	h := &t.history
	for len(h.marks) > 0 && h.marks[0].rev <= rev {
		h.marks = h.marks[1:]
	}
	lin := t.cur.Load()
	t.raise(lin, rev)
	lin.log.Drop(rev, func(e *Event) {
		h.bytes -= e.historyBytes()
		t.w.stats.historyBytes.Add(-e.historyBytes())
		if e.Prev == nil {
			return
		}
		e.Prev.retire(false) // for a deletion, or for readers of the past; a watch that is about to send the event makes it anew
		if !e.Prev.hasValue() {
			t.missing--
		}
	})
	t.w.stats.historyFloor.Store(max(rev, t.w.stats.historyFloor.Load()))
}

// applyCompaction drops the versions below the compacted revision, or below the clock if that is
// lower.
func (w *writer) applyCompaction() {
	rev := min(w.compacted.Load(), w.clock.Revision())
	if rev <= w.stats.compacted.Load() {
		return
	}
	for _, t := range w.tables {
		if lin := t.cur.Load(); lin != nil {
			t.raise(lin, rev)
		}
	}
	w.stats.compacted.Store(rev) // now that it is so
}
