package mirror_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
)

// cleanups is the Cleanup of a test inside another one.
type cleanups []func()

func (c *cleanups) Cleanup(f func()) { *c = append(*c, f) }

func (c *cleanups) run() {
	for _, f := range *c {
		f()
	}
}

// woken waits until all goroutines are idle and returns the numbers of the cursors with a change.
func woken(waiting []<-chan struct{}) (numbers []int) {
	synctest.Wait()
	for i, ch := range waiting {
		select {
		case <-ch:
			numbers = append(numbers, i)
		default:
		}
	}
	return numbers
}

// waitingCursors are n cursors each on a key, a namespace and a value, in this order.
type waitingCursors []*mirror.Cursor

// waitingKey is the key of the i-th namespace.
func waitingKey(i int) string { return fmt.Sprintf("/registry/a/ns-%03d/name", i) }

func newWaitingCursors(s mirror.Snapshot, part *mirror.WatchIndex, n int) (all waitingCursors) {
	for i := range n {
		c := s.Cursor(waitingKey(i), waitingKey(i)+"\x00")
		c.Follow()
		all = append(all, c)
	}
	for i := range n {
		c := s.Cursor(fmt.Sprintf("/registry/a/ns-%03d/", i), fmt.Sprintf("/registry/a/ns-%03d0", i))
		c.Follow()
		all = append(all, c)
	}
	for i := range n {
		c := s.Cursor("", "")
		c.FollowIndex(part, fmt.Sprint("value-", i))
		all = append(all, c)
	}
	return all
}

// requireWakes fails unless the change wakes exactly these cursors, and each of them reads only
// this change.
func (w waitingCursors) requireWakes(t *testing.T, store *memory.Store, op memory.Op, want []int) {
	t.Helper()
	var waiting []<-chan struct{}
	for i, c := range w {
		waiting = append(waiting, c.Changed())
		if evs, err := c.Next(nil, 10); len(evs) != 0 || err != nil {
			t.Fatalf("cursor %d has %s, %v before %v", i, story(evs), err, op)
		}
	}
	rev := store.Txn(op)
	if got := woken(waiting); !slices.Equal(got, want) {
		t.Errorf("%v woke %d, want %d", op, got, want)
	}
	for _, i := range want {
		evs, err := w[i].Next(nil, 10)
		if err != nil || len(evs) != 1 || evs[0].Rev != rev || evs[0].Key() != op.Key || w[i].Position() != rev {
			t.Errorf("cursor %d: %s, %v, position %d after %v at %d", i, story(evs), err, w[i].Position(), op, rev)
		}
	}
}

// requireEnd restores etcd, and fails unless this ends every cursor.
func (w waitingCursors) requireEnd(t *testing.T, store *memory.Store) {
	t.Helper()
	var waiting []<-chan struct{}
	for _, c := range w {
		waiting = append(waiting, c.Changed())
	}
	store.Restore(1, nil)
	time.Sleep(time.Minute)
	if got := woken(waiting); len(got) != len(w) {
		t.Errorf("a restored etcd woke %d cursors of %d", len(got), len(w))
	}
	for i, c := range w {
		if _, err := c.Next(nil, 1); !errors.Is(err, mirror.ErrCompacted) {
			t.Fatalf("cursor %d of before the restore: %v", i, err)
		}
		c.Unfollow()
	}
}

// TestTopic_Event_WakesOnlyItsFollowers: with 1,000 cursors on 1,000 keys, namespaces and values,
// one event wakes exactly the cursors that follow it, and each reads only this event.
func TestTopic_Event_WakesOnlyItsFollowers(t *testing.T) {
	const n = 1000
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		part := mirror.NewWatchIndex(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			if ev.Prev != nil {
				before = string(ev.Prev.Value())
			}
			if ev.Entry != nil {
				now = string(ev.Entry.Value())
			}
			return before, now, true
		}, nil)
		cursors := newWaitingCursors(latest(t, r), part, n)
		synctest.Wait()
		for _, tt := range []struct {
			op   memory.Op
			want []int
		}{
			{memory.Op{Key: waitingKey(7), Value: "value-12"}, []int{7, n + 7, 2*n + 12}},
			{memory.Op{Key: waitingKey(8), Value: "value-12"}, []int{8, n + 8, 2*n + 12}},
			{memory.Op{Key: waitingKey(7), Value: "value-900"}, []int{7, n + 7, 2*n + 12, 2*n + 900}},
			{memory.Op{Key: waitingKey(7) + "/below", Value: "value-1"}, []int{n + 7, 2*n + 1}},
			{memory.Op{Key: waitingKey(7), Delete: true}, []int{7, n + 7, 2*n + 900}},
			{memory.Op{Key: "/registry/a/nobody's", Value: "nobody's"}, nil},
			{memory.Op{Key: "/registry/b/x", Value: "value-5"}, nil},
		} {
			cursors.requireWakes(t, store, tt.op, tt.want)
		}
		cursors.requireEnd(t, store)
	})
}

