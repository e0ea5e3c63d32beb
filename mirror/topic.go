package mirror

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// topic is the part of a lineage's events that concerns one key, the keys below one
// directory, or one value of a Partition: where they are in the log, and who waits for
// the next. There are topics while cursors follow them, so an event costs those who want it
// and a lookup, however many others there are.
type topic struct {
	of       *topics
	name     string
	from     uint64 // every posted event from here on is in postings
	postings eventlog.Postings
	changed  notifier // after each event of the topic, and when nothing more will come
	cursors  int      // guarded by topics.mu
	due      bool     // the feeder's: it is among topics.due
}

// topics are those of one lineage that have one feeder: whoever puts events into them,
// after the clock has reached them and in the log's order. The feeder of keys and
// directories is the writer, that of values the goroutine of a Partition.
//
// What a reader relies on: every event numbered from topic.from up to posted is in the
// topics that it concerns. So there is nothing to agree on between the feeder and a cursor
// that joins, and a cursor's position is never ahead of what it has been given (I4).
type topics struct {
	log    *eventLog
	posted atomic.Uint64
	ended  atomic.Bool   // the feeder has: nothing more is posted
	idle   chan struct{} // a feeder that is told so: closed when the last cursor has left
	keep   bool          // topics without a cursor, while the log holds events of theirs

	mu      sync.Mutex // leaf but for notifiers; held for lookups
	byName  map[string]*topic
	cursors int       // of all topics
	awaited []awaited // in no order
	waiting atomic.Int64

	// Feeder's own.
	due     []*topic // to be woken when the events in hand are posted
	trimmed uint64   // the oldest event held, when the postings were trimmed last
}

// join returns the topic with the name for one more cursor. A topic that is new holds the
// events from the number on that from returns.
func (ts *topics) join(name string, from func() uint64) *topic {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t := ts.byName[name]
	if t == nil {
		t = &topic{of: ts, name: name, from: from()}
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

// leave ends the interest of one cursor in the topic, and reports how many cursors of
// all topics are left.
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

// tell lets cursors read what was posted, up to the event before end, and wakes those whose
// topics have something new.
func (ts *topics) tell(end uint64) {
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

// awaited is a topic that is to be woken, whatever it concerns, when every event below seq
// is posted.
type awaited struct {
	topic *topic
	seq   uint64
}

// await wakes the topic when every event below seq is posted, if that is still to come.
func (ts *topics) await(t *topic, seq uint64) {
	if max(ts.posted.Load(), t.from) >= seq {
		return
	}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.awaited = append(ts.awaited, awaited{t, seq})
	ts.waiting.Store(int64(len(ts.awaited)))
	if ts.posted.Load() >= seq { // the feeder may not have seen it
		t.changed.wake()
	}
}

// trimLocked lets topics forget the events that the log has dropped; they hold what it holds,
// but for as many numbers as there are topics (I7). Cost is O(1) for each event dropped.
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

// changes tell the cursors of a resource that there is something to read: those that read
// everything at once, and those that read a topic when it has changed.
type changes struct {
	notifier // those that read everything

	subscribed atomic.Int64 // cursors on topics of keys and directories, of all lineages
	mu         sync.Mutex   // leaf but for topics.mu
	keys       map[*lineage]*topics
}

// subscribe returns the topic of the keys start <= key < end, nil if there is none: the
// range is neither a key nor a directory inside the resource.
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
	// Before the log's end is looked at: a writer that does not see it yet posts only what
	// lies below that.
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

// unsubscribe is the end of subscribe.
func (c *changes) unsubscribe(lin *lineage, t *topic) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.subscribed.Add(-1)
	if t.of.leave(t) == 0 {
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
	ts.tell(end)
}

// wake wakes everybody, because the resource has become readable or its lineage is dead.
func (c *changes) wake() {
	c.notifier.wake()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ts := range c.keys {
		ts.wakeAll()
	}
}
