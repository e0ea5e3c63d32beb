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
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// TestResource_AfterWaitReady_IsReadable: after WaitReady a read does not return ErrNotReady.
func TestResource_AfterWaitReady_IsReadable(t *testing.T) {
	t.Parallel()
	resources := testrace.Count(3000, 800) // to lengthen the time between the first and the last
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

// incarnations restores an etcd several times under readers. Each incarnation has its own revisions
// and value: the value is its number, the revisions are those from base.
type incarnations struct {
	t        *testing.T
	store    *memory.Store
	restores int
	all      []*mirror.Resource
	done     atomic.Bool // a reader has failed, or the readers must end
}

const (
	incarnationResources = 500
	incarnationRevisions = 1000
)

// base returns the first revision of incarnation i, which is below that of the previous one.
func (x *incarnations) base(i int) mirror.Revision {
	return mirror.Revision(x.restores+1-i) * incarnationRevisions
}

// restore starts incarnation i.
func (x *incarnations) restore(i int) {
	keys := map[string]string{}
	for r := range incarnationResources {
		keys[fmt.Sprintf("/registry/r%d/key", r)] = fmt.Sprint(i)
	}
	x.store.Restore(x.base(i), keys)
}

// check fails unless every value of the snapshot belongs to the incarnation of its revision.
func (x *incarnations) check(s mirror.Snapshot, what string) {
	for e := range s.All("", "") {
		var i int
		if _, err := fmt.Sscan(string(e.Value()), &i); err != nil {
			x.t.Error(err)
		}
		if s.Rev < x.base(i) || s.Rev >= x.base(i)+incarnationRevisions {
			x.t.Errorf("%s at %d shows incarnation %d, whose revisions begin at %d", what, s.Rev, i, x.base(i))
			x.done.Store(true)
		}
	}
}

// read reads the resource in every way, if it is ready. A cursor must not continue in the next
// incarnation.
func (x *incarnations) read(r *mirror.Resource) {
	s, err := r.Latest()
	if err != nil {
		return
	}
	x.check(s, "Latest")
	if then, err := r.At(s.Rev); err == nil {
		x.check(then, "At")
	}
	c := s.Cursor("", "")
	for range 20 {
		evs, err := c.Next(nil, 10)
		if err != nil {
			break
		}
		for _, e := range evs {
			if e.Rev < s.Rev || e.Rev >= s.Rev+incarnationRevisions {
				x.t.Errorf("the cursor of %d returns an event of %d", s.Rev, e.Rev)
				x.done.Store(true)
			}
		}
		runtime.Gosched()
	}
}

// run restores etcd and writes to it, until a reader fails.
func (x *incarnations) run(t *testing.T, m *mirror.Mirror) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	for i := 1; i <= x.restores && !x.done.Load(); i++ {
		x.restore(i)
		for m.PublishedRevision() >= x.base(i)+incarnationRevisions {
			if _, err := m.ReadRevision(ctx); err != nil && !errors.Is(err, mirror.ErrRestored) {
				t.Fatal(err)
			}
		}
		for n := range 20 {
			x.store.Put(fmt.Sprintf("/registry/r%d/key", n), fmt.Sprint(i))
		}
		testcheck.NoError(t, m.Wait(ctx, x.store.Revision()))
	}
}

// TestLatest_WriterIsHeldBeforePublication_Sleeps: a reader that cannot see the head yet leaves its
// processor to others. The time of the bubble would stand still for one that does not sleep.
func TestLatest_WriterIsHeldBeforePublication_Sleeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Put("/registry/a/x", "v"), r)
		release := r.HoldBeforePublication()
		defer release()
		read := make(chan error, 1)
		go func() {
			s, err := r.Latest()
			if err == nil && s.Rev != store.Revision() {
				err = fmt.Errorf("revision %d, want %d", s.Rev, store.Revision())
			}
			read <- err
		}()
		time.Sleep(time.Second)
		if len(read) > 0 {
			t.Errorf("Latest returned before the publication: %v", <-read)
		}
		release()
		if err := <-read; err != nil {
			t.Error(err)
		}
		barrier(t, m)
	})
}

// TestSnapshot_RestoresOfEtcd_AreNotMixed restores etcd under readers. No reader may see the data
// of one incarnation at a revision of another, and a cursor never continues from one to the other.
func TestSnapshot_RestoresOfEtcd_AreNotMixed(t *testing.T) {
	slow(t)
	t.Parallel()
	const restores = 4 // a mirror backs off between lists
	for range testrace.Count(3, 1) {
		x := &incarnations{t: t, store: memory.New(), restores: restores}
		x.restore(0)
		m := start(t, x.store, nil)
		for i := range incarnationResources {
			x.all = append(x.all, claim(t, m, fmt.Sprintf("/registry/r%d/", i)))
		}
		reach(t, m, x.base(0), x.all...)
		var wg sync.WaitGroup
		for g := range 3 {
			wg.Go(func() {
				for n := g; !x.done.Load(); n++ {
					x.read(x.all[n%len(x.all)])
				}
			})
		}
		x.run(t, m)
		x.done.Store(true)
		wg.Wait()
		barrier(t, m)
		if relists := m.Stats().Relists; relists > restores {
			t.Errorf("%d restores made the mirror relist %d times", restores, relists)
		}
		m.Close()
	}
}

// TestMirror_Close_EndsBlockedCalls: Close ends all calls that are blocked on the mirror,
// regardless of their contexts.
func TestMirror_Close_EndsBlockedCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, &script{Source: store, current: func(ctx context.Context) (driver.Header, error) {
			<-ctx.Done()
			return driver.Header{}, ctx.Err()
		}}, presentOnly)
		r := claim(t, m, "/registry/a/")
		excluded, err := m.Exclude("/registry/b/")
		testcheck.NoError(t, err)
		reach(t, m, store.Revision(), r)
		s := latest(t, r)
		ctx := context.Background()
		ended := make(chan error, 4)
		go func() { ended <- m.Wait(ctx, 1000) }()
		go func() { _, err := m.ReadRevision(ctx); ended <- err }()
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
		if _, err := m.ReadRevision(ctx); !errors.Is(err, mirror.ErrClosed) {
			t.Errorf("Current after Close: %v", err)
		}
		if got := read(s); len(got) != 0 { // still readable
			t.Error(got)
		}
	})
}
