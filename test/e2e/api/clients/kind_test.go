package clients

import (
	"context"
	"net/http"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/test/harness"
)

// The custom resource of this package has a status subresource, which a controller writes.
const (
	gizmoGroup = "test.example.com"
	gizmosPath = "/apis/" + gizmoGroup + "/v1/gizmos"

	mapsPath       = "/api/v1/configmaps"
	secretsPath    = "/api/v1/secrets"
	namespacesPath = "/api/v1/namespaces"
)

var (
	gizmoKind     = schema.GroupVersionKind{Group: gizmoGroup, Version: "v1", Kind: "Gizmo"}
	gizmoResource = schema.GroupVersionResource{Group: gizmoGroup, Version: "v1", Resource: "gizmos"}
)

// createGizmos creates the definition and returns when the resource is served.
func createGizmos(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	open := object{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
	_, err := api.Create(ctx, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", object{
		"metadata": object{"name": "gizmos." + gizmoGroup},
		"spec": object{
			"group": gizmoGroup, "scope": "Namespaced",
			"names": object{"plural": "gizmos", "singular": "gizmo", "kind": "Gizmo", "listKind": "GizmoList"},
			"versions": []any{object{
				"name": "v1", "served": true, "storage": true, "subresources": object{"status": object{}},
				"schema": object{"openAPIV3Schema": object{"type": "object", "properties": object{"spec": open, "status": open}}},
			}},
		},
	})
	harness.Check(t, err)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		// Discovery lists the resource later than its path is served; controller-runtime uses
		// discovery.
		r, err := api.Do(ctx, http.MethodGet, "/apis/"+gizmoGroup+"/v1", "", nil)
		if err != nil || r.Code != http.StatusOK {
			return false, err
		}
		r, err = api.Do(ctx, http.MethodGet, gizmosPath, "", nil)
		return err == nil && r.Code == http.StatusOK, err
	}))
}
