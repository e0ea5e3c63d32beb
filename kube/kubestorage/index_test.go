package kubestorage

import (
	"testing"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// onNode selects the pods of a node; with the index that registries declare for it
// if indexed.
func onNode(node string, indexed bool) storage.SelectionPredicate {
	pred := storage.Everything
	pred.Field = fields.OneTermEqualSelector("spec.nodeName", node)
	pred.GetAttrs = podAttrs
	if indexed {
		pred.IndexFields = []string{"spec.nodeName"}
	}
	return pred
}

// labelled selects the pods with one value of a label.
func labelled(key, value string) storage.SelectionPredicate {
	pred := storage.Everything
	pred.Label = labels.SelectorFromSet(labels.Set{key: value})
	pred.GetAttrs = podAttrs
	return pred
}

// indexTwin returns a storage of a resource of its own, so that its metrics are not those of other
// tests.
func indexTwin(t *testing.T, resource string) *twin {
	return newTwinWith(t, mirror.Window{}, func(cfg *storeConfig) {
		cfg.GroupResource = schema.GroupResource{Group: "bounds", Resource: resource}
	})
}

// listLabelled lists the pods with the value, and returns their number.
func (w *twin) listLabelled(t *testing.T, key, value string) int {
	t.Helper()
	out := &example.PodList{}
	if err := w.GetList(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: labelled(key, value)}, out); err != nil {
		t.Fatal(err)
	}
	return len(out.Items)
}
