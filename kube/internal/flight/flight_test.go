package flight

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestGroup_Waiters_ShareResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group[string, int]
		var computed, led atomic.Int32
		for range 10 {
			go func() {
				v, mine, err := g.Do(t.Context(), "key", func() (int, error) {
					time.Sleep(time.Second)
					return int(computed.Add(1)), nil
				})
				if v != 1 || err != nil {
					t.Errorf("got %d, %v", v, err)
				}
				if mine {
					led.Add(1)
				}
			}()
		}
		time.Sleep(time.Minute)
		if computed.Load() != 1 || led.Load() != 1 {
			t.Errorf("computed %d times by %d callers, want 1", computed.Load(), led.Load())
		}
	})
}

func TestGroup_Failure_IsNotShared(t *testing.T) {
	for name, fail := range map[string]func() (int, error){
		"error": func() (int, error) { return 0, errors.New("of the first caller") },
		"panic": func() (int, error) { panic("of the first caller") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var g Group[string, int]
				go func() {
					defer func() { _ = recover() }()
					_, mine, err := g.Do(t.Context(), "key", func() (int, error) {
						time.Sleep(time.Second)
						return fail()
					})
					if !mine || err == nil {
						t.Errorf("mine %v, error %v", mine, err)
					}
				}()
				synctest.Wait()
				v, mine, err := g.Do(t.Context(), "key", func() (int, error) { return 2, nil })
				if v != 2 || !mine || err != nil {
					t.Errorf("the waiter got %d, %v, %v", v, mine, err)
				}
			})
		})
	}
}

func TestGroup_ContextDone_WaiterReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group[string, int]
		go func() {
			_, _, _ = g.Do(t.Context(), "key", func() (int, error) { time.Sleep(time.Minute); return 1, nil })
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, mine, err := g.Do(ctx, "key", func() (int, error) { return 2, nil }); mine || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("mine %v, error %v", mine, err)
		}
		time.Sleep(time.Hour) // until the first caller has returned
	})
}
