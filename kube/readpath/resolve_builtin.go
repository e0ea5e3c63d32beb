package readpath

import (
	"context"
	"net/http"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/deprecation"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/component-base/version"

	"github.com/stratakube/strata/kube/kubestorage"
)

// builtIn reports whether the route may be that of a cached built-in resource: its version is
// registered, and the engine has a storage for a resource of that name.
func (r *Resolver) builtIn(t route) bool {
	for _, k := range r.config.BuiltIn {
		if k.Scheme.IsVersionRegistered(schema.GroupVersion{Group: t.group, Version: t.version}) {
			return r.config.Engine.HoldsBuiltIn(t.resource)
		}
	}
	return false
}

// builtInResource describes a storage of built-in objects as upstream's installer does for its
// routes; nil if the kind of the storage does not belong to the group.
func (r *Resolver) builtInResource(t route, s *kubestorage.Store, next http.Handler) *boundResource {
	gv := schema.GroupVersion{Group: t.group, Version: t.version}
	for _, k := range r.config.BuiltIn {
		kind, ok := kindOf(k.Scheme, s.Kind().NewFunc(), gv)
		listKind, hasList := kindOf(k.Scheme, s.Kind().NewListFunc(), gv)
		if !ok || !hasList {
			continue
		}
		gvk := gv.WithKind(kind)
		res := &boundResource{
			GVR:        t.gvr(),
			Kind:       gvk,
			ListKind:   listKind,
			Store:      s,
			Serializer: k.Serializer,
			FieldLabel: func(label, value string) (string, string, error) {
				return k.Scheme.ConvertFieldLabel(gvk, label, value)
			},
			Decorate: s.Kind().Decorate,
		}
		if s.Kind().Stored == gvk {
			res.Transcoder = s.Kind().Transcoder
		}
		if tables := r.config.Tables; tables != nil {
			if _, err := tables.ConvertToTable(context.Background(), s.Kind().NewListFunc(), rowsOnly); err == nil {
				res.Table = func() rest.TableConvertor { return tables }
			}
		}
		// Only a namespaced resource can be listed in a namespace.
		list := t
		list.verb, list.namespaced = "list", true
		found := probe(list, next)
		if res.Namespaced = found.Store == s; !res.Namespaced {
			list.namespaced = false
			found = probe(list, next)
		}
		if found.Store == s {
			res.IndexFields, res.IndexLabels = found.IndexFields, found.IndexLabels
		}
		if obj, err := k.Scheme.New(gvk); err == nil {
			res.deprecate(obj)
		}
		return res
	}
	return nil
}

// kindOf returns the kind of obj in the group version gv.
func kindOf(scheme *runtime.Scheme, obj runtime.Object, gv schema.GroupVersion) (string, bool) {
	kinds, _, err := scheme.ObjectKinds(obj)
	if err != nil {
		return "", false
	}
	for _, k := range kinds {
		if k.Group == gv.Group && scheme.Recognizes(gv.WithKind(k.Kind)) {
			return k.Kind, true
		}
	}
	return "", false
}

// deprecate sets the warnings and metric labels if the version of obj is deprecated in the release
// that this server reports.
func (r *boundResource) deprecate(obj runtime.Object) {
	obj.GetObjectKind().SetGroupVersionKind(r.Kind)
	// Unknown version numbers are zero; then every deprecated version counts as deprecated now.
	major, minor, _ := deprecation.MajorMinor(version.Get())
	if deprecation.IsDeprecated(obj, major, minor) {
		r.Deprecation = &versionDeprecation{deprecation.WarningMessage(obj), deprecation.RemovedRelease(obj)}
	}
}
