package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// byValue partitions by the first letter of the value. A value that begins with a question mark is
// unknown.
func byValue(t interface{ Cleanup(func()) }, r *mirror.Resource) *mirror.WatchIndex {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	return mirror.NewWatchIndex(ctx, r, func(run func()) bool { wg.Go(run); return true }, valuesOf, nil)
}

// bySet is byValue for cursors that follow sets of letters.
func bySet(t interface{ Cleanup(func()) }, r *mirror.Resource) *mirror.WatchIndex {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	return mirror.NewWatchIndex(ctx, r, func(run func()) bool { wg.Go(run); return true }, valuesOf, strings.Contains)
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

// selection is the selection of a cursor, and the test whether an event is part of it.
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

// pair are two cursors from one position: one that follows the selection, and one that reads all
// events, which are then filtered.
type pair struct {
	selection
	keyed, whole *mirror.Cursor
	got, want    []*mirror.Event
	from, pos    mirror.Revision
}

// selected removes events outside the selection: a cursor that follows a value may return more
// while it catches up.
func (p *pair) selected(evs []*mirror.Event) []*mirror.Event {
	return slices.DeleteFunc(evs, func(ev *mirror.Event) bool { return !p.selects(ev) })
}

// read reads at most limit events with the following cursor, and all with the other one. It returns
// an error of the following cursor, and fails if the other one has no such error.
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
			// The window has moved past it. The other one needs its own events only.
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
		// They may be of two lineages, the second of which has restored history.
		if want := p.want[i]; ev.Rev != want.Rev || ev.Key() != want.Key() {
			return fmt.Errorf("%s: %s, want %s", p, story(p.got), story(p.want))
		}
	}
	// I4: all events at or below its position were returned.
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

func (p *pair) follow(values, sets *mirror.WatchIndex) {
	switch {
	case p.bySet:
		p.keyed.FollowIndex(sets, p.value)
	case p.byValue:
		p.keyed.FollowIndex(values, p.value)
	default:
		p.keyed.Follow()
	}
}

// selections draws the selections of cursors for the resource at prefix.
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

// followedMirror is a mirror with pairs of cursors on one resource. Its methods with a rapid.T are
// the steps of a random walk.
type followedMirror struct {
	store      *memory.Store
	m          *mirror.Mirror
	r          *mirror.Resource // at followedPrefix
	part, sets *mirror.WatchIndex
	inner      *mirror.Resource // claimed inside r, or nil
	pairs      []*pair
	// etcd is never restored and no resource is claimed inside: all events are those of the store
	whole bool
}

func (f *followedMirror) write(t *rapid.T) { f.store.Txn(followedWrites.Draw(t, "ops")...) }

func (f *followedMirror) writeMany(t *rapid.T) {
	for range rapid.IntRange(1, 40).Draw(t, "n") {
		f.write(t)
	}
}

// join adds a pair that begins at the newest revision, or at a past or future one.
func (f *followedMirror) join(t *rapid.T) {
	s, err := f.r.Latest()
	if err != nil {
		return
	}
	p := &pair{selection: selections(followedPrefix).Draw(t, "selection")}
	p.keyed, p.whole, p.from = s.Cursor(p.start, p.end), s.Cursor("", ""), s.Rev
	if _, floor, err := f.r.Oldest(); err == nil && floor <= s.Rev && rapid.Bool().Draw(t, "past") {
		rev := rapid.Int64Range(floor, s.Rev+10).Draw(t, "rev")
		keyed, err := f.r.CursorAfter(rev, p.start, p.end)
		if err != nil {
			return
		}
		whole, err := f.r.CursorAfter(rev, "", "")
		if err != nil {
			return
		}
		p.keyed, p.whole, p.from = keyed, whole, rev
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
		f.pairs[i].keyed.Unfollow()
		f.pairs = slices.Delete(f.pairs, i, i+1)
	}
}

// claimInside claims a prefix inside the resource, or releases it.
func (f *followedMirror) claimInside(*rapid.T) {
	if f.whole {
		return
	}
	if f.inner == nil {
		f.inner, _ = f.m.Claim(followedPrefix + "m/")
	} else {
		f.inner.Release()
		f.inner = nil
	}
}

func (f *followedMirror) restore(t *rapid.T) {
	if !f.whole && rapid.IntRange(0, 5).Draw(t, "rarely") == 0 {
		f.store.Restore(max(1, f.store.Revision()-3), map[string]string{followedPrefix + "m/a": "x"})
	}
}

