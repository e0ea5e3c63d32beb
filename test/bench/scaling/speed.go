package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stratakube/strata/test/bench/internal/stats"
)

const (
	// referenceUnit is the CPU time of a unit of work at the speed to which all CPU times are converted. The speed is arbitrary: it is that of
	// the first measurements.
	referenceUnit = 700 * time.Microsecond
	// unitInterval is the interval of two units: together they are 1 % of a processor.
	unitInterval = 200 * time.Millisecond
	// unitBytes is the data of a unit: more than a cache of level 2, so that a unit depends on the memory as servers do.
	unitBytes = 4 << 20
)

// speedometer measures the speed of the processors while others use them. The CPU time of the same work varies by a half on a shared machine,
// with the clock rate and with the other thread of a core.
type speedometer struct {
	cancel context.CancelFunc
	done   chan struct{}
	units  []time.Duration // owned by the goroutine until done is closed
	err    error
}

// startSpeedometer begins to measure. The caller must stop it.
func startSpeedometer(ctx context.Context) *speedometer {
	ctx, cancel := context.WithCancel(ctx)
	s := &speedometer{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		ticker := time.NewTicker(unitInterval)
		defer ticker.Stop()
		data := make([]byte, unitBytes)
		for s.err == nil {
			s.unit(data)
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}()
	return s
}

// unit does the work of one unit: it touches every cache line, and hashes a part.
func (s *speedometer) unit(data []byte) {
	before, err := threadTime()
	if err != nil {
		s.err = err
		return
	}
	const line = 64
	for i := 0; i < len(data); i += line {
		data[i]++
	}
	sum := sha256.Sum256(data[:len(data)/4])
	copy(data, sum[:])
	after, err := threadTime()
	s.units, s.err = append(s.units, after-before), err
}

func threadTime() (time.Duration, error) {
	var used unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &used); err != nil {
		return 0, fmt.Errorf("CPU time of a thread: %w", err)
	}
	return time.Duration(used.Nano()), nil
}

// stop returns the factor that converts CPU times since the start to the reference speed.
func (s *speedometer) stop() (float64, error) {
	s.cancel()
	<-s.done
	if s.err != nil || len(s.units) == 0 {
		return 1, s.err
	}
	slices.Sort(s.units)
	return float64(referenceUnit) / float64(stats.Percentile(s.units, 0.5)), nil
}
