package replica

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// TestReplica_PrimaryStops_OtherTakesOver: writes go to the healthy primaries only; a primary that returns is used again.
func TestReplica_PrimaryStops_OtherTakesOver(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd, front := e.Etcd(), e.FrontProxy()
	first, other := e.APIServer(etcd, front.TrustFlags()...), e.APIServer(etcd, front.TrustFlags()...)
	replica := e.Replica(etcd, front, []*harness.Server{first, other})
	api := replica.API()
	write := func(name string) {
		t.Helper()
		_, err := api.Create(ctx, configMaps, configMap(name, nil))
		harness.Check(t, err)
	}
	for i := range 10 {
		write(fmt.Sprintf("both-%d", i))
	}
	healthy := func(n float64) {
		t.Helper()
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			got, err := api.Sum(ctx, "strata_replica_primary_healthy")
			return got == n, fmt.Errorf("%v healthy primaries, want %v: %w", got, n, err)
		}))
	}
	healthy(2)
	first.Kill()
	for i := range 10 { // the first one to meet the dead primary is sent to the other
		write(fmt.Sprintf("other-%d", i))
	}
	healthy(1)
	first.Restart()
	healthy(2)
	for i := range 10 {
		write(fmt.Sprintf("again-%d", i))
	}
	sent, err := api.Sum(ctx, "strata_replica_proxy_requests_total", `code="201"`)
	harness.Check(t, err)
	if sent != 30 {
		t.Errorf("%v creations were answered by primaries, want 30: none is sent twice", sent)
	}
}

// TestReplica_DelegateAuth_PrimariesDecide: without keys and without RBAC of its own, a replica authenticates tokens and authorizes reads as the
// primaries do.
func TestReplica_DelegateAuth_PrimariesDecide(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd, front := e.Etcd(), e.FrontProxy()
	primary := e.APIServer(etcd, append(front.TrustFlags(), "--token-auth-file="+e.WriteFile("tokens.csv", []byte(tokens)))...)
	admin := primary.API()
	const rbac = "/apis/rbac.authorization.k8s.io/v1/"
	for _, o := range []struct {
		path   string
		object object
	}{
		{"clusterroles", object{"metadata": object{"name": "reader"}, "rules": []object{{"apiGroups": []string{""}, "resources": []string{"configmaps"}, "verbs": []string{"get", "list"}}}}},
		{"clusterrolebindings", binding("reader", "reader", "reader")},
		{"clusterrolebindings", binding("strata-replica", "system:auth-delegator", "system:strata-replica")},
	} {
		_, err := admin.Create(ctx, rbac+o.path, o.object)
		harness.Check(t, err)
	}
	replica := e.DelegatingReplica(etcd, front, []*harness.Server{primary})
	for _, c := range []struct {
		token, path string
		code        int
	}{
		{"admin-token", "/api/v1/namespaces/kube-system/secrets", 200},
		{"reader-token", "/api/v1/namespaces/default/configmaps", 200},
		{"reader-token", "/api/v1/namespaces/default/secrets", 403},
		{"nothing-token", "/api/v1/namespaces/default/configmaps", 403},
		{"unknown-token", "/api/v1/namespaces/default/configmaps", 401},
		{"", "/api/v1/namespaces/default/configmaps", 403},
		{"nothing-token", "/version", 200},
		{"", "/readyz", 200},
	} {
		want, err := primary.APIFor(primary.ConfigFor(c.token)).Do(ctx, http.MethodGet, c.path, "", nil)
		harness.Check(t, err)
		got, err := replica.APIFor(replica.ConfigFor(c.token)).Do(ctx, http.MethodGet, c.path, "", nil)
		harness.Check(t, err)
		if got.Code != c.code || want.Code != c.code {
			t.Errorf("%q %s: %v, primary %v, want %d", c.token, c.path, got.Err(), want.Err(), c.code)
		}
	}
	created, err := replica.API().Create(ctx, configMaps, configMap("delegated", nil))
	harness.Check(t, err)
	if created.Metadata.Name != "delegated" {
		t.Errorf("created %+v", created)
	}
}

func binding(name, role, user string) object {
	return object{"metadata": object{"name": name}, "roleRef": object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
		"subjects": []object{{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}}}
}
