package checker

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// TestConsistencyCheck_Replicas_HaveEqualHashes compares the hashes of two servers, at the current
// and at an older revision, with the hash of their lists and of etcd's objects.
func TestConsistencyCheck_Replicas_HaveEqualHashes(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	kinds := []kind{maps, secrets, namespaces, leases, things, routes}
	var ops []clientv3.Op
	for _, k := range []kind{maps, secrets, things, routes} {
		for i := range 12 {
			ops = append(ops, k.put(fmt.Sprintf("hash-%d", i), ""))
		}
	}
	commit(t, ctx, ops...)
	for _, k := range kinds {
		mine := requireStatus(t, ctx, lossy, k, "success")
		if mine.EtcdHash != "" || mine.Differences != 0 || mine.Error != "" || len(mine.Missing)+len(mine.Extra)+len(mine.Differing) != 0 {
			t.Errorf("%s: a success has %+v", k.name, mine)
		}
		last, err := lossy.API().LastConsistent(ctx, k.name)
		harness.Check(t, err)
		if len(last) != 1 || last[0].Revision != mine.Revision || last[0].Hash != mine.Hash || last[0].Status != "success" {
			t.Errorf("%s: the last check is %+v, want %+v", k.name, last, mine)
		}
		// The second time, the current revision has become an older one.
		if k != leases && k != namespaces {
			commit(t, ctx, k.put("hash-0", "changed"), clientv3.OpDelete(k.key("hash-1")))
		}
		list(t, ctx, lossy, k, "") // the lossy server has reached the revision
		want := stored(t, ctx, k.prefix, mine.Revision)
		for _, s := range []*harness.Server{lossy, strict} {
			items, _ := list(t, ctx, s, k, exactly(mine.Revision))
			requireSame(t, k.name+" listed", items, want)
			at, err := s.API().HashAt(ctx, k.name, mine.Revision)
			harness.Check(t, err)
			if at.Hash != hashOf(items) || at.Hash != mine.Hash || at.Keys != int64(len(items)) || mine.Keys != at.Keys {
				t.Errorf("%s at %d: %+v, and the check was %+v; want %s of %d objects", k.name, mine.Revision, at, mine, hashOf(items), len(items))
			}
		}
		list(t, ctx, strict, k, "") // the strict server has reached the change
		now := requireStatus(t, ctx, strict, k, "success")
		if now.Revision <= mine.Revision && k != leases && k != namespaces || now.Hash == mine.Hash && k != leases && k != namespaces {
			t.Errorf("%s: after a change %+v, before it %+v", k.name, now, mine)
		}
	}
	// A revision outside memory has no hash.
	if at, err := lossy.API().HashAt(ctx, maps.name, 1<<40); err != nil || at.Hash != "" || at.Error == "" {
		t.Errorf("hash of a revision to come: %+v, %v", at, err)
	}
}

