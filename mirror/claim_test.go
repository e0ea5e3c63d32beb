package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// presentOnly disables the restore of history.
func presentOnly(o *mirror.Options) { o.Replay.Revisions = -1 }

func claim(t *testing.T, m *mirror.Mirror, prefix string) *mirror.Resource {
	t.Helper()
	r, err := m.Claim(prefix)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// reach waits until the published revision is at rev, and the resources can be read with their restored history.
func reach(t *testing.T, m *mirror.Mirror, rev mirror.Revision, resources ...*mirror.Resource) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // longer than a restore of history may take
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
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// barrier returns when the writer has executed all earlier commands, and checks the invariants.
func barrier(t *testing.T, m *mirror.Mirror) {
	t.Helper()
	if err := m.Check(); err != nil {
		t.Fatal(err)
	}
}

// requireNoHoles fails if a reader sees an entry without its value, which would look like an empty
// object.
func requireNoHoles(t *testing.T, r *mirror.Resource) {
	t.Helper()
	s, err := r.Latest()
	if errors.Is(err, mirror.ErrNotReady) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
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

// TestClaim_ValuesNotFetched_ReadsReturnErrNotReady: after Claim and until the writer has fetched the missing
// values, reads return ErrNotReady.
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
					if err != nil {
						t.Fatal(err)
					}
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
func TestClaim_OfExcludedPrefix_ReturnsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/1", "value")
		m := start(t, store, nil)
		excluded, err := m.Exclude("/registry/a/")
		if err != nil {
			t.Fatal(err)
		}
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
