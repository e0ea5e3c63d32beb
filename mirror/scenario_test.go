package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// put writes keys a.. of the resource in one transaction each.
func put(md *model, prefix, value string, n int) {
	for i := range n {
		md.txn(memory.Op{Key: fmt.Sprintf("%s%c", prefix, 'a'+i), Value: value})
	}
}

func newModel() *model {
	return &model{store: memory.New(), at: map[mirror.Revision]state{1: {}}}
}

func requireState(t *testing.T, s mirror.Snapshot, md *model, prefix string) {
	t.Helper()
	if got, want := read(s), md.want(s.Rev, prefix); !maps.Equal(got, want) {
		t.Errorf("%s at %d:%s", prefix, s.Rev, diff(got, want))
	}
}

// overtaken is a resource that a mirror has read up to held.Rev, with snapshots and cursors.
type overtaken struct {
	*model
	m          *mirror.Mirror
	r          *mirror.Resource
	held, back mirror.Snapshot // the newest, and 5 revisions earlier

	// Cursors behind the revision that etcd will be compacted to: at the newest revision, 5
	// revisions earlier, and in the future.
	behind map[string]*mirror.Cursor
	// Cursors that are not behind: on everything and on one key.
	ahead map[string]*mirror.Cursor
}

func newOvertaken(t *testing.T) *overtaken {
	t.Helper()
	o := &overtaken{model: newModel()}
	put(o.model, "/registry/a/", "first", 20)
	o.m = start(t, o.store, nil)
	o.r = claim(t, o.m, "/registry/a/")
	reach(t, o.m, o.store.Revision(), o.r)
	put(o.model, "/registry/a/", "second", 10)
	reach(t, o.m, o.store.Revision())
	o.held = latest(t, o.r)
	var err error
	if o.back, err = o.r.At(o.held.Rev - 5); err != nil {
		t.Fatal(err)
	}
	cursor := func(after mirror.Revision, start, end string) *mirror.Cursor {
		t.Helper()
		c, err := o.r.CursorAfter(after, start, end)
		testcheck.NoError(t, err)
		return c
	}
	o.behind = map[string]*mirror.Cursor{"drained": o.held.Cursor("", ""), "behind": o.back.Cursor("", ""), "future": cursor(o.held.Rev+15, "", "")}
	o.ahead = map[string]*mirror.Cursor{"whole": cursor(o.held.Rev+19, "", ""), "key": cursor(o.held.Rev+19, "/registry/a/t", "/registry/a/t\x00")}
	o.ahead["key"].Follow()
	return o
}

// overtake writes 20 revisions that the feed does not deliver, and compacts etcd to all but the
// last two. It returns when the mirror has relisted. Until then the published revision does not
// decrease, and reads are correct.
func (o *overtaken) overtake(t *testing.T) {
	t.Helper()
	o.store.Stall(true)
	synctest.Wait()
	put(o.model, "/registry/a/", "third", 20)
	o.store.Compact(o.store.Revision() - 2)
	lowest := o.m.PublishedRevision()
	for range 100 { // while the mirror notices and relists
		if now := o.m.PublishedRevision(); now < lowest {
			t.Fatalf("published revision went from %d to %d", lowest, now)
		} else {
			lowest = now
		}
		if s, err := o.r.Latest(); err == nil {
			requireState(t, s, o.model, "/registry/a/")
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
	}
	o.store.Stall(false)
	reach(t, o.m, o.store.Revision(), o.r)
	if got := o.m.Stats().Relists; got != 1 {
		t.Errorf("relisted %d times, want once", got)
	}
}

// requireGap fails unless cursors behind the compacted revision return ErrCompacted, and the others
// the last event. woken is the wake-up of the cursor on one key.
func (o *overtaken) requireGap(t *testing.T, woken <-chan struct{}) {
	t.Helper()
	now := latest(t, o.r).Rev
	for what, c := range o.behind {
		if evs, err := c.Next(nil, 100); !errors.Is(err, mirror.ErrCompacted) || len(evs) != 0 {
			t.Errorf("the cursor that was %s returns %d events, %v; want ErrCompacted", what, len(evs), err)
		}
	}
	<-woken
	for what, c := range o.ahead {
		if evs, err := c.Next(nil, 100); err != nil || len(evs) != 1 || evs[0].Rev != now || c.Position() != now {
			t.Errorf("the cursor that was not behind, %s: %d events, %v, position %d", what, len(evs), err, c.Position())
		}
	}
}

// requireFloor fails unless history begins at the compacted revision.
func (o *overtaken) requireFloor(t *testing.T) {
	t.Helper()
	oldest, floor, err := o.r.Oldest()
	if compacted := latest(t, o.r).Rev - 2; err != nil || oldest != compacted || floor != compacted {
		t.Errorf("oldest %d, floor %d, %v; want the compacted revision %d", oldest, floor, err, compacted)
	}
	if _, err := o.r.CursorAfter(floor-1, "", ""); !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("cursor below the new floor: %v", err)
	}
	if _, err := o.r.At(floor - 1); !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("snapshot below the new floor: %v", err)
	}
}

