package harness

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"strings"
)

// Define creates the definition of a namespaced custom resource, if it does not exist, and returns
// when all servers serve it; discovery lists a resource later than its path is served. The resource
// has one version, v1, with objects of any fields. Fields of version replace those of its entry in
// the definition; nil changes none.
func Define(ctx context.Context, group, plural, kind string, version map[string]any, servers ...*API) error {
	entry := map[string]any{"name": "v1", "served": true, "storage": true, "schema": map[string]any{
		"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}
	maps.Copy(entry, version)
	if err := servers[0].Ensure(ctx, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", map[string]any{
		"metadata": map[string]any{"name": plural + "." + group},
		"spec": map[string]any{
			"group": group, "scope": "Namespaced", "versions": []any{entry},
			"names": map[string]any{"plural": plural, "singular": strings.ToLower(kind), "kind": kind, "listKind": kind + "List"},
		},
	}); err != nil {
		return err
	}
	prefix := "/apis/" + group + "/v1"
	for _, server := range servers {
		for _, path := range []string{prefix, prefix + "/" + plural} {
			if err := Poll(ctx, func(ctx context.Context) (bool, error) {
				r, err := server.Do(ctx, http.MethodGet, path, "", nil)
				if err == nil && r.Code != http.StatusOK {
					err = r.Err()
				}
				return err == nil, err
			}); err != nil {
				return fmt.Errorf("%s is not served: %w", path, err)
			}
		}
	}
	return nil
}
