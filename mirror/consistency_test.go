package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// lose applies the writes without an event for any watch.
func lose(t *testing.T, m *mirror.Mirror, store *memory.Store, ops ...memory.Op) {
	t.Helper()
	reach(t, m, store.Revision())
	store.DropIf(func(driver.Change) bool { return true })
	rev := store.Txn(ops...)
	reach(t, m, rev)
	store.DropIf(nil)
}

// present returns the store's keys below the prefix, as describe prints them.
func present(t *testing.T, store *memory.Store, prefix string) state {
	t.Helper()
	out := state{}
	_, err := store.List(context.Background(), prefix, 0, func(kvs []driver.KV) error {
		for _, kv := range kvs {
			out[string(kv.Key)] = fmt.Sprintf("%s@%d", kv.Value, kv.ModRevision)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func requirePresent(t *testing.T, store *memory.Store, r *mirror.Resource) {
	t.Helper()
	if got, want := read(latest(t, r)), present(t, store, r.Prefix()); !maps.Equal(got, want) {
		t.Fatalf("%s: %s", r.Prefix(), diff(got, want))
	}
}

// check checks a resource and returns the keys that differ.
func check(t *testing.T, r *mirror.Resource) []string {
	t.Helper()
	c, err := r.Check(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, d := range c.Differences {
		keys = append(keys, fmt.Sprintf("%s %d %d", d.Key, d.Cached, d.Etcd))
	}
	if c.Count != len(keys) || len(keys) > 0 && !c.Repaired {
		t.Fatalf("%d differences, reported %v, repaired %t", c.Count, keys, c.Repaired)
	}
	return keys
}

// TestSource_CountsWrites_ArrivalIsChecked: of keys from a list and from events.
func TestSource_CountsWrites_ArrivalIsChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/x", "1")
		m := start(t, store, nil)
		a := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), a)
		store.Put("/registry/a/x", "2")
		store.Put("/registry/a/y", "1")
		reach(t, m, store.Revision(), a)
		if !m.VerifiesVersions() {
			t.Error("the arrival of writes is not checked")
		}
	})
}

// TestCheck_SourceWithoutVersions_FindsLostWrites: without a Version the arrival check covers no
// write, from a list or from an event, and a check finds lost writes.
func TestCheck_SourceWithoutVersions_FindsLostWrites(t *testing.T) {
	for _, listed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			store := memory.New()
			store.CountNoWrites()
			if listed {
				store.Put("/registry/a/x", "1")
				store.Put("/registry/a/x", "2")
			}
			m := start(t, store, nil)
			a := claim(t, m, "/registry/a/")
			reach(t, m, store.Revision(), a)
			if m.VerifiesVersions() == listed {
				t.Errorf("arrival is checked: %t, with a key listed: %t", m.VerifiesVersions(), listed)
			}
			for i := range 3 {
				store.Put("/registry/a/x", fmt.Sprint(i))
				store.Put("/registry/a/y", fmt.Sprint(i))
				store.Delete("/registry/a/y")
			}
			reach(t, m, store.Revision(), a)
			requirePresent(t, store, a)
			lose(t, m, store, memory.Op{Key: "/registry/a/x", Value: "lost"}, memory.Op{Key: "/registry/a/z", Value: "lost"})
			lost := store.Revision()
			store.Put("/registry/a/z", "seen")
			reach(t, m, store.Revision())
			if st := m.Stats(); st.Divergences != 0 || m.VerifiesVersions() {
				t.Errorf("%d divergences, arrival is checked: %t", st.Divergences, m.VerifiesVersions())
			}
			if got := check(t, a); len(got) != 1 || !strings.HasSuffix(got[0], fmt.Sprintf(" %d", lost)) {
				t.Errorf("differ: %v, want the key that was not written again", got)
			}
			requirePresent(t, store, a)
		})
	}
}

