package gcpolicy

import (
	"math"
	"testing"
	"time"
)

// run returns the last target of n seconds with as many bytes allocated in each, in steps.
func (p *policy) run(n int, live, allocs uint64, step time.Duration) (percent int) {
	steps := uint64(time.Second / step)
	for range n * int(steps) {
		percent = p.target(p.allocs+allocs/steps, live, step)
	}
	return percent
}

const mb = 1 << 20

func TestTarget_Allocations_DecideRoom(t *testing.T) {
	for _, c := range []struct {
		allocs, live uint64 // a second; bytes
		percent      int
	}{
		{0, 100 * mb, 48},          // the least
		{4 * mb, 100 * mb, 48},     // ten seconds are less than it
		{100 * mb, 100 * mb, 256},  // the most for a small heap
		{20 * mb, 1000 * mb, 20},   // ten seconds
		{500 * mb, 1000 * mb, 100}, // Go's default
		{0, 1 << 40, 1},            // 0 would be a collection without end
		{0, 0, math.MaxInt32},      // before the first collection
	} {
		// a busy machine delays some steps
		for _, step := range []time.Duration{time.Second / 10, time.Second} {
			if percent := new(policy).run(3, c.live, c.allocs, step); percent != c.percent {
				t.Errorf("%d MiB a second, %d MiB live, every %v: %d %%, want %d", c.allocs/mb, c.live/mb, step, percent, c.percent)
			}
		}
	}
}

// TestTarget_BeginOfLoad_GetsRoomBeforeCollection: the collector begins when 70 % of the room are
// used.
func TestTarget_BeginOfLoad_GetsRoomBeforeCollection(t *testing.T) {
	const live = 1 << 30
	var p policy
	p.run(60, live, 0, time.Second/10)
	const used = 15 * mb // of a load of 150 MiB a second
	if percent := p.target(p.allocs+used, live, time.Second/10); used > leastRoom/2 || percent < 97 {
		t.Errorf("%d %% after %d MiB, want 100", percent, used/mb)
	}
}

func TestTarget_EndOfLoad_ShrinksRoom(t *testing.T) {
	const live = 1 << 30
	var p policy
	busy := p.run(1, live, 100*mb, time.Second/10)
	soon := p.run(5, live, 0, time.Second/10)
	late := p.run(30, live, 0, time.Second/10)
	if busy < 97 || soon < busy/2 || soon >= busy || late != 4 {
		t.Errorf("%d %% under load, %d after 5 s, %d after 35 s; want about 97, more than half of it, 4", busy, soon, late)
	}
}

// TestSecond_ForcedCollection_OnlyAfterLoad: a process that writes frames uses a processor, however
// little it allocates. The collection uses one too, and is not followed by another.
func TestSecond_ForcedCollection_OnlyAfterLoad(t *testing.T) {
	const idle, busy, much = 20 * time.Millisecond, 80 * time.Millisecond, 4 * leastRoom
	var p policy
	var used time.Duration
	for _, c := range []struct {
		seconds int
		used    time.Duration // in each
		garbage uint64
		forced  int
	}{
		{100, idle, much, 0}, // there was no load
		{100, busy, much, 0},
		{9, idle, much, 0},
		{1, idle, much, 1},
		{1000, idle, much, 0},
		{1, busy, much, 0},
		{9, idle, much, 0},
		{1, busy, much, 0}, // not idle for long enough
		{9, idle, much, 0},
		{20, idle, much, 1},
		{1, busy, much, 0},
		{100, idle, leastRoom, 0}, // as an idle server has
		{100, idle, much, 0},
	} {
		forced := 0
		for range c.seconds {
			used += c.used
			p.second(func() time.Duration { return used }, c.garbage, func() { forced++; used += time.Second })
		}
		if forced != c.forced {
			t.Errorf("%d collections forced in %d s with %v of a processor, want %d", forced, c.seconds, c.used, c.forced)
		}
	}
}

func TestProcessorTime_Work_IsCounted(t *testing.T) {
	before := processorTime()
	for processorTime() == before { // until the counter, of some milliseconds, has moved
	}
}
