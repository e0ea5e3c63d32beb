package mirror_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/mirror"
)

// The unit test of KEP-2340's test plan: consistent reads are correct in every order in which
// events, progress and replies with a revision arrive. A few steps are run in every possible order,
// many steps in random orders. Both are repeated with an etcd that sends progress ahead of events
// (etcd#15220), to show that the tests detect a read that is answered too early.

// explore calls f once for every sequence of choices that f can make; choose(n) returns a
// number below n.
func explore(f func(choose func(n int) int)) (runs int) {
	type choice struct{ taken, of int }
	var path []choice
	for {
		depth := 0
		f(func(n int) int {
			if depth == len(path) {
				path = append(path, choice{0, n})
			}
			depth++
			return path[depth-1].taken
		})
		runs++
		for len(path) > 0 && path[len(path)-1].taken+1 == path[len(path)-1].of {
			path = path[:len(path)-1]
		}
		if len(path) == 0 {
			return runs
		}
		path[len(path)-1].taken++
	}
}

// few are steps that are run in every possible order: some writes in a fixed order, their events,
// alone or together, all progress that the watch may report, and consistent reads.
type few struct {
	writes string // one letter for each
	reads  int    // a LIST, then a GET
}

func (f few) String() string { return fmt.Sprintf("%s and %d", f.writes, f.reads) }

// written are the writes of the letters: to the busy resource, to the quiet one, and outside the
// prefix, which advances the revision without an event.
var written = map[byte]memory.Op{
	'b': {Key: busy + "a", Value: "1"},
	'c': {Key: busy + "new", Value: "1"},
	'q': {Key: quietOne + "a", Delete: true},
	'e': {Key: elsewhere + "x"},
}

// everyOrdering calls moved after each step that has moved the published revision or ended the
// watch, and end after the last step of each ordering, when all goroutines are idle. It returns the
// number of orderings.
func (f few) everyOrdering(t *testing.T, overtakes, eventsOnly bool, moved, end func(*testing.T, *stage)) (runs int) {
	t.Helper()
	stories := map[string]bool{}
	synctest.Test(t, func(t *testing.T) {
		runs = explore(func(choose func(int) int) {
			g, err := newStage(func(o *mirror.Options) { o.EventsOnly = eventsOnly })
			testcheck.NoError(t, err)
			defer g.close()
			g.overtakes = overtakes
			reads := []step{g.begin("", 0), g.begin(busy+"a", 0)}[:f.reads]
			writes := 0
			next := func() (steps []step) {
				if g.began == f.reads && len(g.readers) == 0 {
					return nil // later steps have no effect
				}
				if writes < len(f.writes) {
					w := g.write(written[f.writes[writes]])
					steps = append(steps, step{w.name, func() { writes++; w.do() }})
				}
				if g.began < f.reads {
					steps = append(steps, reads[g.began])
				}
				steps = append(steps, g.revisionReads()...)
				if st := g.etcd.now().stream; st != nil {
					steps = append(steps, g.deliveries(len(f.writes))...)
					steps = append(steps, g.progress(st.reported+1, g.furthest())...)
				}
				return steps
			}
			for steps := next(); len(steps) > 0; steps = next() {
				before := g.published
				g.take(steps[choose(len(steps))])
				if err := g.check(); err != nil {
					t.Fatal(g.explain(err))
				}
				if g.published != before || g.etcd.now().stream == nil {
					moved(t, g)
				}
			}
			stories[strings.Join(g.story, "\n")] = true
			if err := g.settle(); err != nil {
				t.Fatal(g.explain(err))
			}
			end(t, g)
		})
	})
	if len(stories) != runs {
		t.Errorf("%d orderings, of which %d are different", runs, len(stories))
	}
	return runs
}

// requireNoDifference fails if a comparison with etcd finds a difference.
func requireNoDifference(t *testing.T, g *stage) {
	t.Helper()
	for _, r := range g.res {
		if keys, err := differences(g.etcd, r); err != nil || len(keys) > 0 {
			t.Fatalf("%s: a comparison with etcd finds %q, %v\n%s", r.Prefix(), keys, err, g.explain(nil))
		}
	}
}

// requireFaultless fails if a read was answered too early, if the mirror has reported a divergence,
// or if a follower had to start over.
func requireFaultless(t interface{ Fatal(...any) }, g *stage) {
	if st := g.m.Stats(); len(g.early) > 0 || st.Divergences+st.Relists != 0 || g.ended != 0 {
		t.Fatal(g.explain(fmt.Errorf("%d divergences, %d relists, %d followers ended", st.Divergences, st.Relists, g.ended)))
	}
}

