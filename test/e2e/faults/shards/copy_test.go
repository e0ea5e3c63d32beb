package shards

import (
	"net/http"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// TestCopy_Leases_ContinueInOtherEtcd copies leases between the etcds of a server that is stopped
// meanwhile. Clients with a revision of the first etcd list again.
func TestCopy_Leases_ContinueInOtherEtcd(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	first, second := env.Etcd(), env.Etcd()
	server := env.APIServer(first)
	api := server.API()
	created := harness.Must[harness.Object](t)(api.Create(ctx, leasesPath, named("one")))
	copied := func(code int, text string, more ...string) {
		t.Helper()
		r, err := env.Run(ctx, "", append([]string{"etcd", "copy", "leases", "--from=" + first.URL, "--to=" + second.URL}, more...)...)
		harness.Check(t, err)
		if r.Code != code || !strings.Contains(r.Stdout+r.Stderr, text) {
			t.Fatalf("exit code %d, want %d and %q:\n%s%s", r.Code, code, text, r.Stdout, r.Stderr)
		}
	}
	copied(1, "stop all API servers")
	if n := keys(t, ctx, second.Client(), "leases/"); n != 0 {
		t.Errorf("a refused copy has written %d keys", n)
	}
	copied(0, "nothing was changed", "--dry-run")
	harness.Check(t, server.Stop())
	copied(0, "on both sides")
	copied(1, "already has")
	if from, to := keys(t, ctx, first.Client(), "leases/"), keys(t, ctx, second.Client(), "leases/"); from != to || from == 0 {
		t.Errorf("%d leases in the first etcd, %d in the second", from, to)
	}

	server.Restart(overrides(map[string]*harness.Etcd{"coordination.k8s.io/leases": second}))
	if got := harness.Must[harness.Object](t)(api.Get(ctx, leasesPath+"/one", "")); got.Metadata.UID != created.Metadata.UID {
		t.Errorf("the lease has the UID %s, want %s", got.Metadata.UID, created.Metadata.UID)
	}
	r, err := api.Read(ctx, leasesPath, "watch=true&resourceVersion="+created.Metadata.ResourceVersion, "")
	harness.Check(t, err)
	if r.Code != http.StatusGone && !strings.Contains(string(r.Body), `"code":410`) {
		t.Errorf("a watch from a revision of the first etcd: %d %s, want 410", r.Code, r.Body)
	}
	_, err = api.Create(ctx, leasesPath, named("two"))
	harness.Check(t, err)
	_, err = first.Client().Delete(ctx, "/registry/leases/", clientv3.WithPrefix())
	harness.Check(t, err)
	requireCode(t, ctx, api, leasesPath+"/two", http.StatusOK)
}
