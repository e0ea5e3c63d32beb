// Package gcpolicy sets the garbage collector's target from the rate of allocations, for a process
// whose live heap consists mostly of bytes without pointers, which cost the collector no scanning.
//
// The heap has room for ten seconds of allocations: at least 48 MiB, at most the size of the live
// heap, which is Go's default, or 256 MiB. When the process has used less than a twentieth of a
// processor for ten seconds after a load, and the heap has twice the least room that is not live,
// one collection returns it to the system. No other one is forced.
package gcpolicy

import (
	"context"
	"math"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"syscall"
	"time"
)

const (
	leastRoom = 48 << 20  // fits a burst of requests; a guess
	mostRoom  = 256 << 20 // of a small live heap, so that a load does not collect it all the time
	period    = 10 * time.Second
	idleShare = 0.05 // of a processor; leases, bookmarks and metrics of an idle server use less
)

// Start adjusts the target every tenth of a second until ctx ends: a load fills the least room in
// less than a second, and the collection that it would cause marks the whole heap. Start does
// nothing if GOGC is set. GOMEMLIMIT applies beside the target.
func Start(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	go func() {
		heap := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/objects:bytes"},
			{Name: "/memory/classes/heap/unused:bytes"}, {Name: "/memory/classes/heap/free:bytes"}}
		metrics.Read(heap)
		p, last, began := policy{allocs: heap[0].Value.Uint64()}, 100, time.Now()
		for ticks := 1; ctx.Err() == nil; ticks++ {
			select {
			case <-ctx.Done():
			case <-time.After(period / 100):
			}
			metrics.Read(heap)
			now := time.Now()
			percent := p.target(heap[0].Value.Uint64(), heap[1].Value.Uint64(), now.Sub(began))
			began = now
			if max(percent-last, last-percent)*10 > last { // a change stops the world
				debug.SetGCPercent(percent)
				last = percent
			}
			if ticks%10 == 0 {
				held := heap[2].Value.Uint64() + heap[3].Value.Uint64() + heap[4].Value.Uint64()
				p.second(processorTime, held-min(held, heap[1].Value.Uint64()), debug.FreeOSMemory)
			}
		}
	}()
}

// processorTime returns the time that the process has used on processors so far.
func processorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // fails for no process of its own
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// policy is the state of Start between two adjustments.
type policy struct {
	allocs  uint64
	rate    float64 // highest allocations per second, decaying to a third within the period
	used    time.Duration
	loaded  bool // since the last collection that was forced
	seconds int  // without load
}

// target takes the bytes allocated so far, the live heap in bytes, and the time since the last
// call. It returns the target for debug.SetGCPercent.
func (p *policy) target(allocs, live uint64, passed time.Duration) (percent int) {
	decay := math.Exp(-passed.Seconds() / period.Seconds())
	p.rate = max(decay*p.rate, float64(allocs-p.allocs)/max(passed, time.Millisecond).Seconds())
	p.allocs = allocs
	room := min(max(p.rate*period.Seconds(), leastRoom), max(float64(live), mostRoom))
	return max(1, int(min(100*room/float64(max(live, 1)), math.MaxInt32)))
}

// second is called every second, with the bytes of the heap that are not live. It collects if a
// load has ended that left many, which is no load itself.
func (p *policy) second(processorTime func() time.Duration, garbage uint64, collect func()) {
	used := processorTime()
	load := used-p.used > time.Duration(idleShare*float64(time.Second))
	p.used = used
	if p.seconds++; load {
		p.loaded, p.seconds = true, 0
	} else if p.loaded && p.seconds >= int(period.Seconds()) {
		p.loaded = false
		if garbage > 2*leastRoom {
			collect()
			p.used = processorTime()
		}
	}
}
