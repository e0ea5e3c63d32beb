package mirror_test

import (
	"context"
	"errors"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// held is a source whose replays wait until release is called.
func held(store *memory.Store) (source driver.Source, release func()) {
	gate := make(chan struct{})
	return &script{Source: store,
		replay: func(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
			select {
			case <-gate:
			case <-ctx.Done():
				return ctx.Err()
			}
			return store.Replay(ctx, prefix, after, through, deliver)
		}}, func() { close(gate) }
}

// TestRestore_BeforeHistory_ServesPresent: while history is being read, the present is served,
// events are delivered, and a watch from before the start waits; then it receives every event since
// its revision.
func TestRestore_BeforeHistory_ServesPresent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := past("/registry/a/", "/registry/b/")
		store := md.store
		source, release := held(store)
		m := start(t, source, nil)
		r := claim(t, m, "/registry/a/")
		testcheck.NoError(t, r.WaitReady(t.Context()))
		listed := store.Revision()
		cursor := latest(t, r).Cursor("", "")
		put(md, "/registry/a/", "beside", 3)
		testcheck.NoError(t, m.Wait(t.Context(), store.Revision()))
		requireState(t, latest(t, r), md, "/registry/a/")
		if evs, err := cursor.Next(nil, 10); err != nil || len(evs) != 3 {
			t.Errorf("%d events, %v; want 3", len(evs), err)
		}
		if _, err := r.CursorAfter(5, "", ""); !errors.Is(err, mirror.ErrNotReady) {
			t.Errorf("a watch from before the start: %v, want ErrNotReady", err)
		}
		if _, err := r.At(5); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("a read at a revision from before the start: %v, want ErrCompacted", err)
		}
		if _, err := r.CursorAfter(listed, "", ""); err != nil {
			t.Errorf("a watch from the list: %v", err)
		}
		if n := m.Stats().Restoring; n != 1 {
			t.Errorf("%d restores, want 1", n)
		}
		release()
		testcheck.NoError(t, r.WaitHistory(t.Context(), 5))
		c, err := r.CursorAfter(5, "", "")
		testcheck.NoError(t, err)
		evs, err := c.Next(nil, 1000)
		testcheck.NoError(t, err)
		got := md.want(5, r.Prefix())
		for _, e := range evs {
			if e.Entry == nil {
				delete(got, e.Key())
			} else {
				got[e.Key()] = read(latest(t, r))[e.Key()]
			}
		}
		requireFloor(t, r, 1)
		if want := md.want(store.Revision(), r.Prefix()); len(evs) == 0 || !maps.Equal(got, want) {
			t.Errorf("%d events lead to%s", len(evs), diff(got, want))
		}
		barrier(t, m)
	})
}

// TestRestore_AfterGap_CursorWaits: after a gap in the feed, a cursor that is behind the list, but
// not behind the gap, receives its next event when the history is restored, and nothing before.
func TestRestore_AfterGap_CursorWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := past("/registry/a/")
		store := md.store
		source, release := held(store)
		m := start(t, source, nil)
		r := claim(t, m, "/registry/a/")
		testcheck.NoError(t, r.WaitReady(t.Context()))
		var clean cleanups
		defer clean.run()
		byIndex := byValue(&clean, r)
		cursors := map[string]*mirror.Cursor{}
		for name, end := range map[string]string{"all": "", "key": "/registry/a/a\x00", "value": ""} {
			// another source has delivered the lost events
			c, err := r.CursorAfter(store.Revision()+2, "/registry/a/a", end)
			testcheck.NoError(t, err)
			switch name {
			case "key":
				c.Follow()
			case "value":
				c.FollowIndex(byIndex, "v")
			}
			defer c.Unfollow()
			cursors[name] = c
		}
		store.Stall(true)
		synctest.Wait()
		store.Put("/registry/a/a", "lost")
		store.Compact(store.Put("/registry/a/a", "lost"))
		last := store.Put("/registry/a/a", "v")
		store.Break()
		store.Stall(false)
		time.Sleep(10 * time.Second)
		testcheck.NoError(t, m.Wait(t.Context(), last))
		if m.Stats().Relists == 0 {
			t.Fatal("no relist")
		}
		var wg sync.WaitGroup
		for name, c := range cursors {
			if evs, err := c.Next(nil, 10); err != nil || len(evs) != 0 || c.Position() >= last {
				t.Errorf("%s, before the restore: %s, %v, position %d", name, story(evs), err, c.Position())
			}
			wg.Go(func() {
				for {
					changed := c.Changed()
					evs, err := c.Next(nil, 10)
					if err != nil || len(evs) > 1 || len(evs) == 1 && evs[0].Rev != last {
						t.Errorf("%s: %s, %v, want %d", name, story(evs), err, last)
					}
					if err != nil || len(evs) > 0 {
						return
					}
					<-changed
				}
			})
		}
		synctest.Wait()
		release()
		wg.Wait()
		barrier(t, m)
	})
}