// goes starts the goroutine of a watch index; a cleanup waits for its end.
func goes(c *cleanups) func(func()) bool {
	var wg sync.WaitGroup
	c.Cleanup(wg.Wait)
	return func(run func()) bool { wg.Go(run); return true }
}

// TestCursor_WithoutOwnEvents_OutlivesWindow: the window moves past the position of a cursor
// without events of its own, and the cursor continues. If one of its events was dropped, it returns
// ErrCompacted.
func TestCursor_WithoutOwnEvents_OutlivesWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) {
			o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: 5000}
		})
		r := claim(t, m, "/registry/a/")
		store.Put("/registry/a/quiet", "quiet")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		part := byValue(&clean, r)
		s := latest(t, r)
		all, key, value, late := s.Cursor("", ""), s.Cursor("/registry/a/quiet", "/registry/a/quiet\x00"), s.Cursor("", ""), s.Cursor("", "")
		key.Follow()
		value.FollowIndex(part, "q")
		late.FollowIndex(part, "q")
		noise := func() {
			for i := range 500 {
				store.Put(fmt.Sprintf("/registry/a/busy-%d", i%7), fmt.Sprint("busy", i))
				time.Sleep(200 * time.Millisecond) // history is dropped at marks, one per second
			}
			synctest.Wait()
		}
		noise()
		if _, floor, _ := r.Oldest(); floor <= s.Rev {
			t.Fatalf("the floor is %d, want it above %d", floor, s.Rev)
		}
		if _, err := all.Next(nil, 1); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("a cursor on everything: %v", err)
		}
		for name, c := range map[string]*mirror.Cursor{"key": key, "value": value} {
			evs, err := c.Next(nil, 10)
			if len(evs) != 0 || err != nil || c.Position() != m.PublishedRevision() {
				t.Errorf("%s: %s, %v, position %d of %d", name, story(evs), err, c.Position(), m.PublishedRevision())
			}
		}
		// An event that the cursors read, and one that is dropped before they read it.
		rev := store.Put("/registry/a/quiet", "quieter")
		synctest.Wait()
		for name, c := range map[string]*mirror.Cursor{"key": key, "value": value} {
			if evs, err := c.Next(nil, 10); len(evs) != 1 || err != nil || evs[0].Rev != rev {
				t.Errorf("%s: %s, %v, want %d", name, story(evs), err, rev)
			}
		}
		noise()
		if _, err := key.Next(nil, 10); err != nil {
			t.Errorf("key, its event was read: %v", err)
		}
		if _, err := value.Next(nil, 10); err != nil {
			t.Errorf("value, its event was read: %v", err)
		}
		if _, err := late.Next(nil, 10); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("an event was dropped before it was read: %v", err)
		}
		key.Unfollow()
		value.Unfollow()
		late.Unfollow()
	})
}

// TestWatchIndex_BusyWithEvent_HoldsPositionsBack: while the watch index is busy with an event, the
// positions of cursors that follow a value do not pass it; the published revision and other cursors
// continue.
func TestWatchIndex_BusyWithEvent_HoldsPositionsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		gate := make(chan struct{})
		part := mirror.NewWatchIndex(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			if strings.HasSuffix(ev.Key(), "/slow") {
				<-gate
			}
			return valuesOf(ev)
		}, nil)
		c, other := latest(t, r).Cursor("", ""), latest(t, r).Cursor("", "")
		c.FollowIndex(part, "x")
		other.FollowIndex(part, "another value")
		key := latest(t, r).Cursor("/registry/a/slow", "/registry/a/slow\x00")
		key.Follow()
		before := store.Put("/registry/a/1", "x")
		slow := store.Put("/registry/a/slow", "y")
		later := store.Put("/registry/a/2", "x")
		synctest.Wait()
		if evs, err := key.Next(nil, 10); err != nil || len(evs) != 1 || key.Position() != later {
			t.Errorf("by key: %s, %v, position %d, want %d", story(evs), err, key.Position(), later)
		}
		evs, err := c.Next(nil, 10)
		if err != nil || len(evs) != 1 || evs[0].Rev != before || c.Position() != slow-1 {
			t.Errorf("by value: %s, %v, position %d, want %d", story(evs), err, c.Position(), slow-1)
		}
		// With Await, the cursor is woken when the watch index is done.
		c.Await(later)
		other.Await(later)
		changed, alsoChanged := c.Changed(), other.Changed()
		close(gate)
		<-changed
		<-alsoChanged
		if evs, err := other.Next(nil, 10); err != nil || len(evs) != 0 || other.Position() != later {
			t.Errorf("another value: %s, %v, position %d, want %d", story(evs), err, other.Position(), later)
		}
		evs, err = c.Next(nil, 10)
		if err != nil || len(evs) != 1 || evs[0].Rev != later || c.Position() != later {
			t.Errorf("by value: %s, %v, position %d, want %d", story(evs), err, c.Position(), later)
		}
		// A write outside the resource: the position advances as well.
		elsewhere := store.Put("/registry/b/x", "x")
		synctest.Wait()
		for name, c := range map[string]*mirror.Cursor{"value": c, "another value": other, "key": key} {
			if evs, err := c.Next(nil, 10); len(evs) != 0 || err != nil || c.Position() != elsewhere {
				t.Errorf("%s: %s, %v, position %d, want %d", name, story(evs), err, c.Position(), elsewhere)
			}
			c.Unfollow()
		}
	})
}

