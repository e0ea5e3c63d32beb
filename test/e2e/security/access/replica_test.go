package access

import (
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestReplica_EveryUserVerbAndOption_EqualsUpstream: a replica decides, answers and audits the
// requests of the matrix as upstream does. The requests for subresources that it does not store are
// decided and audited by its primary, in the same file.
func TestReplica_EveryUserVerbAndOption_EqualsUpstream(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	replica := newEngine("replica", w.strata.auditLog)
	replica.Server = env.Replica(w.etcd, w.front, []*harness.Server{w.strata.Server}, replica.flags()...)
	beside := *w
	beside.strata = replica
	beside.same(t, ctx, "replica-matrix", w.matrix(harness.Long()))
	beside.same(t, ctx, "replica-subresources", subresources())
	local, err := replica.API().Sum(ctx, "strata_readpath_requests_total")
	harness.Check(t, err)
	if local == 0 {
		t.Error("the replica has answered no request from memory")
	}
}
