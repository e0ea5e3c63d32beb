package freshness

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// requests records the times of progress requests, in milliseconds since the last call of take.
type requests struct {
	mu    sync.Mutex
	begin time.Time
	ms    []int64
}

func (r *requests) record(context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ms = append(r.ms, time.Since(r.begin).Milliseconds())
}

func (r *requests) take() []int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	ms := r.ms
	r.begin, r.ms = time.Now(), nil
	return ms
}

// TestProgress_WhileReadersWait_IntervalsDouble: no wait, no request. The intervals of a wait begin
// at progressFirst, and a request goes out at once if progress has ended the last wait.
func TestProgress_WhileReadersWait_IntervalsDouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		published, publisher := NewPublished(ctx.Done(), errors.New("closed"))
		sent := &requests{begin: time.Now()}
		go NewProgress(published, 0, sent.record).Run(ctx)
		time.Sleep(time.Minute)
		for _, want := range [][]int64{{2, 6, 14, 30, 62, 126, 226, 326}, {0, 2, 6, 14, 30, 62, 126, 226, 326}} {
			if got := sent.take(); len(got) != 0 {
				t.Errorf("requests after %v ms without a wait", got)
			}
			rev := published.Revision() + 1
			go func() {
				if err := published.Wait(ctx, rev); err != nil {
					t.Error(err)
				}
			}()
			time.Sleep(330 * time.Millisecond)
			publisher.Publish(rev, true)
			if got := sent.take(); !slices.Equal(got, want) {
				t.Errorf("requests after %v ms, want %v", got, want)
			}
			time.Sleep(time.Minute)
		}
	})
}

// TestProgress_IdleIntervals_NeedWant: requests in idle intervals are sent for callers of Want,
// unless events have moved the published revision.
func TestProgress_IdleIntervals_NeedWant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		published, publisher := NewPublished(ctx.Done(), errors.New("closed"))
		sent := &requests{begin: time.Now()}
		p := NewProgress(published, time.Second, sent.record)
		go p.Run(ctx)
		time.Sleep(250 * time.Millisecond) // between the ticks
		require := func(want int) {
			t.Helper()
			time.Sleep(2500 * time.Millisecond)
			if got := sent.take(); len(got) != want {
				t.Errorf("requests after %v ms, want %d", got, want)
			}
			time.Sleep(500 * time.Millisecond)
			sent.take()
		}
		require(0)
		release := p.Want()
		require(2)
		publisher.Publish(1, false)
		require(1) // not in the interval of the event
		release()
		require(0)
	})
}