// TestCheck_LostEvents_AreFoundAndRepaired: a creation, an update, a deletion and a recreated key
// whose events were lost. Only these keys are read again, only watchers that received them have to
// start over, and other resources are not affected.
func TestCheck_LostEvents_AreFoundAndRepaired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		for i := range 20 {
			store.Put(fmt.Sprintf("/registry/a/%02d", i), "v")
			store.Put(fmt.Sprintf("/registry/b/%02d", i), "v")
		}
		keys, values := 0, map[string]int{}
		source := &counted{script: script{Source: store}, keys: &keys, values: values}
		m := start(t, source, nil)
		a, b := claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/")
		reach(t, m, store.Revision(), a, b)
		if got := check(t, a); got != nil || a.Inconsistent() {
			t.Fatalf("differences without a lost event: %v", got)
		}
		followers := map[*mirror.Resource]*mirror.Cursor{}
		for _, r := range []*mirror.Resource{a, b} {
			followers[r] = latest(t, r).Cursor("", "")
		}
		lose(t, m, store, memory.Op{Key: "/registry/a/001", Value: "new"}, memory.Op{Key: "/registry/a/07", Value: "w"},
			memory.Op{Key: "/registry/a/19", Delete: true}, memory.Op{Key: "/registry/a/zz", Value: "last"})
		lost := store.Revision()
		store.Put("/registry/b/later", "v")
		store.Put("/registry/a/10", "seen")
		reach(t, m, store.Revision())
		old := latest(t, a)
		oldest, _, err := a.Oldest()
		if err != nil || oldest >= lost {
			t.Fatalf("oldest revision is %d, %v", oldest, err)
		}
		keys = 0
		clear(values)
		bytes := func() int64 { return a.Stats().Bytes }
		want := []string{fmt.Sprintf("/registry/a/001 0 %d", lost), fmt.Sprintf("/registry/a/07 %d %d", modOf(old, "/registry/a/07"), lost),
			fmt.Sprintf("/registry/a/19 %d 0", modOf(old, "/registry/a/19")), fmt.Sprintf("/registry/a/zz 0 %d", lost)}
		if got := check(t, a); !slices.Equal(got, want) {
			t.Fatalf("differ %v, want %v", got, want)
		}
		if keys != 21 || len(values) != 3 || values["/registry/a/19"] != 0 {
			t.Errorf("read %d keys and the values of %v, want 21 keys and the stored values of the keys that differ", keys, values)
		}
		requirePresent(t, store, a)
		if want := int64(len("v")*17 + len("new") + len("w") + len("seen") + len("last")); bytes() != want {
			t.Errorf("%d bytes are held, want %d", bytes(), want)
		}
		if !a.Inconsistent() || b.Inconsistent() || m.Stats().Repairs != 1 || m.Stats().Divergences != 0 {
			t.Errorf("inconsistent: %t and %t, %+v", a.Inconsistent(), b.Inconsistent(), m.Stats())
		}
		if oldest, floor, err := a.Oldest(); err != nil || oldest != m.PublishedRevision() || floor != m.PublishedRevision() {
			t.Errorf("oldest revision %d, floor %d, %v; want the published revision %d", oldest, floor, err, m.PublishedRevision())
		} else if all := m.Stats().HistoryFloor; all != floor {
			t.Errorf("floor of all histories %d, want that of the repaired resource, %d", all, floor)
		}
		if _, err := followers[a].Next(nil, 100); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("the cursor did not end: %v", err)
		}
		if evs, err := followers[b].Next(nil, 100); err != nil || len(evs) != 1 {
			t.Errorf("a cursor on another resource: %d events, %v", len(evs), err)
		}
		barrier(t, m)
		if got := check(t, a); got != nil || a.Inconsistent() {
			t.Fatalf("after the repair differ %v, inconsistent: %t", got, a.Inconsistent())
		}
		// Later events follow the repaired keys.
		for _, k := range []string{"001", "07", "19", "zz"} {
			store.Put("/registry/a/"+k, "next")
		}
		reach(t, m, store.Revision())
		requirePresent(t, store, a)
		if st := m.Stats(); st.Divergences != 0 {
			t.Errorf("%+v", st)
		}
		barrier(t, m)
	})
}

// TestClaim_InsideInconsistentResource_IsInconsistent: a prefix that is claimed inside a
// inconsistent resource takes over its history, and is inconsistent until its own check finds no
// difference.
func TestClaim_InsideInconsistentResource_IsInconsistent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/inner/1", "v")
		m := start(t, store, nil)
		outer := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), outer)
		lose(t, m, store, memory.Op{Key: "/registry/a/inner/2", Value: "lost"})
		if got := check(t, outer); len(got) != 1 || !outer.Inconsistent() {
			t.Fatalf("differ %v, inconsistent: %t", got, outer.Inconsistent())
		}
		inner := claim(t, m, "/registry/a/inner/")
		reach(t, m, store.Revision(), inner)
		barrier(t, m)
		if !inner.Inconsistent() || !outer.Inconsistent() {
			t.Errorf("after the claim inconsistent: inside %t, around it %t", inner.Inconsistent(), outer.Inconsistent())
		}
		if got := check(t, inner); got != nil || inner.Inconsistent() || !outer.Inconsistent() {
			t.Errorf("inside differ %v, inconsistent: %t; around it %t", got, inner.Inconsistent(), outer.Inconsistent())
		}
	})
}

