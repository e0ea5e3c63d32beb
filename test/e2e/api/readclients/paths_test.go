package readclients

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// fillPaths creates a namespace with one object of some kinds, and returns when both engines have
// observed them.
func fillPaths(t *testing.T, ctx context.Context, prefix string) (namespace string) {
	t.Helper()
	api := both.strata.API()
	createGizmos(t, ctx, api, both.upstream.API())
	namespace = harness.Namespace(t, ctx, api, harness.NewName(prefix))
	for path, o := range map[string]object{
		maps(namespace):   configMap("one", "data"),
		gizmos(namespace): gizmo("one", "more"),
		"/api/v1/namespaces/" + namespace + "/secrets":   {"metadata": object{"name": "one"}, "stringData": object{"key": "secret"}},
		"/api/v1/namespaces/" + namespace + "/endpoints": {"metadata": object{"name": "one"}},
		"/apis/apps/v1/namespaces/" + namespace + "/deployments": {"metadata": object{"name": "one"}, "spec": object{
			"replicas": 0, "selector": object{"matchLabels": object{"a": "b"}},
			"template": object{"metadata": object{"labels": object{"a": "b"}}, "spec": object{"containers": []any{object{"name": "c", "image": "i"}}}},
		}},
	} {
		created, err := api.Create(ctx, path, o)
		harness.Check(t, err)
		harness.Check(t, both.awaitRevision(ctx, path, created.Metadata.ResourceVersion))
	}
	return namespace
}

