package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// holdList blocks lists of one prefix until they are released or canceled.
type holdList struct {
	*memory.Store
	prefix       string
	gate         chan struct{}
	begun, given chan struct{} // one element for each such list; for each that was canceled
	afterReading bool          // block between reading and answering, not before
}

func hold(store *memory.Store, prefix string) *holdList {
	return &holdList{Store: store, prefix: prefix, gate: make(chan struct{}), begun: make(chan struct{}, 100), given: make(chan struct{}, 100)}
}

func (h *holdList) List(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	if prefix != h.prefix {
		return h.Store.List(ctx, prefix, at, page)
	}
	var pages [][]driver.KV
	var header driver.Header
	var err error
	read := func() {
		header, err = h.Store.List(ctx, prefix, at, func(kvs []driver.KV) error { pages = append(pages, kvs); return nil })
	}
	if h.afterReading {
		read()
	}
	h.begun <- struct{}{}
	select {
	case <-h.gate:
	case <-ctx.Done():
		h.given <- struct{}{}
		return driver.Header{}, ctx.Err()
	}
	if !h.afterReading {
		read()
	}
	for _, p := range pages {
		if err := page(p); err != nil {
			return driver.Header{}, err
		}
	}
	return header, err
}

// TestReload_OneResource_DoesNotDelayOthers: a resource that is being listed is not readable until
// it is complete; other resources are not affected (I8, I9).
func TestReload_OneResource_DoesNotDelayOthers(t *testing.T) {
	for _, afterReading := range []bool{false, true} {
		t.Run(fmt.Sprintf("afterReading=%v", afterReading), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				source := hold(store, "/registry/a/")
				source.afterReading = afterReading
				md := &model{store: store, at: map[mirror.Revision]state{1: {}}}
				for i := range 20 {
					md.txn(memory.Op{Key: fmt.Sprintf("/registry/%c/%d", 'a'+i%2, i), Value: "first"})
				}
				m := start(t, source, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
				b := claim(t, m, "/registry/b/")
				reach(t, m, store.Revision(), b)
				followed := latest(t, b).Cursor("", "")

				a := claim(t, m, "/registry/a/") // values were not stored
				<-source.begun
				for i := range 20 {
					md.txn(
						memory.Op{Key: fmt.Sprintf("/registry/a/%d", i), Value: "second", Delete: i%4 == 0},
						memory.Op{Key: fmt.Sprintf("/registry/b/%d", i), Value: "second"})
				}
				reach(t, m, store.Revision())
				if _, err := a.Latest(); !errors.Is(err, mirror.ErrNotReady) {
					t.Errorf("while it is listed: %v", err)
				}
				if _, err := a.CursorAfter(store.Revision(), "", ""); !errors.Is(err, mirror.ErrNotReady) {
					t.Errorf("cursor while it is listed: %v", err)
				}
				if got, want := read(latest(t, b)), md.want(store.Revision(), "/registry/b/"); !maps.Equal(got, want) {
					t.Errorf("the other resource: %s", diff(got, want))
				}
				if evs, err := followed.Next(nil, 100); err != nil || len(evs) != 20 {
					t.Errorf("the other's cursor: %d events, %v; want 20", len(evs), err)
				}
				listed := source.Revision()
				close(source.gate)
				reach(t, m, store.Revision(), a)
				s := latest(t, a)
				if got, want := read(s), md.want(s.Rev, "/registry/a/"); s.Rev != store.Revision() || !maps.Equal(got, want) {
					t.Errorf("at %d: %s", s.Rev, diff(got, want))
				}
				if afterReading {
					// Later events than the list can be read and followed from there on.
					listed -= 20
				}
				for rev := listed; rev <= store.Revision(); rev++ {
					s, err := a.At(rev)
					testcheck.NoError(t, err)
					if got, want := read(s), md.want(rev, "/registry/a/"); !maps.Equal(got, want) {
						t.Errorf("at %d: %s", rev, diff(got, want))
					}
				}
				barrier(t, m)
				if got := m.Stats().Divergences; got != 0 {
					t.Errorf("%d divergences, want 0: the list does not match the events received during it", got)
				}
			})
		})
	}
}