// TestFeed_OvertakenByCompaction_Relists: the mirror has missed revisions that etcd no longer has,
// and relists. The published revision does not decrease, snapshots held by readers do not change,
// and watchers learn of the gap.
func TestFeed_OvertakenByCompaction_Relists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOvertaken(t)
		defer o.ahead["key"].Unfollow()
		woken := o.ahead["key"].Changed()
		o.overtake(t)
		s := latest(t, o.r)
		requireState(t, s, o.model, "/registry/a/")
		o.requireGap(t, woken)
		o.requireFloor(t)
		requireState(t, o.held, o.model, "/registry/a/")
		requireState(t, o.back, o.model, "/registry/a/")

		// The cursor continues from there.
		c := s.Cursor("", "")
		put(o.model, "/registry/a/", "fourth", 3)
		reach(t, o.m, o.store.Revision())
		if evs, err := c.Next(nil, 100); err != nil || len(evs) != 3 || c.Position() != o.store.Revision() {
			t.Errorf("%d events, %v, position %d", len(evs), err, c.Position())
		}
		barrier(t, o.m)
	})
}

// TestMirror_RestoredEtcd_StartsOver: etcd was restored from a backup, as another cluster or, with
// the same members, as the same one at an older revision. The mirror starts from an empty state,
// the one exception to I1.
func TestMirror_RestoredEtcd_StartsOver(t *testing.T) {
	for _, by := range []string{"watch", "current"} {
		t.Run("detected by "+by, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				md := newModel()
				put(md, "/registry/a/", "first", 20)
				store := md.store
				// A hanging watch delivers nothing: the next consistent read detects the restore.
				var hang atomic.Bool
				hang.Store(by == "current")
				source := &script{Source: store, watch: func(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
					if hang.Load() {
						<-ctx.Done()
						return ctx.Err()
					}
					return store.Watch(ctx, prefix, after, deliver)
				}}
				m := start(t, source, nil)
				r := claim(t, m, "/registry/a/")
				reach(t, m, 21, r)
				m.Compact(15)
				held := latest(t, r)
				c := held.Cursor("", "")
				changed := c.Changed()

				store.Restore(9, map[string]string{"/registry/a/x": "restored"})
				if by == "current" {
					if _, err := m.ReadRevision(context.Background()); !errors.Is(err, mirror.ErrRestored) {
						t.Errorf("Current: %v", err)
					}
					hang.Store(false)
				}
				<-changed
				for m.PublishedRevision() > 9 {
					time.Sleep(time.Millisecond)
				}
				reach(t, m, 9, r)
				s := latest(t, r)
				if got, want := read(s), (state{"/registry/a/x": "restored@9"}); s.Rev != 9 || !maps.Equal(got, want) {
					t.Errorf("at %d:%s", s.Rev, diff(got, want))
				}
				if _, err := c.Next(nil, 1); !errors.Is(err, mirror.ErrCompacted) {
					t.Errorf("a cursor of the previous lineage: %v, want ErrCompacted", err)
				}
				if c.Position() != held.Rev {
					t.Errorf("its position moved to %d", c.Position())
				}
				requireState(t, held, md, "/registry/a/")
				if _, err := r.At(held.Rev); !errors.Is(err, mirror.ErrFutureRevision) {
					t.Errorf("a revision that etcd has not reached again: %v", err)
				}
				if st := m.Stats(); st.Relists != 1 || st.Compacted != 0 {
					t.Errorf("%d relists, compacted to %d; want 1, 0", st.Relists, st.Compacted)
				}

				// The earlier revisions have another content now.
				c = s.Cursor("", "")
				for i := range 20 {
					store.Put("/registry/a/x", fmt.Sprint(i))
				}
				reach(t, m, 29, r)
				evs, err := c.Next(nil, 100)
				if err != nil || len(evs) != 20 || evs[0].Rev != 10 {
					t.Errorf("%d events, %v", len(evs), err)
				}
				if s, err := r.At(21); err != nil || read(s)["/registry/a/x"] != "11@21" {
					t.Errorf("at 21: %v, %v", read(s), err)
				}
				barrier(t, m)
			})
		})
	}
}

