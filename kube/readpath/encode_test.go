package readpath

import (
	"bytes"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/representation"
)

// TestEncoding_InvalidData_IsNotQuotedInError: errors do not quote invalid data, which may be a
// Secret, because errors reach clients and logs.
func TestEncoding_InvalidData_IsNotQuotedInError(t *testing.T) {
	t.Parallel()
	const text = "correct horse battery staple"
	for _, data := range []string{text, "k8s\x00" + text, "k8s\x00\x12\x7f" + text} {
		if _, _, _, err := representation.OpenUnknown([]byte(data)); err == nil || strings.Contains(err.Error(), "horse") {
			t.Errorf("%q: %v", data, err)
		}
	}
	w := watchedPodsWith(t)
	f := format{media: mediaJSON}
	enc, err := newEncoding(w.resource, f)
	testcheck.NoError(t, err)
	enc.head = []byte(`{"kind":"Other",`)
	obj := w.resource.Store.Kind().NewFunc()
	if _, err := enc.appendItem(nil, obj); err == nil || strings.Contains(err.Error(), "metadata") {
		t.Errorf("an object without its head: %v", err)
	}
}

// TestEncoding_CustomResourceWithSchema_IsTranscoded: the items that are made of stored JSON, with
// and without managed fields, are those of the encoder.
func TestEncoding_CustomResourceWithSchema_IsTranscoded(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	d := r.define("1", 0, "v1", "v2", "v3")
	for i := range d.Spec.Versions[:2] {
		d.Spec.Versions[i].Schema = &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
			Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{"spec": {Type: "object", XPreserveUnknownFields: new(true)}},
		}}
	}
	res := r.want(widgetsPath, r.widgets("v1"), 1)
	if res.CustomTranscoder == nil {
		t.Fatal("not transcoded")
	}
	stored := []byte(`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"creationTimestamp":"2026-01-02T03:04:05Z","generation":1,` +
		`"managedFields":[{"manager":"a","operation":"Apply"}],"name":"a","uid":"u"},"spec":{"a":1}}` + "\n")
	for _, cut := range []bool{false, true} {
		enc, err := res.encodings.get(res, format{media: mediaJSON, noManagedFields: cut})
		testcheck.NoError(t, err)
		obj := &unstructured.Unstructured{}
		testcheck.NoError(t, runtime.DecodeInto(unstructured.UnstructuredJSONScheme, stored, obj))
		obj.SetResourceVersion("5")
		want, err := enc.appendItem([]byte("x"), obj)
		testcheck.NoError(t, err)
		transcode := representation.Splicer(res.CustomTranscoder.AppendItem)
		if cut {
			transcode = representation.Cutting(transcode, representation.CutJSONItem)
		}
		if got, ok := transcode([]byte("x"), stored, 5); !ok || !bytes.Equal(got, want) {
			t.Errorf("transcoded %v\n%s, want\n%s", ok, got, want)
		}
		if got, ok := transcode([]byte("x"), []byte("{}"), 5); ok || string(got) != "x" {
			t.Errorf("an object without metadata is transcoded to %s", got)
		}
	}
	d.Spec.PreserveUnknownFields = true
	for _, version := range []string{"v2", "v3"} {
		if res := r.want("/apis/example.com/"+version+"/widgets", r.widgets(version), 1); res.CustomTranscoder != nil {
			t.Errorf("%s, which is not pruned or has no schema, is transcoded", version)
		}
	}
}
