package checker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// asked starts a comparison, and returns once the proxy holds its request for the keys after a key.
// The result is sent when the rule is removed.
func asked(t *testing.T, ctx context.Context, k kind, after string) (*etcdproxy.Rule, chan harness.Consistency) {
	t.Helper()
	rule := proxy.HoldRequests(func(r etcdproxy.Request) bool {
		return etcdproxy.KeysOf(k.prefix)(r) && string(r.Range.Key) > after
	}, 0) // and each repetition
	t.Cleanup(rule.Remove)
	done := make(chan harness.Consistency, 1)
	go func() {
		all, err := lossy.API().Consistent(ctx, k.name)
		if err != nil || len(all) != 1 {
			all = []harness.Consistency{{Error: fmt.Sprint(err), Status: fmt.Sprintf("%d items", len(all))}}
		}
		done <- all[0]
	}()
	harness.Check(t, rule.Await(ctx, 1))
	return rule, done
}

// noAlarm returns a function that requires that no check of the lossy server has failed since the
// call.
func noAlarm(t *testing.T, ctx context.Context) (verify func()) {
	t.Helper()
	count := func() int {
		t.Helper()
		n, err := lossy.API().Checks(ctx, "", "failure")
		harness.Check(t, err)
		return n
	}
	before := count()
	return func() {
		t.Helper()
		if n := count(); n != before {
			t.Errorf("%d checks failed, and %d before", n, before)
		}
	}
}

// TestConsistencyCheck_Compaction_ReportsNoDifference compacts etcd during a comparison of keys,
// before the first page and between two pages.
func TestConsistencyCheck_Compaction_ReportsNoDifference(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	for i := range 12 { // two pages, by the size of the values
		commit(t, ctx, routes.put(fmt.Sprintf("page-%02d", i), strings.Repeat("v", 1<<20)))
	}
	t.Cleanup(func() {
		_, err := client.Delete(context.WithoutCancel(ctx), routes.key("page-"), clientv3.WithPrefix())
		harness.Check(t, err)
	})
	start := commit(t, ctx, routes.put("fence", "0"))
	list(t, ctx, lossy, routes, exactly(start)+"&limit=1")
	for _, after := range []string{"", routes.prefix} {
		verify := noAlarm(t, ctx)
		watch := watched(t, ctx, lossy, routes, start)
		mistakes := checks(t, ctx, lossy, routes, "error")
		rule, done := asked(t, ctx, routes, after)
		commit(t, ctx, routes.put("page-00", ""), clientv3.OpDelete(routes.key("page-01")))
		last := commit(t, ctx, routes.put("fence", "1"))
		_, err := client.Compact(ctx, last, clientv3.WithCompactPhysical())
		harness.Check(t, err)
		rule.Remove()
		if c := <-done; c.Status != "error" || !strings.Contains(c.Error, "compacted") {
			t.Errorf("a check that is overtaken by a compaction is %+v, want an error", c)
		}
		if n := checks(t, ctx, lossy, routes, "error"); n != mistakes+1 {
			t.Errorf("%d errors are counted, and were %d before", n, mistakes)
		}
		until(t, ctx, watch, "fence", last) // memory has reached the compacted revision
		requireStatus(t, ctx, lossy, routes, "success")
		start = last
		verify()
	}
}

// TestConsistencyCheck_UndecodableValue_IsCompared writes values that cannot be decoded: their keys
// are compared like others.
func TestConsistencyCheck_UndecodableValue_IsCompared(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	for _, k := range []kind{maps, leases, things, routes} {
		revision := commit(t, ctx, clientv3.OpPut(k.key("garbage"), "garbage"), k.put("beside", ""))
		for _, s := range []*harness.Server{lossy, strict} {
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				r, err := s.API().Do(ctx, http.MethodGet, k.in("default")+"/garbage", "", nil)
				return err == nil && r.Code == http.StatusInternalServerError, errors.Join(err, fmt.Errorf("garbage is answered with %d", r.Code))
			}))
			list(t, ctx, s, namespaces, "") // memory has reached the write: a GET may read etcd
			c := requireStatus(t, ctx, s, k, "success")
			want := stored(t, ctx, k.prefix, c.Revision)
			if c.Revision < revision || c.Hash != hashOf(want) || c.Keys != int64(len(want)) {
				t.Errorf("%s with garbage: %+v, want the hash %s of %d keys at %d or later", k.name, c, hashOf(want), len(want), revision)
			}
		}
		commit(t, ctx, clientv3.OpDelete(k.key("garbage")))
		for _, s := range []*harness.Server{lossy, strict} {
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				_, err := s.API().List(ctx, k.path, "")
				return err == nil, err
			}))
			requireStatus(t, ctx, s, k, "success")
		}
	}
}

