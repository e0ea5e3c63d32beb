package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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

// start runs a mirror of source until the test ends.
func start(t *testing.T, source driver.Source, change func(*mirror.Options)) *mirror.Mirror {
	t.Helper()
	opts := mirror.Options{Prefix: root, Source: source, Logger: quiet()}
	if change != nil {
		change(&opts)
	}
	m, err := mirror.New(opts)
	testcheck.NoError(t, err)
	t.Cleanup(m.Close)
	return m
}

// presentOnly disables the restore of history.
func presentOnly(o *mirror.Options) { o.Replay.Revisions = -1 }

func claim(t *testing.T, m *mirror.Mirror, prefix string) *mirror.Resource {
	t.Helper()
	r, err := m.Claim(prefix)
	testcheck.NoError(t, err)
	return r
}

// reach waits until the published revision is at rev, and the resources can be read with their
// restored history.
func reach(t *testing.T, m *mirror.Mirror, rev mirror.Revision, resources ...*mirror.Resource) {
	t.Helper()
	// longer than a restore of history may take
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := m.Wait(ctx, rev); err != nil {
		t.Fatalf("published revision is %d, want %d: %v", m.PublishedRevision(), rev, err)
	}
	for _, r := range resources {
		if err := r.WaitReady(ctx); err != nil {
			t.Fatalf("%s does not become ready: %v", r.Prefix(), err)
		}
		waitHistory(ctx, t, r)
	}
}

// waitHistory waits until no restore of history can add events to the resource.
func waitHistory(ctx context.Context, t interface{ Fatalf(string, ...any) }, r *mirror.Resource) {
	_, floor, err := r.Oldest()
	if err != nil {
		return // it was lost again
	}
	if err := r.WaitHistory(ctx, floor-1); err != nil {
		t.Fatalf("history of %s is not restored: %v", r.Prefix(), err)
	}
}

func latest(t *testing.T, r *mirror.Resource) mirror.Snapshot {
	t.Helper()
	s, err := r.Latest()
	testcheck.NoError(t, err)
	return s
}

// barrier returns when the writer has executed all earlier commands, and checks the invariants.
func barrier(t *testing.T, m *mirror.Mirror) {
	t.Helper()
	testcheck.NoError(t, m.Check())
}

// requireNoHoles fails if a reader sees an entry without its value, which would look like an empty
// object.
func requireNoHoles(t *testing.T, r *mirror.Resource) {
	t.Helper()
	s, err := r.Latest()
	if errors.Is(err, mirror.ErrNotReady) {
		return
	}
	testcheck.NoError(t, err)
	n := 0
	for e := range s.All("", "") {
		n++
		if len(e.Value()) == 0 {
			t.Fatalf("%s at %d is shown without its value", e.Key(), e.ModRevision())
		}
	}
	if n != 10 {
		t.Fatalf("%d keys at %d, want 10", n, s.Rev)
	}
}

// TestClaim_ValuesNotFetched_ReadsReturnErrNotReady: after Claim and until the writer has fetched
// the missing values, reads return ErrNotReady.
func TestClaim_ValuesNotFetched_ReadsReturnErrNotReady(t *testing.T) {
	for _, how := range []string{"never claimed", "released", "excluded"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				for i := range 10 {
					store.Put(fmt.Sprintf("/registry/a/%d", i), "value")
				}
				m := start(t, store, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
				reach(t, m, store.Revision())
				switch how {
				case "released":
					r := claim(t, m, "/registry/a/")
					reach(t, m, store.Revision(), r)
					r.Release()
				case "excluded":
					r, err := m.Exclude("/registry/a/")
					testcheck.NoError(t, err)
					barrier(t, m)
					if r.Ready() {
						t.Error("an excluded resource is ready")
					}
					r.Release()
				}
				barrier(t, m)
				release := m.HoldWriter()
				defer release()
				r := claim(t, m, "/registry/a/")
				requireNoHoles(t, r)
				watching := r.ReadyChanged()
				release()
				<-watching
				requireNoHoles(t, r)
				reach(t, m, store.Revision(), r)
				requireNoHoles(t, r)
				latest(t, r)
				barrier(t, m)
			})
		})
	}
}

