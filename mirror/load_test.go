package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// requireHistory compares a resource with the model at every revision from its floor on: its
// snapshots, and the events of a cursor.
func requireHistory(t *rapid.T, r *mirror.Resource, now mirror.Revision, want func(mirror.Revision, string) state) (floor mirror.Revision) {
	oldest, floor, err := r.Oldest()
	testcheck.NoError(t, err)
	if oldest < floor {
		t.Fatalf("%s: oldest version %d, floor %d", r.Prefix(), oldest, floor)
	}
	for rev := oldest; rev <= now; rev++ {
		s, err := r.At(rev)
		if err != nil {
			t.Fatalf("%s at %d: %v", r.Prefix(), rev, err)
		}
		if got, want := read(s), want(rev, r.Prefix()); !maps.Equal(got, want) {
			t.Fatalf("%s at %d:%s", r.Prefix(), rev, diff(got, want))
		}
	}
	for rev := floor; rev <= now; rev++ {
		c, err := r.CursorAfter(rev, "", "")
		if err != nil {
			t.Fatalf("cursor on %s after %d: %v", r.Prefix(), rev, err)
		}
		f := &follower{prefix: r.Prefix(), cur: c, held: want(rev, r.Prefix())}
		testcheck.NoError(t, f.drain(t, want, 3))
	}
	return floor
}

// restoredMirror is a mirror that loads a store with a past. All random choices are drawn from t.
type restoredMirror struct {
	t         *rapid.T
	model     *model
	compacted mirror.Revision

	m      *mirror.Mirror // nil until it is created
	claims map[string]*mirror.Resource

	// Writes, compactions and claims during the load, between its pages and batches. The goroutine
	// that has the turn draws.
	turn chan struct{}
	left int // the number of remaining ones
}

// write writes to some of the resources, or to none, in one transaction.
func (x *restoredMirror) write() {
	var ops []memory.Op
	for range rapid.IntRange(1, 4).Draw(x.t, "ops") {
		key := rapid.SampledFrom([]string{"/registry/a/", "/registry/b/", "/registry/b/inner/", "/registry/c/", "/elsewhere/"}).Draw(x.t, "prefix") +
			rapid.SampledFrom([]string{"1", "2", "3"}).Draw(x.t, "name")
		ops = append(ops, memory.Op{Key: key, Value: rapid.StringN(1, 9, 9).Draw(x.t, "value"), Delete: rapid.IntRange(0, 3).Draw(x.t, "delete") == 0})
	}
	seen := map[string]bool{}
	for i := 0; i < len(ops); i++ { // etcd allows a key only once in a transaction
		if seen[ops[i].Key] {
			ops = append(ops[:i], ops[i+1:]...)
			i--
			continue
		}
		seen[ops[i].Key] = true
	}
	x.model.txn(ops...)
}

func (x *restoredMirror) compact() {
	x.compacted = rapid.Int64Range(x.compacted, x.model.store.Revision()).Draw(x.t, "compact")
	x.model.store.Compact(x.compacted)
}

func (x *restoredMirror) claim() {
	prefix := rapid.SampledFrom([]string{"/registry/a/", "/registry/b/", "/registry/b/inner/", "/registry/c/"}).Draw(x.t, "claim")
	if x.claims[prefix] == nil {
		r, err := x.m.Claim(prefix)
		testcheck.NoError(x.t, err)
		x.claims[prefix] = r
	}
}

// beside writes, compacts or claims, while there are operations left.
func (x *restoredMirror) beside() {
	x.turn <- struct{}{}
	defer func() { <-x.turn }()
	if x.left--; x.left < 0 || x.m == nil {
		return
	}
	switch rapid.IntRange(0, 3).Draw(x.t, "do") {
	case 0, 1:
		x.write()
	case 2:
		x.compact()
	case 3:
		x.claim()
	}
}

