package mirror_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

// followedValues are the first letters of the values that
// TestCursor_ConcurrentWriter_HasStateOfItsPosition writes.
var followedValues = []string{"p", "q", "r", "s"}

// racingFollower repeatedly follows a random selection of the resource.
type racingFollower struct {
	r              *mirror.Resource
	part, sets     *mirror.WatchIndex
	rnd            *rand.Rand
	ended          *atomic.Bool
	returned, lost *atomic.Int64 // events, and cursors that fell out of the window
}

// run follows until the test has ended.
func (f *racingFollower) run(t *testing.T) {
	for !f.ended.Load() {
		s, err := f.r.Latest()
		if err != nil {
			t.Error(err)
			return
		}
		if oldest, floor, err := f.r.Oldest(); err == nil && f.rnd.IntN(2) == 0 {
			if then, err := f.r.At(max(oldest, floor, s.Rev-f.rnd.Int64N(500))); err == nil {
				s = then
			}
		}
		f.follow(t, s, f.selection())
	}
}

// selection draws a key, a directory, a set of two values, or a value.
func (f *racingFollower) selection() selection {
	sel := selection{byValue: true, value: followedValues[f.rnd.IntN(len(followedValues))]}
	switch f.rnd.IntN(4) {
	case 0:
		sel = selection{start: fmt.Sprintf("/registry/a/%d/%d", f.rnd.IntN(3), f.rnd.IntN(10))}
		sel.end = sel.start + "\x00"
	case 1:
		sel = selection{start: fmt.Sprintf("/registry/a/%d/", f.rnd.IntN(3))}
		sel.end = sel.start[:len(sel.start)-1] + "0"
	case 2:
		sel = selection{byValue: true, bySet: true, value: followedValues[f.rnd.IntN(2)] + followedValues[2+f.rnd.IntN(2)]}
	}
	return sel
}

// has reports whether the selection selects the value of an entry in its range.
func (s selection) has(e *mirror.Entry) bool {
	return !s.byValue || strings.Contains(s.value, string(e.Value()[:1]))
}

// held returns the selected entries of the snapshot.
func (s selection) held(in mirror.Snapshot) state {
	out := state{}
	for e := range in.All(s.start, s.end) {
		if s.has(e) {
			out[e.Key()] = describe(e)
		}
	}
	return out
}

// follow reads up to 200 times from the snapshot on, and compares the applied events with the
// snapshot at each position.
func (f *racingFollower) follow(t *testing.T, s mirror.Snapshot, sel selection) {
	p := &pair{selection: sel, keyed: s.Cursor(sel.start, sel.end)}
	defer p.keyed.Unfollow()
	p.follow(f.part, f.sets)
	mine := sel.held(s)
	for range f.rnd.IntN(200) {
		changed := p.keyed.Changed()
		evs, err := p.keyed.Next(nil, 1+f.rnd.IntN(20))
		for _, ev := range p.selected(evs) {
			delete(mine, ev.Key())
			if ev.Entry != nil && sel.has(ev.Entry) {
				mine[ev.Key()] = describe(ev.Entry)
			}
			f.returned.Add(1)
		}
		if err != nil {
			if !errors.Is(err, mirror.ErrCompacted) {
				t.Error(err)
			}
			f.lost.Add(1)
			return
		}
		if len(evs) > 0 {
			continue
		}
		if then, err := f.r.At(p.keyed.Position()); err == nil {
			if want := sel.held(then); !maps.Equal(mine, want) {
				t.Errorf("%s at %d:%s", sel, p.keyed.Position(), diff(mine, want))
				f.ended.Store(true)
			}
		}
		select {
		case <-changed:
		case <-time.After(time.Duration(f.rnd.IntN(3)) * time.Millisecond):
		}
	}
}

// TestCursor_ConcurrentWriter_HasStateOfItsPosition is for the race detector: cursors join at the
// newest and at past revisions, follow, stall and leave on real threads while a writer commits and
// the window trims. At its position, each has exactly the state of its keys or its value at that
// revision.
func TestCursor_ConcurrentWriter_HasStateOfItsPosition(t *testing.T) {
	txns := 6000
	if testing.Short() {
		txns = 1500
	}
	store := memory.New()
	m := start(t, store, func(o *mirror.Options) {
		o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: 300_000}
	})
	r := claim(t, m, "/registry/a/")
	reach(t, m, store.Revision(), r)
	part, sets := byValue(t, r), bySet(t, r)
	var ended atomic.Bool
	var wg sync.WaitGroup
	var returned, lost atomic.Int64
	for i := range 24 {
		f := &racingFollower{r: r, part: part, sets: sets, rnd: rand.New(rand.NewPCG(uint64(i), 1)), ended: &ended, returned: &returned, lost: &lost}
		wg.Go(func() { f.run(t) })
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	for n := range txns {
		ops := map[string]memory.Op{}
		for range 1 + rnd.IntN(3) {
			key := fmt.Sprintf("/registry/a/%d/%d", rnd.IntN(3), rnd.IntN(10))
			ops[key] = memory.Op{Key: key, Value: fmt.Sprintf("%s-%d", followedValues[rnd.IntN(len(followedValues))], n), Delete: rnd.IntN(4) == 0}
		}
		store.Txn(slices.Collect(maps.Values(ops))...)
		if n%20 == 0 {
			// on real threads, so that they do not always fall out of the window
			time.Sleep(time.Millisecond)
		}
	}
	ended.Store(true)
	wg.Wait()
	if returned.Load() == 0 {
		t.Error("no cursor returned an event")
	}
	t.Logf("%d events returned, %d cursors fell out of the window", returned.Load(), lost.Load())
	if n := mirror.Topics(r); n != 0 {
		t.Errorf("%d topics are left", n)
	}
}
