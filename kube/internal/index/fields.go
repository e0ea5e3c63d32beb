package index

import (
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/client-go/tools/cache"
)

// DeclaredFields returns the fields among the indexes that a registry has declared.
func DeclaredFields(indexers *cache.Indexers) (names []string) {
	if indexers == nil {
		return nil
	}
	for name := range *indexers {
		if field, ok := strings.CutPrefix(name, storage.FieldIndex("")); ok {
			names = append(names, field)
		}
	}
	return names
}

// EagerFields returns the fields whose first use in a list makes an index: those that a custom
// resource declares selectable, and those that name the object of an event, because clients that
// describe an object ask once. Upstream declares no index for either.
func EagerFields(group schema.GroupResource, obj runtime.Object, attrs storage.AttrFunc) map[string]bool {
	_, custom := obj.(runtime.Unstructured)
	if attrs == nil || !custom && group != (schema.GroupResource{Resource: "events"}) {
		return nil
	}
	_, known, err := attrs(obj)
	if err != nil {
		return nil // a selectable field whose path is invalid: no object has attributes
	}
	eager := map[string]bool{}
	for field := range known {
		if custom && !strings.HasPrefix(field, "metadata.") || strings.HasPrefix(field, "involvedObject.") {
			eager[field] = true
		}
	}
	return eager
}
