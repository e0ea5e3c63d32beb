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

// TestProgress_OtherWaits_RestartIntervals: a wait for revision 10 keeps its interval of 100 ms
// while another wait begins, unless that is for a lower revision. After 100 ms more the published
// revision moves to 5, which restarts the intervals if progress has moved it and a wait has ended.
func TestProgress_OtherWaits_RestartIntervals(t *testing.T) {
	restarted := []int64{2, 6, 14, 30, 62}
	for name, c := range map[string]struct {
		rev        int64 // of the other wait
		byProgress bool
		want, then []int64
	}{
		"higher":          {11, true, []int64{96}, []int64{96}},
		"same":            {10, true, []int64{96}, []int64{96}},
		"published":       {1, true, []int64{96}, []int64{96}},
		"lower":           {5, true, restarted, []int64{26, 28, 32, 40, 56, 88}},
		"lower, an event": {5, false, restarted, []int64{26}},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			published, publisher := NewPublished(ctx.Done(), errors.New("closed"))
			publisher.Publish(1, true)
			sent := &requests{begin: time.Now()}
			go NewProgress(published, 0, sent.record).Run(ctx)
			go func() { _ = published.Wait(ctx, 10) }()
			time.Sleep(330 * time.Millisecond)
			sent.take()
			go func() { _ = published.Wait(ctx, c.rev) }()
			time.Sleep(100 * time.Millisecond)
			if got := sent.take(); !slices.Equal(got, c.want) {
				t.Errorf("%s: requests after %v ms, want %v", name, got, c.want)
			}
			publisher.Publish(5, c.byProgress)
			time.Sleep(100 * time.Millisecond)
			if got := sent.take(); !slices.Equal(got, c.then) {
				t.Errorf("%s: requests %v ms after revision 5, want %v", name, got, c.then)
			}
		})
	}
}

// TestProgress_RequestWithRead_ReplacesFirstOfWait that begins within progressFirst of it.
func TestProgress_RequestWithRead_ReplacesFirstOfWait(t *testing.T) {
	for after, want := range map[time.Duration][]int64{progressFirst / 2: {0, 3}, progressFirst: {0, 2, 4}} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			published, _ := NewPublished(ctx.Done(), errors.New("closed"))
			published.byProgress.Store(true)
			sent := &requests{begin: time.Now()}
			p := NewProgress(published, 0, sent.record)
			p.withRead()
			go p.Run(ctx)
			time.Sleep(after)
			go func() { _ = published.Wait(ctx, 5) }()
			time.Sleep(5*time.Millisecond - after)
			if got := sent.take(); !slices.Equal(got, want) {
				t.Errorf("a wait after %s: requests after %v ms, want %v", after, got, want)
			}
		})
	}
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
