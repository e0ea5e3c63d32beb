package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

// byValue partitions by the first letter of the value. What begins with a question mark
// cannot be told.
func byValue(t interface{ Cleanup(func()) }, r *mirror.Resource) *mirror.Partition {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	return mirror.NewPartition(ctx, r, func(run func()) bool { wg.Go(run); return true }, valuesOf)
}

// bySet is byValue for cursors that follow sets of letters.
func bySet(t interface{ Cleanup(func()) }, r *mirror.Resource) *mirror.Partition {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	return mirror.NewSetPartition(ctx, r, func(run func()) bool { wg.Go(run); return true }, valuesOf, strings.Contains)
}

func valuesOf(ev *mirror.Event) (before, now string, known bool) {
	known = true
	of := func(e *mirror.Entry) string {
		switch {
		case e == nil || len(e.Value()) == 0:
			return ""
		case e.Value()[0] == '?':
			known = false
		}
		return string(e.Value()[:1])
	}
	before, now = of(ev.Prev), of(ev.Entry)
	return before, now, known
}

// selection is what a cursor is asked for, and how to tell whether an event is part of it.
type selection struct {
	start, end string
	byValue    bool
	bySet      bool // value is a set
	value      string
}

func (s selection) String() string {
	if s.byValue {
		return fmt.Sprintf("value %q in [%s, %s)", s.value, s.start, s.end)
	}
	return fmt.Sprintf("[%s, %s)", s.start, s.end)
}

func (s selection) selects(ev *mirror.Event) bool {
	if k := ev.Key(); k < s.start || s.end != "" && k >= s.end {
		return false
	}
	if !s.byValue {
		return true
	}
	before, now, known := valuesOf(ev)
	if s.bySet {
		return !known || ev.Prev != nil && strings.Contains(s.value, before) || ev.Entry != nil && strings.Contains(s.value, now)
	}
	return !known || ev.Prev != nil && before == s.value || ev.Entry != nil && now == s.value
}

// pair are two cursors from one place: one that follows the selection, and one that reads
// everything and is filtered.
type pair struct {
	selection
	keyed, whole *mirror.Cursor
	got, want    []*mirror.Event
	pos          mirror.Revision
}

// selected drops what the selection does not select: a cursor that follows a value may
// return more while it catches up.
func (p *pair) selected(evs []*mirror.Event) []*mirror.Event {
	return slices.DeleteFunc(evs, func(ev *mirror.Event) bool { return !p.selects(ev) })
}

// read reads at most limit events with the keyed cursor, and everything with the other.
// It returns an error of the keyed cursor, and complains of one that the other one
// does not have.
func (p *pair) read(limit int) error {
	evs, err := p.keyed.Next(nil, limit)
	p.got = append(p.got, p.selected(evs)...)
	pos := p.keyed.Position()
	if pos < p.pos {
		return fmt.Errorf("%s: position %d after %d", p, pos, p.pos)
	}
	p.pos = pos
	if err != nil {
		return err
	}
	if p.whole != nil {
		evs, err = p.whole.Next(nil, 1<<30)
		if errors.Is(err, mirror.ErrCompacted) {
			// The window has moved past it. The other one knows of its own events only.
			p.whole = nil
		} else if err != nil {
			return err
		}
		p.want = append(p.want, p.selected(evs)...)
	}
	if len(p.got) > len(p.want) && p.whole != nil {
		return fmt.Errorf("%s: %s, want %s", p, story(p.got), story(p.want))
	}
	for i, ev := range p.got[:min(len(p.got), len(p.want))] {
		if ev != p.want[i] {
			return fmt.Errorf("%s: %s, want %s", p, story(p.got), story(p.want))
		}
	}
	// I4: what is at or below its position was returned, to the last.
	if len(p.got) < len(p.want) && p.want[len(p.got)].Rev <= pos {
		return fmt.Errorf("%s: position %d: %s, want %s", p, pos, story(p.got), story(p.want))
	}
	return nil
}

