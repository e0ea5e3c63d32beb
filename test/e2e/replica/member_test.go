package replica

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
)

// TestReplica_ReadFromMember_UsesThatMemberOnly: a follower serves a replica; a learner ends its
// start with an error that says so.
func TestReplica_ReadFromMember_UsesThatMemberOnly(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	e := harness.New(t)
	cluster, front := etcdcluster.Start(t, e, 3), e.FrontProxy()
	client := cluster.Client()
	s.copyTo(ctx, t, client)
	leader, err := cluster.Leader(ctx)
	harness.Check(t, err)
	follower := cluster.Members[0]
	if follower == leader {
		follower = cluster.Members[1]
	}
	replica := e.ReplicaOf(cluster.Etcd(), front, []string{nowhere(e)}, "--read-from="+follower.URL, s.keys)
	harness.Check(t, replica.Await(ctx, "/readyz"))
	api := replica.API()
	value, err := storedMap(0, "written")
	harness.Check(t, err)
	written := put(ctx, t, client, mapKey(0), value)
	read, err := api.Get(ctx, configMaps+"/"+mapName(0), "")
	harness.Check(t, err)
	if version := harness.Revision(t, read.Metadata.ResourceVersion); version != written {
		t.Errorf("read resource version %d after the write of %d", version, written)
	}
	ready, err := api.Sum(ctx, "strata_mirror_ready", fmt.Sprintf("endpoints=%q", follower.URL))
	harness.Check(t, err)
	if ready != 1 {
		t.Errorf("%v mirrors of the follower are ready, want 1", ready)
	}

	learner := cluster.StartLearner(t, ctx, e)
	refused := e.ReplicaOf(cluster.Etcd(), front, []string{nowhere(e)}, "--read-from="+learner.URL, s.keys)
	code, err := refused.Wait(ctx)
	harness.Check(t, err)
	if out := refused.Output(); code != 1 || !strings.Contains(out, learner.URL+" is a learner") || !strings.Contains(out, "etcdctl member promote") {
		t.Errorf("exit code %d, want 1 and an error that names the learner and the next step:\n%s", code, refused.Tail())
	}
}
