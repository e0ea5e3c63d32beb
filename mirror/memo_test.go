package mirror_test

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// eachKind runs f on the memos of an entry, of an event, and of a leaf.
func eachKind(t *testing.T, f func(t *testing.T, x *memo.List)) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		c := latest(t, r).Cursor("", "")
		store.Put("/registry/a/x", "1")
		reach(t, m, store.Revision())
		evs, err := c.Next(nil, 1)
		if err != nil || len(evs) != 1 {
			t.Fatal(evs, err)
		}
		f(t, evs[0].Entry.Memos())
		f(t, evs[0].Memos())
		for run := range latest(t, r).Runs("", "") {
			f(t, run.Leaf.Memos())
		}
	})
}

func TestMemo_IsStoredPerMemoKey(t *testing.T) {
	eachKind(t, func(t *testing.T, x *memo.List) {
		s1, s2, closed := new(memo.Key), new(memo.Key), new(memo.Key)
		one, two, three := new(int), new(int), new(int)
		swap := func(s *memo.Key, old, value any, want bool) {
			t.Helper()
			if got := x.Swap(s, old, value); got != want {
				t.Errorf("Swap: %v, want %v", got, want)
			}
		}
		holds := func(s *memo.Key, want any) {
			t.Helper()
			if got := x.Get(s); got != want {
				t.Errorf("holds %v, want %v", got, want)
			}
		}
		holds(s1, nil)
		swap(s1, one, two, false) // there is no memo
		swap(s1, nil, one, true)
		swap(s1, nil, two, false) // the first wins
		holds(s1, one)
		holds(s2, nil)
		swap(s2, nil, two, true)
		swap(closed, nil, three, true)
		swap(s1, two, three, false)
		swap(s1, one, three, true)
		holds(s1, three)
		holds(s2, two)
		holds(closed, three)

		closed.Close()
		holds(closed, three) // still readable
		swap(s2, two, nil, true)
		holds(s2, nil)
		holds(s1, three)
		holds(closed, nil) // dropped by the next write
		swap(s2, nil, nil, true)
		holds(s2, nil)
		swap(s1, three, nil, true)
		holds(s1, nil)
	})
}

// TestMemo_ConcurrentSwaps_OneWins: of several readers of one key exactly one wins each step, and
// the memos of another key are not affected.
func TestMemo_ConcurrentSwaps_OneWins(t *testing.T) {
	eachKind(t, func(t *testing.T, x *memo.List) {
		const keys, readers, steps = 3, 4, 500
		var wg sync.WaitGroup
		var mu sync.Mutex
		won := make([]int, keys)
		all := make([]*memo.Key, keys)
		for i := range all {
			all[i] = new(memo.Key)
			x.Swap(all[i], nil, new(int))
			for range readers {
				wg.Go(func() {
					for {
						old := x.Get(all[i]).(*int)
						if *old == steps {
							return
						}
						next := *old + 1
						if x.Swap(all[i], old, &next) {
							mu.Lock()
							won[i]++
							mu.Unlock()
						}
					}
				})
			}
		}
		wg.Go(func() { // another reader adds and removes a memo
			for range steps {
				s := new(memo.Key)
				if !x.Swap(s, nil, s) || x.Get(s) != s {
					t.Error("a new memo key is in use")
				}
				s.Close()
			}
		})
		wg.Wait()
		for i, n := range won {
			if n != steps {
				t.Errorf("key %d took %d steps, %d won", i, steps, n)
			}
		}
	})
}

// TestMemos_WindowMovesMeanwhile_YieldsRest: the window drops the oldest events of the log
// while memos of closed keys are dropped. The remaining events do not keep theirs.
func TestMemos_WindowMovesMeanwhile_YieldsRest(t *testing.T) {
	t.Parallel()
	store := memory.New()
	m, err := mirror.New(mirror.Options{Prefix: "/registry/", Source: store, Window: mirror.Window{MaxAge: time.Hour, MaxBytes: 2 << 20}})
	testcheck.NoError(t, err)
	defer m.Close()
	r, err := m.Claim("/registry/a/")
	testcheck.NoError(t, err)
	write := func() {
		// The window drops history in parts of a mebibyte.
		for range 12 {
			rev := store.Put("/registry/a/x", strings.Repeat("v", 256<<10))
			testcheck.NoError(t, m.Wait(t.Context(), rev))
		}
		barrier(t, m) // the window has moved
	}
	testcheck.NoError(t, r.WaitReady(t.Context()))
	write()
	events := func() []*mirror.Event {
		_, floor, err := r.Oldest()
		testcheck.NoError(t, err)
		c, err := r.CursorAfter(floor, "", "")
		testcheck.NoError(t, err)
		all, err := c.Next(nil, 1000)
		testcheck.NoError(t, err)
		return all
	}
	of := func(ev *mirror.Event) []*memo.List {
		lists := []*memo.List{ev.Memos(), ev.Entry.Memos()}
		if ev.Prev != nil {
			lists = append(lists, ev.Prev.Memos())
		}
		return lists
	}
	key, value := &memo.Key{}, "derived"
	key.Close()
	first, lists := events()[0].Rev, 0
	for l := range r.Memos(t.Context()) {
		// After the walk over the newest version, of a leaf and an entry, and between events.
		if lists++; lists == 2 || lists == 3 {
			write()
			for _, ev := range events() {
				for _, m := range of(ev) {
					m.Swap(key, m.Get(key), &value)
				}
			}
		}
		l.DropClosed()
	}
	all := events()
	if lists < 3 || len(all) == 0 || all[0].Rev == first {
		t.Fatalf("the window has not moved: %d events, the first at %d", len(all), first)
	}
	for _, ev := range all {
		for i, m := range of(ev) {
			if m.Get(key) != nil {
				t.Errorf("the event at %d has a memo of a closed key: %d of event, object and its predecessor", ev.Rev, i)
			}
		}
	}
}
