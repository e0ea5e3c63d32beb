package gcpolicy

import (
	"testing"
	"time"
)

func TestPercent_DependsOnLiveAndScannedHeap(t *testing.T) {
	for _, c := range []struct {
		live, scanned uint64
		want          int
	}{
		{0, 0, 100},
		{100 << 20, 100 << 20, 88},
		{512 << 20, 512 << 20, 49},
		{512 << 20, 128 << 20, 19}, // the rest has no pointers
		{4 << 30, 4 << 30, 41},
		{1 << 30, 2 << 30, 44}, // samples taken at different times
	} {
		if got := percent(c.live, c.scanned, 1); got != c.want {
			t.Errorf("percent(%d MiB, %d MiB) = %d, want %d", c.live>>20, c.scanned>>20, got, c.want)
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
		{4 * idleFor, 3, idleFree, 0, false},                        // too soon after the last return
		{2*idleFor + freeAgain, 3, idleFree, idleAllocs + 1, false}, // too many allocations
		{3*idleFor + freeAgain, 3, idleFree, 2 * idleAllocs, true},  // few allocations since
	} {
		if got := i.free(start.Add(c.after), c.cycles, c.free, c.allocs); got != c.want {
			t.Errorf("after %v with %d collections and %d bytes: %v, want %v", c.after, c.cycles, c.free, got, c.want)
		}
	}
}

func TestLoad_FrequentCollections_IncreaseHeapRoom(t *testing.T) {
	var l load
	for i, c := range []struct {
		cycles uint64
		want   int
	}{
		{10, 1}, // earlier collections do not count
		{11, 1},
		{13, 2}, {15, 2}, {20, 2}, // busy
		{21, 2},
		{21, 1}, {21, 1}, // idle
	} {
		if got := l.room(c.cycles); got != c.want {
			t.Errorf("sample %d: %d times the room, want %d", i, got, c.want)
		}
	}
	if usual, busy := percent(1<<30, 128<<20, 1), percent(1<<30, 128<<20, busyRoom); busy < 2*usual {
		t.Errorf("percent is %d with the usual room and %d with more", usual, busy)
	}
}