// requireNothingEarly runs every ordering. All reads must be answered as soon as possible and none
// too early; the published revision must be at the feed's revision, and a comparison with etcd must
// never find a difference.
func (f few) requireNothingEarly(t *testing.T, overtakes, eventsOnly bool) {
	runs := f.everyOrdering(t, overtakes, eventsOnly, requireNoDifference, func(t *testing.T, g *stage) {
		requireFaultless(t, g)
		requireNoDifference(t, g)
		if g.answered != f.reads {
			t.Fatal(g.explain(fmt.Errorf("%d reads were answered", g.answered)))
		}
	})
	t.Logf("%d orderings", runs)
}

// states returns all, or only the first ones where a test should explore few states (testrace.Few).
func states(all []few, first int) []few {
	if testrace.Few() {
		return all[:first]
	}
	return all
}

// TestOrderings_AllOfFewSteps_HaveNoEarlyReads: an etcd without the bug.
func TestOrderings_AllOfFewSteps_HaveNoEarlyReads(t *testing.T) {
	slow(t)
	t.Parallel()
	for _, f := range states([]few{{"ceq", 1}, {"ebe", 1}, {"be", 2}, {"eb", 2}, {"bq", 2}}, 1) {
		t.Run(f.String(), func(t *testing.T) { f.requireNothingEarly(t, false, false) })
	}
}

// TestOrderings_EventsOnly_HaveNoEarlyReads: an etcd with the bug, and a published revision that
// ignores progress. Reads wait for the next event.
func TestOrderings_EventsOnly_HaveNoEarlyReads(t *testing.T) {
	slow(t)
	t.Parallel()
	for _, f := range states([]few{{"eb", 1}, {"be", 1}, {"bq", 1}, {"ebe", 1}}, 2) {
		t.Run(f.String(), func(t *testing.T) { f.requireNothingEarly(t, true, true) })
	}
}