func modOf(s mirror.Snapshot, key string) mirror.Revision {
	e, _ := s.Get(key)
	return e.ModRevision()
}

// counted counts the requested keys without values and with values.
type counted struct {
	script
	keys   *int
	values map[string]int
}

func (c *counted) Keys(ctx context.Context, prefix string, at mirror.Revision, most func(string) int, page func([]driver.KV) error) (driver.Header, error) {
	return c.Source.Keys(ctx, prefix, at, most, func(kvs []driver.KV) error {
		for _, kv := range kvs {
			if kv.Value != nil {
				return errors.New("a value was sent")
			}
		}
		*c.keys += len(kvs)
		return page(kvs)
	})
}

func (c *counted) GetAll(ctx context.Context, keys []string, at mirror.Revision, found func(driver.KV) error) error {
	for _, key := range keys {
		c.values[key]++
	}
	return c.Source.GetAll(ctx, keys, at, found)
}

// TestCheck_CallsEachForEveryKey: each is called for all of etcd's keys, except for those of
// resources inside, which are no differences either.
func TestCheck_CallsEachForEveryKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		var want []string
		for i := range 25 {
			want = append(want, fmt.Sprintf("/registry/a/%02d %d", i, store.Put(fmt.Sprintf("/registry/a/%02d", i), "v")))
			store.Put(fmt.Sprintf("/registry/a/11/%d", i), "v")
		}
		m := start(t, store, nil)
		outer, inner := claim(t, m, "/registry/a/"), claim(t, m, "/registry/a/11/")
		reach(t, m, store.Revision(), outer, inner)
		var got []string
		c, err := outer.Check(context.Background(), func(key []byte, mod mirror.Revision) { got = append(got, fmt.Sprintf("%s %d", key, mod)) })
		if err != nil || c.Count != 0 || !slices.Equal(got, want) {
			t.Errorf("Check visited %v, want %v; %+v, %v", got, want, c, err)
		}
		if got := check(t, inner); got != nil {
			t.Errorf("inside differ %v", got)
		}
	})
}

// TestCheck_LineageChanges_ReturnsError: concurrent changes of a resource's lineage end a check
// with an error, and are never reported as a difference.
func TestCheck_LineageChanges_ReturnsError(t *testing.T) {
	lists := func(store *memory.Store) *script { return &script{Source: store} }
	for _, c := range []struct {
		name string
		want error
		when func(store *memory.Store, m *mirror.Mirror, r *mirror.Resource) // after the first page
	}{
		{"compacted", mirror.ErrCompacted, func(store *memory.Store, m *mirror.Mirror, _ *mirror.Resource) {
			store.Put("/registry/b/x", "v")
			store.Compact(store.Revision())
		}},
		{"restored", mirror.ErrRestored, func(store *memory.Store, m *mirror.Mirror, _ *mirror.Resource) {
			store.Restore(3, map[string]string{"/registry/a/1": "other"})
		}},
		{"overtaken", mirror.ErrSuperseded, func(store *memory.Store, m *mirror.Mirror, r *mirror.Resource) {
			r.Release() // and claimed again: another lineage
			_ = m.Check()
			_, _ = m.Claim("/registry/a/")
			_ = m.Check()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				for i := range 30 {
					store.Put(fmt.Sprintf("/registry/a/%02d", i), "v")
				}
				source := &interrupted{script: lists(store)}
				m := start(t, source, nil)
				r := claim(t, m, "/registry/a/")
				reach(t, m, store.Revision(), r)
				source.between = func() { c.when(store, m, r) }
				check, err := r.Check(context.Background(), nil)
				if !errors.Is(err, c.want) {
					t.Errorf("%+v, %v, want %v", check, err, c.want)
				}
				if m.Stats().Repairs != 0 {
					t.Error("Check repaired the resource")
				}
			})
		})
	}
	t.Run("not ready", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			store := memory.New()
			store.FailLists(errors.New("no"))
			m := start(t, store, nil)
			if _, err := claim(t, m, "/registry/a/").Check(context.Background(), nil); !errors.Is(err, mirror.ErrNotReady) {
				t.Errorf("error %v", err)
			}
		})
	})
}

// interrupted calls a function between the first and the second page.
type interrupted struct {
	*script
	between func()
}

