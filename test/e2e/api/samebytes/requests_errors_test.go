package samebytes

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestErrors_MatchUpstream sends requests for missing objects, forbidden requests and invalid
// requests.
func TestErrors_MatchUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	w.settle(t, ctx, "/api/v1/configmaps")
	const maps, object = "/api/v1/namespaces/odd/configmaps", "/api/v1/namespaces/odd/configmaps/plain-1"
	all := cases{}
	for _, path := range []string{
		"/", "/api", "/apis", "/api/v1", "/api/v2", "/api/v1/unknown", "/api/v1/unknown/x", "/api/v1/namespaces/odd/unknown",
		"/apis/unknown", "/apis/unknown/v1", "/apis/unknown/v1/things", "/apis/apps/v9/deployments", "/apis/apps/v1beta1/deployments",
		"/apis/same.example.com/v1alpha1/widgets", "/apis/same.example.com/v9/widgets", "/apis/same.example.com/v1/unknown",
		"/apis/same.example.com/v1/namespaces/odd/unknown/x",
		// A path with a namespace for a cluster-scoped resource, and vice versa.
		"/api/v1/namespaces/odd/nodes", "/api/v1/namespaces/odd/nodes/node1", "/apis/same.example.com/v1/namespaces/odd/planets",
		"/apis/same.example.com/v1/namespaces/odd/planets/earth", "/apis/apiregistration.k8s.io/v1/namespaces/odd/apiservices",
		"/api/v1/configmaps/plain-1", "/apis/same.example.com/v1/widgets/full",
		"/api/v1/namespaces/odd", "/api/v1/namespaces/missing", "/api/v1/namespaces/odd/status", "/api/v1/namespaces/odd/namespaces",
		// Subresources, and resources without the subresource.
		"/api/v1/namespaces/odd/pods/web-1/status", "/api/v1/namespaces/odd/pods/missing/status", "/api/v1/namespaces/odd/pods/web-1/unknown",
		"/api/v1/namespaces/odd/pods/web-1/log", "/api/v1/namespaces/odd/pods/web-1/exec", "/api/v1/namespaces/odd/pods/web-1/ephemeralcontainers",
		"/api/v1/namespaces/odd/configmaps/plain-1/status", "/apis/apps/v1/namespaces/stubs/deployments/deployment4/scale",
		"/apis/same.example.com/v1/namespaces/odd/widgets/full/status", "/apis/same.example.com/v1/namespaces/odd/widgets/full/scale",
		"/apis/same.example.com/v1beta1/namespaces/odd/widgets/full/status", "/apis/same.example.com/v1beta1/namespaces/odd/widgets/full/scale",
		"/apis/same.example.com/v1/planets/earth/status", "/apis/same.example.com/v1/namespaces/odd/widgets/full/unknown",
		"/api/v1/namespaces/odd/pods/web-1/a/b/c", "/api/v1/namespaces/odd/services/missing/proxy",
		// Groups of an aggregated server that is not running.
		"/apis/remote.example.com/v1", "/apis/remote.example.com/v1/things", "/apis/remote.example.com/v1/namespaces/odd/things/x", "/apis/foo.com/as2/things",
		// Paths that are not canonical.
		maps + "/", object + "/", "/api/v1//configmaps", "//api/v1/configmaps", "/api/v1/./configmaps", "/api/v1/namespaces/odd/../odd/configmaps",
		"/api/v1/namespaces//configmaps", "/api/v1/namespaces/odd/configmaps//plain-1", "/api/v1/namespaces/odd/%63onfigmaps", "/api/v1/namespaces/odd/configmaps/%70lain-1",
		"/api/v1/namespaces/odd/configmaps/plain-1%2Fx", "/api/v1/namespaces/odd%2Fconfigmaps", "/api/v1/namespaces/odd/configmaps/%2e%2e", "/api/v1/namespaces/odd/configmaps/..",
		"/API/v1/configmaps", "/api/V1/configmaps", "/api/v1/ConfigMaps", "/api/v1/namespaces/ODD/configmaps", "/api/v1/configmap",
		"/api/v1/namespaces/odd/configmaps/" + strings.Repeat("x", 300), "/api/v1/namespaces/odd/configmaps/%00", "/api/v1/namespaces/odd/configmaps/%ff", "/api/v1/namespaces/%C3%BC/configmaps",
		"/api/v1/proxy", "/api/v1/watch", "/api/v1/redirect/nodes/x", "/api/v1/namespaces/odd/watch/configmaps",
	} {
		for _, m := range []mediaType{media[0], media[1], {"table", media[10].list, media[10].list}} {
			for _, v := range wires {
				all[named("path", strings.ReplaceAll(path, "/", "|"), m.name, v.name)] = v.on(request{path: path, accept: m.list})
			}
		}
	}
	for _, method := range []string{http.MethodHead, http.MethodOptions, http.MethodTrace, "PROPFIND", http.MethodPost, http.MethodPut, http.MethodPatch} {
		for name, path := range map[string]string{"list": maps, "object": object, "missing": maps + "/missing", "custom": "/apis/same.example.com/v1/namespaces/odd/widgets/full", "unknown": "/api/v1/unknown", "componentstatuses": "/api/v1/componentstatuses"} {
			if method == http.MethodHead && name == "componentstatuses" {
				continue // its length depends on the order of its items
			}
			all[named("method", method, name)] = request{method: method, path: path, accept: jsonType}
		}
	}
	for _, token := range []string{tokenNoRights, tokenOneName, tokenAnonymous, tokenUnknown} {
		for name, r := range map[string]request{
			"object":               {path: object},
			"other-object":         {path: maps + "/plain-2"},
			"missing":              {path: maps + "/missing"},
			"list":                 {path: maps},
			"list-all":             {path: "/api/v1/configmaps"},
			"list-one":             {path: maps, query: "fieldSelector=metadata.name%3Dplain-1"},
			"list-one-of-all":      {path: "/api/v1/configmaps", query: "fieldSelector=metadata.name%3Dplain-1"},
			"list-other":           {path: maps, query: "fieldSelector=metadata.name%3Dplain-2"},
			"list-two":             {path: maps, query: "fieldSelector=metadata.name%3Dplain-1,metadata.name%3Dplain-2"},
			"list-one-and-labels":  {path: maps, query: "fieldSelector=metadata.name%3Dplain-1&labelSelector=app"},
			"list-twice":           {path: maps, query: "fieldSelector=metadata.name%3Dplain-1&fieldSelector=metadata.name%3Dplain-2"},
			"list-invalid":         {path: maps, query: "fieldSelector=metadata.name%3Dplain-1,x"},
			"custom":               {path: "/apis/same.example.com/v1/widgets"},
			"custom-one":           {path: "/apis/same.example.com/v1/namespaces/odd/widgets/full"},
			"apiservices":          {path: "/apis/apiregistration.k8s.io/v1/apiservices"},
			"unknown":              {path: "/apis/unknown/v1/things"},
			"version":              {path: "/version"},
			"list-unknown-version": {path: maps, query: "resourceVersion=x"},
		} {
			for _, m := range media[:2] {
				r.token, r.accept = token, m.list
				all[named("user", token, name, m.name)] = r
			}
		}
	}
	w.run(t, ctx, all)
}