// overtake writes revisions that the feed does not deliver, and compacts etcd to one of the first:
// the resource is relisted, and the history after that revision is restored. Cursors from future
// revisions are not behind, and continue.
func (f *followedMirror) overtake(t *rapid.T) {
	f.store.Stall(true)
	if rapid.Bool().Draw(t, "settled") {
		synctest.Wait()
	}
	before := f.store.Revision()
	f.writeMany(t)
	if now := f.store.Revision(); now > before {
		f.store.Compact(rapid.Int64Range(before+1, min(now, before+5)).Draw(t, "compacted"))
	}
	f.store.Break()
	f.store.Stall(false)
}

// requireStored fails unless the pair has the events of the store.
func (f *followedMirror) requireStored(t *rapid.T, p *pair) {
	var want []*mirror.Event
	for _, c := range f.store.Changes(followedPrefix, p.from) {
		ev := mirror.NewEvent(c)
		if c.ModRevision <= p.pos && p.selects(ev) {
			want = append(want, ev)
		}
	}
	if got, want := story(p.got), story(want); got != want {
		t.Fatalf("%s after %d, at %d: %s, want %s", p, p.from, p.pos, got, want)
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

// check checks the invariants and, sometimes, drains all pairs. A pair ends only with its lineage,
// or if an event of its own was dropped.
func (f *followedMirror) check(t *rapid.T) {
	testcheck.NoError(t, f.m.Check())
	if rapid.IntRange(0, 3).Draw(t, "look") != 0 {
		return
	}
	synctest.Wait()
	kept := f.pairs[:0]
	for _, p := range f.pairs {
		if err := p.drain(); errors.Is(err, mirror.ErrCompacted) {
			// A watch index may leave the window too, which ends its cursors.
			if _, floor, ferr := f.r.Oldest(); ferr == nil && floor <= p.pos && p.whole != nil && !p.byValue {
				if _, werr := p.whole.Next(nil, 1<<30); werr == nil {
					t.Fatalf("%s: %v, at %d, floor %d", p, err, p.pos, floor)
				}
			}
			p.keyed.Unfollow()
		} else if err != nil {
			t.Fatal(err)
		} else {
			if f.whole && !p.byValue && p.keyed.Err() == nil {
				f.requireStored(t, p)
			}
			kept = append(kept, p)
		}
	}
	f.pairs = kept
}

// TestCursor_FollowingKeysOrValues_EqualsFilteredEvents runs cursors that follow keys, directories
// and values through writes, joins, leaves, trims, relists, gaps, claims inside others, and
// restores of etcd, and compares them with cursors that read all events, and with the store.
func TestCursor_FollowingKeysOrValues_EqualsFilteredEvents(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(st *testing.T) {
			t := rt
			f := &followedMirror{store: memory.New(), whole: rapid.Bool().Draw(t, "whole")}
			takes := time.Duration(rapid.SampledFrom([]int{0, 3, 20}).Draw(t, "restore")) * time.Second
			source := &script{Source: f.store, replay: func(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
				time.Sleep(takes)
				return f.store.Replay(ctx, prefix, after, through, deliver)
			}}
			var err error
			f.m, err = mirror.New(mirror.Options{Prefix: root, Source: source, Logger: quiet(),
				Window: mirror.Window{MaxAge: 20 * time.Second, MaxBytes: rapid.SampledFrom([]int64{4000, 1 << 20}).Draw(t, "window")}, CheckpointEvents: 4})
			testcheck.NoError(t, err)
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
				"overtake":     f.overtake,
				"restore":      f.restore,
				"settle":       func(*rapid.T) { synctest.Wait() },
				"read":         f.read,
				"":             f.check,
			})
			for _, p := range f.pairs {
				p.keyed.Unfollow()
			}
			synctest.Wait()
			if n := mirror.Topics(f.r); n != 0 {
				t.Errorf("%d topics are left", n)
			}
		})
	})
}

// drain reads all due events, and compares them.
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
		p.want = slices.Clone(p.got) // only the following cursor has the rest
		return nil
	}
	if err := p.read(100); err != nil {
		return err
	}
	if p.keyed.Err() != nil || p.whole.Err() != nil {
		return nil // both wait for the restored history, each where it was
	}
	if len(p.got) != len(p.want) || p.keyed.Position() != p.whole.Position() {
		return fmt.Errorf("%s: at %d %s, want at %d %s", p, p.keyed.Position(), story(p.got), p.whole.Position(), story(p.want))
	}
	return nil
}