func story(evs []*mirror.Event) string {
	var b strings.Builder
	for _, ev := range evs {
		fmt.Fprintf(&b, " %d:%s", ev.Rev, ev.Key())
	}
	return b.String()
}

func (p *pair) follow(values, sets *mirror.Partition) {
	switch {
	case p.bySet:
		p.keyed.FollowValue(sets, p.value)
	case p.byValue:
		p.keyed.FollowValue(values, p.value)
	default:
		p.keyed.Follow()
	}
}

// selections draws what cursors may ask for of the resource at prefix.
func selections(prefix string) *rapid.Generator[selection] {
	return rapid.Custom(func(t *rapid.T) selection {
		ns := prefix + rapid.SampledFrom([]string{"m/", "n/", "o/p/"}).Draw(t, "namespace")
		s := rapid.SampledFrom([]selection{
			{start: ns + "a", end: ns + "a\x00"},
			{start: ns + "b", end: ns + "b\x00"},
			{start: prefix + "a", end: prefix + "a\x00"},
			{start: ns, end: ns[:len(ns)-1] + "0"},
			{start: ns + "a", end: ns + "c"}, // neither a key nor a directory
			{start: prefix, end: prefix[:len(prefix)-1] + "0"},
			{},
		}).Draw(t, "range")
		s.byValue = rapid.Bool().Draw(t, "by value")
		if s.byValue {
			s.value = rapid.SampledFrom([]string{"", "x", "y", "z"}).Draw(t, "value")
			if s.bySet = rapid.Bool().Draw(t, "by set"); s.bySet {
				s.value = rapid.SampledFrom([]string{"x", "xy", "yz", "xyz", "q"}).Draw(t, "set")
			}
		}
		return s
	})
}

const followedPrefix = "/registry/a/" // of the resource of a followedMirror

// followedWrites draws transactions of keys in and around followedPrefix.
var followedWrites = rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) memory.Op {
	dir := rapid.SampledFrom([]string{followedPrefix, followedPrefix + "m/", followedPrefix + "n/", followedPrefix + "o/p/", "/registry/b/"}).Draw(t, "directory")
	return memory.Op{
		Key:    dir + rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "key"),
		Value:  rapid.SampledFrom([]string{"", "x1", "x2", "y1", "y2", "z", "?"}).Draw(t, "value"),
		Delete: rapid.IntRange(0, 3).Draw(t, "delete") == 0,
	}
}), 1, 5, func(o memory.Op) string { return o.Key })

// followedMirror is a mirror with pairs of cursors on one resource. Its methods with a rapid.T are the steps of a random walk.
type followedMirror struct {
	store      *memory.Store
	m          *mirror.Mirror
	r          *mirror.Resource // at followedPrefix
	part, sets *mirror.Partition
	inner      *mirror.Resource // claimed inside r, or nil
	pairs      []*pair
}

func (f *followedMirror) write(t *rapid.T) { f.store.Txn(followedWrites.Draw(t, "ops")...) }

func (f *followedMirror) writeMany(t *rapid.T) {
	for range rapid.IntRange(1, 40).Draw(t, "n") {
		f.write(t)
	}
}

// join adds a pair that begins at the present, or at a revision in the past or the future.
func (f *followedMirror) join(t *rapid.T) {
	s, err := f.r.Latest()
	if err != nil {
		return
	}
	p := &pair{selection: selections(followedPrefix).Draw(t, "selection")}
	p.keyed, p.whole = s.Cursor(p.start, p.end), s.Cursor("", "")
	if _, floor, err := f.r.Oldest(); err == nil && floor <= s.Rev && rapid.Bool().Draw(t, "past") {
		rev := rapid.Int64Range(floor, s.Rev+3).Draw(t, "rev")
		keyed, err := f.r.CursorAfter(rev, p.start, p.end)
		if err != nil {
			return
		}
		whole, err := f.r.CursorAfter(rev, "", "")
		if err != nil {
			return
		}
		p.keyed, p.whole = keyed, whole
	}
	p.follow(f.part, f.sets)
	f.pairs = append(f.pairs, p)
}

