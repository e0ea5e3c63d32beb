package readpath

import (
	"fmt"
	"slices"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource/tableconvertor"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/transcode"
)

// definition returns the definition that serves the resource and version of a route, or nil.
func (r *Resolver) definition(t route) *apiextensionsv1.CustomResourceDefinition {
	if r.config.Definition == nil {
		return nil
	}
	def := r.config.Definition(t.resource + "." + t.group)
	if def == nil || servedVersion(def, t.version) == nil {
		return nil
	}
	return def
}

func servedVersion(def *apiextensionsv1.CustomResourceDefinition, name string) *apiextensionsv1.CustomResourceDefinitionVersion {
	i := slices.IndexFunc(def.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool { return v.Name == name })
	if i < 0 || !def.Spec.Versions[i].Served {
		return nil
	}
	return &def.Spec.Versions[i]
}

// sameForm reports whether upstream keeps the storages when a definition changes from a to b.
func sameForm(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	return a == b || a.UID == b.UID && equality.Semantic.DeepEqual(&a.Spec, &b.Spec) &&
		equality.Semantic.DeepEqual(&a.Status.AcceptedNames, &b.Status.AcceptedNames)
}

// customResource describes a storage of custom resources according to def; nil if the storage is
// for another version.
func customResource(gvr schema.GroupVersionResource, s *kubestorage.Store, def *apiextensionsv1.CustomResourceDefinition) *boundResource {
	v := servedVersion(def, gvr.Version)
	kind := s.Kind().NewFunc().GetObjectKind().GroupVersionKind()
	if v == nil || kind.GroupVersion() != gvr.GroupVersion() {
		return nil
	}
	serializer := newCustomSerializer()
	res := &boundResource{
		GVR:                 gvr,
		Kind:                kind,
		ListKind:            s.Kind().NewListFunc().GetObjectKind().GroupVersionKind().Kind,
		Namespaced:          def.Spec.Scope == apiextensionsv1.NamespaceScoped,
		Custom:              true,
		Store:               s,
		Serializer:          serializer,
		StandardSerializers: serializer.standard(),
	}
	if v.Schema != nil && v.Schema.OpenAPIV3Schema != nil && !def.Spec.PreserveUnknownFields {
		// nil for a schema that is not supported
		res.CustomTranscoder, _ = transcode.NewCustom(kind, v.Schema.OpenAPIV3Schema)
	}
	// Evaluating a column changes its JSONPath, so requests do not share them.
	res.Table = func() rest.TableConvertor { return tableOfColumns(v.AdditionalPrinterColumns) }
	selectable := map[string]bool{}
	for _, f := range v.SelectableFields {
		selectable[strings.TrimPrefix(f.JSONPath, ".")] = true
	}
	res.FieldLabel = func(label, value string) (string, string, error) {
		switch {
		case label == "metadata.name" || label == "metadata.namespace" && res.Namespaced:
		case selectable[label] && selectableFields():
		default:
			return "", "", fmt.Errorf("field label not supported: %s", label)
		}
		return label, value, nil
	}
	if v.Deprecated {
		res.Deprecation = &versionDeprecation{Warning: deprecationWarning(def, v)}
	}
	return res
}

// deprecationWarning returns the warning for clients of a deprecated version: the definition's own
// text, or else a text that names the newest version, in Kubernetes version order, to use instead.
func deprecationWarning(def *apiextensionsv1.CustomResourceDefinition, v *apiextensionsv1.CustomResourceDefinitionVersion) string {
	if v.DeprecationWarning != nil {
		return *v.DeprecationWarning
	}
	text := fmt.Sprintf("%s/%s %s is deprecated", def.Spec.Group, v.Name, def.Spec.Names.Kind)
	newest := v.Name
	for _, other := range def.Spec.Versions {
		if other.Served && !other.Deprecated && version.CompareKubeAwareVersionStrings(newest, other.Name) < 0 {
			newest = other.Name
		}
	}
	if newest != v.Name {
		text += fmt.Sprintf("; use %s/%s %s", def.Spec.Group, newest, def.Spec.Names.Kind)
	}
	return text
}

// tableOfColumns returns the convertor of custom resources whose definition has these columns. If
// one cannot be parsed, tables end before it, as upstream's do.
func tableOfColumns(columns []apiextensionsv1.CustomResourceColumnDefinition) rest.TableConvertor {
	if len(columns) == 0 {
		columns = []apiextensionsv1.CustomResourceColumnDefinition{{
			Name: "Age", Type: "date", Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"], JSONPath: ".metadata.creationTimestamp",
		}}
	}
	convertor, _ := tableconvertor.New(columns)
	return convertor
}
