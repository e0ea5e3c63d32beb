package flight

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// counts are the numbers of computations that a Detached has reported.
type counts struct {
	mu                 sync.Mutex
	awaited, abandoned int
}

func (c *counts) change(awaited, abandoned int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.awaited += awaited
	c.abandoned += abandoned
}

func (c *counts) require(t *testing.T, awaited, abandoned int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.awaited != awaited || c.abandoned != abandoned {
		t.Errorf("%d computations are awaited and %d abandoned, want %d and %d", c.awaited, c.abandoned, awaited, abandoned)
	}
}

func TestDetached_CallersLeave_OthersGetResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n counts
		d := Detached[string, int]{Limit: 1, Changed: n.change}
		computed := 0
		compute := func() (int, error) {
			computed++
			time.Sleep(10 * time.Second)
			return computed, nil
		}
		for range 3 {
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				began := time.Now()
				if _, err := d.Do(ctx, "key", compute); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != time.Second {
					t.Errorf("a caller with a deadline of a second got %v after %v", err, time.Since(began))
				}
			}()
		}
		synctest.Wait()
		n.require(t, 1, 0)
		time.Sleep(2 * time.Second)
		n.require(t, 0, 1)
		if v, err := d.Do(t.Context(), "key", compute); v != 1 || err != nil {
			// although no other may begin
			t.Errorf("the caller that came later got %d, %v", v, err)
		}
		synctest.Wait()
		n.require(t, 0, 0)
	})
}

func TestDetached_Failure_IsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := Detached[string, int]{Limit: 1}
		failure := errors.New("of the computation")
		computed := 0
		for range 3 {
			go func() {
				_, err := d.Do(t.Context(), "key", func() (int, error) {
					computed++
					time.Sleep(time.Second)
					return 0, failure
				})
				if err != failure {
					t.Errorf("got %v", err)
				}
			}()
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if computed != 1 {
			t.Errorf("computed %d times, want 1", computed)
		}
		if v, err := d.Do(t.Context(), "key", func() (int, error) { return 2, nil }); v != 2 || err != nil {
			t.Errorf("after the failure got %d, %v", v, err)
		}
	})
}

func TestDetached_AbandonedAtLimit_OthersWaitForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n counts
		const limit = 3
		d := Detached[int, int]{Limit: limit, Changed: n.change}
		release := make(chan struct{})
		hang := func() (int, error) { <-release; return 0, nil }
		ctx, cancel := context.WithCancel(t.Context())
		for key := range 2 * limit { // awaited ones have no limit
			go d.Do(ctx, key, hang)
		}
		synctest.Wait()
		n.require(t, 2*limit, 0)
		cancel()
		synctest.Wait()
		n.require(t, 0, 2*limit)

		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := d.Do(short, -1, hang); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("without room got %v", err)
		}
		var waiting sync.WaitGroup
		for key := range 10 {
			waiting.Go(func() {
				if v, err := d.Do(t.Context(), 100+key, func() (int, error) { return key, nil }); v != key || err != nil {
					t.Errorf("caller %d got %d, %v", key, v, err)
				}
			})
		}
		synctest.Wait()
		n.require(t, 0, 2*limit)
		close(release)
		waiting.Wait()
		synctest.Wait()
		n.require(t, 0, 0)
	})
}

func TestDetached_ContextEnded_NothingBegins(t *testing.T) {
	d := Detached[int, int]{Limit: 1}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Do(ctx, 1, func() (int, error) { t.Error("computed"); return 0, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