// affected returns the keys of the prefix with an event that the published revision has passed.
func (g *stage) affected(prefix string) (keys []string) {
	if g.etcd.now().stream == nil {
		return nil
	}
	for _, c := range g.etcd.due() {
		if key := string(c.Key); c.ModRevision <= g.published && strings.HasPrefix(key, prefix) && !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// requireDivergence fails unless the mirror has just detected that the feed contradicts itself:
// nothing can be read, and cursors have ended.
func requireDivergence(t *testing.T, g *stage) {
	t.Helper()
	if st := g.m.Stats(); st.Divergences != 1 || g.ended != len(g.res) {
		t.Fatal(g.explain(fmt.Errorf("%d divergences, %d followers ended", st.Divergences, g.ended)))
	}
	for _, r := range g.res {
		if s, err := r.Latest(); !errors.Is(err, mirror.ErrNotReady) {
			t.Fatal(g.explain(fmt.Errorf("%s can be read: %v, %w", r.Prefix(), read(s), err)))
		}
	}
}

// TestOrderings_ProgressAheadOfEvents_IsDetected: an etcd with the bug, and a published revision
// that uses progress. After progress has overtaken an event and until the event arrives, reads are
// answered too early. All of them are detected, and a comparison with etcd at the mirror's own
// revision finds their keys. When the event arrives the mirror discards its whole state, ends the
// cursors, and relists.
func TestOrderings_ProgressAheadOfEvents_IsDetected(t *testing.T) {
	slow(t)
	t.Parallel()
	for _, f := range states([]few{{"be", 1}, {"cq", 1}, {"ebe", 1}, {"eb", 2}}, 2) {
		t.Run(f.String(), func(t *testing.T) {
			early, detected, compared := 0, 0, 0
			runs := f.everyOrdering(t, true, false, func(t *testing.T, g *stage) {
				if g.etcd.now().stream == nil {
					requireDivergence(t, g)
					return
				}
				for _, r := range g.res {
					keys, err := differences(g.etcd, r)
					if want := g.affected(r.Prefix()); err != nil || !slices.Equal(keys, want) {
						t.Fatalf("%s: a comparison with etcd finds %q, %v; want %q\n%s", r.Prefix(), keys, err, want, g.explain(nil))
					}
					compared += len(keys)
				}
			}, func(t *testing.T, g *stage) {
				if len(g.early) != g.inGap {
					t.Fatal(g.explain(fmt.Errorf("%d reads were answered while an event was missing, %d of them were found", g.inGap, len(g.early))))
				}
				if g.inGap > 0 {
					early++
				}
				if !g.gaps {
					requireFaultless(t, g)
					return
				}
				detected++
				found := len(g.early)
				if g.etcd.now().stream == nil {
					requireDivergence(t, g)
					if err := g.settle(); err != nil {
						t.Fatal(g.explain(err))
					}
				}
				if st := g.m.Stats(); st.Divergences != 1 || st.Relists != 1 || len(g.early) != found || g.answered != f.reads {
					t.Fatal(g.explain(fmt.Errorf("%d divergences, %d relists, %d reads answered", st.Divergences, st.Relists, g.answered)))
				}
				requireNoDifference(t, g)
			})
			t.Logf("%d orderings, %d with reads that were answered too early; in %d the mirror detected progress ahead of an event; a comparison found a key %d times",
				runs, early, detected, compared)
			if early == 0 || detected == 0 || compared == 0 {
				t.Error("the bug does not show")
			}
		})
	}
}

// randomStage is a stage with many steps, including faults, in a drawn order.
type randomStage struct {
	*stage
	feedFails bool
}

// next returns the possible next steps.
func (g *randomStage) next() (steps []step) {
	value := fmt.Sprint(len(g.story))
	steps = append(steps,
		g.write(memory.Op{Key: busy + "a", Value: value}),
		g.write(memory.Op{Key: busy + "new", Value: value}),
		g.write(memory.Op{Key: busy + "b", Delete: true}),
		g.write(memory.Op{Key: busy + "b", Value: value}, memory.Op{Key: quietOne + "b", Value: value}, memory.Op{Key: elsewhere + "x"}),
		g.write(memory.Op{Key: quietOne + "a", Delete: true}),
		g.write(memory.Op{Key: root + "unclaimed/x"}),
		g.write(memory.Op{Key: elsewhere + "x"}),
		g.write(memory.Op{Key: elsewhere + "x"}))
	if st := g.etcd.now().stream; st != nil {
		steps = append(steps, g.deliveries(3)...)
		// Repeated; as late as possible; up to date; ahead, if allowed.
		for _, rev := range []mirror.Revision{st.reported, st.reported + 1, g.etcd.inStep(), g.furthest()} {
			if rev <= g.furthest() {
				steps = append(steps, g.progress(rev, rev)...)
			}
		}
		if g.feedFails {
			steps = append(steps, step{"the feed breaks", g.etcd.breakStream})
		}
	}
	steps = append(steps, g.revisionReads()...)
	if call := g.etcd.now().call; call != nil {
		steps = append(steps, step{"the revision cannot be read", g.etcd.fail})
	}
	if len(g.readers) < 6 {
		steps = append(steps, g.begin("", 0), g.begin("", 0), g.begin(busy+"new", 0), g.begin(quietOne+"a", 0))
		for _, ahead := range []mirror.Revision{-1, 1, 3} {
			steps = append(steps, g.begin("", g.published+ahead))
		}
	}
	if len(g.readers) > 0 {
		rd := g.readers[len(g.story)%len(g.readers)]
		steps = append(steps, step{rd.name + " is cancelled", func() { rd.cancelled = true; rd.cancel() }})
	}
	for _, d := range []time.Duration{time.Millisecond, 30 * time.Millisecond, 100 * time.Millisecond, 3 * time.Second} {
		steps = append(steps, step{d.String() + " pass", func() { time.Sleep(d) }})
	}
	if g.etcd.now().hang == nil {
		steps = append(steps, step{"requests for progress hang", g.etcd.holdRequests})
	} else {
		steps = append(steps, step{"requests for progress hang no more", g.etcd.letRequestsGo})
	}
	return steps
}

// run takes the chosen number of steps, waits until all is idle, and returns violations as an
// error.
func (g *randomStage) run(choose func(n int) int) error {
	for range choose(200) {
		steps := g.next()
		g.take(steps[choose(len(steps))])
		if err := g.check(); err != nil {
			return err
		}
		if err := g.m.Check(); err != nil {
			return err
		}
	}
	return g.settle()
}

// TestOrderings_Random_HaveNoEarlyReads draws orderings of more steps than can be enumerated:
// writes, transactions and deletions in two resources and outside, batches of several revisions,
// progress that is late, repeated, or missing, reads that share a revision or wait for a future
// one, a feed that breaks, replies that fail, readers that give up, and time that passes.
func TestOrderings_Random_HaveNoEarlyReads(t *testing.T) {
	slow(t)
	t.Parallel()
	for _, tt := range []struct {
		name                string
		unmoved, eventsOnly bool
	}{
		{name: "progress is answered at any time"},
		{name: "progress is not answered without a new revision", unmoved: true},
		{name: "progress ahead of events, EventsOnly", eventsOnly: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			runs, reads := 0, 0
			synctest.Test(t, func(t *testing.T) {
				rapid.Check(bubble{t}, func(t *rapid.T) {
					if runs++; runs > 10 && testrace.Few() {
						return
					}
					s, err := newStage(func(o *mirror.Options) { o.EventsOnly = tt.eventsOnly })
					testcheck.NoError(t, err)
					defer s.close()
					s.unmoved, s.overtakes = tt.unmoved, tt.eventsOnly
					g := &randomStage{stage: s, feedFails: true}
					if err := g.run(func(n int) int { return evenly.Draw(t, "choice") % n }); err != nil {
						t.Fatal(g.explain(err))
					}
					requireFaultless(t, s)
					reads += g.answered
				})
			})
			t.Logf("%d reads were answered", reads)
			if reads == 0 {
				t.Error("no read was answered")
			}
		})
	}
}

// evenly draws numbers below 1024 with uniform probability, unlike rapid's ranges.
var evenly = rapid.Custom(func(t *rapid.T) (n int) {
	for range 10 {
		n *= 2
		if rapid.Bool().Draw(t, "bit") {
			n++
		}
	}
	return n
})

// TestOrderings_ProgressBug_FindsEarlyReads shows that such orderings detect reads that are
// answered too early: with progress ahead of events there are some, and only while an event is
// missing.
func TestOrderings_ProgressBug_FindsEarlyReads(t *testing.T) {
	const runs = 50
	found, early, answered := 0, 0, 0
	synctest.Test(t, func(t *testing.T) {
		run := func(seed uint64) {
			s, err := newStage(nil)
			testcheck.NoError(t, err)
			defer s.close()
			s.overtakes = true
			g := &randomStage{stage: s}
			if err := g.run(rand.New(rand.NewPCG(seed, 0)).IntN); err != nil {
				t.Fatalf("seed %d: %s", seed, g.explain(err))
			}
			if len(g.early) > g.inGap { // fewer: the missing event did not affect those reads
				t.Fatalf("seed %d: %d reads were answered while an event was missing\n%s", seed, g.inGap, g.explain(nil))
			}
			early += len(g.early)
			answered += g.answered
			if len(g.early) > 0 {
				found++
			}
		}
		for seed := range uint64(runs) {
			run(seed)
		}
	})
	t.Logf("%d of %d reads were answered too early, in %d of %d orderings", early, answered, found, runs)
	if found == 0 {
		t.Error("none was answered too early")
	}
}

// TestCheck_EventNeverDelivered_FindsDifference: progress overtakes an event and the feed breaks
// before the event arrives. The mirror resumes after the revision of the progress, so the event
// never arrives and nothing contradicts the cached state until the key is written again. A
// comparison with etcd finds the difference at any later time.
func TestCheck_EventNeverDelivered_FindsDifference(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := newStage(nil)
		testcheck.NoError(t, err)
		defer g.close()
		requireKeys := func(want ...string) {
			t.Helper()
			if keys, err := differences(g.etcd, g.res[0]); err != nil || !slices.Equal(keys, want) {
				t.Errorf("a comparison finds %q, %v; want %q", keys, err, want)
			}
		}
		g.md.txn(memory.Op{Key: busy + "a", Value: "1"}, memory.Op{Key: busy + "b", Delete: true}, memory.Op{Key: busy + "new", Value: "1"})
		g.etcd.progress(g.etcd.Revision())
		synctest.Wait()
		requireKeys(busy+"a", busy+"b", busy+"new")
		g.etcd.breakStream()
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(g.etcd.due()) > 0 || g.m.Stats().Reconnects != 1 {
			t.Fatal("the event is still to come")
		}
		requireKeys(busy+"a", busy+"b", busy+"new")

		g.md.txn(memory.Op{Key: quietOne + "a", Value: "1"})
		g.etcd.deliver(1)
		synctest.Wait()
		requireKeys(busy+"a", busy+"b", busy+"new") // now at a later revision

		g.md.txn(memory.Op{Key: busy + "new", Value: "2"})
		g.etcd.deliver(1)
		time.Sleep(time.Minute)
		synctest.Wait()
		requireKeys()
		if st := g.m.Stats(); st.Divergences != 1 || st.Relists != 0 {
			t.Errorf("%d divergences, %d relists; want 1 and 0", st.Divergences, st.Relists)
		}
	})
}