func (s *interrupted) Keys(ctx context.Context, prefix string, at mirror.Revision, most func(string) int, page func([]driver.KV) error) (driver.Header, error) {
	all, n := []driver.KV{}, 0
	if _, err := s.Source.Keys(ctx, prefix, at, most, func(kvs []driver.KV) error { all = append(all, kvs...); return nil }); err != nil {
		return driver.Header{}, err
	}
	n = len(all) / 2
	if err := page(all[:n:n]); err != nil {
		return driver.Header{}, err
	}
	s.between()
	header, err := s.Source.Keys(ctx, prefix, at, most, func([]driver.KV) error { return nil })
	if err != nil {
		return driver.Header{}, err
	}
	return header, page(all[n:])
}

// TestCheck_RepairImpossible_RelistsResource: the resource is relisted if there are more keys than
// are read one by one, or if etcd does not return the value of a key.
func TestCheck_RepairImpossible_RelistsResource(t *testing.T) {
	for _, many := range []bool{true, false} {
		t.Run(fmt.Sprintf("many=%t", many), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				store.Put("/registry/a/first", "v")
				source := &unreadable{script{Source: store}}
				m := start(t, source, nil)
				r := claim(t, m, "/registry/a/")
				reach(t, m, store.Revision(), r)
				ops := []memory.Op{{Key: "/registry/a/unreadable", Value: "v"}}
				for i := range 1000 {
					if many {
						ops = append(ops, memory.Op{Key: fmt.Sprintf("/registry/a/%04d", i), Value: "v"})
					}
				}
				lose(t, m, store, ops...)
				c, err := r.Check(context.Background(), nil)
				if err != nil || c.Count != len(ops) || len(c.Differences) != min(1000, len(ops)) || c.Repaired {
					t.Fatalf("%d of %d differences, repaired %t, %v", len(c.Differences), c.Count, c.Repaired, err)
				}
				reach(t, m, store.Revision(), r)
				requirePresent(t, store, r)
				if st := m.Stats(); st.Divergences != 1 || st.Repairs != 0 {
					t.Errorf("%+v", st)
				}
				barrier(t, m)
				if !r.Inconsistent() {
					t.Error("the relisted resource is not inconsistent")
				}
				if got := check(t, r); got != nil || r.Inconsistent() {
					t.Errorf("after the list differ %v, inconsistent: %t", got, r.Inconsistent())
				}

				// A restored history does not reach back to the lost event either.
				wrong := store.Revision() - 1
				r.Release()
				barrier(t, m)
				if _, err := m.Exclude("/registry/a/"); err != nil {
					t.Fatal(err)
				}
				barrier(t, m)
				reached, _, err := again(t, m, store).Oldest()
				if err != nil || reached <= wrong {
					t.Errorf("history reaches back to %d, which is not after %d: %v", reached, wrong, err)
				}
			})
		})
	}
}

// again claims a resource that was excluded, so that it is loaded with its history.
func again(t *testing.T, m *mirror.Mirror, store *memory.Store) *mirror.Resource {
	t.Helper()
	for _, r := range m.Resources() {
		r.Release()
	}
	barrier(t, m)
	r := claim(t, m, "/registry/a/")
	reach(t, m, store.Revision(), r)
	return r
}

// unreadable is a source that does not return the value of a single key.
type unreadable struct{ script }

func (u *unreadable) GetAll(context.Context, []string, mirror.Revision, func(driver.KV) error) error {
	return errors.New("no")
}

// TestRepair_KeyChangesMeanwhile_EqualsEtcd: an event of the key arrives between the comparison and
// the repair. In either order, the cache ends up equal to etcd.
func TestRepair_KeyChangesMeanwhile_EqualsEtcd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/k", "v")
		source := &during{script: script{Source: store}}
		m := start(t, source, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		lose(t, m, store, memory.Op{Key: "/registry/a/k", Delete: true})
		source.get = func() {
			rev := store.Put("/registry/a/k", "again")
			if err := m.Wait(context.Background(), rev); err != nil {
				t.Error(err)
			}
		}
		lose(t, m, store, memory.Op{Key: "/registry/a/other", Value: "v"})
		if _, err := r.Check(context.Background(), nil); err != nil && !errors.Is(err, mirror.ErrSuperseded) {
			t.Fatal(err)
		}
		reach(t, m, store.Revision(), r)
		requirePresent(t, store, r)
		barrier(t, m)
	})
}

