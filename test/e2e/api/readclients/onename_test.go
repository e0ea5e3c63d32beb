package readclients

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestRBAC_SingleName_ReadsThatObjectOnly: a user who may read only one name lists and watches it
// with a field selector for that name. No other form of selector or path shows another object.
func TestRBAC_SingleName_ReadsThatObjectOnly(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	namespace := fillPaths(t, ctx, "onename")
	api := both.strata.API()
	for _, path := range []string{maps(namespace), gizmos(namespace)} {
		created, err := api.Create(ctx, path, object{
			"apiVersion": map[bool]string{true: "v1", false: gizmoGroup + "/v1"}[path == maps(namespace)],
			"kind":       map[bool]string{true: "ConfigMap", false: "Gizmo"}[path == maps(namespace)],
			"metadata":   object{"name": "other", "annotations": object{"secret": "confidential value"}},
		})
		harness.Check(t, err)
		harness.Check(t, both.awaitRevision(ctx, path, created.Metadata.ResourceVersion))
	}
	rbac := "/apis/rbac.authorization.k8s.io/v1/namespaces/" + namespace
	_, err := api.Create(ctx, rbac+"/roles", object{"metadata": object{"name": "one"}, "rules": []any{object{
		"apiGroups": []string{"", gizmoGroup}, "resources": []string{"configmaps", "gizmos"},
		"resourceNames": []string{"one"}, "verbs": []string{"get", "list", "watch"},
	}}})
	harness.Check(t, err)
	_, err = api.Create(ctx, rbac+"/rolebindings", object{"metadata": object{"name": "one"},
		"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "one"},
		"subjects": []any{object{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "onename"}}})
	harness.Check(t, err)
	for _, engine := range both.each() { // authorizers read rules from their informers
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := engine.send(ctx, oneNameToken, http.MethodGet, maps(namespace)+"/one", "", nil)
			return err == nil && r.Code == http.StatusOK, err
		}))
	}

	const watch = "&watch=true&timeoutSeconds=1&resourceVersion=0"
	const one, other = "fieldSelector=metadata.name%3Done", "fieldSelector=metadata.name%3Dother"
	codes := map[string]int{
		"/one":                http.StatusOK,
		"/one?" + other:       http.StatusOK, // a GET has no selector
		"/other":              http.StatusForbidden,
		"/other?" + one:       http.StatusForbidden,
		"":                    http.StatusForbidden,
		"?" + one:             http.StatusOK,
		"?" + one + watch:     http.StatusOK,
		"?" + other:           http.StatusForbidden,
		"?" + other + watch:   http.StatusForbidden,
		"/one?" + watch[1:]:   http.StatusOK,
		"/other?" + watch[1:]: http.StatusForbidden,
		"/one?" + one + watch: http.StatusOK,
		"?" + watch[1:]:       http.StatusForbidden,
		"?" + one + "%2Cmetadata.namespace%3D" + namespace: http.StatusOK,
		"?fieldSelector=metadata.name%21%3Done":            http.StatusForbidden,
		"?fieldSelector=metadata.name%3D%3Done":            http.StatusOK,
		// Upstream decides the answer to two selectors; it must not contain the other object.
		"?" + one + "&" + other:                             0,
		"?" + other + "&" + one:                             0,
		"?" + one + "&" + other + watch:                     0,
		"?" + other + "&" + one + watch:                     0,
		"?" + one + "%2Cmetadata.name%3Dother":              0,
		"?" + one + "%2Cmetadata.name%21%3Done":             0,
		"?" + one + "&watch=false&watch=true":               0,
		"?" + one + "&limit=1&continue=":                    0,
		"?" + one + "&fieldSelector=":                       0,
		"?fieldSelector=&" + one:                            0,
		"/one?" + other + watch:                             0,
		"/one?fieldSelector=metadata.namespace%3Dx" + watch: 0,
		"/one/?" + one:                                      0,
		"//other?" + one:                                    0,
	}
	var requests []request
	for _, path := range []string{maps(namespace), gizmos(namespace)} {
		for rest, code := range codes {
			requests = append(requests, request{token: oneNameToken, method: http.MethodGet, target: path + rest, also: func(r *harness.Response) error {
				if code != 0 && r.Code != code {
					return fmt.Errorf("got %w, want %d", r.Err(), code)
				}
				if strings.Contains(string(r.Body), "confidential value") {
					return fmt.Errorf("the other object is in the answer:\n%s", r.Body)
				}
				return nil
			}})
		}
	}
	both.sameAnswers(t, ctx, requests)
}
