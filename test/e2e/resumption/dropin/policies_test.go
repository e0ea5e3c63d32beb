package dropin

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestPolicies_KeyRemoved_StillApply removes the key of a ResourceQuota and of a webhook
// configuration, by a reload and by a restart. A policy that cannot be read does not cease to
// apply: admission uses it as it was, and after the restart it refuses until it can be read.
func TestPolicies_KeyRemoved_StillApply(t *testing.T) {
	t.Parallel() // it waits for the server to read the file
	const (
		quotas   = "/api/v1/namespaces/default/resourcequotas"
		webhooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
	)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	before, after := harness.Provider{Kind: "aescbc", Key: "before"}, harness.Provider{Kind: "aescbc", Key: "after"}
	config := harness.NewEncryption(t, []string{"resourcequotas", "limitranges", "validatingwebhookconfigurations.admissionregistration.k8s.io"}, before)
	flags := []string{config.Flag(), "--encryption-provider-config-automatic-reload=true"}
	s := env.APIServer(etcd, flags...)
	api := s.API()
	create(t, ctx, api, quotas, object{"metadata": object{"name": "none"}, "spec": object{"hard": object{"count/configmaps": "0"}}})
	// as kube-controller-manager does
	_, err := api.Patch(ctx, quotas+"/none/status", `{"status":{"hard":{"count/configmaps":"0"},"used":{"count/configmaps":"0"}}}`)
	harness.Check(t, err)
	create(t, ctx, api, webhooks, unreachable("first", "secrets"))
	refused := func(when string) {
		t.Helper()
		requireNotCreated(t, ctx, api, when+", by the quota", defaultMaps, object{"metadata": object{"generateName": "map-"}}, "quota: none")
		requireNotCreated(t, ctx, api, when+", by the webhook", defaultSecrets, object{"metadata": object{"generateName": "secret-"}}, "first.example.com")
	}
	awaitRefusal(t, ctx, api, defaultMaps, "quota: none")
	awaitRefusal(t, ctx, api, defaultSecrets, "first.example.com")

	config.Write(t, after)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, quotas+"/none", "", nil)
		return err == nil && r.Code == http.StatusInternalServerError, err
	}))
	refused("after the reload")
	// Their informers have events, and list again what applies.
	create(t, ctx, api, webhooks, unreachable("second", "leases"))
	create(t, ctx, api, quotas, object{"metadata": object{"name": "much"}, "spec": object{"hard": object{"count/secrets": "1000"}}})
	awaitRefusal(t, ctx, api, "/apis/coordination.k8s.io/v1/namespaces/default/leases", "second.example.com")
	refused("after further policies")

	harness.Check(t, s.Stop())
	s = env.StartAPIServer(etcd, flags...)
	harness.Check(t, s.Await(ctx, "/livez"))
	api = s.API()
	awaitRefusal(t, ctx, api, defaultMaps, "not yet ready")
	if r, err := api.Do(ctx, http.MethodGet, "/readyz", "", nil); err != nil || r.Code == http.StatusOK {
		t.Errorf("ready without policies that cannot be read: %v", err)
	}
	config.Write(t, after, before)
	harness.Check(t, s.Await(ctx, "/readyz"))
	awaitRefusal(t, ctx, api, defaultMaps, "quota: none")
	awaitRefusal(t, ctx, api, defaultSecrets, "first.example.com")
}

// unreachable is the configuration of a webhook for new objects of a resource that cannot be
// called.
func unreachable(name, resource string) object {
	return object{"metadata": object{"name": name}, "webhooks": []any{object{
		"name": name + ".example.com", "failurePolicy": "Fail", "sideEffects": "None", "admissionReviewVersions": []any{"v1"}, "timeoutSeconds": 1,
		"clientConfig": object{"url": "https://127.0.0.1:1/"},
		"rules":        []any{object{"apiGroups": []any{"*"}, "apiVersions": []any{"*"}, "operations": []any{"CREATE"}, "resources": []any{resource}}},
	}}}
}

// requireNotCreated fails unless the creation of an object is refused for the reason.
func requireNotCreated(t *testing.T, ctx context.Context, api *harness.API, when, path string, o object, reason string) {
	t.Helper()
	if _, err := api.Create(ctx, path, o); err == nil || !strings.Contains(err.Error(), reason) {
		t.Errorf("%s: %v, want a refusal with %q", when, err, reason)
	}
}

// awaitRefusal waits until new objects are refused for the reason.
func awaitRefusal(t *testing.T, ctx context.Context, api *harness.API, path, reason string) {
	t.Helper()
	var last error
	err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		_, last = api.Create(ctx, path, object{"metadata": object{"generateName": "try-"}})
		return last != nil && strings.Contains(last.Error(), reason), last
	})
	if err != nil {
		t.Fatalf("%s is not refused with %q: %v", path, reason, last)
	}
}
