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
