package mirror

import (
	"fmt"
	"slices"
	"strings"
)

// check checks the topics of keys and directories of a resource with the prefix, of which the writer is
// the feeder; lin is the present lineage, nil if there is none.
func (c *changes) check(prefix string, lin *lineage) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	cursors := 0
	for of, ts := range c.keys {
		ts.mu.Lock()
		err := ts.checkLocked()
		if err == nil && of == lin {
			err = ts.checkKeysLocked(prefix)
		}
		cursors += ts.cursors
		ts.mu.Unlock()
		if err != nil {
			return err
		}
	}
	// A cursor that joins is counted before it has a topic.
	if n := c.subscribed.Load(); n < int64(cursors) {
		return broken("I4", "counts %d cursors on topics, has %d", n, cursors)
	}
	return nil
}

// checkLocked checks what is true of all topics, whatever they concern. The caller is the feeder and
// holds mu.
func (ts *topics) checkLocked() error {
	cursors := 0
	for name, t := range ts.byName {
		if t.name != name || t.of != ts {
			return broken("I4", "topic %q has the name %q", name, t.name)
		}
		if t.cursors < 0 || t.cursors == 0 && !ts.keep {
			return broken("I7", "topic %q has %d cursors", name, t.cursors)
		}
		if err := t.postings.Check(ts.log.End()); err != nil {
			return broken("I4", "topic %q: %w", name, err)
		}
		cursors += t.cursors
	}
	if cursors != ts.cursors {
		return broken("I7", "counts %d cursors of topics, has %d", ts.cursors, cursors)
	}
	if n := ts.waiting.Load(); n != int64(len(ts.awaited)) {
		return broken("I4", "counts %d topics to wake, has %d", n, len(ts.awaited))
	}
	if len(ts.due) > 0 {
		return broken("I4", "%d topics were not woken", len(ts.due))
	}
	return nil
}

// checkKeysLocked checks I4 for topics of keys and directories: each holds exactly the events that
// concern it, from its beginning to the log's end.
func (ts *topics) checkKeysLocked(prefix string) error {
	first, end := ts.log.First(), ts.log.End()
	for name, t := range ts.byName {
		if !strings.HasPrefix(name, prefix) {
			return broken("I4", "topic %q is outside of the resource", name)
		}
		from := max(t.from, first)
		var want []uint64
		for seq := from; seq < end; seq++ {
			key := ts.log.At(seq).Key()
			if key == name || strings.HasSuffix(name, "/") && strings.HasPrefix(key, name) {
				want = append(want, seq)
			}
		}
		if got, ok := t.postings.From(from); !ok || !slices.Equal(got, want) {
			return broken("I4", "topic %q has the events %v from %d on, complete %t; the log has %v", name, got, from, ok, want)
		}
	}
	return nil
}

// verify panics if an invariant of the partition's topics is broken, after the events of a revision
// were posted. The partition's goroutine calls it, which is the feeder. Without the build tag
// strata_invariants it does nothing.
func (s *sorted) verify() {
	if !checkInvariants {
		return
	}
	if err := s.check(); err != nil {
		panic("mirror: " + s.res.prefix + ": invariant " + err.Error())
	}
}

// check returns an error if an event of the revision that was posted last is missing in a topic that
// it concerns, or if the topics contradict each other. Cost is O(topics) where sets are followed,
// else O(topics) in some of the calls (pace).
func (s *sorted) check() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.posted.Load() != s.next {
		return broken("I4", "posted up to %d, sorted up to %d", s.posted.Load(), s.next)
	}
	for i := range s.revision {
		if err := s.checkEventLocked(&s.revision[i]); err != nil {
			return broken("I4", "event %d of %d: %w", s.revision[i].seq, s.revision[i].ev.Rev, err)
		}
	}
	if !s.pace.due(len(s.byName) + s.log.Len()) {
		return nil
	}
	return s.checkLocked()
}

// checkEventLocked returns an error if a topic lacks an event that concerns it. The caller holds mu.
func (s *sorted) checkEventLocked(e *sortedEvent) error {
	if e.seq < s.log.First() {
		return nil // dropped meanwhile
	}
	has := func(name string, t *topic) error {
		if e.seq < t.from {
			return nil
		}
		if seqs, ok := t.postings.From(e.seq); !ok || len(seqs) == 0 || seqs[0] != e.seq {
			return fmt.Errorf("topic %q lacks it", name)
		}
		return nil
	}
	if e.known && s.covers == nil {
		for _, v := range e.values() {
			t := s.byName[v]
			if t == nil && e.seq >= s.oldestLocked() {
				return fmt.Errorf("its value %q has no topic", v)
			}
			if t != nil {
				if err := has(v, t); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for name, t := range s.byName {
		if !e.known || slices.ContainsFunc(e.values(), func(v string) bool { return s.covers(name, v) }) {
			if err := has(name, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// values returns the values of the object before and after the event.
func (e *sortedEvent) values() (values []string) {
	if e.ev.Prev != nil {
		values = append(values, e.before)
	}
	if e.ev.Entry != nil {
		values = append(values, e.now)
	}
	return values
}