func (f *followedMirror) joinAgain(t *rapid.T) {
	if len(f.pairs) > 0 {
		rapid.SampledFrom(f.pairs).Draw(t, "pair").follow(f.part, f.sets)
	}
}

func (f *followedMirror) leave(t *rapid.T) {
	if len(f.pairs) > 0 {
		i := rapid.IntRange(0, len(f.pairs)-1).Draw(t, "pair")
		f.pairs[i].keyed.Close()
		f.pairs = slices.Delete(f.pairs, i, i+1)
	}
}

// claimInside claims a prefix inside the resource, or releases it.
func (f *followedMirror) claimInside(*rapid.T) {
	if f.inner == nil {
		f.inner, _ = f.m.Claim(followedPrefix + "m/")
	} else {
		f.inner.Release()
		f.inner = nil
	}
}

func (f *followedMirror) restore(t *rapid.T) {
	if rapid.IntRange(0, 5).Draw(t, "rarely") == 0 {
		f.store.Restore(max(1, f.store.Revision()-3), map[string]string{followedPrefix + "m/a": "x"})
	}
}

func (f *followedMirror) read(t *rapid.T) {
	for _, p := range f.pairs {
		err := p.read(rapid.IntRange(1, 5).Draw(t, "limit"))
		if err != nil && !errors.Is(err, mirror.ErrCompacted) {
			t.Fatal(err)
		}
	}
}

// check checks the mirror and, sometimes, drains all pairs. A pair ends only with its lineage, or if an event of its own was
// dropped.
func (f *followedMirror) check(t *rapid.T) {
	if err := f.m.Check(); err != nil {
		t.Fatal(err)
	}
	if rapid.IntRange(0, 3).Draw(t, "look") != 0 {
		return
	}
	synctest.Wait()
	kept := f.pairs[:0]
	for _, p := range f.pairs {
		if err := p.drain(); errors.Is(err, mirror.ErrCompacted) {
			// A partition may fall out of the window too, and takes its followers with it.
			if _, floor, ferr := f.r.Oldest(); ferr == nil && floor <= p.pos && p.whole != nil && !p.byValue {
				if _, werr := p.whole.Next(nil, 1<<30); werr == nil {
					t.Fatalf("%s: %v, at %d, floor %d", p, err, p.pos, floor)
				}
			}
			p.keyed.Close()
		} else if err != nil {
			t.Fatal(err)
		} else {
			kept = append(kept, p)
		}
	}
	f.pairs = kept
}

// TestFollowingIsFiltering drives cursors that follow keys, directories and values through
// writes, joins, leaves, trims, relists, releases, claims inside others, and restores of
// etcd, and compares them with cursors that read everything.
func TestFollowingIsFiltering(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(st *testing.T) {
			t := rt
			f := &followedMirror{store: memory.New()}
			var err error
			f.m, err = mirror.New(mirror.Options{Prefix: root, Source: f.store, Logger: quiet(),
				Window: mirror.Window{MaxAge: 20 * time.Second, MaxBytes: 4000}, CheckpointEvents: 4})
			if err != nil {
				t.Fatal(err)
			}
			defer f.m.Close()
			if f.r, err = f.m.Claim(followedPrefix); err != nil {
				t.Fatal(err)
			}
			var clean cleanups
			defer clean.run()
			f.part, f.sets = byValue(&clean, f.r), bySet(&clean, f.r)
			t.Repeat(map[string]func(*rapid.T){
				"write":        f.write,
				"write many":   f.writeMany,
				"sleep":        func(t *rapid.T) { time.Sleep(time.Duration(rapid.IntRange(1, 15).Draw(t, "s")) * time.Second) },
				"join":         f.join,
				"join again":   f.joinAgain,
				"leave":        f.leave,
				"claim inside": f.claimInside,
				"break":        func(*rapid.T) { f.store.Break() },
				"restore":      f.restore,
				"settle":       func(*rapid.T) { synctest.Wait() },
				"read":         f.read,
				"":             f.check,
			})
			for _, p := range f.pairs {
				p.keyed.Close()
			}
			synctest.Wait()
			if n := mirror.Topics(f.r); n != 0 {
				t.Errorf("%d topics are left", n)
			}
		})
	})
}

