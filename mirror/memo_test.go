package mirror_test

import (
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror/memo"
)

// memos are the methods that entries and events have in common.
type memos interface {
	Memo(*memo.Key) any
	SwapMemo(s *memo.Key, old, value any) bool
}

// eachKind runs f on an entry and on an event.
func eachKind(t *testing.T, f func(t *testing.T, x memos)) {
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
		f(t, evs[0].Entry)
		f(t, evs[0])
	})
}

func TestMemo_IsStoredPerMemoKey(t *testing.T) {
	eachKind(t, func(t *testing.T, x memos) {
		s1, s2, closed := new(memo.Key), new(memo.Key), new(memo.Key)
		one, two, three := new(int), new(int), new(int)
		swap := func(s *memo.Key, old, value any, want bool) {
			t.Helper()
			if got := x.SwapMemo(s, old, value); got != want {
				t.Errorf("SwapMemo: %v, want %v", got, want)
			}
		}
		holds := func(s *memo.Key, want any) {
			t.Helper()
			if got := x.Memo(s); got != want {
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
	eachKind(t, func(t *testing.T, x memos) {
		const keys, readers, steps = 3, 4, 500
		var wg sync.WaitGroup
		var mu sync.Mutex
		won := make([]int, keys)
		all := make([]*memo.Key, keys)
		for i := range all {
			all[i] = new(memo.Key)
			x.SwapMemo(all[i], nil, new(int))
			for range readers {
				wg.Go(func() {
					for {
						old := x.Memo(all[i]).(*int)
						if *old == steps {
							return
						}
						next := *old + 1
						if x.SwapMemo(all[i], old, &next) {
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
				if !x.SwapMemo(s, nil, s) || x.Memo(s) != s {
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
