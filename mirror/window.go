package mirror

import "time"

// history is what a resource keeps beside its present. It belongs to the writer.
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

// remember counts what was put into the resource's log, and makes room for it:
// when all histories together exceed the window's bytes, the resource that holds
// the most loses its oldest part, so that a busy one does not take the history of
// the quiet ones (I7, I9). Writer only.
func (m *Mirror) remember(r *Resource, through Revision, events []*Event) {
	var bytes int64
	for _, e := range events {
		bytes += e.historyBytes()
	}
	h := &r.history
	h.bytes += bytes
	h.fresh += bytes
	m.stats.historyBytes.Add(bytes)
	h.mark(through, time.Now())
	m.bound()
}

// held returns the bytes that the window bounds.
func (m *Mirror) held() int64 { return m.stats.historyBytes.Load() + m.stats.versionBytes.Load() }

// dropMade drops the version that was made for readers and has not been asked for the longest, of
// all resources, and reports whether there was one: it is made anew in milliseconds, while
// events are gone for good. Writer only.
func (m *Mirror) dropMade() bool {
	var owner *Resource
	var idle *version
	for _, r := range m.byPrefix {
		if lin := r.cur.Load(); lin != nil {
			for _, v := range *lin.made.Load() {
				if idle == nil || v.used.Load() < idle.used.Load() {
					owner, idle = r, v
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

// bound drops what is more than the window may hold. Writer only.
func (m *Mirror) bound() {
	for m.held() > m.opts.Window.MaxBytes && (m.dropMade() || m.shed()) {
	}
}

// recount counts the history that a new lineage has begun with. Its age counts from now: when its
// events happened only clocks of other machines could tell, and no answer may depend on the time of
// day. Writer only.
func (r *Resource) recount() {
	h, log, now := &r.history, r.cur.Load().log, time.Now()
	before := h.bytes
	for seq := log.First(); seq < log.End(); seq++ {
		e := log.At(seq)
		n := e.historyBytes()
		h.bytes += n
		h.fresh += n
		h.mark(e.Rev, now)
	}
	r.m.stats.historyBytes.Add(h.bytes - before)
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
// there was any. Writer only.
func (m *Mirror) shed() bool {
	var most *Resource
	for _, r := range m.byPrefix {
		if most == nil || r.historyBytes() > most.historyBytes() {
			most = r
		}
	}
	if most.cur.Load() == nil {
		return false
	}
	rev, before, marks := m.clock.rev.Load(), m.held(), most.history.marks
	if len(marks) > 0 {
		rev = marks[0].rev
	}
	most.trim(rev)
	return len(marks) > 0 || m.held() < before
}

// historyBytes is what the resource keeps beside its present: values and versions.
func (r *Resource) historyBytes() int64 { return r.history.bytes + r.versionBytes.Load() }

// age drops what has become too old, and what readers have not asked for for a while.
// Writer only.
func (m *Mirror) age(now time.Time) {
	m.absorb()
	idle := Now() - int64(madeIdle)
	for _, r := range m.byPrefix {
		if lin := r.cur.Load(); lin != nil && lin.forget(func(v *version) bool { return v.used.Load() < idle }) {
			r.countVersionBytes(lin)
		}
		h := &r.history
		h.mark(m.clock.rev.Load(), now)
		n := 0
		for n < len(h.marks) && now.Sub(h.marks[n].at) > m.opts.Window.MaxAge {
			n++
		}
		if n > 0 {
			r.trim(h.marks[n-1].rev)
		}
	}
	m.weigh(now)
}

// trim raises the floor of the resource's log, and its oldest readable version, to
// rev. Writer only.
func (r *Resource) trim(rev Revision) {
	h := &r.history
	for len(h.marks) > 0 && h.marks[0].rev <= rev {
		h.marks = h.marks[1:]
	}
	lin := r.cur.Load()
	r.raise(lin, rev)
	lin.log.Drop(rev, func(e *Event) {
		h.bytes -= e.historyBytes()
		r.m.stats.historyBytes.Add(-e.historyBytes())
		if e.Prev == nil {
			return
		}
		e.Prev.retire(false) // for a deletion, or for readers of the past; a watch that is about to send the event makes it anew
		if !e.Prev.hasValue() {
			r.missing--
		}
	})
	r.m.stats.historyFloor.Store(max(rev, r.m.stats.historyFloor.Load()))
}

// forget is for a resource whose log has been abandoned. Writer only.
func (r *Resource) forget() {
	r.m.stats.historyBytes.Add(-r.history.bytes)
	r.history, r.weighed = history{}, weighed{}
	r.countVersionBytes(nil)
}

// Compact makes rev the oldest revision that can be read with At, as etcd does
// when it is compacted to rev: rev itself stays readable. Logs, and with them
// watchers, keep their own window (KEP-4988). It returns at once; the versions
// go when the writer gets to it. A revision above the clock waits for the clock.
func (m *Mirror) Compact(rev Revision) {
	for {
		old := m.compacted.Load()
		if rev <= old {
			return
		}
		if m.compacted.CompareAndSwap(old, rev) {
			break
		}
	}
	m.do(m.applyCompaction)
}

// Compacted returns the highest revision given to Compact.
func (m *Mirror) Compacted() Revision { return m.compacted.Load() }

// applyCompaction drops the versions below what etcd was compacted to, as far as
// the clock has come. Writer only.
func (m *Mirror) applyCompaction() {
	rev := min(m.compacted.Load(), m.clock.rev.Load())
	if rev <= m.stats.compacted.Load() {
		return
	}
	for _, r := range m.byPrefix {
		if lin := r.cur.Load(); lin != nil {
			r.raise(lin, rev)
		}
	}
	m.stats.compacted.Store(rev) // now that it is so
}
