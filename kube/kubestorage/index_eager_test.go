package kubestorage

import (
	"errors"
	"fmt"
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

	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/mirror"
)

// involvedAttrs are the attributes of pods that stand for events: their node is the name of the
// involved object.
func involvedAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	l, f, err := podAttrs(obj)
	if err != nil {
		return nil, nil, err
	}
	f = maps.Clone(f)
	f["involvedObject.name"], f["involvedObject.kind"] = obj.(*example.Pod).Spec.NodeName, "Pod"
	return l, f, nil
}

// involved selects by field selector.
func involved(t *testing.T, selector string) storage.SelectionPredicate {
	t.Helper()
	pred := storage.Everything
	pred.GetAttrs = involvedAttrs
	var err error
	if pred.Field, err = fields.ParseSelector(selector); err != nil {
		t.Fatal(err)
	}
	return pred
}

// eventTwin returns a storage of n events, of which every hundredth is of one object.
func eventTwin(t *testing.T, n int) *twin {
	t.Helper()
	w := newTwinWith(t, mirror.Window{}, func(cfg *storeConfig) {
		cfg.GroupResource, cfg.GetAttrs = schema.GroupResource{Resource: "events"}, involvedAttrs
	})
	for i := range n {
		pod := newPod(fmt.Sprintf("event-%04d", i))
		pod.Spec.NodeName = fmt.Sprint("object-", i%100)
		w.put(t, pod)
	}
	w.catchUp(t)
	return w
}

// TestEagerField_FullPage_IsFollowedByAnyEvent: the first list by the involved object of events
// uses an index, and a full page is followed by another if any event follows, as upstream has it
// without a declared index.
func TestEagerField_FullPage_IsFollowedByAnyEvent(t *testing.T) {
	w := eventTwin(t, 500)
	r, err := w.Read(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: involved(t, "involvedObject.name=object-7")})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if r.Plan() == nil {
		t.Error("the list uses no index")
	}
	if !r.MoreAfter(contextFor(t), etcdKey(newPod("event-0407"))) || r.MoreAfter(contextFor(t), etcdKey(newPod("event-0499"))) {
		t.Error("another page must follow the last selected event, and none the last event")
	}
}

// TestEagerFields_ByResource_AreDeclaredOnes: they are the selectable fields of custom resources
// and the involved object of events.
func TestEagerFields_ByResource_AreDeclaredOnes(t *testing.T) {
	attrs := func(f fields.Set, err error) storage.AttrFunc {
		return func(runtime.Object) (labels.Set, fields.Set, error) { return nil, f, err }
	}
	known := fields.Set{"metadata.name": "", "metadata.namespace": "", "spec.color": "", "involvedObject.uid": "", "reason": ""}
	custom := func() runtime.Object { return &unstructured.Unstructured{} }
	for name, c := range map[string]struct {
		cfg  storeConfig
		want []string
	}{
		"custom resource":                {storeConfig{NewFunc: custom, GetAttrs: attrs(known, nil), GroupResource: schema.GroupResource{Group: "g", Resource: "r"}}, []string{"involvedObject.uid", "reason", "spec.color"}},
		"custom resource, invalid path":  {storeConfig{NewFunc: custom, GetAttrs: attrs(nil, errors.New("invalid path"))}, nil},
		"events":                         {storeConfig{NewFunc: newExamplePod, GetAttrs: attrs(known, nil), GroupResource: schema.GroupResource{Resource: "events"}}, []string{"involvedObject.uid"}},
		"another resource":               {storeConfig{NewFunc: newExamplePod, GetAttrs: attrs(known, nil), GroupResource: schema.GroupResource{Resource: "pods"}}, nil},
		"events without known selectors": {storeConfig{NewFunc: newExamplePod, GroupResource: schema.GroupResource{Resource: "events"}}, nil},
	} {
		if got := slices.Sorted(maps.Keys(index.EagerFields(c.cfg.GroupResource, c.cfg.NewFunc(), c.cfg.GetAttrs))); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