// TestWatchIndex_ValuesWithoutCursor_AreBounded: a bounded number of values without a cursor keep
// their topics for cursors that join later at an older position; a cursor on another value reads
// the log.
func TestWatchIndex_ValuesWithoutCursor_AreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		part := mirror.NewWatchIndex(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			return ev.Key(), ev.Key(), true
		}, nil)
		began := latest(t, r)
		first := began.Cursor("", "")
		first.FollowIndex(part, "nobody's")
		defer first.Unfollow()
		key := func(i int) string { return fmt.Sprintf("/registry/a/%05d", i) }
		most := 0
		const values = 25_000
		for i := range values {
			store.Put(key(i), "x")
			if i%1000 == 999 {
				synctest.Wait()
				most = max(most, part.Sorted())
			}
		}
		if most > 10_001 || most < 5000 {
			t.Errorf("%d values had topics", most)
		}
		for _, i := range []int{0, 9_999, 10_000, 12_345, 24_999} {
			c := began.Cursor("", "")
			c.FollowIndex(part, key(i))
			var got []*mirror.Event
			for {
				n := len(got)
				var err error
				if got, err = c.Next(got, 1000); err != nil {
					t.Fatal(err)
				}
				if len(got) == n {
					break
				}
			}
			c.Unfollow()
			found := slices.ContainsFunc(got, func(ev *mirror.Event) bool { return ev.Key() == key(i) })
			if !found || c.Position() != m.PublishedRevision() {
				t.Errorf("value %d: found %t among %d events, position %d of %d", i, found, len(got), c.Position(), m.PublishedRevision())
			}
		}
	})
}

// TestWatchIndex_CursorFarBehind_DelaysNoOther: a cursor that follows a value from far behind
// delays no other cursor, and no other cursor loses its position.
func TestWatchIndex_CursorFarBehind_DelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: 20 * time.Second, MaxBytes: 1 << 30} })
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		old := latest(t, r).Rev
		noise := func() {
			store.Put(fmt.Sprintf("/registry/a/busy-%d", store.Revision()%7), fmt.Sprint("busy", store.Revision()))
			time.Sleep(100 * time.Millisecond)
		}
		for range 190 {
			noise()
		}
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		part := mirror.NewWatchIndex(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			time.Sleep(90 * time.Millisecond)
			return valuesOf(ev)
		}, nil)
		behind, err := r.CursorAfter(old, "", "")
		testcheck.NoError(t, err)
		fresh := latest(t, r).Cursor("", "")
		behind.FollowIndex(part, "x")
		fresh.FollowIndex(part, "q")
		defer behind.Unfollow()
		defer fresh.Unfollow()
		store.Put("/registry/a/q", "q")
		for waited := time.Now(); ; noise() {
			evs, err := fresh.Next(nil, 10)
			testcheck.NoError(t, err)
			if len(evs) == 1 {
				break
			}
			if time.Since(waited) > time.Minute { // failure: the backlog is never read
				t.Fatal("the event waits for the backlog of another")
			}
		}
		for range 300 {
			noise()
			if _, err := fresh.Next(nil, 10); err != nil {
				_, floor, _ := r.Oldest()
				t.Fatalf("%v; position %d, floor %d, published revision %d", err, fresh.Position(), floor, m.PublishedRevision())
			}
		}
	})
}

// TestWatchIndex_FallsBehindWindow_CursorsReadLog: if events leave the window before a watch index
// has sorted them, the cursors on a value read them in the log, or return ErrCompacted.
func TestWatchIndex_FallsBehindWindow_CursorsReadLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: 5 * time.Second, MaxBytes: 1 << 30} })
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		slow := make(chan struct{})
		part := mirror.NewWatchIndex(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			<-slow
			return valuesOf(ev)
		}, nil)
		c := latest(t, r).Cursor("", "")
		c.FollowIndex(part, "q")
		defer func() { c.Unfollow() }()
		for i := range 100 {
			store.Put(fmt.Sprintf("/registry/a/busy-%d", i%7), fmt.Sprint("busy", i))
			time.Sleep(200 * time.Millisecond)
		}
		// The cursor is at the watch index's position, which has left the window by now.
		close(slow)
		synctest.Wait()
		if _, err := c.Next(nil, 10); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("position %d: %v", c.Position(), err)
		}
		c.Unfollow()
		c = latest(t, r).Cursor("", "")
		c.FollowIndex(part, "q")
		rev := store.Put("/registry/a/q", "q")
		synctest.Wait()
		if evs, err := c.Next(nil, 10); err != nil || len(evs) != 1 || evs[0].Rev != rev {
			t.Errorf("a cursor that follows later: %s, %v", story(evs), err)
		}
	})
}
