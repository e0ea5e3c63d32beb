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
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/mirror"
)

const (
	raceResources = 4
	raceLimit     = 200_000 // bytes of history
)

// race runs readers of every kind on real threads while a writer commits.
type race struct {
	t     *testing.T
	seed  uint64
	drawn uint64 // number of sources that random returned
	store *memory.Store
	m     *mirror.Mirror
	all   []*mirror.Resource

	wg   sync.WaitGroup
	done atomic.Bool // a reader has failed, or the writer has ended

	acknowledged      atomic.Int64    // the number of the last write
	last              mirror.Revision // newest revision seen by compare
	paged             atomic.Int64    // the revision that pagers read
	compared, skipped atomic.Int64    // reads by compare
	pages             atomic.Int64
	followed, fell    atomic.Int64 // events, and cursors that the window left behind
}

// number is the n-th write of resource i.
func number(i, n int) memory.Op {
	return memory.Op{Key: fmt.Sprintf("/registry/r%d/number", i), Value: fmt.Sprint(n)}
}

func newRace(t *testing.T) *race {
	t.Helper()
	x := &race{t: t, seed: testseed.New(t), store: memory.New()}
	x.store.Txn(numbers(0)...)
	x.m = start(t, x.store, func(o *mirror.Options) {
		o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: raceLimit}
		o.CheckpointEvents = 30
		presentOnly(o) // at every revision the resources have numbers
	})
	for i := range raceResources {
		x.all = append(x.all, claim(t, x.m, fmt.Sprintf("/registry/r%d/", i)))
	}
	reach(t, x.m, x.store.Revision(), x.all...)
	return x
}

// numbers writes n to every resource.
func numbers(n int) (ops []memory.Op) {
	for i := range raceResources {
		ops = append(ops, number(i, n))
	}
	return ops
}

// fail reports the first failure, and ends the race.
func (x *race) fail(format string, args ...any) {
	if x.done.CompareAndSwap(false, true) {
		x.t.Errorf(format, args...)
	}
}

// random returns another source of the seed. It is called by the test's goroutine.
func (x *race) random() *rand.Rand {
	x.drawn++
	return rand.New(rand.NewPCG(x.seed, x.drawn))
}

// reader calls f until the race ends.
func (x *race) reader(f func(rnd *rand.Rand)) {
	rnd := x.random()
	x.wg.Go(func() {
		for !x.done.Load() {
			f(rnd)
		}
	})
}

// numberOf returns the number of resource i in its snapshot.
func (x *race) numberOf(s mirror.Snapshot, i int) string {
	e, ok := s.Get(number(i, 0).Key)
	if !ok {
		x.fail("the number of resource %d is missing at %d", i, s.Rev)
		return ""
	}
	if e.ModRevision() > s.Rev {
		x.fail("a snapshot of %d shows an entry of %d", s.Rev, e.ModRevision())
	}
	return string(e.Value())
}

// gone reports whether a read failed. It may fail only because the window has moved past its
// revision.
func (x *race) gone(err error) bool {
	if err != nil && !errors.Is(err, mirror.ErrCompacted) {
		x.fail("%v", err)
	}
	return err != nil
}

// compare reads two resources at the newest revision and at an older one: both have the same
// number. The published revision and Latest never decrease. One reader calls it.
func (x *race) compare(rnd *rand.Rand) {
	i, j := rnd.IntN(raceResources), rnd.IntN(raceResources)
	published := x.m.PublishedRevision()
	s, err := x.all[i].Latest()
	if x.gone(err) {
		return
	}
	if s.Rev < published || s.Rev < x.last || published < x.last {
		x.fail("published revision decreased: Latest %d, published %d, before %d", s.Rev, published, x.last)
	}
	x.last = s.Rev
	for _, rev := range []mirror.Revision{s.Rev, s.Rev - mirror.Revision(rnd.IntN(200))} {
		a, err := x.all[i].At(rev)
		if x.gone(err) {
			x.skipped.Add(1)
			continue
		}
		b, err := x.all[j].At(rev)
		if x.gone(err) {
			x.skipped.Add(1)
			continue
		}
		if a.Rev != rev || b.Rev != rev {
			x.fail("At(%d) is of %d and %d", rev, a.Rev, b.Rev)
		}
		if m, n := x.numberOf(a, i), x.numberOf(b, j); m != n {
			x.fail("at %d resource %d has %s, resource %d has %s", rev, i, m, j, n)
		}
		x.compared.Add(1)
	}
}

