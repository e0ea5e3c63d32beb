// Package gcpolicy sets the collector's target from the live heap, for a process
// that holds a large, slowly changing state.
//
// Go's default lets the heap grow to twice what is live: for 400 MB of objects at
// rest, 400 MB more for garbage. Most of what this process holds has no pointers
// and costs the collector next to nothing to keep, so it can afford to collect
// after much less.
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
	baseHeadroom = 128 << 20
	// liveShare is the further part of the live heap that may become garbage:
	// measured as the point below which LISTs of 300k objects cost more CPU in
	// collections than they save in memory.
	liveShare = 0.3
	interval  = time.Second
)

// percent returns the value for debug.SetGCPercent with a live heap of the size
// given in bytes: never more than Go's default of 100.
func percent(live uint64) int {
	headroom := baseHeadroom + liveShare*float64(live)
	return int(min(100, 100*headroom/float64(max(live, 1))))
}

// Start adjusts the target every second until ctx ends, and then leaves it as it
// is. If the environment sets GOGC, the operator has decided, and it does nothing.
func Start(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	go func() {
		sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
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
			if p := percent(sample[0].Value.Uint64()); p < last-3 || p > last+3 {
				debug.SetGCPercent(p)
				last = p
			}
		}
	}()
}
