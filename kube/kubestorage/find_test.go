package kubestorage

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/transcode"
	"github.com/stratakube/strata/mirror"
)

// podFinder finds labels and the node in pods that are stored as JSON, and counts the values.
func podFinder(found *atomic.Int64) func(obj runtime.Object, label bool, name string) func([]byte) ([]byte, bool, bool) {
	stored := examplev1.SchemeGroupVersion.WithKind("Pod")
	return func(_ runtime.Object, label bool, name string) func([]byte) ([]byte, bool, bool) {
		var find transcode.Find
		switch {
		case label:
			find = transcode.FindJSONLabel(stored, name)
		case name == "involvedObject.name": // see involvedAttrs
			find = transcode.FindJSONField(stored, "spec.nodeName")
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
	return func(o *options) { o.engine.Finder = podFinder(found) }
}

// foundTwin is eventTwin with values that are found in stored bytes.
func foundTwin(t *testing.T, n int, found *atomic.Int64) *twin {
	t.Helper()
	w := newTwinOf(t, mirror.Window{}, func(cfg *storeConfig) {
		cfg.GroupResource, cfg.GetAttrs = schema.GroupResource{Group: t.Name(), Resource: "events"}, involvedAttrs
	}, podFinder(found))
	for i := range n {
		pod := newPod(fmt.Sprintf("event-%04d", i))
		pod.Spec.NodeName, pod.Labels = fmt.Sprint("object-", i%100), map[string]string{"n": fmt.Sprint(i % 50)}
		w.put(t, pod)
	}
	w.catchUp(t)
	return w
}

// TestFinder_UndecodableObjects_FailListsThatMaySelectThem: an object whose bytes are intact where
// the finder reads is not decoded by a list that excludes its value, and is not among the objects
// that the list reports. One whose bytes are malformed, or hidden by a missing key, fails every
// list.
func TestFinder_UndecodableObjects_FailListsThatMaySelectThem(t *testing.T) {
	for _, unsafe := range []bool{false, true} {
		var found atomic.Int64
		w := foundTwin(t, 200, &found)
		w.lists.Gates.UnsafeDelete = unsafe
		// reports are the objects that a list reports: the first one, or all with
		// AllowUnsafeMalformedObjectDeletion.
		reports := func(selector string) (n int) {
			t.Helper()
			pred := storage.SelectionPredicate{Label: parseLabels(t, selector), Field: fields.Everything(), GetAttrs: involvedAttrs}
			err := w.GetList(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred}, &example.PodList{})
			var status *apierrors.StatusError
			switch {
			case errors.As(err, &status) && unsafe:
				return len(status.ErrStatus.Details.Causes)
			case err != nil:
				return 1
			}
			return 0
		}
		put := func(name, spec, end string) {
			w.etcd.Put(etcdKey(newPod(name)), fmt.Sprintf(`{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","metadata":{"name":%q,"labels":{"n":"1"}},"spec":{"nodeName":%s}%s`, name, spec, end))
			w.catchUp(t)
		}
		put("event-0000-x", "5", "}") // a string in upstream's type
		for round := range 3 {        // by stored values, and by the index
			for selector, want := range map[string]int{"n=7": 0, "n=1": 1, "n!=7": 1, "n in (7,8)": 0, "": 1} {
				if got := reports(selector); got != want {
					t.Errorf("round %d: a list of %q reports %d objects, want %d", round, selector, got, want)
				}
			}
		}
		put("event-0000-y", "5", "")
		for selector, want := range map[string]int{"n=7": 1, "n=1": 2, "n!=7": 2, "": 2} {
			if !unsafe {
				want = 1
			}
			if got := reports(selector); got != want {
				t.Errorf("with malformed bytes, a list of %q reports %d objects, want %d", selector, got, want)
			}
		}
	}
}
