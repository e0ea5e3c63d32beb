package mirror

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestNoWakeupIsLost has the clock moved to a revision just as others begin to wait
// for it. Nothing moves it afterwards before they have been woken, so a waiter that
// is overlooked sleeps until the test's patience ends.
func TestNoWakeupIsLost(t *testing.T) {
	const waiters, revisions = 2, 10_000
	c := newClock()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // a busy machine takes a time slice for each step
	defer cancel()
	var woken atomic.Int64
	var wg sync.WaitGroup
	for range waiters {
		wg.Go(func() {
			for rev := Revision(1); rev <= revisions; rev++ {
				if err := c.wait(ctx, nil, rev); err != nil {
					t.Errorf("waiting for %d at %d: %v", rev, c.rev.Load(), err)
					return
				}
				woken.Add(1)
			}
		})
	}
	for rev := Revision(1); rev <= revisions && ctx.Err() == nil; rev++ {
		// All have been woken for the one before and are on their way to wait again.
		for woken.Load() < waiters*(rev-1) && ctx.Err() == nil {
			runtime.Gosched()
		}
		for spin := range rev % 64 {
			_ = spin
		}
		c.publish(rev, rev%2 == 0)
	}
	wg.Wait()
	if len(c.waiters) != 0 {
		t.Errorf("%d waiters are left", len(c.waiters))
	}
	select {
	case <-c.someoneWaits():
		t.Error("somebody waits, says the clock")
	default:
	}
}