// TestUnusualPathsAndMethods_MatchUpstream: requests other than simple reads of canonical paths get
// upstream's answer, with equal headers.
func TestUnusualPathsAndMethods_MatchUpstream(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	namespace := fillPaths(t, ctx, "paths")
	var requests []request
	for _, target := range []string{
		// Canonical.
		"/api/v1/namespaces/NS/configmaps",
		"/api/v1/namespaces/NS/configmaps/one",
		"/apis/test.example.com/v1/namespaces/NS/gizmos",
		"/apis/test.example.com/v1/namespaces/NS/gizmos/one",
		"/api/v1/namespaces/NS/endpoints", // deprecated: with a Warning header
		"/api/v1/namespaces/NS/endpoints/one",
		"/api/v1/namespaces/NS",
		// Not canonical.
		"//api/v1/namespaces/NS/configmaps",
		"/api//v1/namespaces/NS/configmaps",
		"/api/v1/namespaces/NS//configmaps",
		"/api/v1/namespaces/NS/configmaps//one",
		// of all namespaces: other tests must not write these
		"/api/v1/namespaces//replicationcontrollers",
		"/api/v1/namespaces//configmaps/one",
		"/api/v1/./namespaces/NS/configmaps",
		"/api/v1/namespaces/NS/configmaps/./one",
		"/api/v1/namespaces/NS/secrets/../configmaps/one",
		"/api/v1/namespaces/NS/configmaps/",
		"/api/v1/namespaces/NS/configmaps/one/",
		"/api/v1/namespaces/NS/configmaps/one//",
		"/apis/test.example.com/v1/namespaces/NS/gizmos/",
		"/apis/test.example.com/v1/namespaces/NS/gizmos/one/",
		"/apis/test.example.com/v1//namespaces/NS/gizmos",
		"/api/v1/namespaces/NS/config%6Daps/one",
		"/api/v1/namespaces/NS/configmaps%2Fone",
		"/api/v1/namespaces/NS/configmaps/one%2F",
		"/api/v1/namespaces%2FNS/configmaps/one",
		"/api/v1/namespaces/NS/configmaps/%2e%2e/secrets/one",
		"/api/v1/namespaces/NS/configmaps/..%2Fsecrets%2Fone",
		"/api/v1/namespaces/NS/configmaps/one%00",
		"/api/v1/namespaces/NS/configmaps/%6fne",
		"/api/v1/namespaces/NS/ConfigMaps/one",
		"/API/v1/namespaces/NS/configmaps/one",
		"/api/v1/namespaces/NS/configmaps;x=y",
		"/api/v1/namespaces/NS/configmaps/one?",
		"https://127.0.0.1/api/v1/namespaces/NS/configmaps/one",
		// Missing objects and resources.
		"/api/v1/namespaces/NS/configmaps/two",
		"/apis/test.example.com/v1/namespaces/NS/gizmos/two",
		"/api/v1/namespaces/nowhere/configmaps",
		"/api/v1/namespaces/nowhere/configmaps/one",
		"/api/v1/namespaces/NS/nonsense",
		"/api/v2/namespaces/NS/configmaps",
		"/apis/apps/v1/namespaces/NS/configmaps",
		"/apis/test.example.com/v2/namespaces/NS/gizmos",
		"/apis/test.example.com/v1/gizmos/one",
		"/api/v1/configmaps/one",
		"/api/v1/namespaces/NS/nodes",
		// Subresources.
		"/apis/apps/v1/namespaces/NS/deployments/one/status",
		"/apis/apps/v1/namespaces/NS/deployments/one/scale",
		"/apis/test.example.com/v1/namespaces/NS/gizmos/one/status",
		"/apis/test.example.com/v1/namespaces/NS/gizmos/one/nonsense",
		"/api/v1/namespaces/NS/configmaps/one/status",
		"/api/v1/namespaces/NS/status",
		"/api/v1/namespaces/NS/finalize",
		// Watches by path: one name, a namespace, all namespaces.
		"/api/v1/watch/namespaces/NS/configmaps/one?timeoutSeconds=1&resourceVersion=0",
		"/api/v1/watch/namespaces/NS/configmaps?timeoutSeconds=1&resourceVersion=0",
		"/api/v1/watch/namespaces/NS?timeoutSeconds=1&resourceVersion=0",
		"/apis/test.example.com/v1/watch/namespaces/NS/gizmos?timeoutSeconds=1&resourceVersion=0",
		"/apis/test.example.com/v1/watch/namespaces/NS/gizmos/one?timeoutSeconds=1&resourceVersion=0",
		// Queries that change the verb of a path.
		"/api/v1/namespaces/NS/configmaps/one?watch=true&timeoutSeconds=1&resourceVersion=0",
		"/api/v1/namespaces/NS/configmaps?watch=1&timeoutSeconds=1&resourceVersion=0",
		"/api/v1/namespaces/NS/configmaps?watch&timeoutSeconds=1&resourceVersion=0",
		"/api/v1/namespaces/NS/configmaps?watch=false",
		"/api/v1/namespaces/NS/configmaps?watch=0",
		"/api/v1/namespaces/NS/configmaps?watch=maybe&timeoutSeconds=1&resourceVersion=0",
		"/api/v1/namespaces/NS/configmaps?watch=false&watch=true&timeoutSeconds=1&resourceVersion=0",
		"/api/v1/namespaces/NS/configmaps?watch=true&watch=false&timeoutSeconds=1&resourceVersion=0",
		"/apis/test.example.com/v1/namespaces/NS/gizmos/one?watch=true&timeoutSeconds=1&resourceVersion=0",
		"/apis/test.example.com/v1/namespaces/NS/gizmos?watch=false&watch=true&timeoutSeconds=1&resourceVersion=0",
		// Queries with invalid or repeated parameters.
		"/api/v1/namespaces/NS/configmaps?limit=x",
		"/api/v1/namespaces/NS/configmaps?limit=1&limit=x",
		"/api/v1/namespaces/NS/configmaps?labelSelector=%21%21",
		"/api/v1/namespaces/NS/configmaps?fieldSelector=data.x%3Dy",
		"/api/v1/namespaces/NS/configmaps?resourceVersion=x",
		// (A GET with an invalid resource version is omitted: upstream answers 500, Strata 400.)
		"/api/v1/namespaces/NS/configmaps?resourceVersionMatch=Exact",
		"/api/v1/namespaces/NS/configmaps?continue=x",
		"/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name%3Done&fieldSelector=metadata.name%3Dtwo",
		"/api/v1/namespaces/NS/configmaps?a=b;c=d",
		"/api/v1/namespaces/NS/configmaps?a=%zz",
	} {
		requests = append(requests, request{token: adminToken, method: http.MethodGet, target: strings.ReplaceAll(target, "NS", namespace)})
	}
	for _, method := range []string{"HEAD", "OPTIONS", "TRACE", "get", "LIST"} {
		for _, path := range []string{maps(namespace), maps(namespace) + "/one", gizmos(namespace), gizmos(namespace) + "/one"} {
			requests = append(requests, request{token: adminToken, method: method, target: path})
		}
	}
	for _, header := range []http.Header{
		{"Accept": {"application/cbor"}},
		{"Accept": {"text/html"}},
		{"Accept": {"text/html;q=0.9, application/vnd.kubernetes.protobuf;q=0.5, application/json;q=0.8"}},
		{"Accept": {"*/*"}},
		{"Accept": {"application/*"}},
		{"Accept": {"application/yaml"}},
		{"Accept": {"application/json;as=Table;v=v1;g=meta.k8s.io"}},
		{"Accept": {"application/json;as=Table;v=v1beta1;g=meta.k8s.io"}},
		{"Accept": {"application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"}},
		{"Accept": {"application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"}},
		{"Accept": {"application/json;as=PartialObjectMetadata;v=v1;g=example.com"}},
		{"Accept": {"application/json;stream=watch"}},
		{"If-None-Match": {"*"}},
		{"Range": {"bytes=0-3"}},
		{"X-Http-Method-Override": {"DELETE"}},
		{"Connection": {"Upgrade"}, "Upgrade": {"h2c"}},
	} {
		for _, path := range []string{maps(namespace), maps(namespace) + "/one", gizmos(namespace), gizmos(namespace) + "/one"} {
			requests = append(requests, request{token: adminToken, method: http.MethodGet, target: path, header: header})
		}
	}
	both.sameAnswers(t, ctx, requests)
}

