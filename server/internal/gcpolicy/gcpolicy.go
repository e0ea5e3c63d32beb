// Package gcpolicy sets the garbage collector's target from the live heap, for a process with a
// large, slowly changing state.
//
// Go's default lets the heap grow to twice the live heap: for 400 MB of objects at rest, 400 MB
// more for garbage. Most of the live heap of this process consists of stored values and encoded
// objects, which contain no pointers and cost the collector no scanning. The room for garbage is
// therefore computed from the part that has to be scanned.
package gcpolicy

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// baseHeadroom is always allowed, so that a small heap is not collected continuously; a guess
	// that fits an API server's burst of requests.
	baseHeadroom = 48 << 20
	// scannedShare is the additional room, as a share of the live heap with pointers: less than
	// half of the room that Go's default would allow for that part.
	scannedShare = 0.4
	interval     = time.Second

	// busyCycles collections in a second mean that the room is too small for the load: it doubles,
	// up to busyRoom times the usual room, and halves again after a second without a collection.
	busyCycles = 2
	busyRoom   = 2

	// idleFor is the period without a collection and with few allocations after which free memory,
	// which the runtime would keep for the next burst, is returned to the system, if it is idleFree
	// bytes or more. freeAgain is the minimum time between two such returns. A return costs a
	// collection, which must not happen under steady load.
	idleFor    = 3 * time.Second
	idleFree   = 48 << 20
	idleAllocs = 4 << 20 // a second
	freeAgain  = 15 * time.Second
)

// percent returns the value for debug.SetGCPercent for a live heap of live bytes, of which scanned
// bytes may contain pointers, and for room times the usual room for garbage. It is never more than
// Go's default of 100.
func percent(live, scanned uint64, room int) int {
	headroom := float64(room) * (baseHeadroom + scannedShare*float64(min(scanned, live)))
	return int(min(100, 100*headroom/float64(max(live, 1))))
}

// Start adjusts the target every second until ctx ends, and leaves it unchanged after that. If GOGC
// is set in the environment, Start does nothing: the operator's setting applies.
func Start(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	go func() {
		sample := []metrics.Sample{
			{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/heap:bytes"},
			{Name: "/gc/cycles/total:gc-cycles"}, {Name: "/memory/classes/heap/free:bytes"},
			{Name: "/gc/heap/allocs:bytes"},
		}
		var idle idleness
		var load load
		tick := time.NewTicker(interval)
		defer tick.Stop()
		last := 100
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			metrics.Read(sample)
			// SetGCPercent stops the world, so ignore small changes.
			if p := percent(sample[0].Value.Uint64(), sample[1].Value.Uint64(), load.room(sample[2].Value.Uint64())); p < last-3 || p > last+3 {
				debug.SetGCPercent(p)
				last = p
			}
			if idle.free(time.Now(), sample[2].Value.Uint64(), sample[3].Value.Uint64(), sample[4].Value.Uint64()) {
				debug.FreeOSMemory()
			}
		}
	}()
}

// load estimates the room for garbage that the server needs. The zero value has no samples.
type load struct {
	cycles uint64 // collections so far
	times  int    // multiple of the usual room
}

// room takes the number of collections so far, one interval after the previous sample, and returns
// the factor for the usual room.
func (l *load) room(cycles uint64) int {
	switch since := cycles - l.cycles; {
	case l.times == 0:
		l.times = 1
	case since >= busyCycles:
		l.times = min(2*l.times, busyRoom)
	case since == 0:
		l.times = max(l.times/2, 1)
	}
	l.cycles = cycles
	return l.times
}

// idleness decides when to return free memory to the system. The zero value has no samples.
type idleness struct {
	cycles uint64    // collections so far
	allocs uint64    // bytes allocated so far
	since  time.Time // start of the idle period
	freed  time.Time // time of the last return
}

// free takes the numbers of collections and of allocated bytes so far and the free bytes, one
// interval after the previous sample, and reports whether to return the free bytes.
func (i *idleness) free(now time.Time, cycles, free, allocs uint64) bool {
	allocated := allocs - i.allocs
	i.allocs = allocs
	if cycles != i.cycles || allocated > idleAllocs {
		i.cycles, i.since = cycles, now
		return false
	}
	if free < idleFree || now.Sub(i.since) < idleFor || now.Sub(i.freed) < freeAgain {
		return false
	}
	i.freed = now
	return true
}