// TestReload_ExcludedKeys_AreNotStored: keys that are excluded when the whole prefix is listed are
// not stored. A prefix that is claimed inside them during the list is listed separately, also when
// it is only a part of them.
func TestReload_ExcludedKeys_AreNotStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		for _, p := range []string{"/registry/a/", "/registry/b/", "/registry/b/inner/", "/registry/c/"} {
			put(md, p, "value", 5)
		}
		source := hold(md.store, root)
		source.afterReading = true
		m := start(t, source, nil)
		exclude := func(p string) *mirror.Resource {
			r, err := m.Exclude(p)
			testcheck.NoError(t, err)
			return r
		}
		b, c := exclude("/registry/b/"), exclude("/registry/c/")
		<-source.begun
		source.gate <- struct{}{}
		a := claim(t, m, "/registry/a/")
		reach(t, m, md.store.Revision(), a)

		// Relist, now that the exclusions are known.
		md.store.Stall(true)
		synctest.Wait()
		md.txn(memory.Op{Key: "/registry/a/a", Value: "again"})
		md.txn(memory.Op{Key: "/registry/b/a", Value: "again"})
		md.store.Compact(md.store.Revision())
		<-source.begun
		b.Release()
		b = claim(t, m, "/registry/b/")
		inner := claim(t, m, "/registry/b/inner/")
		c.Release()
		barrier(t, m)
		md.store.Stall(false)
		source.gate <- struct{}{}
		reach(t, m, md.store.Revision(), a, b, inner)
		requireState(t, latest(t, a), md, "/registry/a/")
		requireState(t, latest(t, inner), md, "/registry/b/inner/")
		if got := read(latest(t, b)); len(got) != 5 || got["/registry/b/a"] != fmt.Sprintf("again@%d", md.store.Revision()) {
			t.Errorf("holds %v", got)
		}
		c = claim(t, m, "/registry/c/")
		reach(t, m, md.store.Revision(), c)
		requireState(t, latest(t, c), md, "/registry/c/")
		barrier(t, m)
	})
}

// TestReload_NotNeededAnyMore_IsStopped: when the claim, the state, or the cluster of a list is
// gone, the list and its wait for the published revision end too.
func TestReload_NotNeededAnyMore_IsStopped(t *testing.T) {
	for _, why := range []string{"excluded", "restored", "compacted"} {
		t.Run(why, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				for i := range 30 {
					store.Put(fmt.Sprintf("/registry/a/%d", i), "first")
				}
				source := hold(store, "/registry/a/")
				m := start(t, source, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
				reach(t, m, store.Revision())
				a := claim(t, m, "/registry/a/")
				<-source.begun
				switch why {
				case "excluded":
					a.Release()
					barrier(t, m)
					if _, err := m.Exclude("/registry/a/"); err != nil {
						t.Fatal(err)
					}
				case "restored":
					store.Restore(5, map[string]string{"/registry/a/1": "second"})
				case "compacted":
					store.Stall(true)
					synctest.Wait()
					store.Put("/registry/a/1", "second")
					store.Put("/registry/a/1", "third")
					store.Compact(store.Revision())
					store.Stall(false)
				}
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				select {
				case <-source.given:
				case <-ctx.Done():
					t.Fatal("the list did not end")
				}
				if why != "excluded" {
					reach(t, m, store.Revision(), a)
					if got, want := len(read(latest(t, a))), map[string]int{"restored": 1, "compacted": 30}[why]; got != want {
						t.Errorf("holds %d keys, want %d", got, want)
					}
				}
				barrier(t, m)
			})
		})
	}
}

// TestReload_PendingChanges_AreBounded: while etcd does not answer a list, pending changes are kept
// only as far as the next attempt needs them (I7).
func TestReload_PendingChanges_AreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/x", "value")
		m := start(t, store, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
		reach(t, m, store.Revision())
		store.FailLists(errors.New("etcd is overloaded"))
		a := claim(t, m, "/registry/a/")
		most := 0
		for i := range 600 {
			store.Put(fmt.Sprintf("/registry/a/%d", i%10), strings.Repeat("x", 1000))
			reach(t, m, store.Revision())
			time.Sleep(100 * time.Millisecond)
			most = max(most, m.Pending(a))
		}
		if most > 120 { // attempts are at most five seconds apart
			t.Errorf("up to %d changes wait for a list", most)
		}
		store.FailLists(nil)
		reach(t, m, store.Revision(), a)
		if got := len(read(latest(t, a))); got != 11 {
			t.Errorf("%d keys, want 11", got)
		}
		barrier(t, m)
	})
}

// TestDivergence_Repeated_CausesBoundedLists: a feed that keeps losing events causes a bounded
// number of lists, not one for each of them.
func TestDivergence_Repeated_CausesBoundedLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		a := claim(t, m, "/registry/a/")
		b := claim(t, m, "/registry/b/")
		reach(t, m, store.Revision(), a, b)
		n := 0
		store.DropIf(func(c driver.Change) bool {
			if strings.HasPrefix(string(c.Key), "/registry/a/") {
				n++
				return n%3 == 1
			}
			return false
		})
		for range 6000 {
			store.Put("/registry/a/x", "1")
			store.Put("/registry/b/x", "1")
			time.Sleep(10 * time.Millisecond)
		}
		store.DropIf(nil)
		if got := m.Stats().Divergences; got == 0 || got > 40 {
			t.Errorf("%d lists in a minute", got)
		}
		reach(t, m, store.Revision(), a, b)
		store.Put("/registry/a/x", "last")
		reach(t, m, store.Revision(), a)
		if got, want := read(latest(t, a))["/registry/a/x"], fmt.Sprintf("last@%d", store.Revision()); got != want {
			t.Errorf("holds %s, want %s", got, want)
		}
		barrier(t, m)
	})
}

