package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

// TestReadyMeansReadable: nobody who has waited for a resource to be ready is told
// that it is not.
func TestReadyMeansReadable(t *testing.T) {
	const resources = 3000 // to widen the moment between the first and the last
	for range 5 {
		store := memory.New()
		store.Stall(true)
		store.FailLists(errors.New("not yet"))
		m := start(t, store, nil)
		var all []*mirror.Resource
		for i := range resources {
			all = append(all, claim(t, m, fmt.Sprintf("/registry/r%d/", i)))
		}
		barrier(t, m)
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				r := all[i*resources/4]
				if err := r.WaitReady(context.Background()); err != nil {
					t.Error(err)
				}
				if _, err := r.Latest(); err != nil {
					t.Errorf("%s is ready, but: %v", r.Prefix(), err)
				}
			})
		}
		store.FailLists(nil)
		wg.Wait()
		m.Close()
	}
}

// TestNoSnapshotMixesTwoClusters restores etcd under readers. Each incarnation of
// the cluster has revisions and a value of its own; no reader may see the data of
// one under the revision of another, and a cursor never goes on from one to the
// other.
func TestNoSnapshotMixesTwoClusters(t *testing.T) {
	t.Parallel()
	const (
		rounds, restores = 3, 4 // a mirror backs off between lists
		resources        = 500
		step             = 1000 // revisions of one incarnation
	)
	base := func(i int) mirror.Revision { return mirror.Revision(restores+1-i) * step }
	for range rounds {
		store := memory.New()
		restore := func(i int) {
			keys := map[string]string{}
			for r := range resources {
				keys[fmt.Sprintf("/registry/r%d/key", r)] = fmt.Sprint(i)
			}
			store.Restore(base(i), keys)
		}
		restore(0)
		m := start(t, store, nil)
		var all []*mirror.Resource
		for i := range resources {
			all = append(all, claim(t, m, fmt.Sprintf("/registry/r%d/", i)))
		}
		reach(t, m, base(0), all...)

		var wg sync.WaitGroup
		var done atomic.Bool
		check := func(s mirror.Snapshot, what string) {
			for e := range s.All("", "") {
				var i int
				if _, err := fmt.Sscan(string(e.Value()), &i); err != nil {
					t.Error(err)
				}
				if s.Rev < base(i) || s.Rev >= base(i)+step {
					t.Errorf("%s at %d shows incarnation %d, whose revisions begin at %d", what, s.Rev, i, base(i))
					done.Store(true)
				}
			}
		}
		for g := range 3 {
			wg.Go(func() {
				for n := g; !done.Load(); n++ {
					r := all[n%len(all)]
					s, err := r.Latest()
					if err != nil {
						continue
					}
					check(s, "Latest")
					if then, err := r.At(s.Rev); err == nil {
						check(then, "At")
					}
					c := s.Cursor("", "")
					for range 20 {
						evs, err := c.Next(nil, 10)
						if err != nil {
							break
						}
						for _, e := range evs {
							if e.Rev < s.Rev || e.Rev >= s.Rev+step {
								t.Errorf("the cursor of %d returns an event of %d", s.Rev, e.Rev)
								done.Store(true)
							}
						}
						runtime.Gosched()
					}
				}
			})
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for i := 1; i <= restores && !done.Load(); i++ {
			restore(i)
			for m.Clock() >= base(i)+step {
				if _, err := m.Current(ctx); err != nil && !errors.Is(err, mirror.ErrRestored) {
					t.Fatal(err)
				}
			}
			for n := range 20 {
				store.Put(fmt.Sprintf("/registry/r%d/key", n), fmt.Sprint(i))
			}
			if err := m.Wait(ctx, store.Revision()); err != nil {
				t.Fatal(err)
			}
		}
		done.Store(true)
		wg.Wait()
		barrier(t, m)
		if relists := m.Stats().Relists; relists > restores {
			t.Errorf("%d restores made the mirror list anew %d times", restores, relists)
		}
		m.Close()
	}
}

// TestCloseEndsWaitsAndReads: whoever is blocked on the mirror is let go by Close,
// whatever his context says.
func TestCloseEndsWaitsAndReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, &script{Source: store, current: func(ctx context.Context) (mirror.Header, error) {
			<-ctx.Done()
			return mirror.Header{}, ctx.Err()
		}}, presentOnly)
		r := claim(t, m, "/registry/a/")
		excluded, err := m.Exclude("/registry/b/")
		if err != nil {
			t.Fatal(err)
		}
		reach(t, m, store.Revision(), r)
		s := latest(t, r)
		ctx := context.Background()
		ended := make(chan error, 4)
		go func() { ended <- m.Wait(ctx, 1000) }()
		go func() { _, err := m.Current(ctx); ended <- err }()
		go func() { ended <- excluded.WaitReady(ctx) }()
		go func() {
			c := s.Cursor("", "")
			for {
				changed := c.Changed()
				if _, err := c.Next(nil, 1); err != nil {
					ended <- err
					return
				}
				<-changed
			}
		}()
		synctest.Wait()
		if len(ended) != 0 {
			t.Fatalf("ended before Close: %v", <-ended)
		}
		m.Close()
		synctest.Wait()
		if len(ended) != 4 {
			t.Fatalf("%d of 4 ended", len(ended))
		}
		for range 4 {
			if err := <-ended; err == nil {
				t.Error("ended without an error")
			}
		}
		if _, err := m.Claim("/registry/c/"); !errors.Is(err, mirror.ErrClosed) {
			t.Errorf("Claim after Close: %v", err)
		}
		if err := m.Wait(ctx, 1000); !errors.Is(err, mirror.ErrClosed) {
			t.Errorf("Wait after Close: %v", err)
		}
		if _, err := m.Current(ctx); !errors.Is(err, mirror.ErrClosed) {
			t.Errorf("Current after Close: %v", err)
		}
		if got := read(s); len(got) != 0 { // still readable
			t.Error(got)
		}
	})
}