// drain reads until nothing is due, and compares all of it.
func (p *pair) drain() error {
	for n := -1; n != len(p.got) || p.keyed.Position() == 0; {
		n = len(p.got)
		if err := p.read(3); err != nil {
			return err
		}
	}
	for {
		evs, err := p.keyed.Next(nil, 100)
		if err != nil {
			return err
		}
		p.got = append(p.got, p.selected(evs)...)
		if len(evs) < 100 {
			break
		}
	}
	if p.whole == nil {
		p.want = slices.Clone(p.got) // only it has the rest
		return nil
	}
	if err := p.read(100); err != nil {
		return err
	}
	if len(p.got) != len(p.want) || p.keyed.Position() != p.whole.Position() {
		return fmt.Errorf("%s: at %d %s, want at %d %s", p, p.keyed.Position(), story(p.got), p.whole.Position(), story(p.want))
	}
	return nil
}

// cleanups is the Cleanup of a test inside another one.
type cleanups []func()

func (c *cleanups) Cleanup(f func()) { *c = append(*c, f) }

func (c *cleanups) run() {
	for _, f := range *c {
		f()
	}
}

// woken waits for the cursors' next change and returns the numbers of those that had one
// by the time that all is quiet.
func woken(waiting []<-chan struct{}) (numbers []int) {
	synctest.Wait()
	for i, ch := range waiting {
		select {
		case <-ch:
			numbers = append(numbers, i)
		default:
		}
	}
	return numbers
}

// waitingCursors are n cursors each that follow a key, a namespace and a value, in this order.
type waitingCursors []*mirror.Cursor

// waitingKey is the key of the i-th namespace.
func waitingKey(i int) string { return fmt.Sprintf("/registry/a/ns-%03d/name", i) }

func newWaitingCursors(s mirror.Snapshot, part *mirror.Partition, n int) (all waitingCursors) {
	for i := range n {
		c := s.Cursor(waitingKey(i), waitingKey(i)+"\x00")
		c.Follow()
		all = append(all, c)
	}
	for i := range n {
		c := s.Cursor(fmt.Sprintf("/registry/a/ns-%03d/", i), fmt.Sprintf("/registry/a/ns-%03d0", i))
		c.Follow()
		all = append(all, c)
	}
	for i := range n {
		c := s.Cursor("", "")
		c.FollowValue(part, fmt.Sprint("value-", i))
		all = append(all, c)
	}
	return all
}

// requireWakes fails unless the change wakes exactly these cursors, and each of them reads exactly the change.
func (w waitingCursors) requireWakes(t *testing.T, store *memory.Store, op memory.Op, want []int) {
	t.Helper()
	var waiting []<-chan struct{}
	for i, c := range w {
		waiting = append(waiting, c.Changed())
		if evs, err := c.Next(nil, 10); len(evs) != 0 || err != nil {
			t.Fatalf("cursor %d has %s, %v before %v", i, story(evs), err, op)
		}
	}
	rev := store.Txn(op)
	if got := woken(waiting); !slices.Equal(got, want) {
		t.Errorf("%v woke %d, want %d", op, got, want)
	}
	for _, i := range want {
		evs, err := w[i].Next(nil, 10)
		if err != nil || len(evs) != 1 || evs[0].Rev != rev || evs[0].Key() != op.Key || w[i].Position() != rev {
			t.Errorf("cursor %d: %s, %v, position %d after %v at %d", i, story(evs), err, w[i].Position(), op, rev)
		}
	}
}