// TestLateClaim_AfterEtcdRestore_RelistsBeforeReads: a resource that is listed on its own must be
// of the same cluster as the rest.
func TestLateClaim_AfterEtcdRestore_RelistsBeforeReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/x", "old")
		m := start(t, store, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
		reach(t, m, store.Revision())
		at := store.Revision()
		store.Restore(at, map[string]string{"/registry/a/x": "new"})
		r := claim(t, m, "/registry/a/")
		for relisted := false; !relisted; time.Sleep(time.Millisecond) {
			relisted = m.Stats().Relists > 0
			if s, err := r.Latest(); err == nil && !relisted {
				t.Fatalf("read %v at %d before the mirror detected the restore", read(s), s.Rev)
			}
		}
		reach(t, m, store.Put("/registry/a/y", "1"), r)
		if got := read(latest(t, r)); got["/registry/a/x"] != fmt.Sprintf("new@%d", at) {
			t.Errorf("read %v", got)
		}
	})
}

// TestReload_OfUnclaimedKeys_CopiesNoResource: an event of an unclaimed key was lost, and the keys
// around all resources are relisted. The values of the resources, which the list has too, are not
// copied.
func TestReload_OfUnclaimedKeys_CopiesNoResource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		const keys, size = 100, 100_000
		for i := range keys {
			store.Put(fmt.Sprintf("/registry/a/%d", i), strings.Repeat("v", size))
		}
		m := start(t, store, nil)
		a := claim(t, m, "/registry/a/")
		store.Put("/registry/key", "1")
		reach(t, m, store.Revision(), a)
		store.DropIf(func(driver.Change) bool { return true })
		store.Put("/registry/key", "2")
		reach(t, m, store.Revision())
		store.DropIf(nil)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		rev := store.Put("/registry/key", "3")
		reach(t, m, rev)
		for {
			v, err := m.View(t.Context(), rev, "/registry/key", "/registry/key\x00")
			testcheck.NoError(t, err)
			if v.Covers("/registry/key", "/registry/key\x00") {
				for e := range v.All("", "") {
					if string(e.Value()) != "3" {
						t.Errorf("the value is %q, want 3", e.Value())
					}
				}
				break
			}
			time.Sleep(time.Millisecond)
		}
		runtime.ReadMemStats(&after)
		if m.Stats().Divergences != 1 {
			t.Errorf("%d divergences, want 1", m.Stats().Divergences)
		}
		if allocated := after.TotalAlloc - before.TotalAlloc; allocated > keys*size/2 {
			t.Errorf("allocated %d bytes to relist one key", allocated)
		}
		if n, bytes := latest(t, a).Count("", ""); n != keys || bytes < keys*size {
			t.Errorf("the resource has %d keys of %d bytes", n, bytes)
		}
		barrier(t, m)
	})
}

// TestListFromEtcd_ReturnsPresentStateAndSharesCache: the keys of the range as etcd has them, with
// the cache's entries of those that have not changed. Another etcd is an error.
func TestListFromEtcd_ReturnsPresentStateAndSharesCache(t *testing.T) {
	store := memory.New()
	for _, key := range []string{"a", "b", "end"} {
		store.Put("/registry/a/"+key, "1")
	}
	m := start(t, store, nil)
	r := claim(t, m, "/registry/a/")
	reach(t, m, store.Revision(), r)
	release := m.HoldWriter()
	defer release()
	store.Put("/registry/a/b", "2")
	rev := store.Put("/registry/a/c", "1")
	entries, at, err := r.ListFromEtcd(t.Context(), "/registry/a/", "/registry/a/end")
	testcheck.NoError(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, fmt.Sprintf("%s=%s", e.Key(), e.Value()))
	}
	if want := []string{"/registry/a/a=1", "/registry/a/b=2", "/registry/a/c=1"}; !slices.Equal(got, want) || at != rev {
		t.Fatalf("%q at %d, want %q at %d", got, at, want, rev)
	}
	if cached, ok := latest(t, r).Get("/registry/a/a"); !ok || cached != entries[0] {
		t.Error("the entry that has not changed is not the cache's")
	}
	store.FailLists(errors.New("no leader"))
	if _, _, err := r.ListFromEtcd(t.Context(), "/registry/a/", "/registry/a0"); err == nil || errors.Is(err, mirror.ErrNotReady) {
		t.Errorf("without an answer: %v", err)
	}
	store.FailLists(nil)
	store.Restore(rev+10, nil)
	if _, _, err := r.ListFromEtcd(t.Context(), "/registry/a/", "/registry/a0"); !errors.Is(err, mirror.ErrNotReady) {
		t.Errorf("from another etcd: %v", err)
	}
}
