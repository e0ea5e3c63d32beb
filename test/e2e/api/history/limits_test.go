package history

import (
	"context"
	"net/http"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

const widgets = "/apis/example.com/v1/namespaces/default/widgets"

// TestHistory_Rights_AreThoseOfTheList tests a user with the right to list ConfigMaps, and nothing
// else.
func TestHistory_Rights_AreThoseOfTheList(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	for path, body := range map[string]object{
		"clusterroles": {"metadata": object{"name": "map-lister"}, "rules": []object{{"verbs": []string{"list"}, "apiGroups": []string{""}, "resources": []string{"configmaps"}}}},
		"clusterrolebindings": {"metadata": object{"name": "map-lister"}, "roleRef": object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "map-lister"},
			"subjects": []object{{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "lister"}}},
	} {
		_, err := api.Create(ctx, "/apis/rbac.authorization.k8s.io/v1/"+path, body)
		harness.Check(t, err)
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, _, err := revisionTimes(ctx, server, "lister", "/api/v1/configmaps")
		return err == nil && r.Code == http.StatusOK, err
	}))
	for path, want := range map[string]int{"/api/v1/configmaps": 200, "/api/v1/namespaces/default/configmaps": 200, "/api/v1/secrets": 403, "/apis/apps/v1/deployments": 403} {
		r, _, err := revisionTimes(ctx, server, "lister", path)
		if harness.Check(t, err); r.Code != want {
			t.Errorf("times of %s: %s, want %d", path, r.Err(), want)
		}
	}
	ok(t, ctx, "get", "configmaps", "-A", "--as=lister")
	fails(t, ctx, server, []string{"secrets is forbidden", `User "lister" cannot list`, "needs the right to list"}, "get", "secrets", "--as=lister")
	fails(t, ctx, server, []string{"configmaps is forbidden", `cannot watch`, "also that to watch it"}, "diff", "configmaps", "--as=lister")
	fails(t, ctx, server, []string{"/metrics", "forbidden"}, "top", "--as=lister")
}

func TestHistory_CustomResource_HasHistory(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	harness.Check(t, harness.Define(ctx, "example.com", "widgets", "Widget", nil, api))
	first := harness.Must[harness.Object](t)(api.Create(ctx, widgets, object{"apiVersion": "example.com/v1", "kind": "Widget", "metadata": object{"name": "w"}, "spec": object{"size": 1}}))
	harness.Must[harness.Object](t)(api.Patch(ctx, widgets+"/w", `{"spec":{"size":2}}`))
	revision := first.Metadata.ResourceVersion
	if got := ok(t, ctx, "get", "widget/w", "--at-revision", revision, "-o", "jsonpath={.spec.size}"); got != "1" {
		t.Errorf("size %s", got)
	}
	if got := ok(t, ctx, "diff", "widgets", "--since-revision", revision); !strings.Contains(got, "widget.example.com/w") || !strings.Contains(got, "spec.size") {
		t.Errorf("diff\n%s", got)
	}
}

// TestHistory_ServerWithoutHistory_IsNamed tests upstream's engine.
func TestHistory_ServerWithoutHistory_IsNamed(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	upstream := env.APIServer(etcd, "--disable-admission-plugins=ServiceAccount", "--engine="+harness.Upstream)
	r, _, err := revisionTimes(ctx, upstream, "", "/api/v1/configmaps")
	if harness.Check(t, err); r.Code != http.StatusNotAcceptable {
		t.Errorf("times of upstream: %s, want 406", r.Err())
	}
	for _, args := range []string{"get configmaps", "diff configmaps", "log configmap/a", "replay configmaps"} {
		fails(t, ctx, upstream, []string{"no history", upstream.URL + " is not a Strata server"}, strings.Fields(args)...)
	}
	fails(t, ctx, upstream, []string{"the server is not Strata"}, "top")
}

// TestHistory_BeyondTheWindow_NamesTheOldestRevision makes etcd forget its history, and the server
// with it.
func TestHistory_BeyondTheWindow_NamesTheOldestRevision(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.Namespace(t, ctx, api, harness.NewName("window"))
	first := harness.Must[harness.Object](t)(api.Create(ctx, maps(namespace), configMap("a", nil, object{"x": "1"})))
	revision := first.Metadata.ResourceVersion
	last := harness.Must[harness.Object](t)(api.Patch(ctx, maps(namespace)+"/a", `{"data":{"x":"2"}}`))
	client := etcd.Client()
	// as another API server does
	harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, "compact_rev_key", last.Metadata.ResourceVersion))
	harness.Must[*clientv3.CompactResponse](t)(client.Compact(ctx, harness.Revision(t, last.Metadata.ResourceVersion)))
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		_, times, err := revisionTimes(ctx, server, "", "/api/v1/configmaps")
		return err == nil && times != nil && times.Oldest > harness.Revision(t, revision), err
	}))
	for _, args := range []string{"get cm --at-revision " + revision, "diff cm --since-revision " + revision, "log cm/a --since-revision " + revision,
		"replay cm --since-revision " + revision} {
		fails(t, ctx, server, []string{"revision " + revision + " is older than the server's history: the oldest revision is "}, append(strings.Fields(args), "-n", namespace)...)
	}
}
