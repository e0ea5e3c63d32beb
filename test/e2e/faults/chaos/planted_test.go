package chaos

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// bug is a bug that the product could have. The proxies between one server and etcd emulate it, so
// that the server caches and returns wrong data.
type bug struct {
	name string
	// play plants the bug and removes it again.
	play func(t *testing.T, ctx context.Context, r *round, at *replica)
	// cure makes the server's cache equal to etcd again.
	cure func(t *testing.T, ctx context.Context, r *round)
	// found are the checks that have to fail, with a part of their messages.
	found map[string]string
}

// bugs are the planted bugs; the short form plants the first two, which all kinds of checks find.
// No bug changes a key again after the server has missed one of its events: the server would detect
// the gap by etcd's version of the key.
var bugs = []bug{
	{
		name: "the event of a creation is lost",
		play: func(t *testing.T, ctx context.Context, r *round, at *replica) {
			rules := at.eachDetour(func(p *harness.Proxy) *etcdproxy.Rule {
				return p.DropEvents(etcdproxy.Events(etcdproxy.Creates, etcdproxy.Key(r.planted())), 0)
			})
			defer removeAll(rules)
			r.createPlanted(t, ctx)
			awaitHit(t, ctx, rules)
			r.awaitRequests(t, ctx, at)
		},
		cure:  touchPlanted,
		found: map[string]string{watched: "not Reliable", snapshot: "is missing", mirrored: planted},
	},
	{
		name: "reads of the latest state are stale",
		play: func(t *testing.T, ctx context.Context, r *round, at *replica) {
			// The server's revision stays the same. From then on the proxies report no later
			// revision, and no earlier one either, which the server would treat as a restored etcd.
			var end atomic.Int64
			end.Store(math.MaxInt64)
			rules := at.eachDetour(func(p *harness.Proxy) *etcdproxy.Rule {
				p.Stall(true)
				return p.Backdate(etcdproxy.CountsOf(""), 0, func(revision int64) int64 { return min(revision, end.Load()) })
			})
			defer func() {
				removeAll(rules)
				for _, p := range at.detour {
					p.Stall(false)
				}
			}()
			end.Store(at.standsAt(t, ctx))
			awaitHit(t, ctx, rules)
			r.awaitRequests(t, ctx, at)
		},
		found: map[string]string{fresh: "an earlier answer", linearizable: "cannot come"},
	},
	{
		name: "the event of a deletion is lost",
		play: func(t *testing.T, ctx context.Context, r *round, at *replica) {
			r.createPlanted(t, ctx)
			rules := at.eachDetour(func(p *harness.Proxy) *etcdproxy.Rule {
				return p.DropEvents(etcdproxy.Events(etcdproxy.Deletes, etcdproxy.Key(r.planted())), 0)
			})
			defer removeAll(rules)
			r.deletePlanted(t, ctx)
			awaitHit(t, ctx, rules)
			r.awaitRequests(t, ctx, at)
		},
		cure:  touchPlanted,
		found: map[string]string{watched: "not Reliable", snapshot: "etcd had no", mirrored: "is not in etcd"},
	},
	{
		name: "progress comes ahead of its event",
		play: func(t *testing.T, ctx context.Context, r *round, at *replica) {
			rules := at.eachDetour(func(p *harness.Proxy) *etcdproxy.Rule { return p.HoldEvents(etcdproxy.Key(r.planted())) })
			defer removeAll(rules)
			r.createPlanted(t, ctx)
			var written harness.Object
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
				written, err = r.asked[0].api.Get(ctx, r.plantedPath(), "")
				return err == nil, err
			}))
			s, err := stateOfObject(written)
			harness.Check(t, err)
			awaitHit(t, ctx, rules)
			harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
				return slices.ContainsFunc(r.watchers, func(w *watcher) bool { return w.bookmarked(s.revision) }), errors.New("no watch has received a bookmark")
			}))
			r.awaitRequests(t, ctx, at)
		},
		cure:  touchPlanted,
		found: map[string]string{watched: "not Bookmarkable", snapshot: "is missing"},
	},
}

// planted is the name of an object that no client touches.
const planted = "planted"

func (r *round) planted() string {
	return "/registry/" + string(keyOf(resources[0].name, r.namespaces[0], planted))
}

func (r *round) plantedPath() string { return resources[0].path(r.namespaces[0]) + "/" + planted }

// createPlanted creates the object, and repeats a request that fails: the members of etcd may elect
// another leader.
func (r *round) createPlanted(t *testing.T, ctx context.Context) {
	t.Helper()
	harness.Check(t, r.asked[0].api.Ensure(ctx, resources[0].path(r.namespaces[0]), body(planted, "", halves[0], state{})))
}

// deletePlanted deletes the object if it exists, in the same way.
func (r *round) deletePlanted(t *testing.T, ctx context.Context) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		err := r.asked[0].api.Delete(ctx, r.plantedPath())
		return err == nil || strings.Contains(err.Error(), "404"), err
	}))
}