// source returns the store, with an operation next to each page of a list and each batch of
// history.
func (x *restoredMirror) source() driver.Source {
	store := x.model.store
	return &script{Source: store,
		list: func(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
			return store.List(ctx, prefix, at, func(kvs []driver.KV) error {
				time.Sleep(7 * time.Millisecond)
				x.beside()
				return page(kvs)
			})
		},
		replay: func(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
			return store.Replay(ctx, prefix, after, through, func(b driver.Batch) error {
				time.Sleep(11130 * time.Microsecond) // unlike all other intervals
				x.beside()
				return deliver(b)
			})
		},
	}
}

// load creates the mirror and returns when it has caught up with the store. Claims are made before
// and after the load, and writes after it.
func (x *restoredMirror) load(ctx context.Context, opts mirror.Options) {
	x.turn <- struct{}{}
	var err error
	if x.m, err = mirror.New(opts); err != nil {
		x.t.Fatal(err)
	}
	for range rapid.IntRange(0, 3).Draw(x.t, "early claims") {
		x.claim()
	}
	<-x.turn
	if err := x.m.Wait(ctx, x.model.store.Revision()); err != nil {
		x.t.Fatalf("published revision is %d, want %d: %v", x.m.PublishedRevision(), x.model.store.Revision(), err)
	}
	x.turn <- struct{}{}
	for range rapid.IntRange(1, 3).Draw(x.t, "late claims") {
		x.claim()
	}
	for range rapid.IntRange(0, 5).Draw(x.t, "future") {
		x.write()
	}
	x.left = 0
	<-x.turn
	testcheck.NoError(x.t, x.m.Wait(ctx, x.model.store.Revision()))
}

// want is the model's state of a resource, without the keys of a resource that is claimed inside
// it.
func (x *restoredMirror) want(rev mirror.Revision, prefix string) state {
	w := x.model.want(rev, prefix)
	maps.DeleteFunc(w, func(k, _ string) bool {
		return x.claims["/registry/b/inner/"] != nil && prefix == "/registry/b/" && len(k) > len("/registry/b/inner")
	})
	return w
}

// check checks the mirror's invariants.
func (x *restoredMirror) check() {
	testcheck.NoError(x.t, x.m.Check())
}

// settle returns when all claims are loaded and the window is trimmed.
func (x *restoredMirror) settle(ctx context.Context) {
	x.check() // and all claims have been executed
	for _, r := range x.claims {
		testcheck.NoError(x.t, r.WaitReady(ctx))
		waitHistory(ctx, x.t, r)
	}
	x.m.Weigh()
	x.check() // and the window has been trimmed
}

// TestLoad_RestoredHistory_EqualsModel starts mirrors on stores with a history, during writes,
// compactions and claims, and compares all reads with the model.
func TestLoad_RestoredHistory_EqualsModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(bubble{t}, func(t *rapid.T) {
			x := &restoredMirror{t: t, model: newModel(), claims: map[string]*mirror.Resource{}, turn: make(chan struct{}, 1)}
			for range rapid.IntRange(0, 40).Draw(t, "past") {
				x.write()
			}
			if rapid.Bool().Draw(t, "compacted") {
				x.compact()
			}
			x.left = rapid.IntRange(0, 12).Draw(t, "beside")
			began := x.model.store.Revision()
			bounds := driver.ReplayBounds{Revisions: rapid.Int64Range(1, 60).Draw(t, "revisions"), Bytes: 1 << 20}
			unclaimed := rapid.SampledFrom([]int64{1, 100, math.MaxInt64}).Draw(t, "unclaimed")
			window := rapid.SampledFrom([]int64{400, 1 << 20}).Draw(t, "window")
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			defer func() {
				if x.m != nil {
					x.m.Close()
				}
			}()
			x.load(ctx, mirror.Options{Prefix: root, Source: x.source(), Logger: quiet(), Replay: bounds,
				Window: mirror.Window{MaxBytes: window, MaxAge: time.Hour}, UnclaimedBytes: unclaimed,
				CheckpointEvents: rapid.IntRange(1, 9).Draw(t, "checkpoint")})
			x.settle(ctx)
			for _, r := range x.claims {
				floor := requireHistory(t, r, x.m.PublishedRevision(), x.want)
				if wanted := max(1, x.compacted, began-bounds.Revisions); window > 1<<19 && unclaimed > 1<<19 && x.compacted <= wanted && wanted < began && floor > wanted {
					t.Fatalf("%s: history reaches back to %d, want %d", r.Prefix(), floor, wanted)
				}
			}
			x.check()
			if d := x.m.Stats().Divergences; d != 0 {
				t.Fatalf("%d divergences", d)
			}
		})
	})
}