// page reads five pages at one revision, which all pagers share for a while. The pages have the
// tree of the first page, also when the version is dropped between two pages; a compacted revision
// is not served.
func (x *race) page(rnd *rand.Rand) {
	r := x.all[rnd.IntN(raceResources)]
	rev := mirror.Revision(x.paged.Load())
	if now := x.m.PublishedRevision(); rev == 0 || now-rev > 300 || rnd.IntN(10) == 0 {
		rev = now - mirror.Revision(rnd.IntN(200))
		x.paged.Store(int64(rev))
	}
	var first mirror.Snapshot
	for i := range 5 {
		compacted := x.m.Stats().Compacted
		s, err := r.At(rev)
		if x.gone(err) {
			return
		}
		if rev < compacted {
			x.fail("%d is served, etcd is compacted to %d", rev, compacted)
		}
		release := r.TrackReader(s)
		if i == 0 {
			first = s
		} else if got, want := read(s), read(first); !maps.Equal(got, want) {
			x.fail("page %d at %d:%s", i, rev, diff(got, want))
		}
		x.pages.Add(1)
		release()
	}
}

// holdStill reads a snapshot twice: it does not change, and its counts are those of its entries.
func (x *race) holdStill(rnd *rand.Rand) {
	s, err := x.all[rnd.IntN(raceResources)].Latest()
	if x.gone(err) {
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
		x.fail("the snapshot of %d moved or miscounts: %d entries, %d bytes, counted %d, %d", s.Rev, len(now), size, n, bytes)
	}
}

// racingCursor follows a resource, and applies the events to its own state.
type racingCursor struct {
	*race
	slow bool // so that it falls out of the window

	r    *mirror.Resource
	c    *mirror.Cursor // nil: a new one is due
	held state
}

// begin starts a cursor from a snapshot of the newest or a past revision, or after its revision.
func (f *racingCursor) begin(rnd *rand.Rand) {
	f.r = f.all[rnd.IntN(raceResources)]
	s, err := f.r.Latest()
	if f.gone(err) {
		return
	}
	if rnd.IntN(2) == 0 {
		back, err := f.r.At(s.Rev - mirror.Revision(rnd.IntN(100)))
		if f.gone(err) {
			return
		}
		s = back
	}
	f.held = read(s)
	c := s.Cursor("", "")
	if rnd.IntN(2) == 0 {
		if c, err = f.r.CursorAfter(s.Rev, "", ""); f.gone(err) {
			return
		}
	}
	f.c = c
}

// follow reads some events. If no more are due, the state must be that of the snapshot at the
// cursor's position.
func (f *racingCursor) follow(rnd *rand.Rand) {
	if f.c == nil {
		if f.begin(rnd); f.c == nil {
			return
		}
	}
	if f.slow {
		for range 200 {
			runtime.Gosched()
		}
	}
	before := f.c.Position()
	limit := 1 + rnd.IntN(50)
	evs, err := f.c.Next(nil, limit)
	if f.gone(err) {
		f.fell.Add(1)
		f.c = nil
		return
	}
	for _, e := range evs {
		was := ""
		if e.Prev != nil {
			was = describe(e.Prev)
		}
		if f.held[e.Key()] != was || e.Rev <= before {
			f.fail("%s at %d after %d: previous %q, held %q", e.Key(), e.Rev, before, was, f.held[e.Key()])
		}
		delete(f.held, e.Key())
		if e.Entry != nil {
			f.held[e.Key()] = describe(e.Entry)
		}
	}
	f.followed.Add(int64(len(evs)))
	if len(evs) == limit {
		return
	}
	s, err := f.r.At(f.c.Position())
	if f.gone(err) {
		return
	}
	if want := read(s); !maps.Equal(f.held, want) {
		f.fail("the follower holds at %d:%s", f.c.Position(), diff(f.held, want))
	}
}