// TestClaim_OfExcludedPrefix_ReturnsError: a claim of an excluded resource would read it as empty.
// TestClaim_InvalidPrefix_ReturnsError: a prefix that is not below the mirror's, or no directory.
func TestClaim_InvalidPrefix_ReturnsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := start(t, memory.New(), nil)
		for _, prefix := range []string{"", "/", "/other/a/", root, root + "a", strings.TrimSuffix(root, "/")} {
			if r, err := m.Claim(prefix); err == nil {
				t.Errorf("claimed %q: %v", prefix, r.Prefix())
			}
			if _, err := m.Exclude(prefix); err == nil {
				t.Errorf("excluded %q", prefix)
			}
		}
	})
}

func TestClaim_OfExcludedPrefix_ReturnsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/1", "value")
		m := start(t, store, nil)
		excluded, err := m.Exclude("/registry/a/")
		testcheck.NoError(t, err)
		if _, err := m.Claim("/registry/a/"); err == nil {
			t.Error("Claim of a prefix that is excluded succeeds")
		}
		excluded.Release()
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		if got := read(latest(t, r)); len(got) != 1 {
			t.Errorf("holds %v after the exclusion has ended", got)
		}
		if _, err := m.Exclude("/registry/a/"); err == nil {
			t.Error("Exclude of a prefix that is claimed succeeds")
		}
	})
}

// TestResource_ReleaseTooOften_Panics: otherwise the next claim would act as a release.
func TestResource_ReleaseTooOften_Panics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := start(t, memory.New(), nil)
		r := claim(t, m, "/registry/a/")
		again := claim(t, m, "/registry/a/")
		if r != again {
			t.Error("two claims of one prefix are two resources")
		}
		r.Release()
		reach(t, m, 1, r) // the other claim is still valid
		r.Release()
		defer func() {
			if recover() == nil {
				t.Error("a third Release of two claims succeeds")
			}
		}()
		r.Release()
	})
}

// forget releases the resource and deletes its keys, and returns when the mirror has removed it.
func forget(t *testing.T, m *mirror.Mirror, md *model, r *mirror.Resource) {
	t.Helper()
	r.Release()
	for _, key := range slices.Sorted(maps.Keys(md.want(md.store.Revision(), r.Prefix()))) {
		md.txn(memory.Op{Key: key, Delete: true})
	}
	reach(t, m, md.store.Revision())
	for !r.Removed() {
		time.Sleep(time.Second)
	}
}

// requireFollowable fails unless a cursor after each revision returns every event of the model
// since then, or is refused, and each readable revision is that of the model. It returns the oldest
// revision at which a cursor starts.
func requireFollowable(t *testing.T, md *model, r *mirror.Resource) mirror.Revision {
	t.Helper()
	first := mirror.Revision(0)
	for rev := mirror.Revision(1); rev <= md.store.Revision(); rev++ {
		if s, err := r.At(rev); err == nil {
			requireState(t, s, md, r.Prefix())
		} else if !errors.Is(err, mirror.ErrCompacted) {
			t.Fatal(err)
		}
		c, err := r.CursorAfter(rev, "", "")
		if errors.Is(err, mirror.ErrCompacted) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		if first == 0 {
			first = rev
		}
		events, err := c.Next(nil, 1000)
		testcheck.NoError(t, err)
		held := md.want(rev, r.Prefix())
		for _, e := range events {
			delete(held, e.Key())
			if e.Entry != nil {
				held[e.Key()] = describe(e.Entry)
			}
		}
		if want := md.want(c.Position(), r.Prefix()); !maps.Equal(held, want) {
			t.Errorf("%s: a cursor after %d returns %d events and holds at %d:%s", r.Prefix(), rev, len(events), c.Position(), diff(held, want))
		}
	}
	return first
}

