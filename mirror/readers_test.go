package mirror_test

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

// TestTrackReader_SupersededVersion_CountsReaders: readers of the latest version count only after a
// newer one exists.
func TestTrackReader_SupersededVersion_CountsReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		for i := range 10 {
			store.Put("/registry/a/x", fmt.Sprint(i))
		}
		reach(t, m, store.Revision())
		counted := func(what string, readers int, oldest mirror.Revision) {
			t.Helper()
			if st := r.Stats(); st.Readers != readers || st.OldestRead != oldest {
				t.Errorf("%s: %d readers, the oldest at %d; want %d, %d", what, st.Readers, st.OldestRead, readers, oldest)
			}
		}
		at := func(rev mirror.Revision) mirror.Snapshot {
			t.Helper()
			s, err := r.At(rev)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		present := latest(t, r)
		held := r.TrackReader(present)
		counted("the latest version", 0, 0)
		five, again, three := r.TrackReader(at(5)), r.TrackReader(at(5)), r.TrackReader(at(3))
		counted("three", 3, 3)
		three()
		five()
		counted("one of two of the same revision", 1, 5)
		store.Put("/registry/a/x", "later")
		reach(t, m, store.Revision())
		counted("the previous version too", 2, 5)
		late := r.TrackReader(present)
		counted("a second reader", 3, 5)
		again()
		counted("only that", 2, present.Rev)
		m.Compact(store.Revision())
		r.Release()
		barrier(t, m)
		counted("after the version was dropped", 2, present.Rev)
		late()
		held()
		counted("none", 0, 0)
		r.TrackReader(mirror.Snapshot{})()
	})
}

// TestSnapshot_IsLatest_UntilResourceChanges: writes to other resources do not count.
func TestSnapshot_IsLatest_UntilResourceChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		a, b := claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/")
		reach(t, m, store.Revision(), a, b)
		s := latest(t, a)
		for _, key := range []string{"/registry/b/x", "/registry/a/x"} {
			if !s.IsLatest() {
				t.Errorf("before the write of %s: not the latest", key)
			}
			store.Put(key, "")
			reach(t, m, store.Revision())
		}
		if s.IsLatest() || !latest(t, a).IsLatest() || (mirror.Snapshot{}).IsLatest() {
			t.Error("a snapshot is the latest after a write, or a new one is not")
		}
	})
}
