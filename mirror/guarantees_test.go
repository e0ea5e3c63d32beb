package mirror_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/mirror"
)

const guaranteedPrefix = root + "a/"

// writeRandomly changes up to four keys in one transaction, and adds the changes below
// guaranteedPrefix to the history.
func writeRandomly(rnd *rand.Rand, store *memory.Store, h *watchcheck.History) {
	seen := map[string]bool{}
	var ops []memory.Op
	for range 1 + rnd.IntN(4) {
		op := memory.Op{Key: fmt.Sprintf("%s%d/%d", guaranteedPrefix, rnd.IntN(3), rnd.IntN(3)), Value: "x", Delete: rnd.IntN(4) == 0}
		if rnd.IntN(5) == 0 {
			op.Key = root + "b/other"
		}
		if !seen[op.Key] {
			seen[op.Key] = true
			ops = append(ops, op)
		}
	}
	before := store.Revision()
	rev := store.Txn(ops...)
	if rev == before {
		return // it deleted keys that do not exist
	}
	for _, op := range ops {
		if !strings.HasPrefix(op.Key, guaranteedPrefix) {
			continue
		}
		c := watchcheck.Change{Revision: rev, Key: op.Key}
		if !op.Delete {
			c.State = op.Value
		} else if !live(h, op.Key) {
			continue
		}
		h.Changes = append(h.Changes, c)
	}
	h.Through = rev
}

// resumingReader reads a range with consecutive cursors.
type resumingReader struct {
	start, end string
	follow     bool
	sessions   []watchcheck.Session
	whole      mirror.Revision // it has every event up to here
}

// newResumingReader returns reader i: one third each reads everything, a directory, and a key.
// Every second one follows.
func newResumingReader(i int, from mirror.Revision) *resumingReader {
	c := &resumingReader{follow: i%2 == 0, whole: from}
	switch i % 3 {
	case 1: // a directory
		c.start = fmt.Sprintf("%s%d/", guaranteedPrefix, i%3)
		c.end = fmt.Sprintf("%s%d0", guaranteedPrefix, i%3)
	case 2: // a key
		c.start = fmt.Sprintf("%s%d/%d", guaranteedPrefix, i%3, i%2)
		c.end = c.start + "\x00"
	}
	return c
}

// read records a session that begins where the reader has every event or, sometimes, at an earlier
// random revision. The position of the cursor is its bookmark.
func (c *resumingReader) read(t *testing.T, rnd *rand.Rand, r *mirror.Resource, from mirror.Revision) {
	t.Helper()
	after := c.whole
	if rnd.IntN(3) == 0 {
		after = from + rnd.Int64N(after-from+1)
	}
	cur, err := r.CursorAfter(after, c.start, c.end)
	if err != nil {
		t.Fatalf("a cursor after %d: %v", after, err)
	}
	if c.follow {
		cur.Follow()
	}
	s := watchcheck.Session{After: after}
	for range rnd.IntN(4) {
		events, err := cur.Next(nil, 1+rnd.IntN(10))
		if err != nil {
			t.Fatalf("a cursor after %d: %v", after, err)
		}
		last := mirror.Revision(0)
		for _, e := range events {
			s.Events = append(s.Events, watchcheck.Event{Kind: kindOf(e), Key: e.Key(), Revision: e.Rev})
			last = e.Rev
		}
		if at := cur.Position(); at >= last {
			s.Events = append(s.Events, watchcheck.Event{Kind: watchcheck.Bookmark, Revision: at})
		}
	}
	c.whole = max(c.whole, cur.Position())
	cur.Unfollow()
	c.sessions = append(c.sessions, s)
}

// TestCursor_Resumed_KeepsWatchGuarantees: cursors of all kinds resume at random revisions, on
// several mirrors, while transactions change several keys each. A validator checks each guarantee.
func TestCursor_Resumed_KeepsWatchGuarantees(t *testing.T) {
	const mirrors, rounds, cursors = 4, 20, 30
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(testseed.New(t), 0))
		store := memory.New()
		h := &watchcheck.History{Base: map[string]any{}}
		h.From = store.Txn(memory.Op{Key: root + "b/begin", Value: "1"})
		var readers []*resumingReader
		for i := range cursors {
			readers = append(readers, newResumingReader(i, h.From))
		}
		for range mirrors {
			m := start(t, store, nil)
			r := claim(t, m, guaranteedPrefix)
			reach(t, m, store.Revision(), r)
			for range rounds {
				for range 1 + rnd.IntN(8) {
					writeRandomly(rnd, store, h)
				}
				reach(t, m, store.Revision())
				synctest.Wait()
				for _, c := range readers {
					c.read(t, rnd, r, h.From)
				}
			}
			m.Close()
		}
		if err := h.Check(); err != nil {
			t.Fatal(err)
		}
		for _, c := range readers {
			v := h.View(func(key string, _ any) bool { return c.start <= key && (c.end == "" || key < c.end) })
			if err := v.Check(c.sessions); err != nil {
				t.Errorf("cursor from %q to %q, following %v: %v", c.start, c.end, c.follow, err)
			}
		}
	})
}

// live reports whether a key exists at the end of the history.
func live(h *watchcheck.History, key string) bool {
	for i := len(h.Changes) - 1; i >= 0; i-- {
		if h.Changes[i].Key == key {
			return h.Changes[i].State != nil
		}
	}
	return false
}

func kindOf(e *mirror.Event) watchcheck.Kind {
	switch {
	case e.Prev == nil:
		return watchcheck.Added
	case e.Entry == nil:
		return watchcheck.Deleted
	}
	return watchcheck.Modified
}
