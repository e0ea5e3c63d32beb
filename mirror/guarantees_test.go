package mirror_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/watchcheck"
	"github.com/stratakube/strata/mirror"
)

// TestCursorsGiveWhatTheyGuarantee: cursors of all sorts resume at random revisions, on one mirror after the other, while
// transactions change several keys each. Every guarantee is judged by its validator; a cursor's position is its bookmark.
func TestCursorsGiveWhatTheyGuarantee(t *testing.T) {
	const (
		prefix                   = root + "a/"
		mirrors, rounds, cursors = 4, 20, 30
	)
	type client struct {
		start, end string
		follow     bool
		sessions   []watchcheck.Session
		whole      mirror.Revision // up to here it has got everything
	}
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		h := &watchcheck.History{Base: map[string]any{}}
		h.From = store.Txn(memory.Op{Key: root + "b/begin", Value: "1"})
		write := func() {
			seen := map[string]bool{}
			var ops []memory.Op
			for range 1 + rand.IntN(4) {
				op := memory.Op{Key: fmt.Sprintf("%s%d/%d", prefix, rand.IntN(3), rand.IntN(3)), Value: "x", Delete: rand.IntN(4) == 0}
				if rand.IntN(5) == 0 {
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
				return // it deleted what was not there
			}
			for _, op := range ops {
				if !strings.HasPrefix(op.Key, prefix) {
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
		var clients []*client
		for i := range cursors {
			c := &client{follow: i%2 == 0, whole: h.From}
			switch i % 3 {
			case 1: // a directory
				c.start = fmt.Sprintf("%s%d/", prefix, i%3)
				c.end = fmt.Sprintf("%s%d0", prefix, i%3)
			case 2: // a key
				c.start = fmt.Sprintf("%s%d/%d", prefix, i%3, i%2)
				c.end = c.start + "\x00"
			}
			clients = append(clients, c)
		}
		for range mirrors {
			m := start(t, store, nil)
			r := claim(t, m, prefix)
			reach(t, m, store.Revision(), r)
			for range rounds {
				for range 1 + rand.IntN(8) {
					write()
				}
				reach(t, m, store.Revision())
				synctest.Wait()
				for _, c := range clients {
					after := c.whole
					if rand.IntN(3) == 0 {
						after = h.From + rand.Int64N(after-h.From+1)
					}
					cur, err := r.CursorAfter(after, c.start, c.end)
					if err != nil {
						t.Fatalf("a cursor after %d: %v", after, err)
					}
					if c.follow {
						cur.Follow()
					}
					s := watchcheck.Session{After: after}
					for range rand.IntN(4) {
						events, err := cur.Next(nil, 1+rand.IntN(10))
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
					cur.Close()
					c.sessions = append(c.sessions, s)
				}
			}
			m.Close()
		}
		if err := h.Check(); err != nil {
			t.Fatal(err)
		}
		for _, c := range clients {
			v := h.View(func(key string, _ any) bool { return c.start <= key && (c.end == "" || key < c.end) })
			if err := v.Check(c.sessions); err != nil {
				t.Errorf("cursor from %q to %q, following %v: %v", c.start, c.end, c.follow, err)
			}
		}
	})
}

// live says whether a key exists at the end of the history.
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
