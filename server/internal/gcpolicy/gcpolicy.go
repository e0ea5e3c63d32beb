// Package gcpolicy sets the garbage collector's target from the rate of allocations, for a process
// whose live heap consists mostly of bytes without pointers, which cost the collector no scanning.
//
// The heap has room for ten seconds of allocations: at least 48 MiB, at most the size of the live
// heap, which is Go's default, or 256 MiB. When the process has used less than a twentieth of a
// processor for ten seconds after a load, one collection returns memory to the system. No other one
// is forced.
package gcpolicy

import (
	"context"
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

// Start adjusts the target every second until ctx ends. It does nothing if GOGC is set. GOMEMLIMIT
// applies beside the target.
func Start(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	go func() {
		heap := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/heap/live:bytes"}}
		p, last := policy{}, 100
		for ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			metrics.Read(heap)
			percent, idle := p.next(heap[0].Value.Uint64(), heap[1].Value.Uint64(), processorTime())
			if max(percent-last, last-percent)*10 > last { // a change stops the world
				debug.SetGCPercent(percent)
				last = percent
			}
			if idle {
				debug.FreeOSMemory()
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

// policy is the state of Start between two seconds.
type policy struct {
	allocs  uint64
	used    time.Duration
	rate    float64 // highest allocations in a second, decaying to a third within the period
	loaded  bool    // since the last collection that was forced
	seconds int     // without load
}

// next takes the bytes allocated so far, the live heap in bytes, and the processor time so far. It
// returns the target for debug.SetGCPercent, and whether a load has ended.
func (p *policy) next(allocs, live uint64, used time.Duration) (percent int, idle bool) {
	p.rate = max(0.9*p.rate, float64(allocs-p.allocs))
	room := min(max(p.rate*period.Seconds(), leastRoom), max(float64(live), mostRoom))
	percent = max(1, int(100*room/float64(max(live, 1))))
	if used-p.used > time.Duration(idleShare*float64(time.Second)) {
		p.loaded, p.seconds = true, 0
	} else if p.seconds++; p.loaded && p.seconds >= int(period.Seconds()) {
		p.loaded, idle = false, true
	}
	p.allocs, p.used = allocs, used
	return percent, idle
}
