package mirror_test

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/mirror"
)

// TestWindow_MaxBytes_BoundsHistory writes values of all sizes to several resources. After every
// batch the history is within the bound (I7), and not empty.
func TestWindow_MaxBytes_BoundsHistory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit = 2 << 20
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: limit} })
		var all []*mirror.Resource
		for i := range 4 {
			all = append(all, claim(t, m, fmt.Sprintf("/registry/r%d/", i)))
		}
		reach(t, m, store.Revision(), all...)
		highest := int64(0)
		for i := range testrace.Count(1500, 600) {
			size := []int{10, 250, 5000, 75_000}[i%4]
			store.Put(fmt.Sprintf("/registry/r%d/key", i%7%4), strings.Repeat("x", size))
			reach(t, m, store.Revision())
			synctest.Wait()
			held := m.Stats().HistoryBytes
			if held > limit {
				t.Fatalf("%d bytes of history after %d writes, limit %d", held, i, limit)
			}
			highest = max(highest, held)
		}
		if highest < limit*3/4 {
			t.Errorf("history never held more than %d bytes of %d", highest, limit)
		}
		barrier(t, m)
	})
}

// TestWindow_BusyResource_LosesHistoryFirst: the resource with the largest history loses events
// first, so a watch on a quiet resource can be resumed until its events are too old.
func TestWindow_BusyResource_LosesHistoryFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) {
			o.Window = mirror.Window{MaxAge: 10 * time.Minute, MaxBytes: 4 << 20}
		})
		busy, quiet := claim(t, m, "/registry/busy/"), claim(t, m, "/registry/quiet/")
		store.Put("/registry/quiet/a", "0")
		reach(t, m, store.Revision(), busy, quiet)
		began := store.Revision()
		store.Put("/registry/quiet/a", "1")
		store.Put("/registry/quiet/b", "1")
		for i := range 5 * 60 {
			store.Put("/registry/busy/key", strings.Repeat("x", 100_000))
			if i%60 == 0 {
				store.Put("/registry/quiet/a", fmt.Sprint(i))
			}
			time.Sleep(time.Second)
		}
		reach(t, m, store.Revision())
		if _, floor, _ := busy.Oldest(); floor <= began {
			t.Fatal("the floor of the busy resource did not move: the test has no effect")
		}
		c, err := quiet.CursorAfter(began, "", "")
		if err != nil {
			t.Fatalf("the busy resource evicted the history of the quiet one: %v", err)
		}
		if evs, err := c.Next(nil, 100); err != nil || len(evs) != 7 {
			t.Errorf("%d events, %v; want 7", len(evs), err)
		}
		if s, err := quiet.At(began); err != nil || !maps.Equal(read(s), state{"/registry/quiet/a": fmt.Sprintf("0@%d", began)}) {
			t.Errorf("at %d: %v, %v", began, read(s), err)
		}
		time.Sleep(11 * time.Minute)
		synctest.Wait()
		if _, err := quiet.CursorAfter(began, "", ""); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("after the window's age: %v", err)
		}
		if held := m.Stats().HistoryBytes; held != 0 {
			t.Errorf("%d bytes of history when everything is too old", held)
		}
		barrier(t, m)
	})
}

// TestWindow_MaxAge_EndsHistory: an event stays readable for MaxAge, and not much longer, even
// without further events.
func TestWindow_MaxAge_EndsHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: time.Minute} })
		r := claim(t, m, "/registry/a/")
		first := store.Put("/registry/a/x", "1")
		reach(t, m, first, r)
		readable := func(rev mirror.Revision) bool {
			synctest.Wait()
			s, err := r.At(rev)
			c, cerr := r.CursorAfter(rev, "", "")
			if (err == nil) != (cerr == nil) {
				t.Fatalf("at %d: snapshot %v, cursor %v", rev, err, cerr)
			}
			if err == nil {
				if got := read(s)["/registry/a/x"]; got != fmt.Sprintf("%d@%d", rev-1, rev) {
					t.Fatalf("at %d: %s", rev, got)
				}
				if evs, err := c.Next(nil, 100); err != nil || len(evs) != int(store.Revision()-rev) {
					t.Fatalf("%d events after %d: %v", len(evs), rev, err)
				}
			}
			return err == nil
		}
		second := store.Put("/registry/a/x", "2")
		time.Sleep(300 * time.Millisecond) // it has no mark
		third := store.Put("/registry/a/x", "3")
		time.Sleep(58 * time.Second)
		for _, rev := range []mirror.Revision{first, second, third} {
			if !readable(rev) {
				t.Errorf("revision %d is not readable after 58 s", rev)
			}
		}
		time.Sleep(5 * time.Second)
		if readable(first) || readable(second) || !readable(third) {
			t.Errorf("after 63 s: readable %v %v %v, want only the last", readable(first), readable(second), readable(third))
		}
		barrier(t, m)
	})
}