// TestFeed_ConnectionLost_ResumesWithoutList: a lost connection ends no cursor and causes no list.
func TestFeed_ConnectionLost_ResumesWithoutList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		put(md, "/registry/a/", "first", 5)
		store := md.store
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		s := latest(t, r)
		f := &follower{prefix: "/registry/a/", cur: s.Cursor("", ""), held: read(s), last: s.Rev}
		listed := m.Stats().ListedKeys
		for i := range 20 {
			put(md, "/registry/a/", fmt.Sprint(i), 1+i%3)
			if i%2 == 0 {
				store.Break()
			}
			put(md, "/registry/b/", fmt.Sprint(i), 1)
			if i%3 == 0 {
				reach(t, m, store.Revision())
			}
		}
		reach(t, m, store.Revision())
		n := 0
		for {
			evs, err := f.cur.Next(nil, 7)
			testcheck.NoError(t, err)
			n += len(evs)
			if len(evs) < 7 {
				break
			}
		}
		if n != 39 {
			t.Errorf("%d events, want 39", n)
		}
		requireState(t, latest(t, r), md, "/registry/a/")
		if st := m.Stats(); st.ListedKeys != listed || st.Relists != 0 || st.Reconnects == 0 {
			t.Errorf("listed %d more keys, %d relists, %d reconnects; want 0, 0, at least 1", st.ListedKeys-listed, st.Relists, st.Reconnects)
		}
		barrier(t, m)
	})
}

// TestClaim_EtcdDownAtStart_WaitsForEtcd: claims wait, and are served when etcd is up.
func TestClaim_EtcdDownAtStart_WaitsForEtcd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		put(md, "/registry/a/", "first", 5)
		md.store.FailLists(errors.New("connection refused"))
		m := start(t, md.store, nil)
		a := claim(t, m, "/registry/a/")
		if _, err := a.Latest(); !errors.Is(err, mirror.ErrNotReady) {
			t.Errorf("before the first list: %v", err)
		}
		// For claims that change before the first list, the latest state counts.
		b, err := m.Exclude("/registry/b/")
		testcheck.NoError(t, err)
		c := claim(t, m, "/registry/c/")
		barrier(t, m)
		b.Release()
		b = claim(t, m, "/registry/b/")
		c.Release()
		barrier(t, m)
		c, err = m.Exclude("/registry/c/")
		testcheck.NoError(t, err)
		put(md, "/registry/b/", "first", 3)
		put(md, "/registry/c/", "first", 3)
		time.Sleep(time.Minute)
		barrier(t, m)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := a.WaitReady(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("WaitReady honours its context: %v", err)
		}
		md.store.FailLists(nil)
		reach(t, m, md.store.Revision(), a, b)
		requireState(t, latest(t, a), md, "/registry/a/")
		requireState(t, latest(t, b), md, "/registry/b/")
		if c.Ready() {
			t.Error("an excluded resource is ready")
		}
		put(md, "/registry/c/", "second", 3)
		put(md, "/registry/b/", "second", 3)
		reach(t, m, md.store.Revision())
		requireState(t, latest(t, b), md, "/registry/b/")
		if got := m.Stats().Dropped; got != 3 {
			t.Errorf("%d events dropped unread, want 3", got)
		}
		barrier(t, m)
	})
}