// claimAndRelease claims, reads and releases a resource that is being written.
func (x *race) claimAndRelease(rnd *rand.Rand) {
	r, err := x.m.Claim("/registry/now-and-then/")
	if err != nil {
		x.fail("%v", err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.WaitReady(ctx); err != nil {
		x.fail("%v", err)
	}
	if s, err := r.Latest(); !errors.Is(err, mirror.ErrNotReady) && !x.gone(err) {
		for e := range s.All("", "") {
			if !strings.HasPrefix(string(e.Value()), "value") {
				x.fail("%s is shown as %q", e.Key(), e.Value())
			}
		}
	}
	time.Sleep(time.Duration(rnd.IntN(3)) * time.Millisecond)
	r.Release()
}

// readConsistently reads a write that was acknowledged before the read began, or a later one (I6).
func (x *race) readConsistently(rnd *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	i := rnd.IntN(raceResources)
	n := x.acknowledged.Load()
	rev, err := x.m.ReadRevision(ctx)
	if err == nil {
		err = x.m.Wait(ctx, rev)
	}
	if err != nil {
		x.fail("%v", err)
		return
	}
	s, err := x.all[i].Latest()
	if x.gone(err) {
		return
	}
	var got int64
	if _, err := fmt.Sscan(x.numberOf(s, i), &got); err != nil || got < n {
		x.fail("a consistent read at %d sees number %d, %d was acknowledged (%v)", s.Rev, got, n, err)
	}
}

// write commits transactions, each of which writes its number to all resources, until a reader
// fails. Sometimes the feed breaks, or etcd is compacted. History stays within its bound.
func (x *race) write(txns int) {
	rnd := x.random()
	for n := 1; n <= txns && !x.done.Load(); n++ {
		x.store.Txn(append(numbers(n),
			memory.Op{Key: fmt.Sprintf("/registry/r%d/%d", rnd.IntN(raceResources), rnd.IntN(40)), Value: strings.Repeat("v", rnd.IntN(300)), Delete: rnd.IntN(3) == 0},
			memory.Op{Key: fmt.Sprintf("/registry/now-and-then/%d", rnd.IntN(20)), Value: "value" + strings.Repeat("v", rnd.IntN(300)), Delete: rnd.IntN(3) == 0})...)
		x.acknowledged.Store(int64(n))
		switch {
		case n%50 == 0:
			// Stay close to the feed: a compaction past it would end the followers.
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			if err := x.m.Wait(ctx, x.store.Revision()); err != nil {
				x.fail("%v", err)
			}
			cancel()
			if held := x.m.Stats().HistoryBytes; held > 2*raceLimit {
				x.fail("%d bytes of history, limit %d and a batch", held, raceLimit)
			}
		case n%1009 == 0:
			x.store.Break()
		case n%311 == 0:
			x.m.Compact(x.store.Revision() - 100)
		}
	}
}

// TestReaders_ConcurrentWriter_SeeInvariants runs readers of every kind on real threads while a
// writer commits, the window trims, etcd is compacted, a resource is claimed and released, and the
// feed breaks. It is for the race detector, and it checks the reads:
//
//	I1  published revision and Latest never decrease
//	I2  a snapshot does not change while it is read
//	I3  the events of a cursor lead from its first snapshot to the tree at its position: none lost,
//	    none repeated
//	I5  every transaction writes the same number to all resources; no reader sees two different ones
//	    at one revision
//	I7  history is within its bound
func TestReaders_ConcurrentWriter_SeeInvariants(t *testing.T) {
	t.Parallel()
	txns := testrace.Count(12_000, 4_000)
	if testing.Short() {
		txns = 2_000
	}
	x := newRace(t)
	x.reader(x.compare)
	for range 3 {
		x.reader(x.page)
	}
	x.reader(x.holdStill)
	for i := range 3 {
		x.reader((&racingCursor{race: x, slow: i == 0}).follow)
	}
	x.reader(x.claimAndRelease)
	x.reader(x.readConsistently)
	x.write(txns)
	x.done.Store(true)
	x.wg.Wait()
	barrier(t, x.m)
	st := x.m.Stats()
	t.Logf("%d revisions; compared %d times, too old %d times; %d events followed, %d cursors too slow; %d divergences, %d relists, %d reconnects",
		x.store.Revision(), x.compared.Load(), x.skipped.Load(), x.followed.Load(), x.fell.Load(), st.Divergences, st.Relists, st.Reconnects)
	if st.Divergences+st.Relists > 0 {
		t.Error("divergences or relists with a correct feed")
	}
	for _, r := range x.all {
		if st := r.Stats(); st.Readers != 0 || st.OldestRead != 0 {
			t.Errorf("%d readers are left, at %d", st.Readers, st.OldestRead)
		}
	}
	if x.compared.Load() == 0 || x.followed.Load() == 0 || x.pages.Load() == 0 {
		t.Error("the readers read no state")
	}
}
