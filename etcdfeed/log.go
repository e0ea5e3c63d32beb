package etcdfeed

import (
	"slices"
	"sort"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const (
	// eventOverhead is the estimated memory of an event in addition to its key and value: the
	// messages of protobuf. A guess.
	eventOverhead = 250
	// announcedHistory bounds the wait for the next step of a restore of history, after a list and
	// after each step, and historyTimeout that for the end of a step: a mirror restores for a
	// minute at most.
	announcedHistory = 5 * time.Second
	historyTimeout   = 70 * time.Second
	// offeredPart is the part of a full log, one in so many, that is served and not offered: while
	// a client restores history from the offered revision on, so many bytes may be written. A
	// guess: 16 MiB of 64, 13 s of 1,000 writes/s of 1 KB.
	offeredPart = 4
)

// log is the events after the revision floor and up to the revision end, over all resources, in
// revision order. Revisions in it are complete. It belongs to one epoch of the feed: begin drops it
// and starts another one. All methods may be called concurrently.
type log struct {
	maxBytes int64

	mu       sync.Mutex // leaf; guards the fields below
	cluster  uint64     // 0 before the first epoch
	epoch    int64
	floor    mirror.Revision
	end      mirror.Revision
	events   []*mvccpb.Event
	bytes    int64
	changed  chan struct{}   // closed at the next change
	awaiting time.Time       // until when history below floor may arrive; zero: none will
	reach    mirror.Revision // the history that may arrive is not of events up to here
	since    mirror.Revision
}

func newLog(maxBytes int64) *log { return &log{maxBytes: maxBytes, changed: make(chan struct{})} }

// state is a reading of a log.
type state struct {
	cluster    uint64
	epoch      int64
	floor, end mirror.Revision
	bytes      int64
	awaited    mirror.Revision // all events after it, up to floor, may arrive; floor if none will
	changed    chan struct{}   // closed at the next change of the log
}

// restoring reports whether history below floor may arrive.
func (s state) restoring() bool { return s.awaited < s.floor }

func (l *log) state() state {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stateLocked()
}

// stateLocked is state for a caller that holds mu.
func (l *log) stateLocked() state {
	s := state{cluster: l.cluster, epoch: l.epoch, floor: l.floor, awaited: l.floor, end: l.end, bytes: l.bytes, changed: l.changed}
	if !l.awaiting.IsZero() && time.Now().Before(l.awaiting) {
		s.awaited = min(l.reach, l.floor)
	}
	return s
}

// wakeLocked wakes the readers. The caller holds mu.
func (l *log) wakeLocked() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// begin drops the events and begins an epoch after the revision. With history, events below it may
// arrive by join.
func (l *log) begin(after driver.Header, history bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cluster, l.floor, l.end, l.since = after.ClusterID, after.Revision, after.Revision, after.Revision
	l.epoch++
	l.events, l.bytes, l.awaiting, l.reach = nil, 0, time.Time{}, 0
	if history {
		l.awaiting = time.Now().Add(announcedHistory)
	}
	l.wakeLocked()
}

// resume continues the epoch after the revision if the log has reached it, and otherwise begins
// another epoch.
func (l *log) resume(after driver.Header) {
	l.mu.Lock()
	same := l.cluster == after.ClusterID && l.floor <= after.Revision && after.Revision <= l.end
	l.mu.Unlock()
	if !same {
		l.begin(after, false)
	}
}

// append adds a batch. Events up to the end of the log, which a resumed watch repeats, are left
// out.
func (l *log) append(b driver.Batch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b.Through <= l.end {
		return
	}
	for i := range b.Changes {
		if c := &b.Changes[i]; c.ModRevision > l.end {
			e := eventOf(c)
			l.events = append(l.events, e)
			l.bytes += sizeOf(e)
		}
	}
	l.end = b.Through
	l.trimLocked()
	l.wakeLocked()
}

// offered returns the oldest revision from which a client should begin to read history: the floor,
// unless the log is nearly full, whose floor is about to move. Cost is O(events/offeredPart).
func (l *log) offered() mirror.Revision {
	l.mu.Lock()
	defer l.mu.Unlock()
	rev, bytes := l.floor, l.bytes
	for i := 0; bytes > l.maxBytes-l.maxBytes/offeredPart; {
		next := l.events[i].Kv.ModRevision
		if next == l.events[len(l.events)-1].Kv.ModRevision {
			break
		}
		for rev = next; l.events[i].Kv.ModRevision == rev; i++ {
			bytes -= sizeOf(l.events[i])
		}
	}
	return rev
}

// trimLocked drops the oldest revisions above the bound. The newest revision remains. The caller
// holds mu.
func (l *log) trimLocked() {
	drop := 0
	for l.bytes > l.maxBytes && drop < len(l.events) {
		rev := l.events[drop].Kv.ModRevision
		if rev == l.events[len(l.events)-1].Kv.ModRevision {
			break
		}
		for drop < len(l.events) && l.events[drop].Kv.ModRevision == rev {
			l.bytes -= sizeOf(l.events[drop])
			l.events[drop] = nil // readers have copies of the references
			drop++
		}
		l.floor = rev
	}
	l.events = l.events[drop:]
}

// awaitsLocked reports whether the history before the list is awaited. A restore that belongs to an
// earlier epoch may end after the next one has begun. The caller holds mu.
func (l *log) awaitsLocked(list driver.Header) bool {
	return !l.awaiting.IsZero() && l.cluster == list.ClusterID && l.since == list.Revision
}

// expectHistory sets the wait for the history before the list, which has no events up to the
// revision reach. It has no effect if that is not awaited.
func (l *log) expectHistory(list driver.Header, within time.Duration, reach mirror.Revision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.awaitsLocked(list) {
		return
	}
	l.awaiting = time.Now().Add(within)
	if reach > l.reach {
		l.reach = reach
		l.wakeLocked()
	}
}

// join puts the events after the revision floor and up to the list, with which the epoch began, in
// front, as far as the bound allows. No history arrives after it; events may be nil and floor that
// of the list. It has no effect if the history before the list is not awaited.
func (l *log) join(floor mirror.Revision, list driver.Header, events []*mvccpb.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.awaitsLocked(list) {
		return
	}
	if l.floor == list.Revision {
		for _, e := range events {
			l.bytes += sizeOf(e)
		}
		l.events, l.floor = slices.Concat(events, l.events), floor
		l.trimLocked()
	}
	l.awaiting = time.Time{}
	l.wakeLocked()
}

// read returns the events after a revision in whole revisions, until their size exceeds maxBytes,
// and the revision up to which they are complete. whole is false if the revision is below the
// floor. Readers must not change the events.
func (l *log) read(after mirror.Revision, maxBytes int64) (events []*mvccpb.Event, through mirror.Revision, s state, whole bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s = l.stateLocked()
	if after < l.floor {
		return nil, after, s, false
	}
	first := l.after(after)
	last, size := first, int64(0)
	for last < len(l.events) && size <= maxBytes {
		for rev := l.events[last].Kv.ModRevision; last < len(l.events) && l.events[last].Kv.ModRevision == rev; last++ {
			size += sizeOf(l.events[last])
		}
	}
	through = max(after, l.end)
	if last < len(l.events) {
		through = l.events[last-1].Kv.ModRevision
	}
	return slices.Clone(l.events[first:last]), through, s, true
}

// after returns the index of the first event after the revision. The caller holds mu.
func (l *log) after(rev mirror.Revision) int {
	return sort.Search(len(l.events), func(i int) bool { return l.events[i].Kv.ModRevision > rev })
}

func eventOf(c *driver.Change) *mvccpb.Event {
	if c.Deleted {
		return &mvccpb.Event{Type: mvccpb.DELETE, Kv: &mvccpb.KeyValue{Key: c.Key, ModRevision: c.ModRevision}}
	}
	return &mvccpb.Event{Type: mvccpb.PUT, Kv: &mvccpb.KeyValue{Key: c.Key, Value: c.Value, CreateRevision: c.CreateRevision,
		ModRevision: c.ModRevision, Version: c.Version}}
}

func sizeOf(e *mvccpb.Event) int64 { return int64(len(e.Kv.Key)+len(e.Kv.Value)) + eventOverhead }
