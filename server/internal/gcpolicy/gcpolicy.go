// Package gcpolicy sets the garbage collector's target from the live heap and from the free memory,
// for a process with a large, slowly changing state.
//
// Go's default lets the heap grow to twice the live heap. Most of the live heap of this process
// consists of stored values and encoded objects, which contain no pointers and cost the collector
// no scanning. At rest, or with little free memory, the room for garbage is therefore computed from
// the part that has to be scanned. While the process allocates and memory is free, the room is Go's
// default, so that a write does not pay for a small heap. It grows further while collections take
// more than a small share of the process's CPU time, up to a share of the free memory, and shrinks
// again when collections become rare. An idle process returns free memory to the system.
package gcpolicy

import (
	"context"
	"math"
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

	// busyCycles collections within busyFor that took more than busyShare of the process's CPU time
	// mean that the room is too small for the load: it doubles, up to busyRoom times the room at
	// rest. It halves after quietFor without a collection.
	busyCycles = 2
	busyFor    = 30 * time.Second
	busyShare  = 0.08
	quietFor   = 30 * time.Second
	busyRoom   = 32
	// restPercent and busyPercent bound the room in proportion to the live heap: Go's default, and
	// three times the live heap in all under load.
	restPercent = 100
	busyPercent = 200
	// freeShare is the divisor of the free memory that yields the bound of the room beyond the room
	// at rest.
	freeShare = 4

	// idleFor is the period without a collection and with few allocations after which free memory,
	// which the runtime would keep for the next burst, is returned to the system, if it is idleFree
	// bytes or more. freeAgain is the minimum time between two such returns. A return costs a
	// collection, which must not happen under steady load.
	idleFor    = 3 * time.Second
	idleFree   = 48 << 20
	idleAllocs = 4 << 20 // a second
	freeAgain  = 15 * time.Second
	// settleFor is how long after the last load one more collection takes place: caches have
	// evicted the blocks of the load by then.
	settleFor = 58 * time.Second
)

// percent returns the value for debug.SetGCPercent for a live heap of live bytes, of which scanned
// bytes may contain pointers, for room times the room at rest, and for free bytes of free memory,
// none at rest. It rounds up, to 1 at least: with 0 a collection would begin after each one.
func percent(live, scanned uint64, room int, free int64) int {
	rest := baseHeadroom + scannedShare*float64(min(scanned, live))
	wanted, most := float64(live), restPercent
	if room > 1 {
		wanted, most = max(wanted, float64(room)*rest), busyPercent
	}
	headroom := max(rest, min(wanted, float64(free)/freeShare))
	return max(1, int(math.Ceil(min(float64(most), 100*headroom/float64(max(live, 1))))))
}

// differs reports whether a target deviates from the last one by more than a tenth of it:
// SetGCPercent stops the world, so small changes are ignored. Of a large heap a single percent may
// be much memory.
func differs(target, last int) bool { return max(target-last, last-target)*10 > last }

// Start adjusts the target every second until ctx ends, and leaves it unchanged after that. free
// returns the bytes of memory that the process may still take. If GOGC is set in the environment,
// Start does nothing: the operator's setting applies.
func Start(ctx context.Context, free func() int64) {
	if os.Getenv("GOGC") != "" {
		return
	}
	go func() {
		sample := []metrics.Sample{
			{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/heap:bytes"},
			{Name: automaticCycles}, {Name: "/memory/classes/heap/free:bytes"},
			{Name: "/gc/heap/allocs:bytes"},
			// as of the last collection
			{Name: "/cpu/classes/gc/total:cpu-seconds"}, {Name: "/cpu/classes/user:cpu-seconds"},
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
			now, cycles := time.Now(), sample[2].Value.Uint64()
			room := load.room(now, cycles, cpuTime{collector: sample[5].Value.Float64(), program: sample[6].Value.Float64()})
			returns := idle.free(now, cycles, sample[3].Value.Uint64(), sample[4].Value.Uint64())
			available := int64(0)
			if idle.loadedWithin(idleFor, now) {
				available = free()
			}
			if p := percent(sample[0].Value.Uint64(), sample[1].Value.Uint64(), room, available); differs(p, last) {
				debug.SetGCPercent(p)
				last = p
			}
			if returns {
				debug.FreeOSMemory()
			}
		}
	}()
}

// automaticCycles is the metric of the collections that the target caused. Those of FreeOSMemory
// are none of the load.
const automaticCycles = "/gc/cycles/automatic:gc-cycles"

// cpuTime is the CPU time of the process so far, in seconds, as of the last collection.
type cpuTime struct{ collector, program float64 }

// load estimates the room for garbage that the server needs. The zero value has no samples.
type load struct {
	cycles uint64    // collections so far
	times  int       // multiple of the room at rest
	last   time.Time // of the last collection, or of the last change
	cpu    cpuTime
	recent []collection // within busyFor, since the last change; each with the CPU time before it
}

type collection struct {
	at     time.Time
	before cpuTime
}

// room takes the number of collections so far, and the CPU time, and returns the factor for the
// room at rest.
func (l *load) room(now time.Time, cycles uint64, cpu cpuTime) int {
	since, before := cycles-l.cycles, l.cpu
	l.cycles, l.cpu = cycles, cpu
	if l.times == 0 { // the first sample
		l.times, l.last = 1, now
		return 1
	}
	for len(l.recent) > 0 && now.Sub(l.recent[0].at) >= busyFor {
		l.recent = l.recent[1:]
	}
	for range min(since, busyCycles) {
		l.recent = append(l.recent, collection{now, before})
	}
	switch {
	case since > 0 && len(l.recent) >= busyCycles && cpu.shareSince(l.recent[0].before) > busyShare:
		l.times, l.last, l.recent = min(2*l.times, busyRoom), now, nil
	case since > 0:
		l.last = now
	case now.Sub(l.last) >= quietFor:
		l.times, l.last = max(l.times/2, 1), now
	}
	return l.times
}

// shareSince returns the collector's share of the CPU time since before.
func (c cpuTime) shareSince(before cpuTime) float64 {
	collector := c.collector - before.collector
	return collector / max(collector+c.program-before.program, 1e-9)
}

// idleness decides when to return free memory to the system. The zero value has no samples.
type idleness struct {
	cycles uint64    // collections so far
	allocs uint64    // bytes allocated so far
	since  time.Time // start of the idle period
	freed  time.Time // time of the last return
	// the last time with many allocations, zero after the collection that follows it
	loaded time.Time
}

// free takes the numbers of collections and of allocated bytes so far and the free bytes, one
// interval after the previous sample, and reports whether to return the free bytes.
func (i *idleness) free(now time.Time, cycles, free, allocs uint64) bool {
	allocated := allocs - i.allocs
	i.allocs = allocs
	if allocated > idleAllocs {
		i.loaded = now
	}
	if cycles != i.cycles || allocated > idleAllocs {
		i.cycles, i.since = cycles, now
		return false
	}
	if !i.loaded.IsZero() && now.Sub(i.loaded) >= settleFor {
		i.loaded, i.freed = time.Time{}, now
		return true
	}
	if free < idleFree || now.Sub(i.since) < idleFor || now.Sub(i.freed) < freeAgain {
		return false
	}
	i.freed = now
	return true
}

// loadedWithin reports whether the process has made many allocations within d.
func (i *idleness) loadedWithin(d time.Duration, now time.Time) bool {
	return !i.loaded.IsZero() && now.Sub(i.loaded) < d
}