// past returns a model with a history: every key of the prefixes was written several times.
func past(prefixes ...string) *model {
	md := newModel()
	for n := range 5 {
		for _, p := range prefixes {
			put(md, p, fmt.Sprint(n), 4)
		}
	}
	return md
}

func requireFloor(t *testing.T, r *mirror.Resource, want mirror.Revision) {
	t.Helper()
	if oldest, floor, err := r.Oldest(); err != nil || oldest != want || floor != want {
		t.Errorf("%s: oldest %d, floor %d, %v; want %d", r.Prefix(), oldest, floor, err, want)
	}
}

// TestLoad_ReplayBounds_LimitHistory: restored history ends at the bounds, and at the revision that
// etcd was compacted to.
func TestLoad_ReplayBounds_LimitHistory(t *testing.T) {
	md := past("/registry/a/", "/registry/b/")
	newest := md.store.Revision()
	md.store.Compact(5)
	for name, c := range map[string]struct {
		bounds driver.ReplayBounds
		want   mirror.Revision
	}{
		"by compaction": {driver.ReplayBounds{}, 5},
		"by revisions":  {driver.ReplayBounds{Revisions: 10}, newest - 10},
		"by bytes":      {driver.ReplayBounds{Bytes: 3 * int64(len("/registry/a/0")+len("4"))}, newest - 3},
		"none":          {driver.ReplayBounds{Revisions: -1}, newest},
		"no bytes":      {driver.ReplayBounds{Bytes: -1}, newest},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := start(t, md.store, func(o *mirror.Options) { o.Replay = c.bounds })
				r := claim(t, m, "/registry/a/")
				reach(t, m, newest, r)
				requireFloor(t, r, c.want)
				requireState(t, latest(t, r), md, "/registry/a/")
				barrier(t, m)
			})
		})
	}
}

// TestLoad_CompactedMeanwhile_RetriesFromNewFloor: history that is compacted during its list or
// replay is read again from the new floor.
func TestLoad_CompactedMeanwhile_RetriesFromNewFloor(t *testing.T) {
	for during, floor := range map[string]mirror.Revision{"list": 10, "replay": 30} {
		// there is one list, and a replay for each attempt
		t.Run(during, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				md := past("/registry/a/", "/registry/b/")
				store := md.store
				compactions, begin := 0, make(chan struct{})
				compact := func(on string) {
					<-begin
					if on == during && compactions < 3 {
						compactions++
						store.Compact(mirror.Revision(10 * compactions))
					}
				}
				source := &script{Source: store,
					list: func(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
						compact("list")
						return store.List(ctx, prefix, at, page)
					},
					replay: func(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
						return store.Replay(ctx, prefix, after, through, func(b driver.Batch) error {
							compact("replay")
							return deliver(b)
						})
					},
				}
				m := start(t, source, nil)
				r := claim(t, m, "/registry/a/")
				if !m.Loading() {
					t.Error("the list is not being read")
				}
				close(begin)
				reach(t, m, store.Revision(), r)
				requireFloor(t, r, floor)
				synctest.Wait()
				if m.Loading() || m.Stats().Restoring != 0 {
					t.Error("history is still being restored")
				}
				if st := m.Stats(); st.Replays != 1 || st.ReplayFloor != floor || st.Relists != 0 {
					t.Errorf("%+v", st)
				}
			})
		})
	}
}

