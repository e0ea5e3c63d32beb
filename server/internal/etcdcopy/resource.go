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

// parseResource returns the resource called text: group/resource, as in --etcd-servers-overrides,
// or resource.group, as in kubectl. A built-in resource that is unique needs no group.
func parseResource(text string) (resource, error) {
	var name schema.GroupResource
	if group, plural, ok := strings.Cut(text, "/"); ok {
		name = schema.GroupResource{Group: group, Resource: plural}
	} else {
		name = schema.ParseGroupResource(text)
	}
	if name.Resource == "" || name.Resource == "*" || strings.Contains(name.Resource, "/") || strings.Contains(name.Group, "/") {
		return resource{}, fmt.Errorf("%q is not the name of one resource, such as events, leases.coordination.k8s.io or example.com/widgets", text)
	}
	builtIn := builtInResources()
	if name.Group == "" && !strings.Contains(text, "/") {
		switch groups := builtIn[name.Resource]; {
		case slices.Contains(groups, ""):
		case len(groups) == 1:
			name.Group = groups[0]
		case len(groups) > 1:
			return resource{}, fmt.Errorf("%q is in the groups %s; name one, such as %s.%s", text, strings.Join(groups, ", "), name.Resource, groups[0])
		}
	}
	if name == (schema.GroupResource{Group: "events.k8s.io", Resource: "events"}) {
		name.Group = "" // one resource with two names
	}
	return place(name, builtIn)
}

// place returns the places of the keys of a resource, as kube-apiserver chooses them.
func place(name schema.GroupResource, builtIn map[string][]string) (resource, error) {
	switch {
	case slices.Contains(builtIn[name.Resource], name.Group):
		path := strings.ToLower(name.Resource)
		if special, ok := kubeapiserver.SpecialDefaultResourcePrefixes[name]; ok {
			path = special
		}
		r := resource{name, []string{path + "/"}}
		if name == (schema.GroupResource{Resource: "services"}) {
			// the allocated addresses and ports are stored with the services
			r.paths = append(r.paths, "ranges/")
		}
		return r, nil
	case strings.Contains(name.Group, "."): // a custom resource, a definition or an APIService
		return resource{name, []string{name.Group + "/" + name.Resource + "/"}}, nil
	}
	return resource{}, fmt.Errorf("%q is not a built-in resource; a custom resource needs its group, such as %s.example.com", name, name.Resource)
}

// builtInResources returns the groups of the resources of kube-apiserver by plural.
func builtInResources() map[string][]string {
	all := map[string][]string{}
	for _, gv := range legacyscheme.Scheme.PrioritizedVersionsAllGroups() {
		for kind := range legacyscheme.Scheme.KnownTypes(gv) {
			plural, _ := meta.UnsafeGuessKindToResource(gv.WithKind(kind))
			if groups := all[plural.Resource]; !slices.Contains(groups, gv.Group) {
				all[plural.Resource] = append(groups, gv.Group)
			}
		}
	}
	return all
}