// TestClaim_DuringRelist_GetsListedKeys: resources that are claimed, released or excluded during a
// relist of the whole prefix get their keys when the list arrives.
func TestClaim_DuringRelist_GetsListedKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		store := md.store
		for _, p := range []string{"a", "b", "c", "d"} {
			put(md, "/registry/"+p+"/", "first", 5)
		}
		m := start(t, store, nil)
		a, b := claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/")
		reach(t, m, store.Revision(), a, b)

		store.Stall(true)
		synctest.Wait()
		for _, p := range []string{"a", "b", "c", "d"} {
			put(md, "/registry/"+p+"/", "second", 5)
		}
		store.FailLists(errors.New("etcd is overloaded"))
		store.Compact(store.Revision())
		time.Sleep(100 * time.Millisecond)
		if m.Stats().Relists == 0 {
			t.Fatal("no relist: the test has no effect")
		}
		c := claim(t, m, "/registry/c/")
		d, err := m.Exclude("/registry/d/")
		testcheck.NoError(t, err)
		b.Release()
		barrier(t, m)
		// The cached state is still served meanwhile.
		requireState(t, latest(t, a), md, "/registry/a/")
		requireState(t, latest(t, c), md, "/registry/c/")
		if b.Ready() || d.Ready() {
			t.Error("a resource without a claim is readable")
		}
		store.FailLists(nil)
		store.Stall(false)
		reach(t, m, store.Revision(), a, c)
		requireState(t, latest(t, a), md, "/registry/a/")
		requireState(t, latest(t, c), md, "/registry/c/")
		b = claim(t, m, "/registry/b/")
		d.Release()
		d = claim(t, m, "/registry/d/")
		reach(t, m, store.Revision(), b, d)
		requireState(t, latest(t, b), md, "/registry/b/")
		requireState(t, latest(t, d), md, "/registry/d/")
		barrier(t, m)
	})
}

