package mirror_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// TestWatchdog_SilentFeed_IsRestarted: a feed that delivers nothing while etcd's revision advances
// is restarted, soon at first and with growing patience while the next feeds are silent too. There
// is no relist, and no watch ends.
func TestWatchdog_SilentFeed_IsRestarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		causes := make(chan error, 1000)
		var begun atomic.Int64
		m := start(t, &script{Source: store, watch: func(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
			begun.Add(1)
			err := store.Watch(ctx, prefix, after, deliver)
			causes <- context.Cause(ctx)
			return err
		}}, nil)
		a := claim(t, m, "/registry/a/")
		store.Put("/registry/a/x", "1")
		reach(t, m, store.Revision(), a)
		c := latest(t, a).Cursor("", "")
		time.Sleep(time.Hour)
		if n := m.Stats().SilentFeeds; n != 0 {
			t.Errorf("%d silent feeds of an idle etcd, want 0", n)
		}

		store.Stall(true)
		store.Put("/registry/a/x", "2") // unknown to the feed
		wrote := time.Now()
		if cause := <-causes; !errors.Is(cause, mirror.ErrFeedSilent) {
			t.Errorf("the feed was ended because of %v", cause)
		}
		if took := time.Since(wrote); took > 4*time.Second {
			t.Errorf("the feed was left after %v", took)
		}
		time.Sleep(time.Hour)
		if n := begun.Load(); n < 50 || n > 200 {
			t.Errorf("%d feeds started in an hour of silence, want about two a minute", n)
		}
		store.Stall(false)
		reach(t, m, store.Revision())
		if evs, err := c.Next(nil, 10); err != nil || len(evs) != 1 || string(evs[0].Entry.Value()) != "2" {
			t.Errorf("a watch from before: %d events, %v", len(evs), err)
		}
		synctest.Wait() // a feed may just have been left
		st := m.Stats()
		if st.SilentFeeds == 0 || st.Relists != 0 || st.Divergences != 0 || st.SilentFeeds != st.Reconnects {
			t.Errorf("%+v", st)
		}

		// After a feed has delivered, patience is reset.
		store.Stall(true)
		store.Put("/registry/a/x", "3")
		wrote = time.Now()
		for before := begun.Load(); begun.Load() == before; {
			time.Sleep(100 * time.Millisecond)
		}
		if took := time.Since(wrote); took > 4*time.Second {
			t.Errorf("the feed was left after %v", took)
		}
		store.Stall(false)
	})
}

// TestWatchdog_SlowFeed_IsKept: the feed delivers, although it never catches up.
func TestWatchdog_SlowFeed_IsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, &script{Source: store, watch: func(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
			return store.Watch(ctx, prefix, after, func(b driver.Batch) error {
				time.Sleep(1400 * time.Millisecond)
				return deliver(b)
			})
		}}, nil)
		reach(t, m, store.Revision())
		for range 600 {
			store.Put("/registry/a/x", "v")
			time.Sleep(100 * time.Millisecond)
		}
		if st := m.Stats(); st.SilentFeeds != 0 || st.PublishedRevision == st.EtcdRevision {
			t.Errorf("left %d times; it is at %d, etcd at %d", st.SilentFeeds, st.PublishedRevision, st.EtcdRevision)
		}
	})
}

// TestWatchdog_BusyWriter_FeedIsKept: the writer has not received the delivered batch yet.
func TestWatchdog_BusyWriter_FeedIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		reach(t, m, store.Revision())
		release := m.HoldWriter()
		store.Put("/registry/a/x", "1")
		time.Sleep(time.Minute)
		release()
		reach(t, m, store.Revision())
		if n := m.Stats().SilentFeeds; n != 0 {
			t.Errorf("left %d times", n)
		}
	})
}

// TestWatchdog_EtcdDoesNotAnswer_FeedIsKept: without an answer from etcd, the feed is kept.
func TestWatchdog_EtcdDoesNotAnswer_FeedIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		reach(t, m, store.Revision())
		store.Stall(true)
		store.FailReadRevision(errors.New("no quorum"))
		store.Put("/registry/a/x", "1")
		time.Sleep(time.Minute)
		if n := m.Stats().SilentFeeds; n != 0 {
			t.Errorf("left %d times", n)
		}
		store.FailReadRevision(nil)
		store.Stall(false)
	})
}

// TestWatchdog_RevisionReads_AreFew: one revision read a second on an idle etcd, none on a busy
// one.
func TestWatchdog_RevisionReads_AreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		reach(t, m, store.Revision())
		before := m.Stats()
		time.Sleep(time.Minute + time.Second/2) // not at a tick of the watchdog
		idle := m.Stats()
		if n := idle.RevisionReads - before.RevisionReads; n > 60 {
			t.Errorf("%d reads of an idle etcd's revision in a minute", n)
		}
		if n := idle.ProgressRequests - before.ProgressRequests; n != 0 {
			t.Errorf("%d requests for progress to an idle etcd", n)
		}
		for range 600 {
			store.Put("/registry/a/x", "v")
			time.Sleep(100 * time.Millisecond)
		}
		busy := m.Stats()
		if reads, asks := busy.RevisionReads-idle.RevisionReads, busy.ProgressRequests-idle.ProgressRequests; reads+asks > 1 {
			t.Errorf("%d reads and %d requests for progress while events come", reads, asks)
		}
	})
}