// requireEnd restores etcd, and fails unless that ends every cursor.
func (w waitingCursors) requireEnd(t *testing.T, store *memory.Store) {
	t.Helper()
	var waiting []<-chan struct{}
	for _, c := range w {
		waiting = append(waiting, c.Changed())
	}
	store.Restore(1, nil)
	time.Sleep(time.Minute)
	if got := woken(waiting); len(got) != len(w) {
		t.Errorf("a restored etcd woke %d cursors of %d", len(got), len(w))
	}
	for i, c := range w {
		if _, err := c.Next(nil, 1); !errors.Is(err, mirror.ErrCompacted) {
			t.Fatalf("cursor %d of before the restore: %v", i, err)
		}
		c.Close()
	}
}

// TestAnEventWakesThoseItConcerns: with 1,000 cursors on 1,000 keys, namespaces and
// values, one event wakes exactly the cursors that follow it, and each reads exactly that.
func TestAnEventWakesThoseItConcerns(t *testing.T) {
	const n = 1000
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		part := mirror.NewPartition(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			if ev.Prev != nil {
				before = string(ev.Prev.Value())
			}
			if ev.Entry != nil {
				now = string(ev.Entry.Value())
			}
			return before, now, true
		})
		cursors := newWaitingCursors(latest(t, r), part, n)
		synctest.Wait()
		for _, tt := range []struct {
			op   memory.Op
			want []int
		}{
			{memory.Op{Key: waitingKey(7), Value: "value-12"}, []int{7, n + 7, 2*n + 12}},
			{memory.Op{Key: waitingKey(8), Value: "value-12"}, []int{8, n + 8, 2*n + 12}},
			{memory.Op{Key: waitingKey(7), Value: "value-900"}, []int{7, n + 7, 2*n + 12, 2*n + 900}},
			{memory.Op{Key: waitingKey(7) + "/below", Value: "value-1"}, []int{n + 7, 2*n + 1}},
			{memory.Op{Key: waitingKey(7), Delete: true}, []int{7, n + 7, 2*n + 900}},
			{memory.Op{Key: "/registry/a/nobody's", Value: "nobody's"}, nil},
			{memory.Op{Key: "/registry/b/x", Value: "value-5"}, nil},
		} {
			cursors.requireWakes(t, store, tt.op, tt.want)
		}
		cursors.requireEnd(t, store)
	})
}

// goes starts the goroutine of a partition, which is waited for.
func goes(c *cleanups) func(func()) bool {
	var wg sync.WaitGroup
	c.Cleanup(wg.Wait)
	return func(run func()) bool { wg.Go(run); return true }
}

