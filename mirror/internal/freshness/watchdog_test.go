package freshness

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestWatchdog_SilentFeed_IsReported: Silent reports a feed without a batch when etcd's revision is
// above the published revision, but not a feed that delivers or one of an idle etcd.
func TestWatchdog_SilentFeed_IsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		published, publisher := NewPublished(ctx.Done(), errors.New("closed"))
		var etcd, requested atomic.Int64
		etcd.Store(1)
		reads := NewReads(ctx, published, Env{
			Read:     func(context.Context) (int64, error) { return etcd.Load(), nil },
			Known:    published.Revision,
			Progress: NewProgress(published, 0, func(context.Context) {}),
		})
		feed := NewFeedHealth()
		go (&Watchdog{Feed: feed, Published: published, Reads: reads, Patience: time.Second,
			Request: func(context.Context) { requested.Add(1) }}).Run(ctx)
		publisher.Publish(1, true)
		number := feed.Begin()
		requireSilent := func(want bool) {
			t.Helper()
			synctest.Wait()
			select {
			case n := <-feed.Silent():
				if !want || n != number {
					t.Errorf("feed %d is to be left", n)
				}
			default:
				if want {
					t.Error("the feed is not left")
				}
			}
		}
		time.Sleep(time.Minute)
		requireSilent(false)
		if n := requested.Load(); n != 0 {
			t.Errorf("%d requests though the published revision is etcd's", n)
		}
		etcd.Store(2)
		deliver := Observed(feed, func(int) error { return nil })
		for range 100 {
			time.Sleep(400 * time.Millisecond)
			if err := deliver(0); err != nil {
				t.Error(err)
			}
		}
		requireSilent(false)
		time.Sleep(5 * time.Second)
		requireSilent(true)
		if requested.Load() == 0 {
			t.Error("progress was not requested before the feed was left")
		}
		cancel()
		reads.Close()
	})
}
