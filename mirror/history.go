package mirror

import "time"

// history describes the old revisions of a resource; its table counts it.
type history struct {
	// marks are revisions with the time by which everything up to them had been applied, ascending.
	// History is dropped only up to a mark.
	marks []mark
	bytes int64 // referenced by the log; versions are counted separately
	fresh int64 // of them, added since the last mark
}

type mark struct {
	rev Revision
	at  time.Time
}

// A resource sets a mark every markInterval or markBytes, whichever comes first: this is the
// precision of the window.
const (
	markInterval = time.Second
	markBytes    = 1 << 20
)

// historyOf returns the history of events that were not received from the feed. Its age counts from
// now: the times of the events are known only to the clocks of other machines, and no answer may
// depend on the time of day.
func historyOf(events []*Event) (h history) {
	now := time.Now()
	for _, e := range events {
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