// TestBatch_SeveralRevisions_EachIsReadable: a feed that is behind delivers several revisions in
// one batch; each can be read, and followed from.
func TestBatch_SeveralRevisions_EachIsReadable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		store := md.store
		put(md, "/registry/a/", "first", 3)
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		began := store.Revision()
		store.Stall(true)
		synctest.Wait()
		for i := range 3 { // the store delivers up to three revisions together
			md.txn(
				memory.Op{Key: "/registry/a/a", Value: fmt.Sprint(i)},
				memory.Op{Key: "/registry/a/new", Value: fmt.Sprint(i), Delete: i == 1},
				memory.Op{Key: "/registry/a/b", Delete: true})
		}
		store.Stall(false)
		reach(t, m, store.Revision())
		barrier(t, m)
		if got := m.Stats().Events; got != 7 {
			t.Fatalf("%d events, want 7", got)
		}
		for rev := began; rev <= store.Revision(); rev++ {
			s, err := r.At(rev)
			testcheck.NoError(t, err)
			requireState(t, s, md, "/registry/a/")
			after, err := r.CursorAfter(rev, "", "")
			testcheck.NoError(t, err)
			held := read(s)
			for c := range map[*mirror.Cursor]bool{s.Cursor("", ""): true, after: true} {
				evs, err := c.Next(nil, 100)
				testcheck.NoError(t, err)
				then := maps.Clone(held)
				for _, e := range evs {
					if e.Rev <= rev {
						t.Errorf("the cursor after %d returns an event of %d", rev, e.Rev)
					}
					delete(then, e.Key())
					if e.Entry != nil {
						then[e.Key()] = describe(e.Entry)
					}
				}
				if want := md.want(store.Revision(), "/registry/a/"); !maps.Equal(then, want) {
					t.Errorf("from %d on:%s", rev, diff(then, want))
				}
			}
		}
		// One event at a time: inside a revision the position stays before it (I4), and no longer.
		c, err := r.CursorAfter(began, "", "")
		testcheck.NoError(t, err)
		for i, want := range []struct{ rev, position mirror.Revision }{
			{began + 1, began}, {began + 1, began}, {began + 1, began + 1},
			{began + 2, began + 1}, {began + 2, began + 2},
			{began + 3, began + 2}, {began + 3, began + 3}, // no event is left
		} {
			evs, err := c.Next(nil, 1)
			if err != nil || len(evs) != 1 || evs[0].Rev != want.rev || c.Position() != want.position {
				t.Fatalf("event %d: %v, %v, position %d; want revision %d, position %d", i, evs, err, c.Position(), want.rev, want.position)
			}
		}
		if evs, err := c.Next(nil, 1); err != nil || len(evs) != 0 || c.Position() != began+3 {
			t.Errorf("at the end: %v, %v, position %d", evs, err, c.Position())
		}
	})
}

// TestCursor_KeyRange_ReturnsOnlyItsKeys: a cursor returns only the keys of its range, but its
// position moves with the published revision, as a bookmark requires (I4).
func TestCursor_KeyRange_ReturnsOnlyItsKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		store := md.store
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		c := latest(t, r).Cursor("/registry/a/c", "/registry/a/e")
		open := latest(t, r).Cursor("/registry/a/d", "")
		put(md, "/registry/a/", "1", 6)
		put(md, "/registry/b/", "1", 3)
		reach(t, m, store.Revision())
		for what, c := range map[string]*mirror.Cursor{"c d": c, "d e f": open} {
			evs, err := c.Next(nil, 100)
			got := ""
			for _, e := range evs {
				got += " " + e.Key()[len("/registry/a/"):]
			}
			if err != nil || got != " "+what || c.Position() != store.Revision() {
				t.Errorf("selects%s, %v, position %d; want %s, %d", got, err, c.Position(), what, store.Revision())
			}
		}
		store.Put("/elsewhere", "1")
		reach(t, m, store.Revision())
		if evs, err := c.Next(nil, 1); err != nil || len(evs) != 0 || c.Position() != store.Revision() {
			t.Errorf("progress alone: %v, %v, position %d, want %d", evs, err, c.Position(), store.Revision())
		}
	})
}

// TestCursor_AtFutureRevision_ReturnsOnlyLaterEvents: the cursor starts, and returns only later
// events.
func TestCursor_AtFutureRevision_ReturnsOnlyLaterEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		store := md.store
		put(md, "/registry/a/", "1", 3)
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		future := store.Revision() + 4
		c, err := r.CursorAfter(future, "", "")
		testcheck.NoError(t, err)
		for i := range 4 {
			put(md, "/registry/a/", "2", 1)
			reach(t, m, store.Revision())
			if evs, err := c.Next(nil, 100); err != nil || len(evs) != 0 || c.Position() != future {
				t.Errorf("after %d of 4 writes: %v, %v, position %d", i+1, evs, err, c.Position())
			}
		}
		put(md, "/registry/a/", "3", 2)
		reach(t, m, store.Revision())
		evs, err := c.Next(nil, 100)
		if err != nil || len(evs) != 2 || evs[0].Rev != future+1 || c.Position() != future+2 {
			t.Errorf("%v, %v, position %d", evs, err, c.Position())
		}
	})
}

