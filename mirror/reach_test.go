package mirror_test

import (
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/mirror"
)

// leaves returns weak pointers to the leaves of a snapshot.
func leaves(s mirror.Snapshot) (all []weak.Pointer[btree.Leaf[*mirror.Entry]]) {
	for run := range s.Runs("", "") {
		all = append(all, weak.Make(run.Leaf))
	}
	return all
}

// reachable returns how many of them are still reachable.
func reachable[T any](all []weak.Pointer[T]) (n int) {
	for range 10 { // a stack that is scanned conservatively may keep some for a cycle
		runtime.GC()
		n = 0
		for _, p := range all {
			if p.Value() != nil {
				n++
			}
		}
		if n == 0 {
			break
		}
	}
	return n
}

// TestCursor_AfterRelist_ReleasesEndedLineage: a watch whose client does not read references
// neither the entries nor the events of a resource that was relisted since (I7).
func TestCursor_AfterRelist_ReleasesEndedLineage(t *testing.T) {
	for _, follows := range []string{"everything", "a directory", "a key"} {
		t.Run(follows, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				md := newModel()
				put(md, "/registry/a/n/", "listed", 200)
				m := start(t, md.store, presentOnly)
				r := claim(t, m, "/registry/a/")
				reach(t, m, md.store.Revision(), r)
				var cursors []*mirror.Cursor
				var trees []weak.Pointer[btree.Leaf[*mirror.Entry]]
				var events []weak.Pointer[mirror.Event]
				for generation := range 3 {
					s := latest(t, r)
					c := s.Cursor("", "")
					switch follows {
					case "a directory":
						c = s.Cursor("/registry/a/n/", "/registry/a/n0")
						c.Follow()
					case "a key":
						c = s.Cursor("/registry/a/n/a", "/registry/a/n/a\x00")
						c.Follow()
					}
					cursors = append(cursors, c)
					trees = append(trees, leaves(s)...)
					put(md, "/registry/a/n/", fmt.Sprint("written ", generation), 50)
					reach(t, m, md.store.Revision())
					followed, err := s.Cursor("", "").Next(nil, 50)
					if err != nil || len(followed) != 50 {
						t.Fatalf("%d events, %v", len(followed), err)
					}
					for _, ev := range followed {
						events = append(events, weak.Make(ev))
					}
					trees = append(trees, leaves(latest(t, r))...)

					// The feed is down for longer than etcd keeps history.
					md.store.Stall(true)
					put(md, "/registry/a/n/", fmt.Sprint("missed ", generation), 50)
					md.store.Compact(md.store.Revision())
					md.store.Break()
					md.store.Stall(false)
					time.Sleep(time.Minute)
					reach(t, m, md.store.Revision(), r)
				}
				barrier(t, m)
				if n := reachable(trees); n > 0 {
					t.Errorf("%d of %d leaves of ended lineages are reachable", n, len(trees))
				}
				if n := reachable(events); n > 0 {
					t.Errorf("%d of %d events of ended lineages are reachable", n, len(events))
				}
				requireState(t, latest(t, r), md, "/registry/a/")
				for _, c := range cursors {
					if _, err := c.Next(nil, 10); err == nil {
						t.Error("a cursor continues over a gap")
					}
					c.Unfollow()
				}
				runtime.KeepAlive(cursors)
			})
		})
	}
}

// TestRestoredHistory_DroppedPart_IsReleased: the dropped part of a restored history is released
// (I7).
func TestRestoredHistory_DroppedPart_IsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		for round := range 40 {
			put(md, "/registry/a/", fmt.Sprint("round ", round), 100)
		}
		m := start(t, md.store, func(o *mirror.Options) { o.CheckpointEvents = 16 })
		r := claim(t, m, "/registry/a/")
		reach(t, m, md.store.Revision(), r)
		var old []weak.Pointer[btree.Leaf[*mirror.Entry]]
		oldest, _, err := r.Oldest()
		if err != nil || oldest >= md.store.Revision()-3000 {
			t.Fatalf("history reaches back to %d, %v", oldest, err)
		}
		kept, middle := r.Versions(), md.store.Revision()-1000
		for rev := oldest; rev < middle-600; rev += 16 {
			s, err := r.NearestRetained(rev) // a checkpoint
			testcheck.NoError(t, err)
			if s.Rev < middle-100 { // each 100 writes replace all leaves
				old = append(old, leaves(s)...)
			}
		}
		m.Compact(middle)
		barrier(t, m)
		synctest.Wait() // a weighing may be running
		if n := r.Versions(); n < 2 || n > kept-2 {
			t.Fatalf("%d cached versions, %d after the compaction of half of them", kept, n)
		}
		if n := reachable(old); n > 0 {
			t.Errorf("%d of %d leaves of dropped versions are reachable", n, len(old))
		}
	})
}

// TestMirror_EmptyUnclaimedResources_UseNoMemory: resources without a claim and without keys use no
// memory, however many there were, and can be claimed again.
func TestMirror_EmptyUnclaimedResources_UseNoMemory(t *testing.T) {
	slow(t)
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/x", "kept")
		m := start(t, store, presentOnly)
		a := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), a)
		held := func() uint64 {
			runtime.GC()
			var ms runtime.MemStats
			runtime.ReadMemStats(&ms)
			return ms.HeapAlloc
		}
		definitions := testrace.Count(10_000, 2_500)
		prefix := func(i int) string { return fmt.Sprintf("/registry/example.com/definition%d/", i) }
		before := held()
		for i := range definitions {
			r := claim(t, m, prefix(i))
			if i%100 == 0 { // some had objects
				store.Put(prefix(i)+"object", "value")
				reach(t, m, store.Revision(), r)
				store.Delete(prefix(i) + "object")
				reach(t, m, store.Revision(), r)
			}
			r.Release()
		}
		left := claim(t, m, "/registry/example.com/left/") // this resource has objects
		store.Put("/registry/example.com/left/object", "value")
		reach(t, m, store.Revision(), left)
		left.Release()
		time.Sleep(2 * time.Second)
		barrier(t, m)
		if n := m.Known(); n != 3 {
			t.Errorf("%d resources are known, want the root, the claimed and the one with an object", n)
		}
		if after := held(); after > before+uint64(definitions)*420 {
			t.Errorf("%d definitions leave %d bytes", definitions, after-before)
		}

		// A resource that is created again has its new events, and none from the time without a
		// claim.
		between := store.Revision()
		store.Put(prefix(7)+"new", "value")
		r := claim(t, m, prefix(7))
		reach(t, m, store.Revision(), r)
		if got := read(latest(t, r)); len(got) != 1 {
			t.Errorf("holds %v", got)
		}
		if _, err := r.CursorAfter(between-1000, "", ""); err == nil {
			t.Error("a cursor begins before the removal of the resource")
		}
		store.Delete(prefix(7) + "new")
		reach(t, m, store.Revision())
		c, err := r.CursorAfter(between, "", "")
		testcheck.NoError(t, err)
		if events, err := c.Next(nil, 10); err != nil || len(events) != 2 {
			t.Errorf("%d events after the removal, %v; want 2", len(events), err)
		}
		barrier(t, m)
	})
}