// TestRepair_KeyCreatedAndDeletedMeanwhile_StaysDeleted: memory lacked a key when the check read
// it, and has received and deleted it before the repair. The store counts no writes, so the arrival
// check covers none of these events. In one case the window has dropped them.
func TestRepair_KeyCreatedAndDeletedMeanwhile_StaysDeleted(t *testing.T) {
	for _, dropped := range []bool{false, true} {
		t.Run(fmt.Sprintf("dropped=%t", dropped), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				store.CountNoWrites()
				source := &during{script: script{Source: store}}
				m := start(t, source, func(o *mirror.Options) { o.Window.MaxBytes = 1000 })
				r := claim(t, m, "/registry/a/")
				reach(t, m, store.Revision(), r)
				lose(t, m, store, memory.Op{Key: "/registry/a/x", Value: "lost"})
				source.get = func() {
					store.Put("/registry/a/x", "seen")
					deleted := store.Delete("/registry/a/x")
					for i := 0; dropped && i < 10; i++ {
						store.Put("/registry/a/other", strings.Repeat("v", 500))
						if err := m.Wait(context.Background(), store.Revision()); err != nil {
							t.Error(err)
						}
					}
					if err := m.Wait(context.Background(), store.Revision()); err != nil {
						t.Error(err)
					}
					barrier(t, m)
					if _, floor, err := r.Oldest(); err != nil || (floor >= deleted) != dropped {
						t.Errorf("the floor is %d, %v; the key was deleted at %d", floor, err, deleted)
					}
				}
				c, err := r.Check(context.Background(), nil)
				if err != nil {
					t.Fatal(err)
				}
				if c.Count != 1 || c.Repaired {
					t.Errorf("%d differences, repaired %t; want 1, and a list", c.Count, c.Repaired)
				}
				reach(t, m, store.Revision(), r)
				requirePresent(t, store, r)
				barrier(t, m)
			})
		})
	}
}

type during struct {
	script
	get func()
}

func (d *during) GetAll(ctx context.Context, keys []string, at mirror.Revision, found func(driver.KV) error) error {
	if d.get != nil {
		d.get()
	}
	return d.Source.GetAll(ctx, keys, at, found)
}

// TestCheck_TwoResourcesDiffer_RelistsAll: one lost event concerns one resource. Two resources
// that differ are the sign of a wider problem, such as an etcd that was restored to an older state
// and written to since.
func TestCheck_TwoResourcesDiffer_RelistsAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		for i := range 10 {
			store.Put(fmt.Sprintf("/registry/%c/%d", 'a'+i%3, i), "v")
		}
		m := start(t, store, presentOnly)
		a, b, c := claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/"), claim(t, m, "/registry/c/")
		reach(t, m, store.Revision(), a, b, c)
		lose(t, m, store, memory.Op{Key: "/registry/a/0", Delete: true}, memory.Op{Key: "/registry/b/1", Value: "w"},
			memory.Op{Key: "/registry/c/2", Value: "w"})
		for _, r := range []*mirror.Resource{a, b} {
			if len(check(t, r)) == 0 {
				t.Fatalf("%s does not differ", r.Prefix())
			}
		}
		// With the next event of the feed, the mirror relists.
		store.Put("/registry/d/x", "v")
		for m.Stats().Relists == 0 {
			time.Sleep(time.Second)
		}
		reach(t, m, store.Revision(), a, b, c)
		for _, r := range []*mirror.Resource{a, b, c} {
			requirePresent(t, store, r)
		}
	})
}

// TestCheck_PagesOfKeys_AreBounded: the values of a page's keys take at most 8 MiB.
func TestCheck_PagesOfKeys_AreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		for i := range 30 {
			size := 10
			if i >= 10 && i < 20 {
				size = 3 << 20
			}
			store.Put(fmt.Sprintf("/registry/a/%02d", i), strings.Repeat("x", size))
		}
		source := &sized{script: script{Source: store}}
		m := start(t, source, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		if got := check(t, r); got != nil {
			t.Fatalf("differ %v", got)
		}
		// Ten small and two large ones, then two at a time, then the rest, of which the source may
		// have more.
		if want := []int{12, 2, 2, 2, 12}; !slices.Equal(source.pages, want) {
			t.Errorf("pages of %v, want %v", source.pages, want)
		}
	})
}

type sized struct {
	script
	pages []int
}

func (s *sized) Keys(ctx context.Context, prefix string, at mirror.Revision, most func(string) int, page func([]driver.KV) error) (driver.Header, error) {
	return s.Source.Keys(ctx, prefix, at, most, func(kvs []driver.KV) error {
		s.pages = append(s.pages, len(kvs))
		return page(kvs)
	})
}
