package mirror

import (
	"slices"
	"time"
)

// window decides which revision history reaches back to. It belongs to the writer.
type window struct {
	Window
	// marks are revisions with the time they were applied and the bytes that
	// history had taken in by then, ascending; history is cut at marks only.
	marks []mark
	taken int64 // bytes taken in since the start
	cut   int64 // bytes given back since the start
}

type mark struct {
	rev   Revision
	at    time.Time
	taken int64
}

// A mark is set at most every markInterval or markBytes, whichever is less: the
// window is as exact as that.
const (
	markInterval = time.Second
	markBytes    = 1 << 20
)

func (w *window) took(rev Revision, bytes int64, now time.Time) {
	w.taken += bytes
	if n := len(w.marks); n > 0 {
		last := w.marks[n-1]
		if now.Sub(last.at) < markInterval && w.taken-last.taken < markBytes {
			return
		}
	}
	w.marks = append(w.marks, mark{rev, now, w.taken})
}

// due returns the revision up to which history has left the window, 0 if none has.
func (w *window) due(now time.Time) Revision {
	n := 0
	for n < len(w.marks) && (now.Sub(w.marks[n].at) > w.MaxAge || w.taken-w.marks[n].taken >= w.MaxBytes) {
		n++
	}
	// A burst between two marks may exceed the bytes on its own; then even the
	// newest mark is due, and history ends there.
	if n == 0 {
		return 0
	}
	rev := w.marks[n-1].rev
	w.marks = slices.Delete(w.marks, 0, n)
	return rev
}

// trim drops history up to rev from every resource. Writer only.
func (m *Mirror) trim(rev Revision) {
	for _, r := range m.byPrefix {
		if lin := r.cur.Load(); lin != nil {
			r.trim(lin, rev)
		}
	}
	m.stats.historyFloor.Store(rev)
}

// trim raises the floor of the resource's log, and the oldest readable version, to
// rev.
func (r *Resource) trim(lin *lineage, rev Revision) {
	r.dropVersions(lin, rev)
	lin.log.Drop(rev, func(e *Event) {
		r.m.window.cut += e.historyBytes()
		if e.Prev != nil && !e.Prev.hasValue() {
			r.missing--
		}
	})
	r.m.stats.historyBytes.Store(r.m.window.taken - r.m.window.cut)
}

// dropVersions makes rev the oldest version that can be read. It needs the events
// up to rev still in the log.
func (r *Resource) dropVersions(lin *lineage, rev Revision) {
	cps := *lin.checkpoints.Load()
	if cps[0].rev >= rev {
		return
	}
	i := 0
	for i+1 < len(cps) && cps[i+1].rev <= rev {
		i++
	}
	oldest, ok := lin.roll(cps[i], rev)
	if !ok {
		// I3: the log reaches back to the oldest checkpoint, whose floor is moved
		// by this goroutine only.
		panic("mirror: the log ends above the oldest version of " + r.prefix)
	}
	next := append([]*version{oldest}, cps[i+1:]...)
	lin.checkpoints.Store(&next)
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
	m.stats.compacted.Store(rev)
	for _, r := range m.byPrefix {
		if lin := r.cur.Load(); lin != nil {
			r.dropVersions(lin, rev)
		}
	}
}
