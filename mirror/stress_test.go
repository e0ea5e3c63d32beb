package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

// TestReadersAmongWriters runs readers of every kind on real threads while a writer
// commits, the window trims, etcd is compacted, a resource is claimed and released,
// and the feed breaks. It is meant for the race detector, and it checks what the
// readers see:
//
//	I1  clock and Latest never go back
//	I2  a snapshot does not move while it is read
//	I3  what a cursor returns leads from the snapshot it began with to the tree at
//	    its position: nothing lost, nothing twice
//	I5  every transaction writes the same number to all resources; nobody sees two
//	    different ones at one revision
//	I7  history is within its bound
func TestReadersAmongWriters(t *testing.T) {
	t.Parallel()
	const (
		resources = 4
		limit     = 200_000
	)
	txns := 12_000
	if testing.Short() {
		txns = 2_000
	}
	store := memory.New()
	number := func(i, n int) memory.Op {
		return memory.Op{Key: fmt.Sprintf("/registry/r%d/number", i), Value: fmt.Sprint(n)}
	}
	var ops []memory.Op
	for i := range resources {
		ops = append(ops, number(i, 0))
	}
	store.Txn(ops...)
	m := start(t, store, func(o *mirror.Options) {
		o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: limit}
		o.CheckpointEvents = 30
		presentOnly(o) // at every revision there are numbers
	})
	var all []*mirror.Resource
	for i := range resources {
		all = append(all, claim(t, m, fmt.Sprintf("/registry/r%d/", i)))
	}
	reach(t, m, store.Revision(), all...)

	var done atomic.Bool
	var wg sync.WaitGroup
	fail := func(format string, args ...any) {
		if done.CompareAndSwap(false, true) {
			t.Errorf(format, args...)
		}
	}
	reader := func(f func(rnd *rand.Rand)) {
		rnd := rand.New(rand.NewPCG(rand.Uint64(), 0))
		wg.Go(func() {
			for !done.Load() {
				f(rnd)
			}
		})
	}
	numberOf := func(s mirror.Snapshot, i int) string {
		e, ok := s.Get(number(i, 0).Key)
		if !ok {
			fail("the number of resource %d is gone at %d", i, s.Rev)
			return ""
		}
		if e.ModRevision() > s.Rev {
			fail("a snapshot of %d shows an entry of %d", s.Rev, e.ModRevision())
		}
		return string(e.Value())
	}
	// gone is what a reader may be told: the window moves below it.
	gone := func(err error) bool {
		if err != nil && !errors.Is(err, mirror.ErrCompacted) {
			fail("%v", err)
		}
		return err != nil
	}

	// The same number everywhere at one revision, the newest and an older one.
	var compared, skipped atomic.Int64
	var last mirror.Revision
	reader(func(rnd *rand.Rand) {
		i, j := rnd.IntN(resources), rnd.IntN(resources)
		clock := m.Clock()
		s, err := all[i].Latest()
		if gone(err) {
			return
		}
		if s.Rev < clock || s.Rev < last || clock < last {
			fail("the clock went back: Latest %d, clock %d, before %d", s.Rev, clock, last)
		}
		last = s.Rev
		for _, rev := range []mirror.Revision{s.Rev, s.Rev - mirror.Revision(rnd.IntN(200))} {
			a, err := all[i].At(rev)
			if gone(err) {
				skipped.Add(1)
				continue
			}
			b, err := all[j].At(rev)
			if gone(err) {
				skipped.Add(1)
				continue
			}
			if a.Rev != rev || b.Rev != rev {
				fail("At(%d) is of %d and %d", rev, a.Rev, b.Rev)
			}
			if x, y := numberOf(a, i), numberOf(b, j); x != y {
				fail("at %d resource %d says %s, resource %d says %s", rev, i, x, j, y)
			}
			compared.Add(1)
		}
	})
	// Pagers: several at one revision get the same tree, which holds what the first page showed,
	// also when the version is dropped between two pages; what is compacted stays away.
	var pages atomic.Int64
	var paged atomic.Int64 // the revision
	for range 3 {
		reader(func(rnd *rand.Rand) {
			r := all[rnd.IntN(resources)]
			rev := mirror.Revision(paged.Load())
			if now := m.Clock(); rev == 0 || now-rev > 300 || rnd.IntN(10) == 0 {
				rev = now - mirror.Revision(rnd.IntN(200))
				paged.Store(int64(rev))
			}
			var first mirror.Snapshot
			for i := range 5 {
				compacted := m.Stats().Compacted
				s, err := r.At(rev)
				if gone(err) {
					return
				}
				if rev < compacted {
					fail("%d is served, etcd is compacted to %d", rev, compacted)
				}
				release := r.Hold(s)
				if i == 0 {
					first = s
				} else if got, want := read(s), read(first); !maps.Equal(got, want) {
					fail("page %d at %d:%s", i, rev, diff(got, want))
				}
				pages.Add(1)
				release()
			}
		})
	}
	// A snapshot stays as it is, and its counts are those of what it holds.
	reader(func(rnd *rand.Rand) {
		s, err := all[rnd.IntN(resources)].Latest()
		if gone(err) {
			return
		}
		before := read(s)
		n, bytes := s.Count("", "")
		for range 20 {
			runtime.Gosched()
		}
		size := int64(0)
		for e := range s.All("", "") {
			size += e.Size()
		}
		if now := read(s); !maps.Equal(now, before) || len(now) != n || size != bytes {
			fail("the snapshot of %d moved or miscounts: %d entries, %d bytes, counted %d, %d", s.Rev, len(now), size, n, bytes)
		}
	})
	// Followers: lively ones, and one that dawdles until the window leaves it behind.
	var followed, fell atomic.Int64
	for f := range 3 {
		var c *mirror.Cursor
		var r *mirror.Resource
		var held state
		reader(func(rnd *rand.Rand) {
			if c == nil {
				r = all[rnd.IntN(resources)]
				s, err := r.Latest()
				if gone(err) {
					return
				}
				if rnd.IntN(2) == 0 {
					back, err := r.At(s.Rev - mirror.Revision(rnd.IntN(100)))
					if gone(err) {
						return
					}
					s = back
				}
				held = read(s)
				c = s.Cursor("", "")
				if rnd.IntN(2) == 0 {
					if c, err = r.CursorAfter(s.Rev, "", ""); gone(err) {
						c = nil
						return
					}
				}
			}
			if f == 0 {
				for range 200 {
					runtime.Gosched()
				}
			}
			before := c.Position()
			limit := 1 + rnd.IntN(50)
			evs, err := c.Next(nil, limit)
			if gone(err) {
				fell.Add(1)
				c = nil
				return
			}
			for _, e := range evs {
				was := ""
				if e.Prev != nil {
					was = describe(e.Prev)
				}
				if held[e.Key()] != was || e.Rev <= before {
					fail("%s at %d after %d: previous %q, held %q", e.Key(), e.Rev, before, was, held[e.Key()])
				}
				delete(held, e.Key())
				if e.Entry != nil {
					held[e.Key()] = describe(e.Entry)
				}
			}
			followed.Add(int64(len(evs)))
			if len(evs) == limit {
				return
			}
			s, err := r.At(c.Position())
			if gone(err) {
				return
			}
			if want := read(s); !maps.Equal(held, want) {
				fail("the follower holds at %d:%s", c.Position(), diff(held, want))
			}
		})
	}
	// Somebody claims, reads and releases a resource that is being written.
	reader(func(rnd *rand.Rand) {
		r, err := m.Claim("/registry/now-and-then/")
		if err != nil {
			fail("%v", err)
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := r.WaitReady(ctx); err != nil {
			fail("%v", err)
		}
		if s, err := r.Latest(); !errors.Is(err, mirror.ErrNotReady) && !gone(err) {
			for e := range s.All("", "") {
				if !strings.HasPrefix(string(e.Value()), "value") {
					fail("%s is shown as %q", e.Key(), e.Value())
				}
			}
		}
		time.Sleep(time.Duration(rnd.IntN(3)) * time.Millisecond)
		r.Release()
	})
	// Consistent reads see what was acknowledged before them (I6).
	var acknowledged atomic.Int64
	reader(func(rnd *rand.Rand) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		i := rnd.IntN(resources)
		n := acknowledged.Load()
		rev, err := m.Current(ctx)
		if err == nil {
			err = m.Wait(ctx, rev)
		}
		if err != nil {
			fail("%v", err)
			return
		}
		s, err := all[i].Latest()
		if gone(err) {
			return
		}
		var got int64
		if _, err := fmt.Sscan(numberOf(s, i), &got); err != nil || got < n {
			fail("a consistent read at %d sees number %d, %d was acknowledged (%v)", s.Rev, got, n, err)
		}
	})

	rnd := rand.New(rand.NewPCG(rand.Uint64(), 1))
	for n := 1; n <= txns && !done.Load(); n++ {
		ops = ops[:0]
		for i := range resources {
			ops = append(ops, number(i, n))
		}
		ops = append(ops,
			memory.Op{Key: fmt.Sprintf("/registry/r%d/%d", rnd.IntN(resources), rnd.IntN(40)), Value: strings.Repeat("v", rnd.IntN(300)), Delete: rnd.IntN(3) == 0},
			memory.Op{Key: fmt.Sprintf("/registry/now-and-then/%d", rnd.IntN(20)), Value: "value" + strings.Repeat("v", rnd.IntN(300)), Delete: rnd.IntN(3) == 0})
		store.Txn(ops...)
		acknowledged.Store(int64(n))
		switch {
		case n%50 == 0:
			// Not so far ahead that the feed is overtaken, which would end the followers.
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			if err := m.Wait(ctx, store.Revision()); err != nil {
				fail("%v", err)
			}
			cancel()
			if held := m.Stats().HistoryBytes; held > 2*limit {
				fail("%d bytes of history, limit %d and a batch", held, limit)
			}
		case n%1009 == 0:
			store.Break()
		case n%311 == 0:
			m.Compact(store.Revision() - 100)
		}
	}
	done.Store(true)
	wg.Wait()
	barrier(t, m)
	st := m.Stats()
	t.Logf("%d revisions; compared %d times, too old %d times; %d events followed, %d cursors too slow; %d divergences, %d relists, %d reconnects",
		store.Revision(), compared.Load(), skipped.Load(), followed.Load(), fell.Load(), st.Divergences, st.Relists, st.Reconnects)
	if st.Divergences+st.Relists > 0 {
		t.Error("the mirror distrusted a faultless feed")
	}
	for _, r := range all {
		if st := r.Stats(); st.Readers != 0 || st.OldestRead != 0 {
			t.Errorf("%d readers are left, at %d", st.Readers, st.OldestRead)
		}
	}
	if compared.Load() == 0 || followed.Load() == 0 || pages.Load() == 0 {
		t.Error("the readers saw nothing")
	}
}
