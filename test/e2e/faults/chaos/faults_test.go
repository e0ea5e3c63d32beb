package chaos

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// seeds are fixed seeds that every run plays: they have found bugs before.
var seeds = []uint64{
	1146471152, // a bookmark below the revision of an earlier event
}

// TestFaults_ConcurrentClients_HistoriesAreValid plays every fault while clients read and write
// through three servers, and judges the answers. The short form plays the fixed seeds. Then it
// plants bugs, which the same judges have to find.
func TestFaults_ConcurrentClients_HistoriesAreValid(t *testing.T) {
	ctx := newContext(t)
	s := newScene(t, ctx)
	s.playRounds(t, ctx)
	if !t.Failed() && harness.Engine() == harness.Strata {
		s.plantBugs(t, ctx)
	}
}

func (s *scene) playRounds(t *testing.T, ctx context.Context) {
	t.Helper()
	began := time.Now()
	total, lost, rounds := 0, 0, 0
	play := func(seed uint64) {
		t.Run(fmt.Sprintf("%s=%d", seedEnv, seed), func(t *testing.T) {
			v := s.playRound(t, ctx, seed)
			v.report(t, seed)
			t.Logf("%v", v)
			total += v.operations()
			lost += len(v.found[acknowledged])
			rounds++
		})
	}
	switch {
	case number(t, seedEnv, 0) != 0:
		play(number(t, seedEnv, 0))
	case harness.Long():
		most, least := int(number(t, operationsEnv, 100_000)), parseDuration(t, durationEnv)
		for _, seed := range seeds {
			play(seed)
		}
		for !t.Failed() && (total < most || time.Since(began) < least) {
			play(rand.Uint64N(1 << 32))
		}
	default:
		for _, seed := range seeds {
			play(seed)
		}
	}
	if harness.Engine() == harness.Strata {
		if used, err := s.indexed(ctx); err != nil || used == 0 {
			t.Errorf("no list used an index (%v): they were all of few objects", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	var each []string
	for _, name := range slices.Sorted(maps.Keys(s.faults)) {
		n += s.faults[name]
		each = append(each, fmt.Sprintf("%d %s", s.faults[name], name))
	}
	t.Logf("%d operations checked in %d rounds under %d faults in %v, %d acknowledged writes lost: %s", total, rounds, n,
		time.Since(began).Round(time.Second), lost, strings.Join(each, ", "))
}

// playRound plays all faults, waits until the cluster is healthy, and judges.
func (s *scene) playRound(t *testing.T, ctx context.Context, seed uint64) *verdict {
	t.Helper()
	r := newRound(s, seed, s.createNamespaces(t, ctx, fmt.Sprintf("round-%d", seed), s.replicas))
	defer r.empty(t, ctx)
	r.fill(t, ctx)
	return r.run(t, ctx, func(ctx context.Context) {
		var lanes sync.WaitGroup
		for i, faults := range s.lanes {
			lanes.Go(func() {
				if err := r.play(ctx, t, i, faults); err != nil {
					t.Errorf("%s=%d: %v", seedEnv, seed, err)
				}
			})
		}
		lanes.Wait()
	})
}

// run runs clients and watchers while happens runs, stops them afterwards, and judges.
func (r *round) run(t *testing.T, ctx context.Context, happens func(context.Context)) *verdict {
	t.Helper()
	r.watchers = r.newWatchers()
	var watching, asking sync.WaitGroup
	watch, stopWatching := context.WithCancel(ctx)
	ask, stopAsking := context.WithCancel(ctx)
	defer asking.Wait()
	defer watching.Wait()
	defer stopAsking()
	defer stopWatching()
	fences := map[*watcher]chan int64{}
	for _, w := range r.watchers {
		fence := make(chan int64, 1)
		fences[w] = fence
		watching.Go(func() { w.run(watch, r, fence) })
	}
	for n := range clients {
		asking.Go(func() { r.client(ask, n) })
	}
	asking.Go(func() { r.transact(ask) })

	happens(ctx)
	stopAsking()
	asking.Wait()
	asked := r.now()

	healing, cancel := context.WithTimeoutCause(ctx, heal, fmt.Errorf("not well after %v", heal))
	defer cancel()
	ends, last, err := r.fences(healing)
	harness.Check(t, err)
	for _, w := range r.watchers {
		fences[w] <- ends[w]
	}
	done := make(chan struct{})
	go func() { watching.Wait(); close(done) }()
	select {
	case <-done:
	case <-healing.Done():
		t.Errorf("%s=%d: watches have not come to the end: %v", seedEnv, r.seed, context.Cause(healing))
		stopWatching()
		<-done
	}
	h, err := r.history.Now(healing)
	harness.Check(t, err)
	watchedAt := r.now()
	v := r.judge(t, h)
	judged := r.now()
	settled, cancel := context.WithTimeoutCause(ctx, heal, fmt.Errorf("not well after %v", heal))
	defer cancel()
	r.requireMirrors(settled, v, last, true)
	t.Logf("%d requests were sent in %.1fs; watches ended after %.1fs more, judged in %.1fs; not answered: %v", r.attempted.Load(), asked.Seconds(),
		(watchedAt - asked).Seconds(), (judged - watchedAt).Seconds(), r.failures)
	return v
}

// requireMirrors compares each server's cache with etcd at the same revision, by lists and by the
// servers' own checks, and, if compare is set, the caches with each other, by their hashes at one
// revision.
func (r *round) requireMirrors(ctx context.Context, v *verdict, last int64, compare bool) {
	hashes := map[string]map[string]int{} // by resource: hash, and the replica that returned it
	for _, to := range r.asked {
		for _, res := range resources {
			var page *harness.List
			err := harness.Poll(ctx, func(ctx context.Context) (ok bool, err error) {
				ctx, cancel := context.WithTimeout(ctx, requestTimeout)
				defer cancel()
				// From the cache, at a revision not older than the end of the round.
				page, err = to.api.List(ctx, res.path(""), fmt.Sprintf("resourceVersionMatch=NotOlderThan&resourceVersion=%d", last))
				return err == nil, err
			})
			if err != nil {
				v.add(mirrored, "replica %d: %v", to.n, err)
				continue
			}
			var at int64
			if _, err := fmt.Sscan(page.Metadata.ResourceVersion, &at); err != nil {
				v.add(mirrored, "replica %d: %v", to.n, err)
				continue
			}
			var stored *clientv3.GetResponse
			if err := r.scene.again(ctx, func(ctx context.Context) (err error) {
				stored, err = r.scene.client.Get(ctx, "/registry/"+res.name+"/", clientv3.WithPrefix(), clientv3.WithRev(at), clientv3.WithKeysOnly())
				return err
			}); err != nil {
				v.add(mirrored, "read etcd at %d: %v", at, err)
				continue
			}
			held := map[string]string{}
			for _, item := range page.Items {
				held[item.Key()] = item.Metadata.ResourceVersion
			}
			for _, kv := range stored.Kvs {
				name := strings.TrimPrefix(string(kv.Key), "/registry/"+res.name+"/")
				if held[name] != fmt.Sprint(kv.ModRevision) {
					v.add(mirrored, "replica %d at %d: %s is at %q, in etcd at %d", to.n, at, name, held[name], kv.ModRevision)
				}
				delete(held, name)
			}
			for name, at := range held {
				v.add(mirrored, "replica %d: %s@%s is not in etcd", to.n, name, at)
			}
			if harness.Engine() == harness.Strata {
				r.requireConsistent(ctx, v, to, res, last, compare, hashes)
			}
		}
	}
}

// requireConsistent makes a server compare itself with etcd, and, if compare is set, return its
// hash at a revision.
func (r *round) requireConsistent(ctx context.Context, v *verdict, to *replica, res resource, last int64, compare bool, hashes map[string]map[string]int) {
	var checked []harness.Consistency
	err := harness.Poll(ctx, func(ctx context.Context) (ok bool, err error) {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		checked, err = to.api.Consistent(ctx, res.name)
		if err == nil && len(checked) == 1 && checked[0].Status == "error" {
			err = fmt.Errorf("%+v", checked[0])
		}
		return err == nil, err
	})
	if err != nil || len(checked) != 1 || checked[0].Status != "success" || checked[0].Revision < last {
		v.add(mirrored, "replica %d: its check of %s after %d is %+v, %v", to.n, res.name, last, checked, err)
	}
	if !compare {
		return
	}
	var at harness.Consistency
	err = r.scene.again(ctx, func(ctx context.Context) (err error) {
		at, err = to.api.HashAt(ctx, res.name, last)
		return err
	})
	if err != nil || at.Hash == "" {
		v.add(mirrored, "replica %d: its hash of %s at %d is %+v, %v", to.n, res.name, last, at, err)
		return
	}
	if hashes[res.name] == nil {
		hashes[res.name] = map[string]int{}
	}
	hashes[res.name][at.Hash] = to.n
	if len(hashes[res.name]) > 1 {
		v.add(mirrored, "the hashes of %s at %d differ: %v", res.name, last, hashes[res.name])
	}
}

func parseDuration(t *testing.T, name string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(envOr(name, "0s"))
	harness.Check(t, err)
	return d
}
