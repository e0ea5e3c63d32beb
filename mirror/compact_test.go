package mirror_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
)

// requireGone fails unless oldest can be read, and no revision below it.
func requireGone(t *testing.T, r *mirror.Resource, md *model, oldest mirror.Revision) {
	t.Helper()
	if s, err := r.At(oldest); err != nil {
		t.Errorf("at %d: %v", oldest, err)
	} else {
		requireState(t, s, md, r.Prefix())
	}
	if _, err := r.At(oldest - 1); !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("at %d, below the oldest: %v", oldest-1, err)
	}
	if got := r.Stats().OldestRevision; got != oldest {
		t.Errorf("the oldest revision is %d, want %d", got, oldest)
	}
}

// TestCompact_DropsCachedVersionsButNotHeldSnapshots: cached versions are dropped at once, without
// other events; snapshots held by a reader stay.
func TestCompact_DropsCachedVersionsButNotHeldSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		m := start(t, md.store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, md.store.Revision(), r)
		for i := range 10 {
			put(md, "/registry/a/", fmt.Sprint(i), 10)
		}
		reach(t, m, md.store.Revision())
		var held []mirror.Snapshot
		for rev := mirror.Revision(20); rev <= 90; rev += 10 {
			s, err := r.At(rev)
			testcheck.NoError(t, err)
			held = append(held, s)
		}
		synctest.Wait()
		before := r.Stats().Versions
		m.Compact(55)
		synctest.Wait() // no time passes
		requireGone(t, r, md, 55)
		// The versions at 20 to 50, and the first one, are dropped; one was made for the read of
		// 55.
		if got := r.Stats().Versions; got != before-5+1 {
			t.Errorf("%d versions after compaction, there were %d", got, before)
		}
		if _, err := r.CursorAfter(20, "", ""); err != nil {
			t.Errorf("compaction has ended a watch: %v", err) // KEP-4988
		}
		for _, s := range held {
			requireState(t, s, md, "/registry/a/")
		}
		m.Compact(54) // no effect
		m.Compact(md.store.Revision())
		synctest.Wait()
		requireGone(t, r, md, md.store.Revision())
		if st := r.Stats(); st.Versions > 1 || st.VersionBytes != 0 {
			t.Errorf("%d versions of %d bytes, want only the latest", st.Versions, st.VersionBytes)
		}
		barrier(t, m)
	})
}

// TestCompact_AbovePublishedRevision_WaitsForIt: a compaction above the published revision takes
// effect when the published revision reaches it, without an event.
func TestCompact_AbovePublishedRevision_WaitsForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		m := start(t, md.store, nil)
		r := claim(t, m, "/registry/a/")
		put(md, "/registry/a/", "1", 10)
		reach(t, m, md.store.Revision(), r)
		now := md.store.Revision()
		m.Compact(now + 3)
		synctest.Wait()
		requireGone(t, r, md, now) // up to the published revision
		if m.CompactRevision() != now+3 || m.Stats().Compacted != now {
			t.Errorf("Compacted is %d, CompactRevision is %d", m.Stats().Compacted, m.CompactRevision())
		}
		for range 5 {
			md.txn(memory.Op{Key: elsewhere + "x", Value: "1"})
		}
		reach(t, m, now+5)
		synctest.Wait()
		requireGone(t, r, md, now+3)
		barrier(t, m)
	})
}

// TestCompact_EtcdRestored_StartsOver: a restored etcd has its own compactions.
func TestCompact_EtcdRestored_StartsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		put(md, "/registry/a/", "first", 20)
		m := start(t, md.store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, 21, r)
		m.Compact(15)
		synctest.Wait()
		requireGone(t, r, md, 15)

		md.store.Restore(9, map[string]string{"/registry/a/x": "restored"})
		for m.PublishedRevision() > 9 {
			time.Sleep(time.Millisecond)
		}
		reach(t, m, 9, r)
		if m.CompactRevision() != 0 || m.Stats().Compacted != 0 {
			t.Errorf("Compacted is %d, CompactRevision is %d, want 0 after the restore", m.Stats().Compacted, m.CompactRevision())
		}
		for i := range 20 {
			md.store.Put("/registry/a/x", fmt.Sprint(i))
		}
		reach(t, m, 29, r)
		at := func(rev mirror.Revision) string {
			s, err := r.At(rev)
			if err != nil {
				return "compacted"
			}
			return read(s)["/registry/a/x"]
		}
		if got := at(11); got != "1@11" {
			t.Errorf("at 11: %s", got)
		}
		m.Compact(12) // lower than the revision before the restore
		synctest.Wait()
		if at(11) != "compacted" || at(12) != "2@12" {
			t.Errorf("compacted to 12: at 11 %s, at 12 %s", at(11), at(12))
		}
		barrier(t, m)
	})
}