// TestLoad_ReplayFails_ServesNewestRevision: after a failed replay the newest revision is served
// without history.
func TestLoad_ReplayFails_ServesNewestRevision(t *testing.T) {
	hangs := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	fails := func(context.Context) error { return errors.New("broken") }
	for name, f := range map[string]func(context.Context) error{"it fails": fails, "it hangs": hangs} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				md := past("/registry/a/")
				m := start(t, &script{Source: md.store,
					replay: func(ctx context.Context, _ string, _ driver.Header, _ mirror.Revision, _ func(driver.Batch) error) error {
						return f(ctx)
					}}, nil)
				r := claim(t, m, "/registry/a/")
				reach(t, m, md.store.Revision(), r)
				requireFloor(t, r, md.store.Revision())
				requireState(t, latest(t, r), md, "/registry/a/")
			})
		})
	}
}

// TestLoad_RestoredEtcd_HasNoHistory: etcd's history before a restore differs from the events that
// clients have received, so it is not restored.
func TestLoad_RestoredEtcd_HasNoHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := past("/registry/a/")
		store := md.store
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		requireFloor(t, r, 1)
		cursor := latest(t, r).Cursor("", "")
		store.Restore(10, map[string]string{"/registry/a/a": "backup"})
		store.Put("/registry/a/b", "new")
		synctest.Wait()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		requireFloor(t, r, 11)
		if _, err := cursor.Next(nil, 1); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("a cursor of the time before: %v", err)
		}
		if st := m.Stats(); st.EtcdRestores != 1 {
			t.Errorf("%d restores of etcd, want 1", st.EtcdRestores)
		}
		barrier(t, m)
	})
}

// TestLoad_ReplayContradictsList_StartsWithoutHistory: a resource whose replay contradicts the list
// begins without history; the others keep theirs.
func TestLoad_ReplayContradictsList_StartsWithoutHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := past("/registry/a/", "/registry/b/")
		store := md.store
		store.Compact(20)
		lost, claimed := false, make(chan struct{})
		m := start(t, &script{Source: store,
			list: func(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
				<-claimed
				return store.List(ctx, prefix, at, page)
			},
			replay: func(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
				return store.Replay(ctx, prefix, after, through, func(b driver.Batch) error {
					for i := range b.Changes {
						if !lost && string(b.Changes[i].Key) == "/registry/a/c" {
							lost = true
							b.Changes = append(b.Changes[:i], b.Changes[i+1:]...)
							break
						}
					}
					return deliver(b)
				})
			}}, nil)
		a, b := claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/")
		synctest.Wait()
		close(claimed)
		reach(t, m, store.Revision(), a, b)
		requireFloor(t, a, store.Revision())
		requireFloor(t, b, 20)
		requireState(t, latest(t, a), md, "/registry/a/")
		barrier(t, m)
	})
}

// TestLateClaim_HasHistoryBeforeStart: a resource that is claimed long after the start, and whose
// values were not stored, can be read at revisions before the start.
func TestLateClaim_HasHistoryBeforeStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := past("/registry/a/", "/registry/b/")
		store := md.store
		store.Compact(8)
		m := start(t, store, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
		reach(t, m, store.Revision())
		put(md, "/registry/a/", "after the start", 4)
		reach(t, m, store.Revision())
		a := claim(t, m, "/registry/a/")
		put(md, "/registry/a/", "after the claim", 2)
		reach(t, m, store.Revision(), a)
		requireFloor(t, a, 8)
		for rev := mirror.Revision(8); rev <= m.PublishedRevision(); rev++ {
			s, err := a.At(rev)
			testcheck.NoError(t, err)
			requireState(t, s, md, "/registry/a/")
		}
		barrier(t, m)
	})
}

