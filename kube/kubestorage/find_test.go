package kubestorage

import (
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"

	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/kube/transcode"
)

// podFinder finds labels and the node in pods that are stored as JSON, and counts the values.
func podFinder(found *atomic.Int64) func(label bool, name string) transcode.Find {
	stored := examplev1.SchemeGroupVersion.WithKind("Pod")
	return func(label bool, name string) transcode.Find {
		var find transcode.Find
		switch {
		case label:
			find = transcode.FindJSONLabel(stored, name)
		case name == "spec.nodeName":
			find = transcode.FindJSONField(stored, name)
		}
		if find == nil {
			return nil
		}
		return func(stored []byte) ([]byte, bool, bool) {
			value, present, ok := find(stored)
			if ok {
				found.Add(1)
			}
			return value, present, ok
		}
	}
}

func withFinder(found *atomic.Int64) func(*options) {
	return func(o *options) { o.engine.Kinds = formOf(kind.Form{Find: podFinder(found)}) }
}

// formOf is the table of one form.
func formOf(f kind.Form) kind.Table {
	return func(schema.GroupResource, runtime.Object) kind.Form { return f }
}
