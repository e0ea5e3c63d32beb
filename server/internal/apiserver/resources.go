package apiserver

import (
	"errors"
	"net/http"
	"slices"
	"strings"

	restful "github.com/emicklei/go-restful/v3"
	apiextensionshelpers "k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"
)

// Resources are the resources that the server chain of a process stores itself. Its methods may be
// called concurrently once the chain is built.
type Resources struct {
	follow *followedInformers
	// the subresources that can be read; "" is the object itself
	builtIn map[schema.GroupVersionResource][]string
}

// Stored reports whether a GET, LIST or WATCH described by info reads an object that this chain
// stores: a built-in resource that its flags enable, or a custom resource whose definition is
// established here. It returns false for versions that an APIService assigns to another server, and
// for all versions until the APIServices are known. Cost is some map lookups.
func (r *Resources) Stored(info *request.RequestInfo) bool {
	resource := schema.GroupVersionResource{Group: info.APIGroup, Version: info.APIVersion, Resource: info.Resource}
	if remote := r.follow.remote; !remote.known() || !remote.local(resource.GroupVersion()) {
		return false
	}
	if subresources, ok := r.builtIn[resource]; ok {
		return slices.Contains(subresources, info.Subresource)
	}
	definition := r.follow.definition(resource.Resource + "." + resource.Group)
	return definition != nil && customStored(definition, resource.Version, info.Subresource)
}

// customStored reports whether the definition serves the version with the subresource.
func customStored(definition *apiextensionsv1.CustomResourceDefinition, version, subresource string) bool {
	if !apiextensionshelpers.IsCRDConditionTrue(definition, apiextensionsv1.Established) {
		return false
	}
	for _, v := range definition.Spec.Versions {
		if v.Name != version || !v.Served {
			continue
		}
		switch subresource {
		case "":
			return true
		case "status":
			return v.Subresources != nil && v.Subresources.Status != nil
		case "scale":
			return v.Subresources != nil && v.Subresources.Scale != nil
		}
	}
	return false
}

// OnDefinitions calls changed after each change of a definition of a custom resource or of an
// APIService that the chain has seen. It must be called before the chain is built; changed must not
// block.
func (r *Resources) OnDefinitions(changed func()) { r.follow.onChange(changed) }

// fill reads the built-in resources from the routes of the chain's servers.
func (r *Resources) fill(chain *aggregatorapiserver.APIAggregator) error {
	r.builtIn = map[schema.GroupVersionResource][]string{}
	for server := chain.GenericAPIServer; server != nil; {
		for _, service := range server.Handler.GoRestfulContainer.RegisteredWebServices() {
			r.addRoutes(service)
		}
		server, _ = server.NextDelegate().(*genericapiserver.GenericAPIServer)
	}
	if len(r.builtIn) == 0 {
		return errors.New("the server chain has no routes of built-in resources")
	}
	return nil
}

// addRoutes adds the resources of a group version, whose routes have the form
// ROOT[/namespaces/{namespace}]/RESOURCE[/{name}[/SUBRESOURCE]].
func (r *Resources) addRoutes(service *restful.WebService) {
	gv, ok := groupVersionOf(service.RootPath())
	if !ok {
		return
	}
	for _, route := range service.Routes() {
		parts := strings.Split(strings.Trim(strings.TrimPrefix(route.Path, service.RootPath()), "/"), "/")
		if route.Method != http.MethodGet || parts[0] == "" || parts[0] == "watch" {
			continue
		}
		if len(parts) > 2 && parts[0] == "namespaces" && parts[1] == "{namespace}" {
			parts = parts[2:]
		}
		resource, subresource := gv.WithResource(parts[0]), ""
		if len(parts) == 3 {
			subresource = parts[2]
		} else if len(parts) > 3 {
			continue // a path within a subresource
		}
		if !slices.Contains(r.builtIn[resource], subresource) {
			r.builtIn[resource] = append(r.builtIn[resource], subresource)
		}
	}
}

// groupVersionOf returns the group version of the root of its routes: /api/VERSION or
// /apis/GROUP/VERSION.
func groupVersionOf(root string) (schema.GroupVersion, bool) {
	switch parts := strings.Split(strings.Trim(root, "/"), "/"); {
	case len(parts) == 2 && parts[0] == "api":
		return schema.GroupVersion{Version: parts[1]}, true
	case len(parts) == 3 && parts[0] == "apis":
		return schema.GroupVersion{Group: parts[1], Version: parts[2]}, true
	}
	return schema.GroupVersion{}, false
}
