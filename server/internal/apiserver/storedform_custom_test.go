package apiserver

import (
	"errors"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/objectmeta"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/stratakube/strata/kube/transcode"
)

// customForm reads stored custom resources as upstream does: the steps of the decoder of their
// storages, which is not exported
// (k8s.io/apiextensions-apiserver/pkg/apiserver/customresource_handler.go), and then GetAttrs of
// their registry.
type customForm struct {
	gvk      schema.GroupVersionKind
	schema   *structuralschema.Structural
	fields   []string
	getAttrs func(u *unstructured.Unstructured) (labels.Set, fields.Set, error)
	labels   map[string]transcode.Find
	found    map[string]transcode.Find // fields
}

func newCustomForm(t testing.TB) *customForm {
	t.Helper()
	text := structuralschema.Structural{Generic: structuralschema.Generic{Type: "string"}}
	small := structuralschema.Structural{Generic: structuralschema.Generic{Type: "string", Default: structuralschema.JSON{Object: "small"}}}
	embedded := structuralschema.Structural{Generic: structuralschema.Generic{Type: "object"},
		Extensions: structuralschema.Extensions{XEmbeddedResource: true, XPreserveUnknownFields: true},
		Properties: map[string]structuralschema.Structural{"color": text}}
	c := &customForm{
		gvk:    schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Thing"},
		fields: []string{"spec.color", "spec.size", "template.color", "template.kind", "template.metadata.creationTimestamp"},
		schema: &structuralschema.Structural{Generic: structuralschema.Generic{Type: "object"}, Properties: map[string]structuralschema.Structural{
			"spec": {Generic: structuralschema.Generic{Type: "object"}, Properties: map[string]structuralschema.Structural{"color": text, "size": small}}, "template": embedded,
		}},
	}
	var selectable []apiextensionsv1.SelectableField
	for _, f := range c.fields {
		selectable = append(selectable, apiextensionsv1.SelectableField{JSONPath: "." + f})
	}
	strategy := customresource.NewStrategy(nil, true, c.gvk, nil, nil, c.schema, nil, nil, selectable)
	c.getAttrs = func(u *unstructured.Unstructured) (labels.Set, fields.Set, error) { return strategy.GetAttrs(u) }
	table, err := kinds(nil)
	if err != nil {
		t.Fatal(err)
	}
	obj := &unstructured.Unstructured{}
	obj.SetGroupVersionKind(c.gvk)
	find := table(schema.GroupResource{}, obj).Find
	c.labels, c.found = map[string]transcode.Find{}, map[string]transcode.Find{}
	for _, key := range []string{"a", "c", ""} {
		c.labels[key] = find(true, key)
	}
	for _, name := range c.fields {
		c.found[name] = find(false, name)
	}
	return c
}

// read decodes a stored object; an error is one that a list reports.
func (c *customForm) read(data []byte) (*unstructured.Unstructured, error) {
	u := &unstructured.Unstructured{}
	if _, _, err := unstructured.UnstructuredJSONScheme.Decode(data, nil, u); err != nil {
		return nil, err
	}
	kind, _, err := unstructured.NestedString(u.Object, "kind")
	if err != nil {
		return nil, err
	}
	apiVersion, _, err := unstructured.NestedString(u.Object, "apiVersion")
	if err != nil {
		return nil, err
	}
	meta, hasMeta, err := objectmeta.GetObjectMeta(u.Object, true)
	if err != nil {
		return nil, err
	}
	gv, err := schema.ParseGroupVersion(apiVersion)
	if err != nil {
		return nil, err
	}
	if gv.WithKind(kind) == c.gvk {
		pruning.Prune(u.Object, c.schema, true)
		defaulting.PruneNonNullableNullsWithoutDefaults(u.Object, c.schema)
		if err := objectmeta.Coerce(nil, u.Object, c.schema, false, true); err != nil {
			return nil, err
		}
	}
	u.SetAPIVersion(apiVersion)
	u.SetKind(kind)
	if hasMeta {
		if err := objectmeta.SetObjectMeta(u.Object, meta); err != nil {
			return nil, err
		}
	}
	defaulting.Default(u.Object, c.schema)
	return u, nil
}

