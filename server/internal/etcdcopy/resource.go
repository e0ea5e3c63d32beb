package etcdcopy

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/kubeapiserver"

	_ "k8s.io/kubernetes/pkg/controlplane" // installs the built-in groups
)

// resource is a resource with the places of its keys, relative to the prefix of all keys.
type resource struct {
	name  schema.GroupResource
	paths []string // with a slash at the end of each
}

// override returns the resource in the form of --etcd-servers-overrides.
func (r resource) override() string { return r.name.Group + "/" + r.name.Resource }

// parseResource returns the resource called text, with the places that kube-apiserver chooses:
// group/resource, as in --etcd-servers-overrides, or resource.group, as in kubectl. A built-in
// resource needs no group.
func parseResource(text string) (resource, error) {
	group, plural, ok := strings.Cut(text, "/")
	name := schema.GroupResource{Group: group, Resource: plural}
	if !ok {
		name = schema.ParseGroupResource(text)
	}
	if name.Resource == "" || strings.ContainsAny(name.Resource, "*/") {
		return resource{}, fmt.Errorf("%q is not the name of one resource, such as events, leases.coordination.k8s.io or example.com/widgets", text)
	}
	groups := builtIn(name.Resource)
	if !ok && name.Group == "" && len(groups) > 0 && !slices.Contains(groups, "") {
		name.Group = groups[0]
	}
	if name == (schema.GroupResource{Group: "events.k8s.io", Resource: "events"}) {
		name.Group = "" // one resource with two names
	}
	path, special := kubeapiserver.SpecialDefaultResourcePrefixes[name]
	switch {
	case special:
	case slices.Contains(groups, name.Group):
		path = name.Resource
	case strings.Contains(name.Group, "."): // a custom resource, a definition or an APIService
		path = name.Group + "/" + name.Resource
	default:
		return resource{}, fmt.Errorf("%q is not a built-in resource; a custom resource needs its group, such as %s.example.com", name, name.Resource)
	}
	r := resource{name, []string{path + "/"}}
	if name == (schema.GroupResource{Resource: "services"}) {
		// the allocated addresses and ports are stored with the services
		r.paths = append(r.paths, "ranges/")
	}
	return r, nil
}

// builtIn returns the groups of kube-apiserver that have a resource.
func builtIn(plural string) (groups []string) {
	for _, gv := range legacyscheme.Scheme.PrioritizedVersionsAllGroups() {
		for kind := range legacyscheme.Scheme.KnownTypes(gv) {
			if name, _ := meta.UnsafeGuessKindToResource(gv.WithKind(kind)); name.Resource == plural {
				groups = append(groups, gv.Group)
			}
		}
	}
	return groups
}
