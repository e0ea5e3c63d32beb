package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

const root = "/registry/"

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

type state = map[string]string // key to value and revision, as describe prints them

func describe(e *mirror.Entry) string { return fmt.Sprintf("%s@%d", e.Value(), e.ModRevision()) }

// model is etcd as it should be seen: the state at every revision.
type model struct {
	store *memory.Store
	at    map[mirror.Revision]state
}

func (md *model) txn(ops ...memory.Op) {
	old := md.at[md.store.Revision()]
	rev := md.store.Txn(ops...)
	if _, ok := md.at[rev]; ok {
		return
	}
	next := maps.Clone(old)
	for _, op := range ops {
		if op.Delete {
			delete(next, op.Key)
		} else {
			next[op.Key] = fmt.Sprintf("%s@%d", op.Value, rev)
		}
	}
	md.at[rev] = next
}

func (md *model) want(rev mirror.Revision, prefix string) state {
	out := state{}
	for k, v := range md.at[rev] {
		if len(k) >= len(prefix) && k[:len(prefix)] == prefix {
			out[k] = v
		}
	}
	return out
}

func read(s mirror.Snapshot) state {
	out := state{}
	for e := range s.All("", "") {
		out[e.Key()] = describe(e)
	}
	return out
}

func diff(got, want state) string {
	s := ""
	for k, v := range want {
		if got[k] != v {
			s += fmt.Sprintf(" %s is %q, want %q;", k, got[k], v)
		}
	}
	for k, v := range got {
		if want[k] == "" {
			s += fmt.Sprintf(" %s is %q, want none;", k, v)
		}
	}
	return s
}

// follower applies what a cursor returns to a state of its own.
type follower struct {
	prefix string
	cur    *mirror.Cursor
	held   state
	last   mirror.Revision
}

// drain reads everything due and checks it against the model: Ordered, Unique,
// Reliable and Bookmarkable at once, since at its position the follower must hold
// exactly what etcd held there.
func (f *follower) drain(t *rapid.T, want func(mirror.Revision, string) state, limit int) error {
	for {
		evs, err := f.cur.Next(nil, limit)
		if err != nil {
			return err
		}
		for _, e := range evs {
			if e.Rev < f.last {
				t.Fatalf("event of %d after %d", e.Rev, f.last)
			}
			f.last = e.Rev
			if e.Prev != nil {
				if f.held[e.Key()] != describe(e.Prev) {
					t.Fatalf("%s at %d: previous %s, held %s", e.Key(), e.Rev, describe(e.Prev), f.held[e.Key()])
				}
				delete(f.held, e.Key())
			} else if f.held[e.Key()] != "" {
				t.Fatalf("%s at %d: created, but held", e.Key(), e.Rev)
			}
			if e.Entry != nil {
				f.held[e.Key()] = describe(e.Entry)
			}
		}
		if len(evs) < limit {
			if want := want(f.cur.Position(), f.prefix); !maps.Equal(f.held, want) {
				t.Fatalf("at %d the follower of %s holds %v, want %v", f.cur.Position(), f.prefix, f.held, want)
			}
			return nil
		}
	}
}

// bubble hides Deadline, which may not be called inside a synctest bubble.
type bubble struct{ testing.TB }