// TestRestoredHistory_StaysWithinMaxBytes: restored events count as history, and the restored
// history is as large as the window allows (I7).
func TestRestoredHistory_StaysWithinMaxBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		for n := range 3000 {
			md.txn(memory.Op{Key: fmt.Sprintf("/registry/a/%d", n%7), Value: fmt.Sprintf("%01000d", n)})
		}
		const limit = 2 << 20
		m := start(t, md.store, func(o *mirror.Options) { o.Window.MaxBytes = limit })
		r := claim(t, m, "/registry/a/")
		reach(t, m, md.store.Revision(), r)
		barrier(t, m) // updates the counters
		oldest, floor, err := r.Oldest()
		testcheck.NoError(t, err)
		kept := md.store.Revision() - floor
		if oldest != floor || kept < 800 || kept > limit/1000 {
			t.Errorf("%d readable revisions, oldest %d, floor %d", kept, oldest, floor)
		}
		time.Sleep(2 * time.Hour)
		if _, floor, _ := r.Oldest(); floor < md.store.Revision()-1 {
			t.Errorf("after the window's time history reaches back to %d", floor)
		}
		barrier(t, m)
	})
}

// TestRestoredHistory_MaxAge_CountsFromRestore: the age of restored history counts from the
// restore.
func TestRestoredHistory_MaxAge_CountsFromRestore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		put(md, "/registry/a/", "before", 100)
		time.Sleep(3 * time.Hour)
		m := start(t, md.store, func(o *mirror.Options) { o.Window.MaxAge = time.Hour })
		a := claim(t, m, "/registry/a/")
		reach(t, m, md.store.Revision(), a)
		restored := md.store.Revision() - 90
		floor := func() mirror.Revision {
			t.Helper()
			barrier(t, m)
			_, floor, err := a.Oldest()
			testcheck.NoError(t, err)
			return floor
		}
		time.Sleep(50 * time.Minute)
		put(md, "/registry/a/", "after", 10)
		reach(t, m, md.store.Revision())
		if f := floor(); f > restored {
			t.Errorf("after 50 minutes the floor is %d, want %d", f, restored)
		}
		time.Sleep(20 * time.Minute)
		if f := floor(); f < restored+90 || f > md.store.Revision()-10 {
			t.Errorf("after 70 minutes the floor is %d, want at least %d, which was written after the start", f, restored+90)
		}
	})
}

// TestLateClaim_AfterEtcdRestore_HasNoOlderHistory: a resource that is claimed after etcd was
// restored, or has contradicted itself, has no history from before either.
func TestLateClaim_AfterEtcdRestore_HasNoOlderHistory(t *testing.T) {
	for _, how := range []string{"restored", "rewritten"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				m := start(t, store, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
				a, b := claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/")
				all := func(what string, n int) {
					for i := range n {
						for _, prefix := range []string{"/registry/a/", "/registry/b/", "/registry/late/"} {
							store.Put(prefix+"k", fmt.Sprint(what, i))
						}
					}
				}
				all("lost", 20)
				reach(t, m, store.Revision(), a, b)
				lost := m.PublishedRevision()
				if how == "restored" {
					store.Restore(5, map[string]string{"/registry/late/k": "backup"})
					synctest.Wait()
					time.Sleep(10 * time.Second)
					all("new", 30)
				} else {
					store.Stall(true)
					store.Rewrite(5, map[string]string{"/registry/late/k": "backup"})
					all("new", 60)
					store.Stall(false)
				}
				time.Sleep(20 * time.Second)
				reach(t, m, store.Revision(), a, b)
				late := claim(t, m, "/registry/late/")
				reach(t, m, store.Revision(), late)
				_, floor, err := late.Oldest()
				if _, wanted, _ := a.Oldest(); err != nil || floor < wanted {
					t.Errorf("history reaches back to %d, %v; that of others to %d", floor, err, wanted)
				}
				if _, err := late.CursorAfter(lost, "", ""); how == "rewritten" && !errors.Is(err, mirror.ErrCompacted) {
					t.Errorf("a watch resumes at a lost revision: %v, want ErrCompacted", err)
				}
				barrier(t, m)
			})
		})
	}
}