// TestAQuietFollowerOutlivesTheWindow: the window moves past a position at which nothing
// of the follower's own happened; and when something was lost, it learns of it.
func TestAQuietFollowerOutlivesTheWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) {
			o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: 5000}
		})
		r := claim(t, m, "/registry/a/")
		store.Put("/registry/a/quiet", "quiet")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		part := byValue(&clean, r)
		s := latest(t, r)
		all, key, value, late := s.Cursor("", ""), s.Cursor("/registry/a/quiet", "/registry/a/quiet\x00"), s.Cursor("", ""), s.Cursor("", "")
		key.Follow()
		value.FollowValue(part, "q")
		late.FollowValue(part, "q")
		noise := func() {
			for i := range 500 {
				store.Put(fmt.Sprintf("/registry/a/busy-%d", i%7), fmt.Sprint("busy", i))
				time.Sleep(200 * time.Millisecond) // history is cut by the second
			}
			synctest.Wait()
		}
		noise()
		if _, floor, _ := r.Oldest(); floor <= s.Rev {
			t.Fatalf("the floor is %d, want it above %d", floor, s.Rev)
		}
		if _, err := all.Next(nil, 1); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("a cursor on everything: %v", err)
		}
		for name, c := range map[string]*mirror.Cursor{"key": key, "value": value} {
			evs, err := c.Next(nil, 10)
			if len(evs) != 0 || err != nil || c.Position() != m.Clock() {
				t.Errorf("%s: %s, %v, position %d of %d", name, story(evs), err, c.Position(), m.Clock())
			}
		}
		// An event of theirs that is read, and one that is dropped before it is.
		rev := store.Put("/registry/a/quiet", "quieter")
		synctest.Wait()
		for name, c := range map[string]*mirror.Cursor{"key": key, "value": value} {
			if evs, err := c.Next(nil, 10); len(evs) != 1 || err != nil || evs[0].Rev != rev {
				t.Errorf("%s: %s, %v, want %d", name, story(evs), err, rev)
			}
		}
		noise()
		if _, err := key.Next(nil, 10); err != nil {
			t.Errorf("key, its event was read: %v", err)
		}
		if _, err := value.Next(nil, 10); err != nil {
			t.Errorf("value, its event was read: %v", err)
		}
		if _, err := late.Next(nil, 10); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("an event was dropped before it was read: %v", err)
		}
		key.Close()
		value.Close()
		late.Close()
	})
}

// TestAPositionWaitsForThePartition: while the partition is busy with an event, nobody who
// follows a value is told that he has seen what is later; the clock and others go on.
func TestAPositionWaitsForThePartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		gate := make(chan struct{})
		part := mirror.NewPartition(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			if strings.HasSuffix(ev.Key(), "/slow") {
				<-gate
			}
			return valuesOf(ev)
		})
		c, other := latest(t, r).Cursor("", ""), latest(t, r).Cursor("", "")
		c.FollowValue(part, "x")
		other.FollowValue(part, "somebody else's")
		key := latest(t, r).Cursor("/registry/a/slow", "/registry/a/slow\x00")
		key.Follow()
		before := store.Put("/registry/a/1", "x")
		slow := store.Put("/registry/a/slow", "y")
		later := store.Put("/registry/a/2", "x")
		synctest.Wait()
		if evs, err := key.Next(nil, 10); err != nil || len(evs) != 1 || key.Position() != later {
			t.Errorf("by key: %s, %v, position %d, want %d", story(evs), err, key.Position(), later)
		}
		evs, err := c.Next(nil, 10)
		if err != nil || len(evs) != 1 || evs[0].Rev != before || c.Position() != slow-1 {
			t.Errorf("by value: %s, %v, position %d, want %d", story(evs), err, c.Position(), slow-1)
		}
		// It is told when the partition is done, if it wants to know.
		c.Await(later)
		other.Await(later)
		changed, alsoChanged := c.Changed(), other.Changed()
		close(gate)
		<-changed
		<-alsoChanged
		if evs, err := other.Next(nil, 10); err != nil || len(evs) != 0 || other.Position() != later {
			t.Errorf("another value: %s, %v, position %d, want %d", story(evs), err, other.Position(), later)
		}
		evs, err = c.Next(nil, 10)
		if err != nil || len(evs) != 1 || evs[0].Rev != later || c.Position() != later {
			t.Errorf("by value: %s, %v, position %d, want %d", story(evs), err, c.Position(), later)
		}
		// Nothing happens here, but elsewhere: the position moves all the same.
		elsewhere := store.Put("/registry/b/x", "x")
		synctest.Wait()
		for name, c := range map[string]*mirror.Cursor{"value": c, "another value": other, "key": key} {
			if evs, err := c.Next(nil, 10); len(evs) != 0 || err != nil || c.Position() != elsewhere {
				t.Errorf("%s: %s, %v, position %d, want %d", name, story(evs), err, c.Position(), elsewhere)
			}
			c.Close()
		}
	})
}

