package readpath

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestDeprecatedVersion_SendsWarningAndIsCounted clients, and are counted.
func TestDeprecatedVersion_SendsWarningAndIsCounted(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "warned")
	const base = "/api/v1/namespaces/warned/endpoints"
	_, err := api.Create(ctx, base, object{"metadata": object{"name": "a"}})
	harness.Check(t, err)
	before := metric(t, ctx, api, `apiserver_requested_deprecated_apis{group="",removed_release="",resource="endpoints"`)
	for _, read := range [][2]string{
		{base + "/a", ""}, {base + "/none", ""}, {base, ""}, {base, "resourceVersion=0"}, {base, "limit=x"}, {"/api/v1/endpoints", ""}, {base, "watch=true&timeoutSeconds=1"},
	} {
		until(t, ctx, read[0], read[1], func(r *harness.Response) bool { return len(r.Header["Warning"]) == 1 })
	}
	byBytes(t, ctx, base, "")
	if after := metric(t, ctx, api, `apiserver_requested_deprecated_apis{group="",removed_release="",resource="endpoints"`); after != 1 {
		t.Errorf("the deprecated version is reported %v times, before %v, want once", after, before)
	}
	if r := same(t, ctx, "/api/v1/namespaces/warned/configmaps", ""); len(r.Header["Warning"]) != 0 {
		t.Errorf("configmaps have warnings: %q", r.Header["Warning"])
	}
}

// TestInvalidResourcePath_MatchesUpstream get upstream's answers.
func TestInvalidResourcePath_MatchesUpstream(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "paths")
	same(t, ctx, "/api/v1/nodes", "")
	for _, path := range []string{
		// cluster-scoped
		"/api/v1/namespaces/paths/nodes", "/api/v1/namespaces/paths/nodes/a", "/api/v1/namespaces/paths/namespaces",
		"/api/v1/configmaps/a", // namespaced
		"/api/v1/namespaces/paths", "/api/v1/namespaces", "/api/v1/namespaces/none", "/api/v1/namespaces/paths/status",
		"/api/v1/namespaces/paths/configmaps/kube-root-ca.crt", "/api/v1/namespaces/paths/configmaps/UPPER",
		"/api/v1/componentstatuses/none", "/api/v1/bindings", "/api/v1/nothing", "/api/v2/pods", "/apis/apps/v1beta1/deployments", "/apis/apps/v1/configmaps",
		"/apis/authentication.k8s.io/v1/tokenreviews", "/apis/authorization.k8s.io/v1/namespaces/paths/localsubjectaccessreviews",
		"/apis/autoscaling/v1/horizontalpodautoscalers", "/apis/autoscaling/v2/horizontalpodautoscalers",
		"/apis/apiregistration.k8s.io/v1/apiservices/v1.apps", "/apis/apiregistration.k8s.io/v1/namespaces/paths/apiservices",
	} {
		same(t, ctx, path, "")
	}
	var reads [][2]string
	for _, path := range []string{
		"/api/v1/nodes", "/api/v1/namespaces", "/api/v1/namespaces/paths", "/api/v1/secrets", "/apis/apps/v1/deployments",
		"/apis/autoscaling/v1/horizontalpodautoscalers", "/apis/autoscaling/v2/horizontalpodautoscalers",
		"/apis/rbac.authorization.k8s.io/v1/clusterroles", definitionsPath, "/apis/apiregistration.k8s.io/v1/apiservices",
	} {
		reads = append(reads, [2]string{path, ""})
	}
	allByBytes(t, ctx, reads...)
}

// TestBuiltInResources_AreReadFromMemory except resources that are not stored.
func TestBuiltInResources_AreReadFromMemory(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	var reads [][2]string
	r := get(t, ctx, api, "/api/v1", "")
	for _, path := range listable(t, r, "/api/v1") {
		if path == "/api/v1/componentstatuses" {
			passedOn(t, ctx, path, "resource")
			continue
		}
		reads = append(reads, [2]string{path, ""})
	}
	groups, err := api.Do(ctx, http.MethodGet, "/apis", "", nil)
	harness.Check(t, err)
	for _, gv := range groupVersions(t, groups) {
		if strings.Contains(gv, ".example.com/") {
			continue // of another test
		}
		for _, path := range listable(t, get(t, ctx, api, "/apis/"+gv, ""), "/apis/"+gv) {
			reads = append(reads, [2]string{path, ""})
		}
	}
	allByBytes(t, ctx, reads...)
}