// TestClaim_AfterRemovalAndCompaction_ReturnsEveryEventOrErrCompacted: the mirror has removed the
// resource, which had no claim and no keys. A compaction has dropped the versions of that time, but
// not the log around the resource. Its next claim has no events from before the removal, so cursors
// from there are refused (I3).
func TestClaim_AfterRemovalAndCompaction_ReturnsEveryEventOrErrCompacted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := newModel()
		md.txn(memory.Op{Key: "/registry/a/x", Value: "v"})
		m := start(t, md.store, presentOnly)
		a, b := claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/")
		put(md, "/registry/b/", "v", 1)
		reach(t, m, md.store.Revision(), a, b)
		forget(t, m, md, a)
		removed := m.PublishedRevision()
		put(md, "/registry/elsewhere/", "v", 2)
		put(md, "/registry/a/", "between", 1)
		reach(t, m, md.store.Revision())
		m.Compact(md.store.Revision())
		barrier(t, m)
		a = claim(t, m, "/registry/a/")
		reach(t, m, md.store.Revision(), a)
		put(md, "/registry/a/", "again", 2)
		reach(t, m, md.store.Revision())
		if first := requireFollowable(t, md, a); first != removed {
			t.Errorf("cursors start at %d, want the removal %d", first, removed)
		}
		barrier(t, m)

		// Of several removed resources, the last one bounds the history of every later claim.
		forget(t, m, md, a)
		put(md, "/registry/elsewhere/", "v", 2)
		reach(t, m, md.store.Revision())
		forget(t, m, md, b)
		removed = m.PublishedRevision()
		put(md, "/registry/elsewhere/", "v", 2)
		reach(t, m, md.store.Revision())
		m.Compact(md.store.Revision())
		for _, prefix := range []string{"/registry/a/", "/registry/b/", "/registry/c/"} {
			r := claim(t, m, prefix)
			reach(t, m, md.store.Revision(), r)
			put(md, prefix, "third", 1)
			reach(t, m, md.store.Revision())
			if first := requireFollowable(t, md, r); first != removed {
				t.Errorf("%s: cursors start at %d, want the removal %d", prefix, first, removed)
			}
		}
		barrier(t, m)
	})
}

// TestRestore_ResourceRemovedMeanwhile_LeavesNoHole: the mirror has removed a resource while
// history was being read. The resource is claimed again before (early) or after that history is
// joined. The history ends below the removal, so the resource gets none, and the removal is not
// reported as a lost event.
func TestRestore_ResourceRemovedMeanwhile_LeavesNoHole(t *testing.T) {
	for _, compact := range []bool{false, true} {
		for _, early := range []bool{false, true} {
			t.Run(fmt.Sprintf("compacted=%t,early=%t", compact, early), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { removeDuringRestore(t, compact, early) })
			})
		}
	}
}

// removeDuringRestore is a run of the test; early is that of the second claim.
func removeDuringRestore(t *testing.T, compact, early bool) {
	md := past("/registry/a/", "/registry/b/")
	source, release := held(md.store)
	log := &strings.Builder{}
	m := start(t, source, func(o *mirror.Options) { o.Logger = slog.New(slog.NewTextHandler(log, nil)) })
	a, b := claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/")
	testcheck.NoError(t, errors.Join(a.WaitReady(t.Context()), b.WaitReady(t.Context())))
	listed := md.store.Revision()
	forget(t, m, md, a)
	removed := m.PublishedRevision()
	put(md, "/registry/elsewhere/", "v", 2)
	reach(t, m, md.store.Revision())
	if compact {
		m.Compact(md.store.Revision())
	}
	if early {
		claim(t, m, "/registry/a/")
		barrier(t, m)
	}
	release()
	reach(t, m, md.store.Revision(), b)
	a = claim(t, m, "/registry/a/")
	put(md, "/registry/a/", "again", 2)
	reach(t, m, md.store.Revision(), a)
	if first := requireFollowable(t, md, a); first != removed {
		t.Errorf("cursors start at %d, want the removal %d", first, removed)
	}
	if first := requireFollowable(t, md, b); first >= listed {
		t.Errorf("cursors of a resource with history start at %d, listed at %d", first, listed)
	}
	barrier(t, m)
	m.Close()
	if strings.Contains(log.String(), "level=ERROR") {
		t.Error(log)
	}
}
