// Package eventlog is a log of events in revision order, written by one goroutine and read by any
// number of cursors without a lock. Events are appended, and older ones may be added below the
// first, until the first is dropped.
//
// A position in the log is a sequence number. The log finds an event by its number through an
// atomically published table of chunks. A reader has a number, not a reference, so however far it
// falls behind, the log can drop events that left the window; the reader learns this from its next
// read.
package eventlog

import (
	"sort"
	"sync/atomic"
)

// chunkSize is the number of events in one allocation of the table. A guess that keeps the table
// short (a window of 300,000 events has 2,344 chunks) and the last, partly filled chunk small (1
// KB).
const chunkSize = 128

// Start is the sequence number of a log's first appended event. Older events, which are prepended,
// have lower numbers.
const Start = 1 << 40

// Event is an element of a log. Revision must not decrease from one appended event to the next.
type Event interface {
	Revision() int64
}

type chunk[T any] [chunkSize]atomic.Pointer[T]

// table maps sequence numbers to chunks: chunks[i] contains the numbers from (base+i)*chunkSize on.
// A published table is never written again.
type table[T any] struct {
	base   uint64
	chunks []*chunk[T]
}

// Log contains the events that were added and not dropped yet. Append, Prepend and Drop belong to
// one writer; all other methods may be called concurrently.
type Log[T any, E interface {
	*T
	Event
}] struct {
	table atomic.Pointer[table[T]]
	first atomic.Uint64 // number of the oldest event
	end   atomic.Uint64 // number of the next event
	floor atomic.Int64
	dead  atomic.Bool
}

// New returns an empty log that will contain every event above floor.
func New[T any, E interface {
	*T
	Event
}](floor int64) *Log[T, E] {
	l := &Log[T, E]{}
	l.table.Store(&table[T]{base: Start / chunkSize})
	l.first.Store(Start)
	l.end.Store(Start)
	l.floor.Store(floor)
	return l
}

// Floor returns the revision above which the log has every event.
func (l *Log[T, E]) Floor() int64 { return l.floor.Load() }

// End returns the sequence number after the newest event. An event is readable as soon as End is
// above its number.
func (l *Log[T, E]) End() uint64 { return l.end.Load() }

// First returns the sequence number of the oldest event, End if there is none.
func (l *Log[T, E]) First() uint64 { return l.first.Load() }

// Len returns the number of events.
func (l *Log[T, E]) Len() int { return int(l.end.Load() - l.first.Load()) }

// Dead reports whether the log was abandoned: it receives no more events, and its readers have to
// start over.
func (l *Log[T, E]) Dead() bool { return l.dead.Load() }

// Abandon marks the log dead permanently.
func (l *Log[T, E]) Abandon() { l.dead.Store(true) }

// Release releases all events of an abandoned log; its writer calls it. Afterwards At returns nil,
// and the result of After is meaningless. A reader that finds the log dead after a read discards
// the result.
func (l *Log[T, E]) Release() { l.table.Store(&table[T]{base: Start / chunkSize}) }

// Prepend adds events below the first one, and lowers the floor: the log then has every event above
// floor. It must be called before the first Drop.
func (l *Log[T, E]) Prepend(floor int64, events []E) {
	first, tab := l.first.Load(), l.table.Load()
	start := first - uint64(len(events))
	next := &table[T]{base: start / chunkSize}
	for range tab.base - next.base {
		next.chunks = append(next.chunks, new(chunk[T]))
	}
	next.chunks = append(next.chunks, tab.chunks...)
	for i, e := range events {
		s := start + uint64(i)
		next.chunks[s/chunkSize-next.base][s%chunkSize].Store((*T)(e))
	}
	// In this order, so that a reader that finds the lower floor also finds the events.
	l.table.Store(next)
	l.first.Store(start)
	l.floor.Store(floor)
}

// Append adds events, which become visible together.
func (l *Log[T, E]) Append(events ...E) {
	seq := l.end.Load()
	tab := l.table.Load()
	need := int((seq+uint64(len(events))+chunkSize-1)/chunkSize - tab.base)
	if need > len(tab.chunks) {
		next := &table[T]{base: tab.base, chunks: make([]*chunk[T], need)}
		for i := copy(next.chunks, tab.chunks); i < need; i++ {
			next.chunks[i] = new(chunk[T])
		}
		tab = next
		l.table.Store(tab)
	}
	for i, e := range events {
		s := seq + uint64(i)
		tab.chunks[s/chunkSize-tab.base][s%chunkSize].Store((*T)(e))
	}
	l.end.Store(seq + uint64(len(events)))
}

// At returns the event with the number, nil if it was dropped or does not exist yet (seq >= End).
func (l *Log[T, E]) At(seq uint64) E {
	tab := l.table.Load()
	c := seq / chunkSize
	if c < tab.base || c-tab.base >= uint64(len(tab.chunks)) {
		return nil
	}
	return E(tab.chunks[c-tab.base][seq%chunkSize].Load())
}

// After returns the number of the first event in the log whose revision is above rev, End if there
// is none. The caller has to check rev >= Floor(), before and after, to know that no such event was
// dropped.
func (l *Log[T, E]) After(rev int64) uint64 {
	first, end := l.first.Load(), l.end.Load()
	if end <= first {
		return end
	}
	return first + uint64(sort.Search(int(end-first), func(i int) bool {
		e := l.At(first + uint64(i))
		return e != nil && e.Revision() > rev
	}))
}

// Drop removes every event with a revision of at most rev and raises the floor to rev. It calls
// forget, if given, for each of them.
func (l *Log[T, E]) Drop(rev int64, forget func(E)) {
	if rev <= l.floor.Load() {
		return
	}
	// Raise the floor first: a reader that checks it after reading then detects the drop.
	l.floor.Store(rev)
	tab, seq, end := l.table.Load(), l.first.Load(), l.end.Load()
	for ; seq < end; seq++ {
		slot := &tab.chunks[seq/chunkSize-tab.base][seq%chunkSize]
		e := E(slot.Load())
		if e.Revision() > rev {
			break
		}
		l.first.Store(seq + 1)
		slot.Store(nil)
		if forget != nil {
			forget(e)
		}
	}
	if gone := seq/chunkSize - tab.base; gone > 0 {
		gone = min(gone, uint64(len(tab.chunks)))
		l.table.Store(&table[T]{base: tab.base + gone, chunks: append([]*chunk[T](nil), tab.chunks[gone:]...)})
	}
}