// TestCursor_AtFutureRevision_MissesNoDroppedEvent: events up to the cursor's start may leave the
// window before it reads them.
func TestCursor_AtFutureRevision_MissesNoDroppedEvent(t *testing.T) {
	for _, follows := range []string{"the log", "keys", "an index"} {
		t.Run(follows, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var clean cleanups
				defer clean.run()
				ctx, end := context.WithCancel(t.Context())
				defer end()
				md := newModel()
				m := start(t, md.store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: time.Minute} })
				r := claim(t, m, "/registry/a/")
				put(md, "/registry/a/ns/", "1", 3)
				reach(t, m, md.store.Revision(), r)
				future := md.store.Revision() + 4
				c, err := r.CursorAfter(future, "/registry/a/ns/", "/registry/a/ns0")
				testcheck.NoError(t, err)
				switch follows {
				case "keys":
					c.Follow()
				case "an index":
					c.FollowIndex(mirror.NewWatchIndex(ctx, r, goes(&clean), valuesOf, nil), "v")
				}
				defer c.Unfollow()
				for i := range 4 {
					put(md, "/registry/a/ns/", fmt.Sprint("v", i), 1)
				}
				reach(t, m, md.store.Revision())
				time.Sleep(2 * time.Minute) // they leave the window
				put(md, "/registry/a/ns/", "v", 2)
				reach(t, m, md.store.Revision())
				synctest.Wait() // the poster may post the events later than they are published
				if _, err := r.CursorAfter(future-1, "", ""); !errors.Is(err, mirror.ErrCompacted) {
					t.Fatalf("the window has revision %d: %v", future, err)
				}
				evs, err := c.Next(nil, 100)
				if err != nil || len(evs) != 2 || evs[0].Rev != future+1 || c.Position() != future+2 {
					t.Errorf("%v, %v, position %d, want the two events after %d", evs, err, c.Position(), future)
				}
			})
		})
	}
}

// TestCursor_RevisionLargerThanLimit_ContinuesWithin: calls with a limit return each event of a
// large transaction once, also if the watch index that the cursor follows ends between them. The
// position passes the revision with its last event.
func TestCursor_RevisionLargerThanLimit_ContinuesWithin(t *testing.T) {
	for _, indexEnds := range []bool{false, true} {
		t.Run(fmt.Sprintf("index ends=%v", indexEnds), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				m := start(t, store, nil)
				r := claim(t, m, "/registry/a/")
				reach(t, m, store.Revision(), r)
				var clean cleanups
				defer clean.run()
				ctx, end := context.WithCancel(t.Context())
				defer end()
				index := mirror.NewWatchIndex(ctx, r, goes(&clean), valuesOf, nil)
				c := latest(t, r).Cursor("", "")
				c.FollowIndex(index, "v")
				before := store.Put("/registry/a/before", "v")
				var ops []memory.Op
				want := []string{"/registry/a/before"}
				for i := range 10 {
					ops = append(ops, memory.Op{Key: fmt.Sprintf("/registry/a/%d", i), Value: "v"})
					want = append(want, ops[i].Key)
				}
				rev := store.Txn(ops...)
				reach(t, m, rev)
				synctest.Wait()
				var got []string
				for i, n := range []int{4, 4, 3} {
					if i == 1 && indexEnds {
						end()
						synctest.Wait()
					}
					evs, err := c.Next(nil, 4)
					if err != nil || len(evs) != n {
						t.Fatalf("%d events, %v; want %d", len(evs), err, n)
					}
					for _, e := range evs {
						got = append(got, e.Key())
					}
					if at := c.Position(); len(got) < len(want) && at != before {
						t.Errorf("the position is %d after a part of %d, want %d", at, rev, before)
					}
				}
				if !slices.Equal(got, want) {
					t.Errorf("got events of %q, want %q", got, want)
				}
				if evs, err := c.Next(nil, 4); err != nil || len(evs) != 0 || c.Position() != rev {
					t.Errorf("then %d events, %v, position %d; want %d", len(evs), err, c.Position(), rev)
				}
			})
		})
	}
}
