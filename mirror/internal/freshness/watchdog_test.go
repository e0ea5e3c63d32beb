package freshness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
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

// TestWatchdog_FeedBehind_IsLeftAfterPatience: without a batch etcd's revision is read when a
// second has passed. Progress is requested until the feed is left; the next one has twice the time.
// Before the first feed, and while the writer is busy, nothing is read.
func TestWatchdog_FeedBehind_IsLeftAfterPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		published, _ := NewPublished(ctx.Done(), errors.New("closed"))
		var mu sync.Mutex
		var seen []string
		began := time.Now()
		record := func(what string) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, fmt.Sprint(what, " ", time.Since(began)))
		}
		var etcd atomic.Int64
		feed := NewFeedHealth()
		reads := NewReads(ctx, published, Env{Read: func(context.Context) (int64, error) { record("read"); return etcd.Load(), nil }, Known: published.Revision})
		go (&Watchdog{Feed: feed, Published: published, Reads: reads, Patience: time.Second, Request: func(context.Context) { record("request") }}).Run(ctx)
		expect := func(through time.Duration, want ...string) {
			t.Helper()
			time.Sleep(through - time.Since(began))
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(seen, want) {
				t.Errorf("until %s: %q, want %q", through, seen, want)
			}
			seen = nil
		}
		expectLeft := func(want bool) {
			t.Helper()
			if left := len(feed.silent) > 0; left != want {
				t.Errorf("after %s the feed is left: %t", time.Since(began), left)
			} else if left {
				<-feed.Silent()
			}
		}
		expect(10 * time.Second)
		feed.Begin()
		expect(13*time.Second, "read 11.5s", "read 13s")
		etcd.Store(1)
		expect(15*time.Second, "read 14.5s", "request 14.5s", "read 15s", "request 15s")
		expectLeft(false)
		expect(15500*time.Millisecond, "read 15.5s")
		expectLeft(true)
		expect(18500*time.Millisecond, "read 17s", "request 17s", "read 17.5s", "request 17.5s", "read 18s", "request 18s", "read 18.5s", "request 18.5s")
		expectLeft(false)
		expect(19*time.Second, "read 19s")
		expectLeft(true)

		writing, failed := make(chan struct{}), errors.New("failed")
		deliver := Observed(feed, func(int) error { <-writing; return failed })
		delivered := make(chan error, 1)
		go func() { delivered <- deliver(0) }()
		expect(30 * time.Second)
		close(writing)
		if err := <-delivered; err != failed {
			t.Errorf("the error of the writer becomes %v", err)
		}
		expect(30500*time.Millisecond, "read 30.5s", "request 30.5s")
		cancel()
		reads.Close()
	})
}
