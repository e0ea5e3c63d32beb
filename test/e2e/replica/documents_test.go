package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

const (
	aggregated = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	openAPIv2  = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"
)

// documentRequests are requests for discovery, OpenAPI documents and the version.
var documentRequests = []struct{ path, accept string }{
	{"/version", ""}, {"/api", ""}, {"/apis", ""}, {"/api", aggregated}, {"/apis", aggregated}, {"/api/v1", ""}, {"/apis/apps", ""}, {"/apis/apps/v1", ""},
	{"/apis/apps/v1", "application/vnd.kubernetes.protobuf"}, {"/openapi/v2", ""}, {"/openapi/v2", openAPIv2}, {"/openapi/v3", ""}, {"/openapi/v3/apis/apps/v1", ""},
	{"/openapi/v3/apis/none/v1", ""}, {"/apis/none", ""}, {"/apis/none/v1", ""}, {"/unknown", ""}, {"/", ""}, {"/openid/v1/jwks", ""},
	{"/.well-known/openid-configuration", ""},
}

// TestReplica_Documents_EqualPrimary: code, entity tag, content type and every byte, of the first
// answer and of one from the cache.
func TestReplica_Documents_EqualPrimary(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	primary, replica := s.primary, s.replica
	for _, d := range documentRequests {
		for range 2 {
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				// discovery still changes after a start, and with definitions
				want, err := primary.API().DoAs(ctx, http.MethodGet, d.path, "", "", d.accept, nil)
				if err != nil {
					return false, err
				}
				got, err := replica.API().DoAs(ctx, http.MethodGet, d.path, "", "", d.accept, nil)
				if err != nil {
					return false, err
				}
				err = equalDocuments(got, want)
				return err == nil, fmt.Errorf("%s %s: %w", d.path, d.accept, err)
			}))
		}
	}
	cached, err := replica.API().Sum(ctx, "strata_replica_documents_total", `result="cached"`)
	harness.Check(t, err)
	if cached == 0 {
		t.Error("no document was answered from the cache")
	}
	t.Run("user without rights", func(t *testing.T) {
		r, err := replica.APIFor(replica.ConfigFor("")).Do(ctx, http.MethodGet, "/apis", "", nil)
		harness.Check(t, err)
		if r.Code != http.StatusForbidden {
			t.Errorf("anonymous /apis: %d, want 403", r.Code)
		}
	})
}

func equalDocuments(got, want *harness.Response) error {
	if got.Code != want.Code {
		return fmt.Errorf("code %d, primary %d", got.Code, want.Code)
	}
	for _, name := range []string{"Content-Type", "Etag", "Vary"} {
		if got.Header.Get(name) != want.Header.Get(name) {
			return fmt.Errorf("%s %q, primary %q", name, got.Header.Get(name), want.Header.Get(name))
		}
	}
	if !bytes.Equal(got.Body, want.Body) {
		return errors.New("another body than the primary's")
	}
	return nil
}

const definition = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"gizmos.example.com"},
"spec":{"group":"example.com","scope":"Namespaced","names":{"plural":"gizmos","singular":"gizmo","kind":"Gizmo"},
"versions":[{"name":"v1","served":true,"storage":true,"subresources":{"status":{}},"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`

// TestReplica_DefinitionCreatedAfterStart_IsServed: a custom resource that is defined while a
// replica runs is discovered and read there, and reads end with the definition.
func TestReplica_DefinitionCreatedAfterStart_IsServed(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	api := s.replica.API()
	const definitions, gizmos = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "/apis/example.com/v1/namespaces/default/gizmos"
	_, err := api.Create(ctx, definitions, definition)
	harness.Check(t, err)
	until := func(what string, condition func(ctx context.Context) (bool, error)) {
		t.Helper()
		if err := harness.Poll(ctx, condition); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	until("create an object", func(ctx context.Context) (bool, error) {
		_, err := api.Create(ctx, gizmos, object{"apiVersion": "example.com/v1", "kind": "Gizmo", "metadata": object{"name": "one"}})
		return err == nil, err
	})
	until("discover the group", func(ctx context.Context) (bool, error) {
		r, err := api.DoAs(ctx, http.MethodGet, "/apis", "", "", aggregated, nil)
		return err == nil && bytes.Contains(r.Body, []byte("gizmos")), err
	})
	until("list from memory", func(ctx context.Context) (bool, error) {
		local := func() (float64, error) { // proxied requests are not counted
			return api.Sum(ctx, "apiserver_request_total", `verb="LIST"`, `resource="gizmos"`)
		}
		before, err := local()
		if err != nil {
			return false, err
		}
		list, err := api.List(ctx, gizmos, "")
		if err != nil {
			return false, err
		}
		after, err := local()
		return err == nil && len(list.Items) == 1 && after > before, fmt.Errorf("%d objects, %v requests answered by the replica: %w", len(list.Items), after-before, err)
	})
	status, err := api.Do(ctx, http.MethodGet, gizmos+"/one/status", "", nil)
	harness.Check(t, err)
	if status.Code != http.StatusOK {
		t.Errorf("status subresource: %v", status.Err())
	}
	harness.Check(t, api.Delete(ctx, definitions+"/gizmos.example.com"))
	until("end with the definition", func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, gizmos, "", nil)
		return err == nil && r.Code == http.StatusNotFound, err
	})
}