// TestPretty_IndentsJSONExceptWatchEvents: browsers, curl and Wget get indented JSON, and so do
// requests with ?pretty. A watch always has one line per event.
func TestPretty_IndentsJSONExceptWatchEvents(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	namespace := fillPaths(t, ctx, "pretty")
	var requests []request
	add := func(path, query, agent, accept string, indented bool) {
		header := http.Header{"User-Agent": {agent}}
		if accept != "" {
			header.Set("Accept", accept)
		}
		requests = append(requests, request{token: adminToken, method: http.MethodGet, target: path + "?" + query, header: header, also: func(r *harness.Response) error {
			if got := strings.Contains(string(r.Body), "\n  \"kind\""); got != indented {
				return fmt.Errorf("indented: %v, want %v", got, indented)
			}
			return nil
		}})
	}
	const metadata = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
	for _, path := range []string{maps(namespace), maps(namespace) + "/one", gizmos(namespace), gizmos(namespace) + "/one"} {
		for agent, indented := range map[string]bool{
			"": false, "Go-http-client/2.0": false, "kubectl/v1.37.2": false, "Opera/9.0": false, "a curl/7": false, "wget/1.21": false, "Mozilla/4.0": false,
			"curl/7.88.1": true, "curlish": true, "Wget/1.21": true, "Mozilla/5.0 (X11; Linux x86_64)": true,
		} {
			add(path, "", agent, "", indented)
			add(path, "pretty=true", agent, "", true)
			add(path, "pretty=false", agent, "", false)
		}
		for query, indented := range map[string]bool{"pretty=1": true, "pretty=0": false, "pretty": false, "pretty=": false, "pretty=x": false, "pretty=false&pretty=true": false, "PRETTY=1": false} {
			add(path, query, "kubectl/v1.37.2", "", indented)
		}
		if strings.HasSuffix(path, "/one") {
			add(path, "pretty=true", "", metadata, true)
			// an object's path is a GET, even with watch=true
			add(path, "watch=true", "curl/7.88.1", "", true)
		} else {
			add(path, "watch=true&timeoutSeconds=1&resourceVersion=0", "curl/7.88.1", "", false)
			add(path, "watch=true&timeoutSeconds=1&resourceVersion=0&pretty=true", "curl/7.88.1", metadata, false)
		}
	}
	both.sameAnswers(t, ctx, requests)
}