// compare fails if a value that is found is not the one that upstream's selectors evaluate, or if
// upstream cannot decode the object, unless for the metadata of an embedded object, of which only
// the schema knows. It returns the number of values.
func (c *customForm) compare(t *testing.T, data []byte) (n int) {
	t.Helper()
	var ofLabels labels.Set
	var ofFields fields.Set
	u, decodeErr := c.read(data)
	if decodeErr == nil {
		if ofLabels, ofFields, decodeErr = c.getAttrs(u); decodeErr != nil {
			u = nil
		}
	}
	if embedded := new(field.Error); errors.As(decodeErr, &embedded) {
		return 0
	}
	check := func(find transcode.Find, name, want string, has bool) {
		if find == nil {
			return
		}
		value, present, ok := find(data)
		switch {
		case !ok:
		case u == nil:
			t.Fatalf("%s: found %q, but decoding fails: %v, in %q", name, value, decodeErr, data)
		case u.GroupVersionKind() != c.gvk:
			t.Fatalf("%s: found %q in the kind %s, in %q", name, value, u.GroupVersionKind(), data)
		case present != has || string(value) != want:
			t.Fatalf("%s: found %q, %t, want %q, %t, in %q", name, value, present, want, has, data)
		default:
			n++
		}
	}
	for key, find := range c.labels {
		want, has := ofLabels[key]
		check(find, key, want, has)
	}
	for name, find := range c.found {
		check(find, name, ofFields[name], true)
	}
	return n
}

// storedThings are custom resources: seeds of FuzzFinders_CustomResource. The first ones have all
// values that can be found.
var storedThings = []string{
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"name":"x","labels":{"a":"b","c":"d"}},"spec":{"color":"red","size":"big"},"template":{"color":"blue","kind":"Pod"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"name":5,"labels":{"a":"b"}},"spec":{"color":"red","size":"big","other":[{}]},"template":{"color":"blue","kind":"Pod"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"creationTimestamp":"never"},"spec":{"color":"","size":""},"template":{"color":"blue","kind":"Pod"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":null,"spec":{"color":"red"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":"none","spec":{"color":"red"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":[{}],"spec":{"color":"red"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{"a":"b"}},"metadata":7,"spec":{"color":"red"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{"a":"b"}},"spec":{"size":null}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{"a":"b"}},"spec":{"color":"red"},"status":1e999}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":"none"},"spec":"none","template":"none"}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red"},"template":{"metadata":{"name":"x","creationTimestamp":"2020-01-01T00:00:00+01:00"}}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red"},"template":{"kind":"Pod","metadata":{"name":"x","labels":7,"creationTimestamp":"never"}}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red"},"template":{"metadata":"none"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","items":[],"spec":{"color":"red"}}`,
	`{"apiVersion":"example.com/v2","kind":"Thing","spec":{"color":"red"}}`, `{"apiVersion":"a/b/c","kind":"Thing"}`, `{}`, ``,
}

// TestFinder_CustomResources_EqualsDecoder: the first three objects have all values.
func TestFinder_CustomResources_EqualsDecoder(t *testing.T) {
	c := newCustomForm(t)
	for i, text := range storedThings {
		want := strings.Count(text, `"labels":{`)*2 + strings.Count(text, `"color":"`) + strings.Count(text, `"size":"`) + 1
		if i == 2 {
			want += 2 // no object without labels has one
		}
		if n := c.compare(t, []byte(text)); i < 3 && n != want {
			t.Errorf("%d of %d values were found in %s", n, want, text)
		}
	}
}

// FuzzFinders_CustomResource compares the values that are found in any bytes with the attributes of
// upstream's decoder.
func FuzzFinders_CustomResource(f *testing.F) {
	c := newCustomForm(f)
	for _, text := range storedThings {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) { c.compare(t, data) })
}