// TestHistoryBytes_AfterClaimAndRelease_EqualLogs: the counted bytes equal the logs.
func TestHistoryBytes_AfterClaimAndRelease_EqualLogs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		reach(t, m, store.Revision())
		began := store.Revision()
		for i := range 500 {
			store.Put(fmt.Sprintf("/registry/%c/%d", 'a'+i%2, i%10), strings.Repeat("x", 1000))
		}
		reach(t, m, store.Revision())
		barrier(t, m)
		before := m.Stats().HistoryBytes
		if before < 480*1000 {
			t.Fatalf("only %d bytes of history", before)
		}
		a := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), a)
		barrier(t, m)
		if got := m.Stats().HistoryBytes; got != before {
			t.Errorf("%d bytes of history after the claim, %d before", got, before)
		}
		c, err := a.CursorAfter(began, "", "")
		testcheck.NoError(t, err)
		if evs, err := c.Next(nil, 1000); err != nil || len(evs) != 250 {
			t.Errorf("%d events, %v; want the 250 from before the claim", len(evs), err)
		}
		if got := a.Versions(); got != 2 {
			t.Errorf("%d versions of 250 events, want 2", got)
		}
		a.Release()
		barrier(t, m)
		if got := m.Stats().HistoryBytes; got < before/3 || got > before*2/3 {
			t.Errorf("%d bytes of history after the release, %d before", got, before)
		}
		if _, err := m.Exclude("/registry/b/"); err != nil {
			t.Fatal(err)
		}
		barrier(t, m)
		if got := m.Stats().HistoryBytes; got != 0 {
			t.Errorf("%d bytes of history, want 0 without history", got)
		}
	})
}

// TestWindow_ValuesOutside_AreReleased checks with weak pointers: values that left the window are
// referenced neither by the resource nor by the one they were carved out of.
func TestWindow_ValuesOutside_AreReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		for i := range 100 {
			store.Put(fmt.Sprintf("/registry/a/%d", i), "first")
			store.Put(fmt.Sprintf("/registry/other/%d", i), "first")
		}
		m := start(t, store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: time.Minute} })
		reach(t, m, store.Revision())
		r := claim(t, m, "/registry/a/") // carved out of the root
		reach(t, m, store.Revision(), r)
		s := latest(t, r)
		e, ok := s.Get("/registry/a/7")
		if !ok {
			t.Fatal("lost")
		}
		old := weak.Make(e)
		s, e = mirror.Snapshot{}, nil
		store.Put("/registry/a/7", "second")
		reach(t, m, store.Revision())
		runtime.GC()
		if old.Value() == nil {
			t.Error("the window has lost a value")
		}
		time.Sleep(2 * time.Minute)
		barrier(t, m)
		runtime.GC()
		if old.Value() != nil {
			t.Error("a superseded value outlives the window")
		}
	})
}

// TestCheckpoints_Compacted_AreDropped: those below the compacted revision, and no other.
func TestCheckpoints_Compacted_AreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.CheckpointEvents = 10 })
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		for i := range 1000 {
			store.Put(fmt.Sprintf("/registry/a/%d", i%31), fmt.Sprint(i))
		}
		reach(t, m, store.Revision())
		before := r.Versions()
		m.Compact(store.Revision() - 100)
		barrier(t, m)
		if n := r.Versions(); n < 2 || n > before-3 {
			t.Errorf("%d of %d versions are left after a compaction to a tenth of the history", n, before)
		}
	})
}

