package replica

import (
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestReplica_DelegateAuth_PrimariesDecide: without keys and without RBAC of its own, a replica
// authenticates tokens and authorizes reads as the primaries do.
func TestReplica_DelegateAuth_PrimariesDecide(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	primary, role := s.primary, harness.NewName("reader")
	admin := primary.API()
	const rbac = "/apis/rbac.authorization.k8s.io/v1/"
	for _, o := range []struct {
		path   string
		object object
	}{
		{"clusterroles", object{"metadata": object{"name": role}, "rules": []object{{"apiGroups": []string{""}, "resources": []string{"configmaps"}, "verbs": []string{"get", "list"}}}}},
		{"clusterrolebindings", binding(role, role, "reader")},
		{"clusterrolebindings", binding(harness.NewName("strata-replica"), "system:auth-delegator", "system:strata-replica")},
	} {
		_, err := admin.Create(ctx, rbac+o.path, o.object)
		harness.Check(t, err)
	}
	replica := env.DelegatingReplica(s.readOnly, s.front, []*harness.Server{primary}, s.keys)
	endWith(t, replica)
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
		want, err := primary.APIFor(primary.ConfigFor(c.token)).Read(ctx, c.path, "", "")
		harness.Check(t, err)
		got, err := replica.APIFor(replica.ConfigFor(c.token)).Read(ctx, c.path, "", "")
		harness.Check(t, err)
		if got.Code != c.code || want.Code != c.code {
			t.Errorf("%q %s: %v, primary %v, want %d", c.token, c.path, got.Err(), want.Err(), c.code)
		}
	}
	created, err := replica.API().Create(ctx, s.maps(ctx, t), configMap("delegated", nil))
	harness.Check(t, err)
	if created.Metadata.Name != "delegated" {
		t.Errorf("created %+v", created)
	}
}

func binding(name, role, user string) object {
	return object{"metadata": object{"name": name}, "roleRef": object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
		"subjects": []object{{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}}}
}
