package gcpolicy

import (
	"testing"
	"time"
)

// second is one second of a process, with what it allocates and uses in it.
type second struct {
	allocs uint64
	used   time.Duration
}

// run returns the last results of as many equal seconds, and how many of them ended a load.
func (p *policy) run(n int, live uint64, s second) (percent, ended int) {
	for range n {
		var idle bool
		if percent, idle = p.next(p.allocs+s.allocs, live, p.used+s.used); idle {
			ended++
		}
	}
	return percent, ended
}

func TestNext_Allocations_DecideRoom(t *testing.T) {
	const mb = 1 << 20
	for _, c := range []struct {
		allocs, live uint64 // a second; bytes
		percent      int
	}{
		{0, 100 * mb, 48},          // the least
		{4 * mb, 100 * mb, 48},     // ten seconds are less than it
		{6 * mb, 100 * mb, 60},     // ten seconds
		{100 * mb, 100 * mb, 256},  // the most for a small heap
		{20 * mb, 1000 * mb, 20},   // ten seconds
		{500 * mb, 1000 * mb, 100}, // Go's default
		{0, 1 << 40, 1},            // 0 would be a collection without end
		{0, 0, 5033164800},         // before the first collection
	} {
		if percent, _ := new(policy).run(3, c.live, second{allocs: c.allocs}); percent != c.percent {
			t.Errorf("%d MiB a second, %d MiB live: %d %%, want %d", c.allocs/mb, c.live/mb, percent, c.percent)
		}
	}
}

func TestNext_EndOfLoad_ShrinksRoom(t *testing.T) {
	const live = 1 << 30
	var p policy
	busy, _ := p.run(1, live, second{allocs: 100 << 20})
	soon, _ := p.run(5, live, second{})
	late, _ := p.run(30, live, second{})
	if busy < 97 || soon < busy/2 || soon >= busy || late != 4 {
		t.Errorf("%d %% under load, %d after 5 s, %d after 35 s; want about 97, more than half of it, 4", busy, soon, late)
	}
}

// TestNext_ForcedCollection_OnlyAfterLoad: a process that writes frames uses a processor, however
// little it allocates.
func TestNext_ForcedCollection_OnlyAfterLoad(t *testing.T) {
	idle, busy := second{used: 20 * time.Millisecond}, second{used: 80 * time.Millisecond}
	var p policy
	for _, c := range []struct {
		seconds int
		second
		forced int
	}{
		{100, idle, 0}, // there was no load
		{100, busy, 0},
		{9, idle, 0},
		{1, idle, 1},
		{1000, idle, 0},
		{1, busy, 0},
		{9, idle, 0},
		{1, busy, 0}, // not idle for long enough
		{9, idle, 0},
		{20, idle, 1},
	} {
		if _, forced := p.run(c.seconds, 1<<30, c.second); forced != c.forced {
			t.Errorf("%d collections forced in %d s with %v of a processor, want %d", forced, c.seconds, c.used, c.forced)
		}
	}
}

func TestProcessorTime_Work_IsCounted(t *testing.T) {
	before := processorTime()
	for processorTime() == before { // until the counter, of some milliseconds, has moved
	}
}
