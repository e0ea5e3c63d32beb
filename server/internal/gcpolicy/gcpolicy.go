// Package gcpolicy sets the collector's target from the live heap, for a process
// that holds a large, slowly changing state.
//
// Go's default lets the heap grow to twice what is live: for 400 MB of objects at
// rest, 400 MB more for garbage. Most of what this process holds are stored values and
// encoded objects, which have no pointers and cost the collector nothing to keep: the
// room for garbage follows from the part that it has to scan.
package gcpolicy

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// baseHeadroom is always allowed, so that a small heap is not collected all
	// the time; a guess that fits an API server's burst of requests.
	baseHeadroom = 48 << 20
	// scannedShare is the further room, as a share of the live heap that has pointers:
	// less than half of what Go's default would allow if there were nothing else.
	scannedShare = 0.4
	interval     = time.Second

	// busyCycles collections in a second mean that the room is too small for what the server
	// has to do: it doubles, up to busyRoom times, and halves again after a second
	// without any.
	busyCycles = 2
	busyRoom   = 2

	// idleFor is how long no collection must have been needed, and little have been allocated,
	// until memory that is free, and that the runtime would keep for the next burst, goes
	// back to the system, if it is idleFree bytes or more; freeAgain how long until that may
	// happen again. It costs a collection, which must not fall into a steady load.
	idleFor    = 3 * time.Second
	idleFree   = 48 << 20
	idleAllocs = 4 << 20 // a second
	freeAgain  = 15 * time.Second
)

// percent returns the value for debug.SetGCPercent with a live heap of the size, of
// which scanned may contain pointers, in bytes, and room times the usual room for garbage:
// never more than Go's default of 100.
func percent(live, scanned uint64, room int) int {
	headroom := float64(room) * (baseHeadroom + scannedShare*float64(min(scanned, live)))
	return int(min(100, 100*headroom/float64(max(live, 1))))
}

// Start adjusts the target every second until ctx ends, and then leaves it as it
// is. If the environment sets GOGC, the operator has decided, and it does nothing.
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
			// SetGCPercent stops the world: only when it matters.
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

// load tells how much room for garbage the server needs. The zero value has seen nothing.
type load struct {
	cycles uint64 // collections so far
	times  int    // the usual room
}

// room takes a sample of collections so far, one interval after the one before, and
// returns by how much the usual room is to be multiplied.
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

// idleness tells when it is time to return free memory. The zero value has seen nothing.
type idleness struct {
	cycles uint64    // collections so far
	allocs uint64    // bytes allocated so far
	since  time.Time // when it began
	freed  time.Time // when memory was returned
}

// free takes a sample, of collections and of bytes allocated so far and of free bytes, one
// interval after the one before, and reports whether to return those.
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
