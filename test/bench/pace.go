package main

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"
)

// pace is a steady rate of operations, independent of the completion of earlier ones: each runs in
// a goroutine of its own (an open loop).
type pace struct {
	interval time.Duration // between two operations
	duration time.Duration // for how long operations are begun
	// bound of the operations in flight; an operation that is due while so many run is skipped
	atOnce int
}

// perSecond is a pace of n operations a second.
func perSecond(n int, duration time.Duration, atOnce int) pace {
	return pace{interval: time.Second / time.Duration(n), duration: duration, atOnce: atOnce}
}

// run begins operation number i at i times the interval, or as soon as it can where it is late. It
// returns when all that were begun have ended and the duration is over, or when one has failed,
// with that error.
func (p pace) run(ctx context.Context, operation func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(p.atOnce)
	began := time.Now()
	for i := 0; ; i++ {
		due := time.Duration(i) * p.interval
		if !waitUntil(ctx, began.Add(min(due, p.duration))) || due >= p.duration {
			break
		}
		group.TryGo(func() error { return operation(ctx, i) })
	}
	return group.Wait()
}

// waitUntil returns true at the time given, false if ctx is done before.
func waitUntil(ctx context.Context, at time.Time) bool {
	wait := time.Until(at)
	if wait <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