// TestCursor_AfterRelistGap_Continues: etcd was compacted past the published revision, and the
// resource was relisted. Cursors that are not behind continue, and are woken by later events.
func TestCursor_AfterRelistGap_Continues(t *testing.T) {
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
			// Their next events are in the gap, and their client has already received these from
			// another source.
			c, err := r.CursorAfter(store.Revision()+10, "/registry/a/d/k", "/registry/a/d/k\x00")
			switch name {
			case "directory":
				c, err = r.CursorAfter(store.Revision()+10, "/registry/a/d/", "/registry/a/d0")
			case "value":
				c, err = r.CursorAfter(store.Revision()+10, "", "")
			}
			testcheck.NoError(t, err)
			if name == "value" {
				c.FollowIndex(part, "v")
			} else {
				c.Follow()
			}
			defer c.Unfollow()
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
			t.Fatal("no relist")
		}
		changed := map[string]<-chan struct{}{}
		for name, c := range cursors {
			for { // as a watch does: it may be woken without an event
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
			ch := c.Changed()
			evs, err := c.Next(nil, 10)
			for ; err == nil && len(evs) == 0; evs, err = c.Next(nil, 10) {
				// woken without an event
				<-ch
				ch = c.Changed()
			}
			if err != nil || len(evs) != 1 || evs[0].Rev != rev {
				t.Errorf("%s: %s, %v, want %d", name, story(evs), err, rev)
			}
		}
	})
}

// TestCursor_UnfollowAtFloor_ReadsOn: a cursor whose topic has no events is at the published
// revision when all events up to there have left the window.
func TestCursor_UnfollowAtFloor_ReadsOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, func(o *mirror.Options) { o.Window = mirror.Window{MaxAge: time.Minute} })
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Put("/registry/a/x", "1"), r)
		c := latest(t, r).Cursor("/registry/a/x", "/registry/a/x\x00")
		c.Follow()
		reach(t, m, store.Put("/registry/a/y", "1"), r)
		synctest.Wait() // the poster may post the event later than it is published
		if evs, err := c.Next(nil, 9); len(evs) > 0 || err != nil {
			t.Fatalf("%s, %v", story(evs), err)
		}
		time.Sleep(time.Hour)
		if _, floor, err := r.Oldest(); err != nil || floor != c.Position() {
			t.Fatalf("the floor is %d, %v, want the position %d", floor, err, c.Position())
		}
		c.Unfollow()
		rev := store.Put("/registry/a/x", "2")
		reach(t, m, rev, r)
		if evs, err := c.Next(nil, 9); err != nil || len(evs) != 1 || evs[0].Rev != rev {
			t.Errorf("%s, %v, want the event of %d", story(evs), err, rev)
		}
	})
}

// TestCursor_Since_ReturnsVisitedEvents: events between a snapshot and a cursor on the whole
// resource, unless the cursor has not reached it, or one of them is of another lineage.
func TestCursor_Since_ReturnsVisitedEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		put := func(value string) mirror.Snapshot {
			store.Put("/registry/a/x", value)
			reach(t, m, store.Revision(), r)
			return latest(t, r)
		}
		require := func(what string, c *mirror.Cursor, s mirror.Snapshot, most int, wantOK bool, want ...string) {
			t.Helper()
			events, ok := c.Since(s, nil, most)
			var got []string
			for _, ev := range events {
				got = append(got, string(ev.Entry.Value()))
			}
			if ok != wantOK || ok && !slices.Equal(got, want) {
				t.Errorf("%s: %v %t, want %v %t", what, got, ok, want, wantOK)
			}
		}
		one := put("1")
		c := one.Cursor("", "")
		require("at the snapshot", c, one, 0, true)
		three := []mirror.Snapshot{put("2"), put("3")}[1]
		require("before the events", c, one, 9, true)
		require("before the snapshot", c, three, 9, false)
		next := *c
		if _, err := next.Next(nil, 1); err != nil {
			t.Fatal(err)
		}
		require("after one event", &next, one, 9, true, "2")
		if _, err := next.Next(nil, 9); err != nil {
			t.Fatal(err)
		}
		require("after two events", &next, one, 2, true, "2", "3")
		require("after two events", &next, one, 1, false)
		require("at the next snapshot", &next, three, 0, true)
		if !next.SameLineage(c) {
			t.Error("the cursor has left the lineage")
		}

		store.Restore(store.Revision(), map[string]string{"/registry/a/x": "other"})
		time.Sleep(time.Minute)
		reach(t, m, store.Revision(), r)
		require("at a snapshot of the ended lineage", &next, three, 9, true)
		require("at a snapshot of the next lineage", &next, latest(t, r), 9, false)
		if next.SameLineage(latest(t, r).Cursor("", "")) {
			t.Error("both lineages are the same")
		}
	})
}