// TestConsistencyCheck_PageTooLarge_ReportsNoDifference fails the first request for keys like a
// client whose limit the answer exceeds.
func TestConsistencyCheck_PageTooLarge_ReportsNoDifference(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	for i := range 20 {
		commit(t, ctx, things.put(fmt.Sprintf("large-%d", i), ""))
	}
	list(t, ctx, lossy, things, exactly(commit(t, ctx, things.put("fence", "large"))))
	verify := noAlarm(t, ctx)
	rule := proxy.FailRequests(etcdproxy.KeysOf(things.prefix), 1, status.Error(codes.ResourceExhausted, "grpc: received message larger than max"))
	t.Cleanup(rule.Remove)
	proxy.Reset()
	c := requireStatus(t, ctx, lossy, things, "success")
	if want := stored(t, ctx, things.prefix, c.Revision); c.Hash != hashOf(want) {
		t.Errorf("%+v, want the hash %s", c, hashOf(want))
	}
	limits := []int64{}
	for _, r := range proxy.Ranges() {
		if r.KeysOnly && strings.HasPrefix(string(r.Key), things.prefix) {
			limits = append(limits, r.Limit)
		}
	}
	if rule.Hits() != 1 || len(limits) < 2 || limits[1] >= limits[0] {
		t.Errorf("pages of %v keys, want the second request for fewer", limits)
	}
	verify()
}

// TestConsistencyCheck_WritesMeanwhile_ReportNoDifference compares continuously on both servers
// while all kinds are written at full speed.
func TestConsistencyCheck_WritesMeanwhile_ReportNoDifference(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	kinds := []kind{maps, secrets, things, routes}
	verify := noAlarm(t, ctx)
	writing, stop := context.WithCancel(ctx)
	defer stop()
	var writers sync.WaitGroup
	start := commit(t, ctx, maps.put("fence", "writes"))
	for w := range 4 {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for n := 0; writing.Err() == nil; n++ {
				var ops []clientv3.Op
				for i, key := range r.Perm(50)[:1+r.IntN(5)] {
					k, name := kinds[(n+i)%len(kinds)], fmt.Sprintf("write-%d", key)
					if r.IntN(3) == 0 {
						ops = append(ops, clientv3.OpDelete(k.key(name)))
					} else {
						ops = append(ops, k.put(name, fmt.Sprint(n)))
					}
				}
				// Whether it is applied or not, the hashes of memory and of etcd are equal.
				if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
					t.Log(err)
				}
			}
		})
	}
	const rounds = 15
	succeeded := 0
	for round := range rounds {
		for _, k := range kinds {
			s := []*harness.Server{lossy, strict}[round%2]
			c := requireStatus(t, ctx, s, k, "success")
			if c.Status == "success" {
				succeeded++
			}
			if want := stored(t, ctx, k.prefix, c.Revision); c.Hash != hashOf(want) {
				t.Errorf("%s at %d: hash %s, want %s of %d keys", k.name, c.Revision, c.Hash, hashOf(want), len(want))
			}
		}
	}
	stop()
	writers.Wait()
	end := commit(t, ctx, maps.put("fence", "written"))
	t.Logf("%d checks succeeded during %d writes", succeeded, end-start-1)
	if end-start < 200 {
		t.Errorf("%d writes, want many", end-start)
	}
	var ops []clientv3.Op
	for _, k := range kinds {
		ops = append(ops, clientv3.OpDelete(k.key("write-"), clientv3.WithPrefix()))
	}
	commit(t, ctx, ops...)
	verify()
}
