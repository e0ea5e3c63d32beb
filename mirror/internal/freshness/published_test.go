package freshness

import (
	"container/heap"
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestPublished_PublishDuringWait_LosesNoWakeup moves the published revision to a revision at the
// moment at which waits for it begin. The published revision does not move again before they have
// ended, so a waiter without a wake-up sleeps until the test's timeout.
func TestPublished_PublishDuringWait_LosesNoWakeup(t *testing.T) {
	const waiters, revisions = 2, 10_000
	c, publisher := NewPublished(nil, nil)
	// A busy machine takes a time slice for each step, so there are fewer steps there.
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var woken atomic.Int64
	var wg sync.WaitGroup
	for range waiters {
		wg.Go(func() {
			for rev := int64(1); rev <= revisions; rev++ {
				if err := c.Wait(ctx, rev); err != nil {
					t.Errorf("waiting for %d at %d: %v", rev, c.Revision(), err)
					return
				}
				woken.Add(1)
			}
		})
	}
	for rev := int64(1); rev < revisions && time.Since(began) < time.Minute; rev++ {
		// All were woken for the previous revision and are about to wait again.
		for woken.Load() < waiters*(rev-1) && ctx.Err() == nil {
			runtime.Gosched()
		}
		for spin := range rev % 64 {
			_ = spin
		}
		publisher.Publish(rev, rev%2 == 0)
	}
	publisher.Publish(revisions, true) // ends all waits
	wg.Wait()
	if len(c.waiters) != 0 {
		t.Errorf("%d waiters are left", len(c.waiters))
	}
	select {
	case <-c.whileWaits():
		t.Error("whileWaits is signaled for ended waits")
	default:
	}
}

// TestPublished_Waits_EndAtTheirRevision: each wait ends as soon as the published revision has
// reached its revision.
func TestPublished_Waits_EndAtTheirRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, publisher := NewPublished(nil, nil)
		publisher.Publish(1, true)
		var mu sync.Mutex
		var woken []int64
		for _, rev := range []int64{9, 3, 7, 3, 5, 11} {
			go func() {
				if err := c.Wait(context.Background(), rev); err == nil {
					mu.Lock()
					defer mu.Unlock()
					woken = append(woken, rev)
					if now := c.Revision(); now < rev {
						t.Errorf("woken for %d at %d", rev, now)
					}
				}
			}()
		}
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			if err := c.Wait(ctx, 2); !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled wait: %v", err)
			}
		}()
		synctest.Wait()
		cancel()
		synctest.Wait()
		if err := c.Check(); err != nil {
			t.Error(err)
		}
		for _, step := range []struct {
			through int64
			want    []int64
		}{{2, nil}, {3, []int64{3, 3}}, {8, []int64{5, 7}}, {8, nil}, {20, []int64{9, 11}}} {
			publisher.Publish(step.through, true)
			synctest.Wait()
			slices.Sort(woken)
			if !slices.Equal(woken, step.want) {
				t.Errorf("at %d woken for %v, want %v", step.through, woken, step.want)
			}
			woken = nil
		}
		if err := c.Wait(context.Background(), 20); err != nil {
			t.Error(err)
		}
	})
}

// TestPublishedCheck_StateContradictsWaits_ReturnsError: with one wait, for revision 5.
func TestPublishedCheck_StateContradictsWaits_ReturnsError(t *testing.T) {
	for says, change := range map[string]func(*Published){
		"":                         func(*Published) {},
		"is pending":               func(c *Published) { c.rev.Store(5) }, // as Publish does first
		"has the index":            func(c *Published) { c.waiters[0].index = 1 },
		"lowest awaited revision":  func(c *Published) { c.min.Store(6) },
		"1 waits, reported: false": func(c *Published) { c.reportedWaits = false },
		"waiting closed false":     func(c *Published) { c.hasWaits = make(chan struct{}) },
		"resting closed true":      func(c *Published) { c.noWaits = c.hasWaits },
	} {
		c, _ := NewPublished(nil, nil)
		if err := c.Check(); err != nil {
			t.Error("without waits:", err)
		}
		heap.Push(&c.waiters, &waiter{rev: 5})
		c.setMinLocked()
		change(c)
		if err := c.Check(); (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
}
