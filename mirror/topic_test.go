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

// TestFollowingIsFiltering drives cursors that follow keys, directories and values through
// writes, joins, leaves, trims, relists, releases, claims inside others, and restores of
// etcd, and compares them with cursors that read everything.
func TestFollowingIsFiltering(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(st *testing.T) {
			t := rt
			const prefix, inner = "/registry/a/", "/registry/a/m/"
			store := memory.New()
			m, err := mirror.New(mirror.Options{Prefix: root, Source: store, Logger: quiet(),
				Window: mirror.Window{MaxAge: 20 * time.Second, MaxBytes: 4000}, CheckpointEvents: 4})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			r, err := m.Claim(prefix)
			if err != nil {
				t.Fatal(err)
			}
			var clean cleanups
			defer clean.run()
			part, sets := byValue(&clean, r), bySet(&clean, r)
			var claimed *mirror.Resource
			var pairs []*pair

			op := rapid.Custom(func(t *rapid.T) memory.Op {
				dir := rapid.SampledFrom([]string{prefix, prefix + "m/", prefix + "n/", prefix + "o/p/", "/registry/b/"}).Draw(t, "directory")
				return memory.Op{
					Key:    dir + rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "key"),
					Value:  rapid.SampledFrom([]string{"", "x1", "x2", "y1", "y2", "z", "?"}).Draw(t, "value"),
					Delete: rapid.IntRange(0, 3).Draw(t, "delete") == 0,
				}
			})
			ops := rapid.SliceOfNDistinct(op, 1, 5, func(o memory.Op) string { return o.Key })
			t.Repeat(map[string]func(*rapid.T){
				"write": func(t *rapid.T) { store.Txn(ops.Draw(t, "ops")...) },
				"write many": func(t *rapid.T) {
					for range rapid.IntRange(1, 40).Draw(t, "n") {
						store.Txn(ops.Draw(t, "ops")...)
					}
				},
				"sleep": func(t *rapid.T) { time.Sleep(time.Duration(rapid.IntRange(1, 15).Draw(t, "s")) * time.Second) },
				"join": func(t *rapid.T) {
					s, err := r.Latest()
					if err != nil {
						return
					}
					p := &pair{selection: selections(prefix).Draw(t, "selection")}
					p.keyed, p.whole = s.Cursor(p.start, p.end), s.Cursor("", "")
					if _, floor, err := r.Oldest(); err == nil && floor <= s.Rev && rapid.Bool().Draw(t, "past") {
						rev := rapid.Int64Range(floor, s.Rev+3).Draw(t, "rev")
						keyed, err := r.CursorAfter(rev, p.start, p.end)
						if err != nil {
							return
						}
						whole, err := r.CursorAfter(rev, "", "")
						if err != nil {
							return
						}
						p.keyed, p.whole = keyed, whole
					}
					p.follow(part, sets)
					pairs = append(pairs, p)
				},
				"join again": func(t *rapid.T) {
					if len(pairs) > 0 {
						rapid.SampledFrom(pairs).Draw(t, "pair").follow(part, sets)
					}
				},
				"leave": func(t *rapid.T) {
					if len(pairs) > 0 {
						i := rapid.IntRange(0, len(pairs)-1).Draw(t, "pair")
						pairs[i].keyed.Close()
						pairs = slices.Delete(pairs, i, i+1)
					}
				},
				"claim inside": func(t *rapid.T) {
					if claimed == nil {
						claimed, _ = m.Claim(inner)
					} else {
						claimed.Release()
						claimed = nil
					}
				},
				"break": func(*rapid.T) { store.Break() },
				"restore": func(t *rapid.T) {
					if rapid.IntRange(0, 5).Draw(t, "rarely") == 0 {
						store.Restore(max(1, store.Revision()-3), map[string]string{prefix + "m/a": "x"})
					}
				},
				"settle": func(*rapid.T) { synctest.Wait() },
				"read": func(t *rapid.T) {
					for _, p := range pairs {
						err := p.read(rapid.IntRange(1, 5).Draw(t, "limit"))
						if err != nil && !errors.Is(err, mirror.ErrCompacted) {
							t.Fatal(err)
						}
					}
				},
				"": func(t *rapid.T) {
					if err := m.Check(); err != nil {
						t.Fatal(err)
					}
					if rapid.IntRange(0, 3).Draw(t, "look") != 0 {
						return
					}
					synctest.Wait()
					kept := pairs[:0]
					for _, p := range pairs {
						if err := p.drain(); errors.Is(err, mirror.ErrCompacted) {
							// The lineage is dead, or an event of its own was dropped. (A partition
							// may fall out of the window too, and takes its followers with it.)
							if _, floor, ferr := r.Oldest(); ferr == nil && floor <= p.pos && p.whole != nil && !p.byValue {
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
					pairs = kept
				},
			})
			for _, p := range pairs {
				p.keyed.Close()
			}
			synctest.Wait()
			if n := mirror.Topics(r); n != 0 {
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

// TestAnEventWakesThoseItConcerns: with 1,000 cursors on 1,000 keys, namespaces and
// values, one event wakes exactly those of its own, and each reads exactly that.
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
		key := func(i int) string { return fmt.Sprintf("/registry/a/ns-%03d/name", i) }
		var cursors []*mirror.Cursor // by key, then by namespace, then by value
		s := latest(t, r)
		for i := range n {
			c := s.Cursor(key(i), key(i)+"\x00")
			c.Follow()
			cursors = append(cursors, c)
		}
		for i := range n {
			c := s.Cursor(fmt.Sprintf("/registry/a/ns-%03d/", i), fmt.Sprintf("/registry/a/ns-%03d0", i))
			c.Follow()
			cursors = append(cursors, c)
		}
		for i := range n {
			c := s.Cursor("", "")
			c.FollowValue(part, fmt.Sprint("value-", i))
			cursors = append(cursors, c)
		}
		synctest.Wait()
		for _, tt := range []struct {
			op   memory.Op
			want []int
		}{
			{memory.Op{Key: key(7), Value: "value-12"}, []int{7, n + 7, 2*n + 12}},
			{memory.Op{Key: key(8), Value: "value-12"}, []int{8, n + 8, 2*n + 12}},
			{memory.Op{Key: key(7), Value: "value-900"}, []int{7, n + 7, 2*n + 12, 2*n + 900}},
			{memory.Op{Key: key(7) + "/below", Value: "value-1"}, []int{n + 7, 2*n + 1}},
			{memory.Op{Key: key(7), Delete: true}, []int{7, n + 7, 2*n + 900}},
			{memory.Op{Key: "/registry/a/nobody's", Value: "nobody's"}, nil},
			{memory.Op{Key: "/registry/b/x", Value: "value-5"}, nil},
		} {
			var waiting []<-chan struct{}
			for i, c := range cursors {
				waiting = append(waiting, c.Changed())
				if evs, err := c.Next(nil, 10); len(evs) != 0 || err != nil {
					t.Fatalf("cursor %d has %s, %v before %v", i, story(evs), err, tt.op)
				}
			}
			rev := store.Txn(tt.op)
			if got := woken(waiting); !slices.Equal(got, tt.want) {
				t.Errorf("%v woke %d, want %d", tt.op, got, tt.want)
			}
			for _, i := range tt.want {
				evs, err := cursors[i].Next(nil, 10)
				if err != nil || len(evs) != 1 || evs[0].Rev != rev || evs[0].Key() != tt.op.Key || cursors[i].Position() != rev {
					t.Errorf("cursor %d: %s, %v, position %d after %v at %d", i, story(evs), err, cursors[i].Position(), tt.op, rev)
				}
			}
		}
		// The end concerns everybody.
		var waiting []<-chan struct{}
		for _, c := range cursors {
			waiting = append(waiting, c.Changed())
		}
		store.Restore(1, nil)
		time.Sleep(time.Minute)
		if got := woken(waiting); len(got) != len(cursors) {
			t.Errorf("a restored etcd woke %d cursors of %d", len(got), len(cursors))
		}
		for i, c := range cursors {
			if _, err := c.Next(nil, 1); !errors.Is(err, mirror.ErrCompacted) {
				t.Fatalf("cursor %d of before the restore: %v", i, err)
			}
			c.Close()
		}
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

// TestFollowersAmongWriters is for the race detector: cursors join from the present and the
// past, follow, stall and leave on real threads while a writer commits and the window trims.
// At its position, each holds exactly what its keys or its value had there.
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
	values := []string{"p", "q", "r", "s"}
	for i := range 24 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 1))
			for !ended.Load() {
				s, err := r.Latest()
				if err != nil {
					t.Error(err)
					return
				}
				if oldest, floor, err := r.Oldest(); err == nil && rnd.IntN(2) == 0 {
					if then, err := r.At(max(oldest, floor, s.Rev-rnd.Int64N(500))); err == nil {
						s = then
					}
				}
				sel := selection{byValue: true, value: values[rnd.IntN(len(values))]}
				switch rnd.IntN(4) {
				case 0:
					sel = selection{start: fmt.Sprintf("/registry/a/%d/%d", rnd.IntN(3), rnd.IntN(10))}
					sel.end = sel.start + "\x00"
				case 1:
					sel = selection{start: fmt.Sprintf("/registry/a/%d/", rnd.IntN(3))}
					sel.end = sel.start[:len(sel.start)-1] + "0"
				case 2:
					sel = selection{byValue: true, bySet: true, value: values[rnd.IntN(2)] + values[2+rnd.IntN(2)]}
				}
				held := func(s mirror.Snapshot) state {
					out := state{}
					for e := range s.All(sel.start, sel.end) {
						if !sel.byValue || strings.Contains(sel.value, string(e.Value()[:1])) {
							out[e.Key()] = describe(e)
						}
					}
					return out
				}
				p := &pair{selection: sel, keyed: s.Cursor(sel.start, sel.end)}
				p.follow(part, sets)
				mine := held(s)
				for range rnd.IntN(200) {
					changed := p.keyed.Changed()
					evs, err := p.keyed.Next(nil, 1+rnd.IntN(20))
					for _, ev := range p.selected(evs) {
						delete(mine, ev.Key())
						if ev.Entry != nil && (!sel.byValue || strings.Contains(sel.value, string(ev.Entry.Value()[:1]))) {
							mine[ev.Key()] = describe(ev.Entry)
						}
						returned.Add(1)
					}
					if err != nil {
						if !errors.Is(err, mirror.ErrCompacted) {
							t.Error(err)
						}
						lost.Add(1)
						break
					}
					if len(evs) > 0 {
						continue
					}
					if then, err := r.At(p.keyed.Position()); err == nil {
						if want := held(then); !maps.Equal(mine, want) {
							t.Errorf("%s at %d:%s", sel, p.keyed.Position(), diff(mine, want))
							ended.Store(true)
						}
					}
					select {
					case <-changed:
					case <-time.After(time.Duration(rnd.IntN(3)) * time.Millisecond):
					}
				}
				p.keyed.Close()
			}
		})
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	for n := range txns {
		ops := map[string]memory.Op{}
		for range 1 + rnd.IntN(3) {
			key := fmt.Sprintf("/registry/a/%d/%d", rnd.IntN(3), rnd.IntN(10))
			ops[key] = memory.Op{Key: key, Value: fmt.Sprintf("%s-%d", values[rnd.IntN(len(values))], n), Delete: rnd.IntN(4) == 0}
		}
		store.Txn(slices.Collect(maps.Values(ops))...)
		if n%20 == 0 {
			time.Sleep(time.Millisecond) // on real threads, so that they do not fall out of the window all the time
		}
	}
	ended.Store(true)
	wg.Wait()
	if returned.Load() == 0 {
		t.Error("nobody was given anything")
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
