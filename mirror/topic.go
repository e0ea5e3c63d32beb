package mirror

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// topic is the part of a lineage's events that concerns one key, the keys below one directory, or
// one value of a WatchIndex: their positions in the log, and the cursors that wait for the next
// event. Topics exist while cursors follow them. An event therefore costs one lookup, and work only
// for the cursors of its topics.
type topic struct {
	owner    *topics
	name     string
	from     uint64 // every posted event from this number on is in postings
	postings eventlog.Postings
	changed  notifier // after each event of the topic, and when the poster has ended
	cursors  int      // guarded by topics.mu
	due      bool     // owned by the poster: the topic is in topics.due
}

// topics contains the topics of one lineage that have the same poster. The poster posts events into
// them after the published revision has reached the events and in the log's order. The writer is
// the poster of keys and directories, the goroutine of a WatchIndex is the poster of values.
//
// Guarantee for readers: every event numbered from topic.from up to posted is in the topics that it
// concerns. So a cursor that joins needs no agreement with the poster, and its position is never
// ahead of the events returned to it (I4).
type topics struct {
	log    *eventLog
	posted atomic.Uint64
	ended  atomic.Bool   // the poster has ended: no more events are posted
	idle   chan struct{} // closed when the last cursor has left, for posters that end then
	keep   bool          // keep topics without a cursor, while the log has events of theirs

	mu      sync.Mutex // leaf but for notifiers; held for lookups
	byName  map[string]*topic
	cursors int       // of all topics
	awaited []awaited // in no order
	waiting atomic.Int64

	// Owned by the poster.
	due     []*topic // to be woken when the current events are posted
	trimmed uint64   // the oldest event in the log, when the postings were last trimmed
}

// join returns the topic with the name for one more cursor. A new topic contains the events from
// the number returned by from on.
func (ts *topics) join(name string, from func() uint64) *topic {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t := ts.byName[name]
	if t == nil {
		t = &topic{owner: ts, name: name, from: from()}
		ts.add(t)
	}
	t.cursors++
	ts.cursors++
	return t
}

// add adds a topic. The caller holds mu.
func (ts *topics) add(t *topic) {
	if ts.byName == nil {
		ts.byName = map[string]*topic{}
	}
	ts.byName[t.name] = t
}

// leave removes one cursor from the topic, and returns the number of cursors left on all topics.
func (ts *topics) leave(t *topic) int {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t.cursors--
	ts.cursors--
	if t.cursors == 0 && !ts.keep {
		delete(ts.byName, t.name)
	}
	return ts.cursors
}

// postLocked adds an event to the topic, which may be nil.
func (ts *topics) postLocked(t *topic, seq, first uint64) {
	if t == nil {
		return
	}
	t.postings.Append(seq, first)
	if !t.due {
		t.due = true
		ts.due = append(ts.due, t)
	}
}

// notify publishes the posted events up to the number end, exclusive, and wakes the cursors of
// topics with new events.
func (ts *topics) notify(end uint64) {
	ts.posted.Store(end)
	for _, t := range ts.due {
		t.due = false
		t.changed.wake()
	}
	clear(ts.due)
	ts.due = ts.due[:0]
	if ts.waiting.Load() > 0 {
		ts.mu.Lock()
		defer ts.mu.Unlock()
		ts.awaited = slices.DeleteFunc(ts.awaited, func(a awaited) bool {
			if a.seq <= end {
				a.topic.changed.wake()
			}
			return a.seq <= end
		})
		ts.waiting.Store(int64(len(ts.awaited)))
	}
}

// awaited is a topic to wake when every event below seq is posted, even if none of them concerns
// it.
type awaited struct {
	topic *topic
	seq   uint64
}

// await wakes the topic when every event below seq is posted, unless they already are.
func (ts *topics) await(t *topic, seq uint64) {
	if max(ts.posted.Load(), t.from) >= seq {
		return
	}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.awaited = append(ts.awaited, awaited{t, seq})
	ts.waiting.Store(int64(len(ts.awaited)))
	if ts.posted.Load() >= seq { // the poster may have missed the new element
		t.changed.wake()
	}
}

// trimLocked drops the postings of events that the log has dropped. Topics keep at most as many
// stale numbers as there are topics (I7). Cost is O(1) for each dropped event.
func (ts *topics) trimLocked(first uint64) {
	if first-ts.trimmed < uint64(len(ts.byName)) {
		return
	}
	ts.trimmed = first
	for name, t := range ts.byName {
		t.postings.Trim(first)
		if t.cursors == 0 && t.postings.Len() == 0 {
			delete(ts.byName, name)
		}
	}
}

// wakeAll wakes the cursors of all topics.
func (ts *topics) wakeAll() {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, t := range ts.byName {
		t.changed.wake()
	}
}

// changes notifies the cursors of a resource of new events: cursors on the whole log at each
// change, and cursors on a topic when the topic has changed.
type changes struct {
	notifier // for cursors on the whole log

	subscribed atomic.Int64 // cursors on topics of keys and directories, of all lineages
	mu         sync.Mutex   // leaf but for topics.mu
	keys       map[*lineage]*topics
}

// subscribe returns the topic of the keys start <= key < end, nil if the range is neither a key nor
// a directory inside the resource.
func (c *changes) subscribe(prefix string, lin *lineage, start, end string) *topic {
	switch {
	case len(start) <= len(prefix):
		return nil
	case strings.HasSuffix(start, "/"):
		if end != prefixEnd(start) {
			return nil
		}
	case end != start+"\x00":
		return nil
	}
	// Count before reading the log's end: a writer that does not see the count yet posts only
	// events below that end.
	c.subscribed.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	ts := c.keys[lin]
	if ts == nil {
		ts = &topics{log: lin.log}
		if c.keys == nil {
			c.keys = map[*lineage]*topics{}
		}
		c.keys[lin] = ts
	}
	return ts.join(start, lin.log.End)
}

// unsubscribe undoes subscribe.
func (c *changes) unsubscribe(lin *lineage, t *topic) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.subscribed.Add(-1)
	if t.owner.leave(t) == 0 {
		delete(c.keys, lin)
	}
}

// topicsOf returns the topics of keys and directories of a lineage, nil if there are none.
func (c *changes) topicsOf(lin *lineage) *topics {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.keys[lin]
}

// postKeys posts the newest events of the log, whose keys begin with a prefix of the given length,
// to the topics of their keys and directories.
func (ts *topics) postKeys(prefix int, events []*Event) {
	end, first := ts.log.End(), ts.log.First()
	ts.mu.Lock()
	for i, ev := range events {
		seq, key := end-uint64(len(events)-i), ev.Key()
		if !strings.HasSuffix(key, "/") {
			ts.postLocked(ts.byName[key], seq, first)
		}
		for at := prefix; ; {
			n := strings.IndexByte(key[at:], '/')
			if n < 0 {
				break
			}
			at += n + 1
			ts.postLocked(ts.byName[key[:at]], seq, first)
		}
	}
	ts.trimLocked(first)
	ts.mu.Unlock()
	ts.notify(end)
}

// wake wakes all cursors, because the resource has become readable or its lineage is dead.
func (c *changes) wake() {
	c.notifier.wake()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ts := range c.keys {
		ts.wakeAll()
	}
}