// TestLateClaim_ManyResources_DoNotQueueForHistory: many resources without stored values become
// readable soon, with history or without.
func TestLateClaim_ManyResources_DoNotQueueForHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 40
		md := newModel()
		for i := range n {
			put(md, fmt.Sprintf("/registry/%02d/", i), "value", 2)
		}
		store := md.store
		m := start(t, &script{Source: store,
			replay: func(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
				time.Sleep(3 * time.Second)
				return store.Replay(ctx, prefix, after, through, deliver)
			}}, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
		reach(t, m, store.Revision())
		var claimed []*mirror.Resource
		for i := range n {
			claimed = append(claimed, claim(t, m, fmt.Sprintf("/registry/%02d/", i)))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		for _, r := range claimed {
			if err := r.WaitReady(ctx); err != nil {
				t.Fatalf("%s: %v", r.Prefix(), err)
			}
			requireState(t, latest(t, r), md, r.Prefix())
		}
		barrier(t, m)
	})
}

// While the prefix is listed, the progress has the keys that have arrived, of any resource, and the
// last of them.
func TestLoadState_ListInProgress_HasKeysOfItsPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		for _, key := range []string{"/registry/a/1", "/registry/a/2", "/registry/b/1"} {
			store.Put(key, "x")
		}
		next := make(chan struct{})
		source := &script{Source: store, list: func(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
			return store.List(ctx, prefix, at, func(kvs []driver.KV) error {
				for i := range kvs {
					<-next
					if err := page(kvs[i : i+1]); err != nil {
						return err
					}
				}
				return nil
			})
		}}
		m := start(t, source, presentOnly)
		if p := m.LoadState(); !p.Loading || p.Listed != 0 || p.Position != "" {
			t.Errorf("before the first page: %+v", p)
		}
		for i, position := range []string{"/registry/a/1", "/registry/a/2", "/registry/b/1"} {
			next <- struct{}{}
			synctest.Wait()
			if p := m.LoadState(); p.Listed != int64(i+1) || p.Received != p.Listed || p.Position != position {
				t.Errorf("after %d pages: %+v, want %d keys up to %s", i+1, p, i+1, position)
			}
		}
		if p := m.LoadState(); p.Loading || p.Failed != 0 {
			t.Errorf("at the end: %+v", p)
		}
	})
}

// TestClaim_AfterDivergence_RestoresNoOlderHistory: the clients of a resource have not received a
// lost event. A later claim restores no history from before the divergence, on which a watch would
// resume across it.
func TestClaim_AfterDivergence_RestoresNoOlderHistory(t *testing.T) {
	for _, how := range []string{"consistent", "repaired", "relisted"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				md := past("/registry/a/")
				store := md.store
				m := start(t, store, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
				a := claim(t, m, "/registry/a/")
				reach(t, m, store.Revision(), a)
				want := mirror.Revision(1)
				if how != "consistent" {
					lose(t, m, store, memory.Op{Key: "/registry/a/a", Value: "lost"})
					want = store.Revision()
				}
				switch how {
				case "repaired":
					if got := check(t, a); len(got) != 1 || m.Stats().Repairs != 1 {
						t.Fatalf("differ: %v, %d repairs", got, m.Stats().Repairs)
					}
				case "relisted":
					reach(t, m, store.Put("/registry/a/a", "next"))
					if n := m.Stats().Divergences; n != 1 {
						t.Fatalf("%d divergences, want 1", n)
					}
				}
				for i := range 5 {
					store.Put("/registry/a/b", fmt.Sprint(i))
				}
				reach(t, m, store.Revision(), a)
				synctest.Wait() // until the first claim has its history
				a.Release()
				barrier(t, m)
				replays := m.Stats().Replays
				a = claim(t, m, "/registry/a/")
				reach(t, m, store.Revision(), a)
				synctest.Wait()
				if n := m.Stats().Replays; n != replays+1 {
					t.Fatalf("history was restored %d times for the claim, want once", n-replays)
				}
				requireFloor(t, a, want)
				if _, err := a.CursorAfter(want-1, "", ""); !errors.Is(err, mirror.ErrCompacted) {
					t.Errorf("a watch resumes before the divergence: %v, want ErrCompacted", err)
				}
				barrier(t, m)
			})
		})
	}
}