// TestCompact_DuringLoad_AppliesToLoadedHistory: etcd was compacted past the history of a resource
// while that was being loaded.
func TestCompact_DuringLoad_AppliesToLoadedHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		put(md, "/registry/a/", "1", 5)
		m := start(t, md.store, nil)
		excluded, err := m.Exclude("/registry/b/")
		testcheck.NoError(t, err)
		a := claim(t, m, "/registry/a/")
		put(md, "/registry/b/", "1", 10)
		reach(t, m, md.store.Revision(), a)
		compacted := md.store.Revision() - 4
		m.Compact(compacted) // the store still has all of it
		synctest.Wait()
		excluded.Release()
		b := claim(t, m, "/registry/b/")
		reach(t, m, md.store.Revision(), b)
		if _, floor, err := b.Oldest(); err != nil || floor >= compacted {
			t.Fatalf("the loaded history begins at %d, %v; the test has no effect", floor, err)
		}
		requireGone(t, b, md, compacted)
		barrier(t, m)
	})
}

// TestCachedVersions_Idle_AreDropped: idle versions are dropped; their bytes count until then.
func TestCachedVersions_Idle_AreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		m := start(t, md.store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, md.store.Revision(), r)
		for i := range 10 {
			put(md, "/registry/a/", fmt.Sprint(i), 10)
		}
		reach(t, m, md.store.Revision())
		time.Sleep(3 * time.Second)
		synctest.Wait()
		rest := r.Stats()
		asked := func() {
			t.Helper()
			s, err := r.At(50)
			testcheck.NoError(t, err)
			requireState(t, s, md, "/registry/a/")
		}
		for range 6 { // two minutes
			asked()
			time.Sleep(20 * time.Second)
			synctest.Wait()
			if st := r.Stats(); st.Versions != rest.Versions+1 || st.VersionBytes <= rest.VersionBytes {
				t.Fatalf("%d versions of %d bytes while one is read, %d of %d before", st.Versions, st.VersionBytes, rest.Versions, rest.VersionBytes)
			}
			if st, all := r.Stats(), m.Stats(); all.VersionBytes != st.VersionBytes || all.Versions < st.Versions {
				t.Errorf("the mirror reports %d versions of %d bytes", all.Versions, all.VersionBytes)
			}
		}
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if st := r.Stats(); st.Versions != rest.Versions || st.VersionBytes != rest.VersionBytes {
			t.Errorf("%d versions of %d bytes, want %d of %d", st.Versions, st.VersionBytes, rest.Versions, rest.VersionBytes)
		}
		asked()
		barrier(t, m)
	})
}

// TestWindow_MaxBytes_IncludesVersions: the bytes of versions and of values together stay below the
// bound.
func TestWindow_MaxBytes_IncludesVersions(t *testing.T) {
	slow(t)
	oneSequence(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit = 400_000
		md := newModel()
		var ops []memory.Op
		for i := range 2000 {
			ops = append(ops, memory.Op{Key: fmt.Sprintf("/registry/a/%04d", i), Value: "0"})
		}
		md.txn(ops...)
		m := start(t, md.store, func(o *mirror.Options) {
			o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: limit}
			o.CheckpointEvents = 1
		})
		r := claim(t, m, "/registry/a/")
		reach(t, m, md.store.Revision(), r)
		highest, versions := int64(0), int64(0)
		for i := range 5000 {
			md.store.Put(ops[i*7%len(ops)].Key, fmt.Sprint(i))
			if i%50 == 0 {
				reach(t, m, md.store.Revision())
				time.Sleep(1100 * time.Millisecond) // they are weighed
				barrier(t, m)
				if st := m.Stats(); st.HistoryBytes+st.VersionBytes > limit {
					t.Fatalf("%d bytes of values and %d of versions, limit %d", st.HistoryBytes, st.VersionBytes, limit)
				} else {
					highest, versions = max(highest, st.HistoryBytes+st.VersionBytes), max(versions, st.VersionBytes)
				}
			}
		}
		if highest < limit*3/4 || versions < limit/20 || r.Stats().OldestRevision < 100 {
			t.Errorf("at most %d bytes, %d of them versions, of %d; the oldest revision is %d", highest, versions, limit, r.Stats().OldestRevision)
		}
	})
}

// TestVersion_OutsideWindow_IsHeldByReadersOnly: once the window has passed a version, only its
// readers reference it.
func TestVersion_OutsideWindow_IsHeldByReadersOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: time.Minute} })
		r := claim(t, m, "/registry/a/")
		first := store.Put("/registry/a/x", "first")
		reach(t, m, first, r)
		for i := range 100 {
			store.Put("/registry/a/x", fmt.Sprint(i))
		}
		reach(t, m, store.Revision())
		s, err := r.At(first)
		testcheck.NoError(t, err)
		release := r.TrackReader(s)
		e, _ := s.Get("/registry/a/x")
		value := weak.Make(e)
		e = nil
		time.Sleep(3 * time.Minute)
		barrier(t, m)
		if _, err := r.At(first); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("older than the window: %v", err)
		}
		runtime.GC()
		if value.Value() == nil {
			t.Error("the garbage collector freed a value that a reader uses")
		}
		if st := r.Stats(); st.Readers != 1 || st.OldestRead != first {
			t.Errorf("%d readers, the oldest at %d", st.Readers, st.OldestRead)
		}
		release()
		runtime.KeepAlive(s)
		s = mirror.Snapshot{}
		runtime.GC()
		if value.Value() != nil {
			t.Error("a version outlives its last reader")
		}
	})
}
