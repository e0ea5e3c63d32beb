package mirror

import (
	"slices"
	"strings"
)

// check checks the topics of keys and directories of a resource with the prefix, whose poster is
// the writer; lin is the current lineage, nil if there is none.
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
		return broken("I4", "recorded %d cursors on topics, actual %d", n, cursors)
	}
	return nil
}

// checkLocked checks the properties of all kinds of topics. The caller is the poster and holds mu.
func (ts *topics) checkLocked() error {
	cursors := 0
	for name, t := range ts.byName {
		if t.name != name || t.owner != ts {
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
		return broken("I7", "recorded %d cursors of topics, actual %d", ts.cursors, cursors)
	}
	if n := ts.waiting.Load(); n != int64(len(ts.awaited)) {
		return broken("I4", "recorded %d topics to wake, actual %d", n, len(ts.awaited))
	}
	if len(ts.due) > 0 {
		return broken("I4", "%d topics were not woken", len(ts.due))
	}
	return nil
}

// checkKeysLocked checks I4 for topics of keys and directories: each contains exactly the events
// that concern it, from its first number to the log's end.
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
