package replica

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/server/test/internal/etcdcluster"
	"github.com/stratakube/strata/server/test/internal/harness"
)

// TestReplica_MemoryBehindEtcd_IsNotReady: while no events arrive, the lag grows and /readyz names the etcd; both end with the stall.
func TestReplica_MemoryBehindEtcd_IsNotReady(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd, front := e.Etcd(), e.FrontProxy()
	proxy := e.Proxy(etcd)
	primary := e.APIServer(etcd, front.TrustFlags()...)
	replica := e.Replica(proxy.Etcd(), front, []*harness.Server{primary})
	api := replica.API()
	until := func(what string, condition func(ctx context.Context) (bool, error)) {
		t.Helper()
		if err := harness.Poll(ctx, condition); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	lag := func(ctx context.Context) (float64, error) { return api.Sum(ctx, "strata_replica_lag_seconds") }
	until("level", func(ctx context.Context) (bool, error) {
		seconds, err := lag(ctx)
		return err == nil && seconds == 0, fmt.Errorf("lag %v: %w", seconds, err)
	})
	proxy.Stall(true)
	_, err := primary.API().Create(ctx, configMaps, configMap("not-seen", nil))
	harness.Check(t, err)
	until("not ready", func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, "/readyz", "verbose", nil)
		if err != nil {
			return false, err
		}
		return r.Code == http.StatusInternalServerError && strings.Contains(string(r.Body), "[-]replica-lag"), r.Err()
	})
	r, err := api.Do(ctx, http.MethodGet, "/livez", "", nil)
	harness.Check(t, err)
	if r.Code != http.StatusOK {
		t.Errorf("/livez: %v: a restart would not help", r.Err())
	}
	if log := replica.Output(); !strings.Contains(log, "memory has been behind etcd at "+proxy.Etcd().URL) {
		t.Error("the log does not name the etcd behind which memory is")
	}
	seconds, err := lag(ctx)
	harness.Check(t, err)
	if seconds < 5 {
		t.Errorf("lag %v s, want more than the bound of 5 s", seconds)
	}
	proxy.Stall(false)
	harness.Check(t, replica.Await(ctx, "/readyz"))
	until("level again", func(ctx context.Context) (bool, error) {
		seconds, err := lag(ctx)
		return err == nil && seconds == 0, fmt.Errorf("lag %v: %w", seconds, err)
	})
}

// TestReplica_ReadFromMember_UsesThatMemberOnly: a follower serves a replica; a learner ends its start with an error that says so.
func TestReplica_ReadFromMember_UsesThatMemberOnly(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	cluster, front := etcdcluster.Start(t, e, 3), e.FrontProxy()
	primary := e.APIServer(cluster.Etcd(), front.TrustFlags()...)
	leader, err := cluster.Leader(ctx)
	harness.Check(t, err)
	follower := cluster.Members[0]
	if follower == leader {
		follower = cluster.Members[1]
	}
	replica := e.Replica(cluster.Etcd(), front, []*harness.Server{primary}, "--read-from="+follower.URL)
	api := replica.API()
	created, err := api.Create(ctx, configMaps, configMap("through-follower", nil))
	harness.Check(t, err)
	read, err := api.Get(ctx, configMaps+"/through-follower", "")
	harness.Check(t, err)
	if read.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
		t.Errorf("read resource version %s after the write of %s", read.Metadata.ResourceVersion, created.Metadata.ResourceVersion)
	}
	ready, err := api.Sum(ctx, "strata_mirror_ready", fmt.Sprintf("endpoints=%q", follower.URL))
	harness.Check(t, err)
	if ready != 1 {
		t.Errorf("%v mirrors of the follower are ready, want 1", ready)
	}

	learner := cluster.StartLearner(t, ctx, e)
	refused := e.StartReplica(cluster.Etcd(), front, []*harness.Server{primary}, "--read-from="+learner.URL)
	code, err := refused.Wait(ctx)
	harness.Check(t, err)
	if out := refused.Output(); code != 1 || !strings.Contains(out, learner.URL+" is a learner") || !strings.Contains(out, "etcdctl member promote") {
		t.Errorf("exit code %d, want 1 and an error that names the learner and the next step:\n%s", code, refused.Tail())
	}
}
