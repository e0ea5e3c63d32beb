package index

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// TestEagerFields_ByResource_AreDeclaredOnes: they are the selectable fields of custom resources
// and the involved object of events.
func TestEagerFields_ByResource_AreDeclaredOnes(t *testing.T) {
	attrs := func(f fields.Set, err error) storage.AttrFunc {
		return func(runtime.Object) (labels.Set, fields.Set, error) { return nil, f, err }
	}
	known := fields.Set{"metadata.name": "", "metadata.namespace": "", "spec.color": "", "involvedObject.uid": "", "reason": ""}
	custom := func() runtime.Object { return &unstructured.Unstructured{} }
	pod := func() runtime.Object { return &example.Pod{} }
	events := schema.GroupResource{Resource: "events"}
	for name, c := range map[string]struct {
		group   schema.GroupResource
		newFunc func() runtime.Object
		attrs   storage.AttrFunc
		want    []string
	}{
		"custom resource":                {schema.GroupResource{Group: "g", Resource: "r"}, custom, attrs(known, nil), []string{"involvedObject.uid", "reason", "spec.color"}},
		"custom resource, invalid path":  {schema.GroupResource{}, custom, attrs(nil, errors.New("invalid path")), nil},
		"events":                         {events, pod, attrs(known, nil), []string{"involvedObject.uid"}},
		"another resource":               {schema.GroupResource{Resource: "pods"}, pod, attrs(known, nil), nil},
		"events without known selectors": {events, pod, nil, nil},
	} {
		if got := slices.Sorted(maps.Keys(EagerFields(c.group, c.newFunc(), c.attrs))); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