// TestCheckpoints_AreCheckpointEventsApart: there is one for CheckpointEvents events, and every
// revision between them can be read.
func TestCheckpoints_AreCheckpointEventsApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.CheckpointEvents = 50 })
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		md := &model{store: store, at: map[mirror.Revision]state{1: {}}}
		for i := range 1000 {
			md.txn(memory.Op{Key: fmt.Sprintf("/registry/a/%d", i*7%31), Value: fmt.Sprint(i), Delete: i%5 == 4})
		}
		reach(t, m, store.Revision())
		if got := r.Versions(); got < 4 || got > 10 {
			t.Errorf("%d versions of about 1000 events, want one for 50, and one for each doubling", got)
		}
		for rev := mirror.Revision(1); rev <= store.Revision(); rev++ {
			s, err := r.At(rev)
			testcheck.NoError(t, err)
			if got, want := read(s), md.want(rev, "/registry/a/"); !maps.Equal(got, want) {
				t.Fatalf("at %d: %s", rev, diff(got, want))
			}
		}
		m.Compact(900)
		barrier(t, m)
		if _, err := r.At(899); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("below the compacted revision: %v", err)
		}
		s, err := r.At(900)
		if err != nil || !maps.Equal(read(s), md.want(900, "/registry/a/")) {
			t.Errorf("at the compacted revision: %v", err)
		}
		if _, err := r.CursorAfter(1, "", ""); err != nil {
			t.Errorf("compaction has ended a watch: %v", err) // KEP-4988
		}
		if st := r.Stats(); st.OldestRevision != 900 || st.Versions != r.Versions() || st.Versions > 16+3 {
			t.Errorf("after compaction to 900: %d versions, oldest %d", st.Versions, st.OldestRevision)
		}
	})
}

// TestHistory_MemoryPerRevision_IsBounded measures the memory of history in addition to the
// superseded keys and values (events, entries, allocator rounding, versions).
func TestHistory_MemoryPerRevision_IsBounded(t *testing.T) {
	slow(t)
	if testrace.Enabled {
		t.Skip("the race detector's heap is another")
	}
	if mirror.CheckInvariants {
		t.Skip("the checks of invariants allocate, and take minutes for 60,000 batches")
	}
	all, versions := historyMemory(t, 20_000, 60_000)
	t.Logf("%.0f bytes for each revision, %.0f of them versions", all, versions)
	if all > 300 {
		t.Errorf("%.0f bytes for each revision beyond keys and values, want 300 at most", all)
	}
	if versions == 0 || versions > all {
		t.Errorf("%.0f of %.0f bytes are reported as versions", versions, all)
	}
}

// TestWindow_CachedVersions_AreEvictedBeforeEvents: versions cached for readers are evicted before
// events.
func TestWindow_CachedVersions_AreEvictedBeforeEvents(t *testing.T) {
	slow(t)
	oneSequence(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		var ops []memory.Op
		for i := range 20000 {
			ops = append(ops, memory.Op{Key: fmt.Sprintf("/registry/a/%06d", i), Value: "0"})
		}
		md.txn(ops...)
		m := start(t, md.store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: 6 << 20} })
		r := claim(t, m, "/registry/a/")
		reach(t, m, md.store.Revision(), r)
		for i := range 16000 {
			md.store.Put(ops[i*7919%len(ops)].Key, fmt.Sprint(i))
			if i%2000 == 0 {
				reach(t, m, md.store.Revision())
				time.Sleep(1100 * time.Millisecond)
			}
		}
		reach(t, m, md.store.Revision())
		m.Weigh()
		barrier(t, m)
		_, before, _ := r.Oldest()
		now := md.store.Revision()
		for i := range 16 {
			if _, err := r.At(now - mirror.Revision(900*(i+1)) + 450); err != nil {
				t.Log(i, err)
			}
		}
		m.Weigh()
		barrier(t, m)
		if _, after, _ := r.Oldest(); after > before {
			t.Errorf("16 lists at old revisions moved the floor of watches from %d to %d of %d", before, after, now)
		}
	})
}