// TestConsistencyCheck_ReadsOnlyKeysFromEtcd: a check reads from etcd keys in pages, at the
// revision of memory, and nothing else.
func TestConsistencyCheck_ReadsOnlyKeysFromEtcd(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	const objects, big, bigBytes = 2000, 24, 1 << 20
	small, large := strings.Repeat("v", 1024), strings.Repeat("v", bigBytes)
	for first := 0; first < objects; first += 100 {
		var ops []clientv3.Op
		for i := range 100 {
			ops = append(ops, things.put(fmt.Sprintf("keys-%04d", first+i), small))
		}
		commit(t, ctx, ops...)
	}
	for i := range big {
		commit(t, ctx, routes.put(fmt.Sprintf("keys-%04d", i), large))
	}
	t.Cleanup(func() {
		for _, k := range []kind{things, routes} {
			_, err := client.Delete(context.WithoutCancel(ctx), k.key("keys-"), clientv3.WithPrefix())
			harness.Check(t, err)
		}
	})
	for _, k := range []kind{things, routes} {
		list(t, ctx, lossy, k, exactly(commit(t, ctx, k.put("asked", "")))+"&limit=1")
		hook.broken.Store(true)
		calls := hook.calls.Load()
		proxy.Reset()
		began := time.Now()
		c := requireStatus(t, ctx, lossy, k, "success")
		traffic, ranges := proxy.Traffic(), proxy.Ranges()
		hook.broken.Store(false)
		if hook.calls.Load() != calls {
			t.Errorf("%s: a check has the webhook convert", k.name)
		}
		ranges = slices.DeleteFunc(ranges, func(r *pb.RangeRequest) bool { return !strings.HasPrefix(string(r.Key), k.prefix) })
		next, largest := k.prefix, int64(0)
		for _, r := range ranges {
			if !r.KeysOnly || r.CountOnly || r.Revision != c.Revision || r.Limit < 1 || r.Limit > 10_000 || string(r.Key) < next {
				t.Errorf("%s: a check requests %v, want keys only, at %d, within bounds, from %q on", k.name, r, c.Revision, next)
			}
			next, largest = string(r.Key), max(largest, r.Limit)
		}
		// etcd reads the values of a page before it omits them: a page is 8 MiB of values.
		if k == routes && (len(ranges) < big*bigBytes/(8<<20) || largest > 600) {
			t.Errorf("%s: %d pages of up to %d keys, want pages of 8 MiB of values", k.name, len(ranges), largest)
		}
		// A page that takes 5 s is requested again.
		if k == things && len(ranges) != 1 && time.Since(began) < 4*time.Second {
			t.Errorf("%s: %d pages, want 1", k.name, len(ranges))
		}
		keys := traffic[etcdproxy.Keys]
		if perKey := keys.AnswerBytes / c.Keys; keys.Requests != int64(len(ranges)) || perKey < 20 || perKey > 120 {
			t.Errorf("%s: %+v for %d keys, want no more requests than %d, and 20 to 120 bytes for each key", k.name, keys, c.Keys, len(ranges))
		}
		t.Logf("%s: %d keys, %d pages, %d bytes of etcd", k.name, c.Keys, len(ranges), keys.AnswerBytes)
	}
}

// TestConsistencyCheck_RunsOncePerInterval: each resource is compared once per interval, also
// without requests; with interval 0 there are no periodic checks; with the gate off there are no
// checks at all.
func TestConsistencyCheck_RunsOncePerInterval(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	without := env.Proxy(etcd)
	off := env.APIServer(without.Etcd(), noServiceAccounts, often, "--strata-feature-gates=DetectCacheInconsistency=false",
		harness.Unchecked("its gate is off"))
	kinds := []kind{maps, secrets, leases, things, routes}
	for _, k := range kinds {
		for _, s := range []*harness.Server{off, strict} {
			list(t, ctx, s, k, "")
		}
	}
	all := func(s *harness.Server) (n [3]int) {
		t.Helper()
		for i, status := range []string{"success", "failure", "error"} {
			var err error
			n[i], err = s.API().Checks(ctx, "", status)
			harness.Check(t, err)
		}
		return n
	}
	onDemand, onSchedule := all(lossy), all(strict)
	proxy.Reset()
	before := map[kind]int{}
	for _, k := range kinds {
		before[k] = checks(t, ctx, strict, k, "success")
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		for _, k := range kinds {
			if n := checks(t, ctx, strict, k, "success"); n < before[k]+3 {
				return false, fmt.Errorf("%d checks of %s, %d before", n, k.name, before[k])
			}
		}
		return true, nil
	}))
	if now := all(strict); now[1] != onSchedule[1] || now[2] != onSchedule[2] {
		t.Errorf("on schedule: checks %v, and %v before, want successes only", now, onSchedule)
	}
	if now, keys := all(lossy), proxy.Traffic()[etcdproxy.Keys]; now != onDemand || keys.Requests != 0 {
		t.Errorf("with interval 0: checks %v, and %v before; requests to etcd %+v", now, onDemand, keys)
	}
	if keys := without.Traffic()[etcdproxy.Keys]; all(off) != [3]int{} || keys.Requests != 0 {
		t.Errorf("with the gate off: checks %v; requests to etcd %+v", all(off), keys)
	}
	r, err := off.API().Do(ctx, http.MethodPost, "/debug/strata/consistency", "", nil)
	harness.Check(t, err)
	last, err := off.API().LastConsistent(ctx, "")
	if r.Code != http.StatusForbidden || err != nil || len(last) != 0 || all(off) != [3]int{} {
		t.Errorf("with the gate off a check is answered with %v, the last ones were %v, %v; want 403 and none", r.Err(), last, err)
	}
	harness.Check(t, off.Stop())
}