// TestMirrorIsEtcdAtEveryRevision drives a store, the mirror's environment and its
// clients at random and compares whatever can be read with the model.
func TestMirrorIsEtcdAtEveryRevision(t *testing.T) {
	t.Parallel()
	prefixes := []string{"/registry/a/", "/registry/b/", "/registry/b/inner/", "/registry/c/"}
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(bubble{t}, func(t *rapid.T) {
			store := memory.New()
			md := &model{store: store, at: map[mirror.Revision]state{1: {}}}
			for i := range rapid.IntRange(0, 40).Draw(t, "initial") {
				md.txn(memory.Op{Key: fmt.Sprintf("/registry/%c/i%02d", 'a'+i%3, i), Value: "i"})
			}
			m, err := mirror.New(mirror.Options{
				Prefix: root, Source: store, Logger: quiet(),
				Window:           mirror.Window{MaxAge: 20 * time.Second, MaxBytes: rapid.Int64Range(500, 1<<20).Draw(t, "window")},
				UnclaimedBytes:   rapid.Int64Range(1, 400).Draw(t, "unclaimed"),
				CheckpointEvents: rapid.IntRange(1, 20).Draw(t, "checkpoint"),
			})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			claimed := map[string]*mirror.Resource{}
			excluded := map[string]*mirror.Resource{}
			// Once claimed, the inner prefix is no part of the one around it any more.
			divided := false
			want := func(rev mirror.Revision, prefix string) state {
				w := md.want(rev, prefix)
				maps.DeleteFunc(w, func(k, _ string) bool {
					return divided && prefix == "/registry/b/" && strings.HasPrefix(k, "/registry/b/inner/")
				})
				return w
			}
			var followers []*follower
			var frozen []mirror.Snapshot
			var frozenWant []state
			stalled, lossy := false, false

			settle := func() bool {
				if stalled {
					synctest.Wait()
					return false
				}
				synctest.Wait() // what is wrong has shown
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				if err := m.Wait(ctx, store.Revision()); err != nil {
					t.Fatalf("the mirror stays at %d, etcd is at %d", m.Clock(), store.Revision())
				}
				for p, r := range claimed {
					if err := r.WaitReady(ctx); err != nil {
						t.Fatalf("%s does not become ready", p)
					}
				}
				return true
			}
			key := rapid.Custom(func(t *rapid.T) string {
				return rapid.SampledFrom(prefixes).Draw(t, "prefix") + string(rune('a'+rapid.IntRange(0, 8).Draw(t, "key")))
			})
			op := rapid.Custom(func(t *rapid.T) memory.Op {
				return memory.Op{Key: key.Draw(t, "key"), Value: rapid.StringN(0, 30, -1).Draw(t, "value"), Delete: rapid.IntRange(0, 2).Draw(t, "delete") == 0}
			})
			t.Repeat(map[string]func(*rapid.T){
				"txn": func(t *rapid.T) {
					ops := rapid.SliceOfNDistinct(op, 1, 5, func(o memory.Op) string { return o.Key }).Draw(t, "ops")
					md.txn(ops...)
				},
				"burst": func(t *rapid.T) {
					for i := range rapid.IntRange(1, 60).Draw(t, "n") {
						md.txn(memory.Op{Key: prefixes[i%len(prefixes)] + "x", Value: fmt.Sprint(i)})
					}
				},
				"claim": func(t *rapid.T) {
					p := rapid.SampledFrom(prefixes).Draw(t, "prefix")
					exclude := rapid.IntRange(0, 3).Draw(t, "exclude") == 0
					if claimed[p] != nil || excluded[p] != nil {
						return
					}
					claims, how := claimed, m.Claim
					if exclude {
						claims, how = excluded, m.Exclude
					}
					r, err := how(p)
					if err != nil {
						t.Fatal(err)
					}
					claims[p] = r
					if p == "/registry/b/inner/" && !divided {
						divided = true
						for _, f := range followers {
							if f.prefix == "/registry/b/" {
								f.cur = nil
							}
						}
						if err := m.Check(); err != nil { // it has happened
							t.Fatal(err)
						}
					}
				},
				"release": func(t *rapid.T) {
					p := rapid.SampledFrom(prefixes).Draw(t, "prefix")
					for _, claims := range []map[string]*mirror.Resource{claimed, excluded} {
						if r := claims[p]; r != nil {
							delete(claims, p)
							r.Release()
						}
					}
				},
				"stall": func(*rapid.T) { stalled = !stalled; store.Stall(stalled) },
				"break": func(*rapid.T) { store.Break() },
				"sleep": func(t *rapid.T) { time.Sleep(time.Duration(rapid.IntRange(1, 15).Draw(t, "s")) * time.Second) },
				"compact": func(t *rapid.T) {
					rev := rapid.Int64Range(1, store.Revision()).Draw(t, "rev")
					store.Compact(rev)
					m.Compact(rev)
				},
				"lose an event": func(t *rapid.T) {
					if !settle() {
						return
					}
					n := 0
					store.DropIf(func(mirror.Change) bool { n++; return n == 1 })
					lossy = true
					md.txn(op.Draw(t, "lost"))
					settle()
					store.DropIf(nil)
					// The loss shows with the next event of the key, at the latest.
					for _, p := range prefixes {
						for c := 'a'; c <= 'i'; c++ {
							md.txn(memory.Op{Key: p + string(c), Value: "again"})
						}
						md.txn(memory.Op{Key: p + "x", Value: "again"})
					}
					settle()
					lossy = false
					for _, f := range followers { // they may have missed it, like the mirror
						f.cur = nil
					}
					frozen, frozenWant = nil, nil
				},
				"check": func(t *rapid.T) { // whatever goes on, nothing differs
					for p, r := range claimed {
						if c, err := r.Check(context.Background(), nil); err == nil && c.Count > 0 {
							t.Fatalf("%s: %+v", p, c.Differences)
						}
					}
				},
				"lose an event, and check": func(t *rapid.T) {
					if len(claimed) == 0 || !settle() {
						return
					}
					p := rapid.SampledFrom(slices.Sorted(maps.Keys(claimed))).Draw(t, "prefix")
					lost := op.Draw(t, "lost")
					lost.Key = p + lost.Key[len(lost.Key)-1:]
					n := 0
					store.DropIf(func(mirror.Change) bool { n++; return n == 1 })
					md.txn(lost)
					settle()
					store.DropIf(nil)
					c, err := claimed[p].Check(context.Background(), nil)
					if err != nil || c.Count > 1 || c.Count == 1 && c.Differences[0].Key != lost.Key || (n > 0) != (c.Count > 0) {
						t.Fatalf("%s: %+v, %v; %d changes were lost", p, c, err, n)
					}
					for p, r := range claimed {
						if c, err := r.Check(context.Background(), nil); err != nil || c.Count > 0 || r.Suspect() {
							t.Fatalf("%s after the repair: %+v, %v", p, c, err)
						}
					}
					// Two resources in doubt are a reason to list everything anew with the next event.
					md.txn(memory.Op{Key: "/registry/c/x", Value: "v"})
					settle()
					for i, f := range followers {
						if c.Count > 0 && f.prefix == p {
							followers[i].cur = nil // it may have missed it, like the mirror
						}
					}
				},
				"freeze": func(t *rapid.T) {
					for _, r := range claimed {
						if s, err := r.Latest(); err == nil {
							frozen = append(frozen, s)
							frozenWant = append(frozenWant, read(s))
						}
					}
				},
				"read the past": func(t *rapid.T) { // the same revisions, again and again, in any order
					if lossy || !settle() {
						return
					}
					for p, r := range claimed {
						oldest, _, err := r.Oldest()
						if err != nil {
							t.Fatal(err)
						}
						revs := rapid.SliceOfN(rapid.Int64Range(oldest, m.Clock()), 1, 25).Draw(t, "revisions")
						for _, rev := range append(revs, revs...) {
							s, err := r.At(rev)
							if errors.Is(err, mirror.ErrCompacted) {
								continue // the window moved
							} else if err != nil {
								t.Fatal(err)
							}
							if got, want := read(s), want(rev, p); !maps.Equal(got, want) {
								t.Fatalf("%s at %d: %s", p, rev, diff(got, want))
							}
							frozen = append(frozen, s)
							frozenWant = append(frozenWant, read(s))
						}
					}
				},
				"follow": func(t *rapid.T) {
					for p, r := range claimed {
						s, err := r.Latest()
						if err != nil {
							continue
						}
						followers = append(followers, &follower{prefix: p, cur: s.Cursor("", ""), held: read(s), last: s.Rev})
						if oldest, floor, err := r.Oldest(); err == nil {
							rev := rapid.Int64Range(max(oldest, floor), s.Rev+3).Draw(t, "rev")
							c, err := r.CursorAfter(rev, "", "")
							if err != nil {
								continue
							}
							if then, err := r.At(rev); err == nil {
								followers = append(followers, &follower{prefix: p, cur: c, held: read(then), last: rev})
							}
						}
					}
				},
				"": func(t *rapid.T) {
					if err := m.Check(); err != nil {
						t.Fatal(err)
					}
					if !settle() {
						return
					}
					for p, r := range excluded {
						if s, err := r.Latest(); !errors.Is(err, mirror.ErrNotReady) {
							t.Fatalf("%s is excluded, but reads as %v, %v", p, read(s), err)
						}
					}
					for p, r := range claimed {
						s, err := r.Latest()
						if err != nil {
							t.Fatal(err)
						}
						oldest, floor, err := r.Oldest()
						if err != nil {
							t.Fatal(err)
						}
						for rev := oldest; rev <= s.Rev && !lossy; rev++ {
							then, err := r.At(rev)
							if errors.Is(err, mirror.ErrCompacted) {
								continue // the window moved
							}
							if err != nil {
								t.Fatal(err)
							}
							if got, want := read(then), want(rev, p); !maps.Equal(got, want) {
								t.Fatalf("%s at %d: %s", p, rev, diff(got, want))
							}
						}
						if _, err := r.At(oldest - 1); !errors.Is(err, mirror.ErrCompacted) {
							t.Fatalf("%s below the oldest version %d: %v", p, oldest, err)
						}
						if _, err := r.CursorAfter(floor-1, "", ""); !errors.Is(err, mirror.ErrCompacted) {
							t.Fatalf("cursor below the floor: %v", err)
						}
						if _, err := r.At(s.Rev + 1); !errors.Is(err, mirror.ErrFutureRevision) {
							t.Fatalf("%s above the clock: %v", p, err)
						}
						if got, want := read(s), want(s.Rev, p); !maps.Equal(got, want) {
							t.Fatalf("%s now: %s", p, diff(got, want))
						}
					}
					kept := followers[:0]
					for _, f := range followers {
						if f.cur == nil {
							continue
						}
						if err := f.drain(t, want, rapid.IntRange(1, 9).Draw(t, "limit")); err == nil {
							kept = append(kept, f)
						} else if !errors.Is(err, mirror.ErrCompacted) {
							t.Fatal(err)
						}
					}
					followers = kept
				},
			})
			for i, s := range frozen { // I2
				if got := read(s); !maps.Equal(got, frozenWant[i]) {
					t.Fatalf("the snapshot of %d moved: %v, was %v", s.Rev, got, frozenWant[i])
				}
			}
		})
	})
}
