package samebytes

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/test/harness"
)

// resource is a version of a resource that can be listed.
type resource struct {
	gvr        schema.GroupVersionResource
	kind       string
	namespaced bool
	custom     bool
	watchable  bool
}

// String is the name of subtests, for example pods.v1 or deployments.v1.apps.
func (r resource) String() string {
	return strings.Trim(strings.Join([]string{r.gvr.Resource, r.gvr.Version, r.gvr.Group}, "."), ".")
}

// root is the path of the version.
func (r resource) root() string {
	if r.gvr.Group == "" {
		return "/api/" + r.gvr.Version
	}
	return "/apis/" + r.gvr.Group + "/" + r.gvr.Version
}

// path is the path of all objects.
func (r resource) path() string { return r.root() + "/" + r.gvr.Resource }

// in is the path of the objects of a namespace; of all objects if namespace is empty.
func (r resource) in(namespace string) string {
	if namespace == "" {
		return r.path()
	}
	return r.root() + "/namespaces/" + namespace + "/" + r.gvr.Resource
}

// stored reports whether objects are stored in etcd.
func (r resource) stored() bool { return r.gvr.Resource != "componentstatuses" }

// unserved are the groups of APIServices without a running backend.
var unserved = []string{"foo.com", "remote.example.com", "old.example.com"}

// discover returns all listable resources, in all versions.
func discover(ctx context.Context, api *harness.API) ([]resource, error) {
	var groups struct {
		Groups []struct {
			Versions []struct{ GroupVersion string }
		}
	}
	if err := read(ctx, api, "/apis", &groups); err != nil {
		return nil, err
	}
	versions := []string{"v1"}
	for _, g := range groups.Groups {
		for _, v := range g.Versions {
			versions = append(versions, v.GroupVersion)
		}
	}
	var found []resource
	for _, version := range versions {
		gv, err := schema.ParseGroupVersion(version)
		if err != nil {
			return nil, err
		}
		if slices.Contains(unserved, gv.Group) {
			continue
		}
		var list struct {
			Resources []struct {
				Name       string
				Kind       string
				Namespaced bool
				Verbs      []string
			}
		}
		root := (resource{gvr: gv.WithResource("")}).root()
		if err := read(ctx, api, root, &list); err != nil {
			return nil, err
		}
		for _, r := range list.Resources {
			if slices.Contains(r.Verbs, "list") && !strings.Contains(r.Name, "/") {
				found = append(found, resource{
					gvr: gv.WithResource(r.Name), kind: r.Kind, namespaced: r.Namespaced,
					custom: gv.Group == customGroup, watchable: slices.Contains(r.Verbs, "watch"),
				})
			}
		}
	}
	return found, nil
}

// read gets JSON, and retries until the server is ready.
func read(ctx context.Context, api *harness.API, path string, into any) error {
	return harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, path, "", nil)
		if err != nil {
			return false, err
		}
		if r.Code != http.StatusOK {
			return false, r.Err()
		}
		return true, json.Unmarshal(r.Body, into)
	})
}
