package clients

import (
	"context"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/test/harness"
)

// The custom resource of this package has a status subresource, which a controller writes.
const (
	gizmoGroup = "test.example.com"
	gizmosPath = "/apis/" + gizmoGroup + "/v1/gizmos"

	mapsPath = "/api/v1/configmaps"
)

var (
	gizmoResource = schema.GroupVersionResource{Group: gizmoGroup, Version: "v1", Resource: "gizmos"}
)

// createGizmos creates the definition and returns when the resource is served.
func createGizmos(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	open := object{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
	harness.Check(t, harness.Define(ctx, gizmoGroup, "gizmos", "Gizmo", object{
		"subresources": object{"status": object{}},
		"schema":       object{"openAPIV3Schema": object{"type": "object", "properties": object{"spec": open, "status": open}}},
	}, api))
}
