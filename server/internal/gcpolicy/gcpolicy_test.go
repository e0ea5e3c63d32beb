package gcpolicy

import (
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"
)

// TestAutomaticCycles_ReturnOfMemory_IsNotCounted: collections that return memory to the system
// must not look like a load.
func TestAutomaticCycles_ReturnOfMemory_IsNotCounted(t *testing.T) {
	sample := []metrics.Sample{{Name: automaticCycles}, {Name: "/gc/cycles/total:gc-cycles"}}
	others := func() uint64 { // collections that are not counted
		metrics.Read(sample)
		return sample[1].Value.Uint64() - sample[0].Value.Uint64()
	}
	before := others()
	debug.FreeOSMemory()
	if got := others() - before; got != 1 {
		t.Errorf("of a return of memory, %d collections are not counted, want 1", got)
	}
}

func TestPercent_DependsOnLiveAndScannedHeap(t *testing.T) {
	for _, c := range []struct {
		live, scanned uint64
		want          int
	}{
		{0, 0, 100},
		{100 << 20, 100 << 20, 88},
		{512 << 20, 512 << 20, 50}, // rounded up
		{512 << 20, 128 << 20, 20}, // the rest has no pointers
		{4 << 30, 4 << 30, 42},
		{1 << 30, 2 << 30, 45}, // samples taken at different times
		// 108 MiB are 0.9 %; a target of 0 would be a collection without end
		{12 << 30, 150 << 20, 1},
		{1 << 40, 0, 1},
	} {
		if got := percent(c.live, c.scanned, 1, 0); got != c.want {
			t.Errorf("percent(%d MiB, %d MiB) = %d, want %d", c.live>>20, c.scanned>>20, got, c.want)
		}
	}
}

// TestDiffers_Target_IsRelative: the room of a large heap deviates from the wanted by no larger
// share than that of a small one.
func TestDiffers_Target_IsRelative(t *testing.T) {
	for _, c := range []struct {
		wanted, last int
		want         bool
	}{
		{100, 100, false},
		{110, 100, false},
		{90, 100, false},
		{111, 100, true},
		{89, 100, true},
		{10, 10, false},
		{2, 1, true}, // twice the room
		{1, 2, true},
		{1, 4, true},
		{1, 1, false},
	} {
		if got := differs(c.wanted, c.last); got != c.want {
			t.Errorf("differs(%d, %d) = %v, want %v", c.wanted, c.last, got, c.want)
		}
	}
}

func TestIdleness_IdleServer_ReturnsFreeMemory(t *testing.T) {
	var i idleness
	start := time.Now()
	for _, c := range []struct {
		after                time.Duration
		cycles, free, allocs uint64
		want                 bool
	}{
		{0, 1, idleFree, 0, false},
		{idleFor - time.Second, 1, idleFree, 0, false}, // not long enough
		{idleFor, 2, idleFree, 0, false},               // a collection happened
		{2 * idleFor, 2, idleFree - 1, 0, false},       // too few free bytes
		{2 * idleFor, 2, idleFree, 0, true},
		{3 * idleFor, 3, idleFree, 0, false},
		// too soon after the last return
		{4 * idleFor, 3, idleFree, 0, false},
		{2*idleFor + freeAgain, 3, idleFree, idleAllocs + 1, false}, // too many allocations
		{3*idleFor + freeAgain, 3, idleFree, 2 * idleAllocs, true},  // few allocations since
		// One more, however few bytes are free, when caches have dropped what the load used; then
		// none.
		{2*idleFor + freeAgain + settleFor - time.Second, 4, 0, 2 * idleAllocs, false},
		{2*idleFor + freeAgain + settleFor, 4, 0, 2 * idleAllocs, true},
		{2*idleFor + freeAgain + 3*settleFor, 4, 0, 2 * idleAllocs, false},
	} {
		if got := i.free(start.Add(c.after), c.cycles, c.free, c.allocs); got != c.want {
			t.Errorf("after %v with %d collections and %d bytes: %v, want %v", c.after, c.cycles, c.free, got, c.want)
		}
	}
}

// TestIdleness_Allocations_AreALoad: many allocations are a load for some seconds, few are none.
func TestIdleness_Allocations_AreALoad(t *testing.T) {
	var i idleness
	start := time.Now()
	for _, c := range []struct {
		after  time.Duration
		allocs uint64
		want   bool
	}{
		{0, idleAllocs, false},
		{time.Second, 2*idleAllocs + 1, true},
		{idleFor, 3 * idleAllocs, true},
		{time.Second + idleFor, 4 * idleAllocs, false},
		{2*time.Second + idleFor, 6 * idleAllocs, true},
	} {
		now := start.Add(c.after)
		i.free(now, 1, 0, c.allocs)
		if got := i.loadedWithin(idleFor, now); got != c.want {
			t.Errorf("after %v and %d bytes: loaded %v, want %v", c.after, c.allocs, got, c.want)
		}
	}
}

func TestPercent_Busy_FollowsFreeMemory(t *testing.T) {
	const live, scanned = 1 << 30, 256 << 20
	rest := percent(live, scanned, 1, 0)
	for _, c := range []struct {
		room int
		free int64
		want int
	}{
		{1, 64 << 30, restPercent},              // Go's default
		{1, 1 << 30, 25},                        // a quarter of the free memory
		{2, 64 << 30, max(restPercent, 2*rest)}, // twice the room at rest
		{busyRoom, 64 << 30, busyPercent},       // the bound in proportion to the live heap
		{busyRoom, 4 << 30, 100},                // a quarter of the free memory
		{busyRoom, 100 << 20, rest},             // under a limit, never less than at rest
		{busyRoom, -1, rest},                    // over the limit
	} {
		if got := percent(live, scanned, c.room, c.free); got != c.want {
			t.Errorf("%d times the room, %d MiB free: %d, want %d", c.room, c.free>>20, got, c.want)
		}
	}
}

// TestLoad_ExpensiveCollections_IncreaseHeapRoom: the room grows while collections are frequent and
// expensive, and shrinks without.
func TestLoad_ExpensiveCollections_IncreaseHeapRoom(t *testing.T) {
	var l load
	start := time.Now()
	at := func(second int, cycles uint64, collector, program float64, want int) {
		t.Helper()
		if got := l.room(start.Add(time.Duration(second)*time.Second), cycles, cpuTime{collector, program}); got != want {
			t.Errorf("second %d: %d times the room, want %d", second, got, want)
		}
	}
	at(0, 1, 0, 0, 1)
	for n := 1; n <= 10; n++ { // frequent and cheap: 5 % of the time
		at(n, uint64(1+n), 0.05*float64(n), 0.95*float64(n), 1)
	}
	at(41, 12, 2, 11, 1)
	at(48, 13, 4, 18, 2) // two within 7 s, 22 %
	at(55, 14, 6, 25, 2)
	at(62, 15, 8, 32, 4)
	at(63, 17, 10, 33, 8)
	at(64, 27, 20, 34, 16)
	at(65, 37, 30, 35, 32)
	at(66, 47, 40, 36, busyRoom)
	at(95, 47, 40, 36, 32) // quiet
	at(96, 47, 40, 36, 16)
	at(126, 47, 40, 36, 8)
	at(156, 48, 41, 37, 8)
	at(186, 48, 41, 37, 4)
}