// TestFollowersGoOnAfterAGap: etcd was compacted past what the mirror knew, and the resource was
// listed anew. Who is not behind goes on, and is woken by what happens after.
func TestFollowersGoOnAfterAGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		store.Put("/registry/a/x", "x")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		part := byValue(&clean, r)
		cursors := map[string]*mirror.Cursor{}
		for _, name := range []string{"key", "directory", "value"} {
			// What they are about to see is in the gap, and they have seen it elsewhere.
			c, err := r.CursorAfter(store.Revision()+10, "/registry/a/d/k", "/registry/a/d/k\x00")
			switch name {
			case "directory":
				c, err = r.CursorAfter(store.Revision()+10, "/registry/a/d/", "/registry/a/d0")
			case "value":
				c, err = r.CursorAfter(store.Revision()+10, "", "")
			}
			if err != nil {
				t.Fatal(err)
			}
			if name == "value" {
				c.FollowValue(part, "v")
			} else {
				c.Follow()
			}
			defer c.Close()
			cursors[name] = c
		}
		store.Stall(true)
		synctest.Wait()
		for range 10 {
			store.Put("/registry/a/x", "x")
		}
		store.Compact(store.Revision())
		store.Break()
		store.Stall(false)
		time.Sleep(time.Minute)
		lists := m.Stats().Relists
		if lists == 0 {
			t.Fatal("nothing was listed anew")
		}
		changed := map[string]<-chan struct{}{}
		for name, c := range cursors {
			for { // as a watch does: it may be woken for nothing
				ch := c.Changed()
				if evs, err := c.Next(nil, 10); err != nil || len(evs) != 0 {
					t.Fatalf("%s: %s, %v", name, story(evs), err)
				}
				select {
				case <-ch:
					continue
				default:
				}
				changed[name] = ch
				break
			}
		}
		rev := store.Put("/registry/a/d/k", "v")
		for name, c := range cursors {
			<-changed[name]
			if evs, err := c.Next(nil, 10); err != nil || len(evs) != 1 || evs[0].Rev != rev {
				t.Errorf("%s: %s, %v, want %d", name, story(evs), err, rev)
			}
		}
	})
}

// TestValuesThatNobodyFollows are remembered for those who come later from an older place, but
// not more than so many; who asks for one that was forgotten looks for himself.
func TestValuesThatNobodyFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		part := mirror.NewPartition(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			return ev.Key(), ev.Key(), true
		})
		began := latest(t, r)
		first := began.Cursor("", "")
		first.FollowValue(part, "nobody's")
		defer first.Close()
		key := func(i int) string { return fmt.Sprintf("/registry/a/%05d", i) }
		most := 0
		const values = 25_000
		for i := range values {
			store.Put(key(i), "x")
			if i%1000 == 999 {
				synctest.Wait()
				most = max(most, part.Sorted())
			}
		}
		if most > 10_001 || most < 5000 {
			t.Errorf("%d values had topics", most)
		}
		for _, i := range []int{0, 9_999, 10_000, 12_345, 24_999} {
			c := began.Cursor("", "")
			c.FollowValue(part, key(i))
			var got []*mirror.Event
			for {
				n := len(got)
				var err error
				if got, err = c.Next(got, 1000); err != nil {
					t.Fatal(err)
				}
				if len(got) == n {
					break
				}
			}
			c.Close()
			found := slices.ContainsFunc(got, func(ev *mirror.Event) bool { return ev.Key() == key(i) })
			if !found || c.Position() != m.Clock() {
				t.Errorf("value %d: found %t among %d events, position %d of %d", i, found, len(got), c.Position(), m.Clock())
			}
		}
	})
}

// followedValues are the first letters of the values that TestFollowersAmongWriters writes.
var followedValues = []string{"p", "q", "r", "s"}