// touchPlanted changes the object whose event the server missed, bypassing that server.
func touchPlanted(t *testing.T, ctx context.Context, r *round) {
	r.deletePlanted(t, ctx)
	r.createPlanted(t, ctx)
}

// plantBugs plants each bug between etcd and a server that runs no periodic consistency checks, and
// fails the test unless the judges find it.
func (s *scene) plantBugs(t *testing.T, ctx context.Context) {
	at := s.newReplica(t, replicas, nil, harness.Unchecked("bugs are planted"))
	ready, cancel := context.WithTimeout(ctx, heal)
	defer cancel()
	harness.Check(t, at.server.Await(ready, "/readyz"))
	harness.Check(t, s.throughDetour(at, true))
	for i, b := range bugs[:harness.Pick(2, len(bugs))] {
		t.Run(b.name, func(t *testing.T) {
			seed := uint64(1)<<32 + uint64(i) // never drawn at random
			both := []*replica{s.replicas[0], at}
			r := newRound(s, seed, s.createNamespaces(t, ctx, fmt.Sprintf("planted-%d", i), both))
			// a server that has written knows the revision of its write
			r.asked, r.written, r.watched = both, both[:1], both[1:]
			defer r.empty(t, ctx)
			v := r.run(t, ctx, func(ctx context.Context) {
				ctx, cancel := context.WithTimeoutCause(ctx, heal, fmt.Errorf("the bug has no effect within %v", heal))
				defer cancel()
				r.awaitRequests(t, ctx, at)
				b.play(t, ctx, r, at)
			})
			for check, says := range b.found {
				if !slices.ContainsFunc(v.found[check], func(text string) bool { return strings.Contains(text, says) }) {
					t.Errorf("%s has not found the fault: got %q, want %q", check, v.found[check], says)
				}
			}
			t.Logf("found by %v", v.checks())
			if b.cure != nil {
				b.cure(t, ctx, r)
			}
			well := &verdict{found: map[string][]string{}}
			// the server may have no history from before the repair
			r.requireMirrors(ctx, well, r.newest.Load(), false)
			well.report(t, seed)
		})
	}
}

// eachDetour adds a rule to each proxy of the replica, as its watch may be on any member.
func (r *replica) eachDetour(add func(*harness.Proxy) *etcdproxy.Rule) (rules []*etcdproxy.Rule) {
	for _, p := range r.detour {
		rules = append(rules, add(p))
	}
	return rules
}

// standsAt returns the revision of a server whose watch is stalled, after the events in flight have
// arrived.
func (r *replica) standsAt(t *testing.T, ctx context.Context) int64 {
	t.Helper()
	const enough = 10 // equal readings in a row
	last, times := int64(0), 0
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		at, err := r.api.Metric(ctx, "strata_mirror_revision{")
		if err != nil {
			return false, err
		}
		if times++; int64(at) != last {
			last, times = int64(at), 1
		}
		return times == enough, fmt.Errorf("it is at %d", last)
	}))
	return last
}

func removeAll(rules []*etcdproxy.Rule) {
	for _, r := range rules {
		r.Remove()
	}
}

// awaitHit returns when one of the rules was applied.
func awaitHit(t *testing.T, ctx context.Context, rules []*etcdproxy.Rule) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return slices.ContainsFunc(rules, func(r *etcdproxy.Rule) bool { return r.Hits() > 0 }), errors.New("no proxy has played the bug")
	}))
}

// awaitRequests returns when clients have written through a healthy server and have done consistent
// reads at the other one, several times each.
func (r *round) awaitRequests(t *testing.T, ctx context.Context, at *replica) {
	t.Helper()
	began := r.now()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		written, gets, lists := 0, 0, 0
		for _, o := range r.ops {
			switch {
			case o.call < began || o.outcome != done:
			case o.kind != get && o.replica != at.n:
				written++
			case o.kind == get && o.replica == at.n && o.mode == present && written > 20:
				gets++
			}
		}
		for _, l := range r.lists {
			if l.call > began && l.outcome == done && l.replica == at.n && l.mode == present {
				lists++
			}
		}
		const enough = 20
		return written > enough && gets > enough && lists > enough, fmt.Errorf("%d writes, %d GETs, %d LISTs", written, gets, lists)
	}))
}

// bookmarked reports whether a watch has received a bookmark at the revision or a later one.
func (w *watcher) bookmarked(revision int64) bool {
	sessions, err := w.sessions.Recorded(0)
	if err != nil {
		return true // the judge reports that error
	}
	return slices.ContainsFunc(sessions, func(s watchcheck.Session) bool {
		return slices.ContainsFunc(s.Events, func(e watchcheck.Event) bool {
			return e.Kind == watchcheck.Bookmark && e.Revision >= revision
		})
	})
}
