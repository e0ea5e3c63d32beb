package mirror

import "time"

// history is what a resource keeps beside its present. It belongs to the writer.
type history struct {
	// marks are revisions with the time by which everything up to them had been
	// applied, ascending; history is cut at marks only.
	marks []mark
	bytes int64 // held by the log
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

// bound drops what is more than the window may hold. Writer only.
func (m *Mirror) bound() {
	for m.stats.historyBytes.Load() > m.opts.Window.MaxBytes {
		m.shed()
	}
}

// recount counts the history that a new lineage has begun with. What was restored is as old
// as the next change whose date is known, and else as the mirror. Writer only.
func (r *Resource) recount(dated []mark) {
	h, log, now := &r.history, r.cur.Load().log, time.Now()
	before := h.bytes
	for seq := log.First(); seq < log.End(); seq++ {
		e := log.At(seq)
		n := e.historyBytes()
		h.bytes += n
		h.fresh += n
		for len(dated) > 0 && dated[0].rev < e.Rev {
			dated = dated[1:]
		}
		at := now
		if len(dated) > 0 && dated[0].at.Before(now) {
			at = dated[0].at
		}
		h.mark(e.Rev, at)
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

// shed drops the oldest history of the resource that holds the most. Writer only.
func (m *Mirror) shed() {
	var most *Resource
	for _, r := range m.byPrefix {
		if most == nil || r.history.bytes > most.history.bytes {
			most = r
		}
	}
	rev := m.clock.rev.Load()
	if marks := most.history.marks; len(marks) > 0 {
		rev = marks[0].rev
	}
	most.trim(rev)
}

// age drops what has become too old. Writer only.
func (m *Mirror) age(now time.Time) {
	for _, r := range m.byPrefix {
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
}

// trim raises the floor of the resource's log, and its oldest readable version, to
// rev. Writer only.
func (r *Resource) trim(rev Revision) {
	h := &r.history
	for len(h.marks) > 0 && h.marks[0].rev <= rev {
		h.marks = h.marks[1:]
	}
	lin := r.cur.Load()
	r.dropVersions(lin, rev)
	lin.log.Drop(rev, func(e *Event) {
		h.bytes -= e.historyBytes()
		r.m.stats.historyBytes.Add(-e.historyBytes())
		if e.Prev != nil && !e.Prev.hasValue() {
			r.missing--
		}
	})
	r.m.stats.historyFloor.Store(max(rev, r.m.stats.historyFloor.Load()))
}

// forget is for a resource whose log has been abandoned. Writer only.
func (r *Resource) forget() {
	r.m.stats.historyBytes.Add(-r.history.bytes)
	r.history = history{}
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
	from := cps[i]
	if head := lin.head.Load(); head.rev <= rev {
		from = head
	}
	oldest, ok := lin.roll(from, rev)
	if !ok {
		// I3: the log reaches back to the oldest checkpoint, whose floor is moved
		// by this goroutine only.
		panic("mirror: the log ends above the oldest version of " + r.prefix)
	}
	next := append([]*version{oldest}, cps[i+1:]...)
	lin.checkpoints.Store(&next)
}

// The distance between two versions of the past doubles after every thinSteps of
// them, up to 1<<thinLimit times the one between the newest. A version shares less
// with its neighbour the more events lie between, so distance is what saves memory:
// with 100,000 objects, versions cost 0.9 KB for each of 50,000 events without
// thinning and 0.35 KB with it, less for each of more (BenchmarkMemory). A read of
// the oldest past rolls at most 8,192 events forward by default.
const (
	thinSteps = 8
	thinLimit = 6
)

// distance returns how many events lie between two versions that thin leaves, so many events
// before the newest; events is the distance between new ones.
func distance(before, events int) int {
	d := events
	for before > thinSteps*d && d < events<<thinLimit {
		before -= thinSteps * d
		d *= 2
	}
	return d
}

// thin drops versions that are closer to their neighbours than their age asks for,
// never the first or the last; events is the distance between new ones. It may
// write to cps.
func thin(cps []*version, events int) []*version {
	kept := len(cps) - 1 // cps[kept:] are the ones that stay
	for i := len(cps) - 2; i > 0; i-- {
		distance := uint64(events) << min((len(cps)-kept)/thinSteps, thinLimit)
		if cps[kept].seq-cps[i-1].seq > distance {
			kept--
			cps[kept] = cps[i]
		}
	}
	if len(cps) > 1 {
		kept--
		cps[kept] = cps[0]
	}
	return cps[kept:]
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
