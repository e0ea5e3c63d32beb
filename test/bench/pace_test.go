package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestPace_SlowOperations_KeepRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var mu sync.Mutex
		var at []time.Duration
		err := perSecond(10, time.Second, 100).run(t.Context(), func(context.Context, int) error {
			mu.Lock()
			at = append(at, time.Since(began))
			mu.Unlock()
			time.Sleep(3 * time.Second) // later ones do not wait for it
			return nil
		})
		if err != nil || time.Since(began) != 900*time.Millisecond+3*time.Second {
			t.Errorf("ended after %v with %v", time.Since(began), err)
		}
		slices.Sort(at)
		for i, got := range at {
			if got != time.Duration(i)*100*time.Millisecond {
				t.Errorf("operations began at %v", at)
				break
			}
		}
		if len(at) != 10 {
			t.Errorf("%d operations, want 10", len(at))
		}
	})
}

func TestPace_AtConcurrencyLimit_SkipsOperations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var begun []int
		err := perSecond(10, time.Second, 2).run(t.Context(), func(_ context.Context, i int) error {
			mu.Lock()
			begun = append(begun, i)
			mu.Unlock()
			time.Sleep(450 * time.Millisecond)
			return nil
		})
		if slices.Sort(begun); err != nil || !slices.Equal(begun, []int{0, 1, 5, 6}) {
			t.Errorf("began %v, %v", begun, err)
		}
	})
}

func TestPace_ContextDoneOrError_Stops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, failure := time.Now(), errors.New("failure")
		err := perSecond(10, time.Hour, 2).run(t.Context(), func(_ context.Context, i int) error {
			if i == 3 {
				return failure
			}
			return nil
		})
		if err != failure || time.Since(began) > time.Second {
			t.Errorf("ended after %v with %v", time.Since(began), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began = time.Now()
		if err := perSecond(10, time.Hour, 2).run(ctx, func(context.Context, int) error { return nil }); err != nil || time.Since(began) != time.Second {
			t.Errorf("ended after %v with %v", time.Since(began), err)
		}
	})
}
