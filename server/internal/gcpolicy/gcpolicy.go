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
	baseHeadroom = 64 << 20
	// scannedShare is the further room, as a share of the live heap that has pointers:
	// half of what Go's default would allow if there were nothing else.
	scannedShare = 0.5
	interval     = time.Second
)

// percent returns the value for debug.SetGCPercent with a live heap of the size, of
// which scanned may contain pointers, in bytes: never more than Go's default of 100.
func percent(live, scanned uint64) int {
	headroom := baseHeadroom + scannedShare*float64(min(scanned, live))
	return int(min(100, 100*headroom/float64(max(live, 1))))
}

// Start adjusts the target every second until ctx ends, and then leaves it as it
// is. If the environment sets GOGC, the operator has decided, and it does nothing.
func Start(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	go func() {
		sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/heap:bytes"}}
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
			if p := percent(sample[0].Value.Uint64(), sample[1].Value.Uint64()); p < last-3 || p > last+3 {
				debug.SetGCPercent(p)
				last = p
			}
		}
	}()
}