// racingFollower follows a random selection of the resource, again and again.
type racingFollower struct {
	r              *mirror.Resource
	part, sets     *mirror.Partition
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

// held returns the entries of the snapshot that are selected.
func (s selection) held(in mirror.Snapshot) state {
	out := state{}
	for e := range in.All(s.start, s.end) {
		if s.has(e) {
			out[e.Key()] = describe(e)
		}
	}
	return out
}

// follow reads up to 200 times from the snapshot on, and compares the applied events with the snapshot at each position.
func (f *racingFollower) follow(t *testing.T, s mirror.Snapshot, sel selection) {
	p := &pair{selection: sel, keyed: s.Cursor(sel.start, sel.end)}
	defer p.keyed.Close()
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

// TestFollowersAmongWriters is for the race detector: cursors join from the present and the
// past, follow, stall and leave on real threads while a writer commits and the window trims.
// At its position, each holds exactly the state that its keys or its value had there.
func TestFollowersAmongWriters(t *testing.T) {
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
			time.Sleep(time.Millisecond) // on real threads, so that they do not fall out of the window all the time
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

// TestABacklogIsItsOwnersOwn: who follows a value from far behind makes nobody else wait, and
// costs nobody his place.
func TestABacklogIsItsOwnersOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: 20 * time.Second, MaxBytes: 1 << 30} })
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		old := latest(t, r).Rev
		noise := func() {
			store.Put(fmt.Sprintf("/registry/a/busy-%d", store.Revision()%7), fmt.Sprint("busy", store.Revision()))
			time.Sleep(100 * time.Millisecond)
		}
		for range 190 {
			noise()
		}
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		part := mirror.NewPartition(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			time.Sleep(90 * time.Millisecond)
			return valuesOf(ev)
		})
		behind, err := r.CursorAfter(old, "", "")
		if err != nil {
			t.Fatal(err)
		}
		fresh := latest(t, r).Cursor("", "")
		behind.FollowValue(part, "x")
		fresh.FollowValue(part, "q")
		defer behind.Close()
		defer fresh.Close()
		store.Put("/registry/a/q", "q")
		for waited := time.Now(); ; noise() {
			evs, err := fresh.Next(nil, 10)
			if err != nil {
				t.Fatal(err)
			}
			if len(evs) == 1 {
				break
			}
			if time.Since(waited) > time.Minute { // a failure: the backlog is never read
				t.Fatal("the event waits for the backlog of another")
			}
		}
		for range 300 {
			noise()
			if _, err := fresh.Next(nil, 10); err != nil {
				_, floor, _ := r.Oldest()
				t.Fatalf("%v; position %d, floor %d, clock %d", err, fresh.Position(), floor, m.Clock())
			}
		}
	})
}

// TestAPartitionThatFallsBehind: when events leave the window before a partition has come to
// them, those who follow a value read them in the log, or learn that they cannot.
func TestAPartitionThatFallsBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: 5 * time.Second, MaxBytes: 1 << 30} })
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		var clean cleanups
		defer clean.run()
		slow := make(chan struct{})
		part := mirror.NewPartition(t.Context(), r, goes(&clean), func(ev *mirror.Event) (before, now string, known bool) {
			<-slow
			return valuesOf(ev)
		})
		c := latest(t, r).Cursor("", "")
		c.FollowValue(part, "q")
		defer func() { c.Close() }()
		for i := range 100 {
			store.Put(fmt.Sprintf("/registry/a/busy-%d", i%7), fmt.Sprint("busy", i))
			time.Sleep(200 * time.Millisecond)
		}
		// Its position stands where the partition stands, which is out of the window by now.
		close(slow)
		synctest.Wait()
		if _, err := c.Next(nil, 10); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("position %d: %v", c.Position(), err)
		}
		c.Close()
		c = latest(t, r).Cursor("", "")
		c.FollowValue(part, "q")
		rev := store.Put("/registry/a/q", "q")
		synctest.Wait()
		if evs, err := c.Next(nil, 10); err != nil || len(evs) != 1 || evs[0].Rev != rev {
			t.Errorf("who comes after: %s, %v", story(evs), err)
		}
	})
}
