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

	"github.com/stratakube/strata/mirror"
)

// involvedAttrs are the attributes of pods that stand for events: their node is the name of the involved object.
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

// TestEagerField_FirstList_UsesIndex: the first list by the involved object of events makes the index, that by another field does not.
func TestEagerField_FirstList_UsesIndex(t *testing.T) {
	w := eventTwin(t, 500)
	for _, c := range []struct {
		selector string
		planned  bool
		want     int
	}{
		{"spec.nodeName=object-7", false, 5},
		{"involvedObject.name=object-7", true, 5},
		{"involvedObject.kind=Pod,involvedObject.name=object-8", true, 5},
		{"involvedObject.name!=object-7", true, 495},
	} {
		opts := storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: involved(t, c.selector)}
		r, err := w.Read(contextFor(t), "/pods/", opts)
		if err != nil {
			t.Fatal(err)
		}
		if (r.plan != nil) != c.planned {
			t.Errorf("%s: an index is used: %t, want %t", c.selector, r.plan != nil, c.planned)
		}
		if r.declared != nil {
			t.Errorf("%s: page tokens depend on an index that upstream does not declare", c.selector)
		}
		r.Close()
		out := &example.PodList{}
		if err := w.GetList(contextFor(t), "/pods/", opts, out); err != nil || len(out.Items) != c.want {
			t.Errorf("%s: %d events (%v), want %d", c.selector, len(out.Items), err, c.want)
		}
	}
	// As upstream without a declared index, a full page is followed by another if any event follows.
	r, err := w.Read(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: involved(t, "involvedObject.name=object-7")})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if !r.MoreAfter(contextFor(t), etcdKey(newPod("event-0407"))) || r.MoreAfter(contextFor(t), etcdKey(newPod("event-0499"))) {
		t.Error("another page must follow the last selected event, and none the last event")
	}
}

// TestPlan_UnselectiveTermFirst_IsTestedInFewLeaves: a term that every object meets makes no digests where another term excludes the
// leaf, though it is the first one of the selector.
func TestPlan_UnselectiveTermFirst_IsTestedInFewLeaves(t *testing.T) {
	w := eventTwin(t, 6400) // at least 100 leaves
	pred := involved(t, "involvedObject.kind=Pod,metadata.name=event-6399,involvedObject.name=object-99")
	out := &example.PodList{}
	if err := w.GetList(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred}, out); err != nil || len(out.Items) != 1 {
		t.Fatalf("%d events (%v), want 1", len(out.Items), err)
	}
	leaves := map[any]int{}
	for d := range mustLatest(t, w.Store).Digests() {
		d.Each(func(of, _ any) { leaves[of]++ })
	}
	counts := slices.Sorted(maps.Values(leaves))
	if len(counts) != 2 || counts[1] < 100 {
		t.Fatalf("digests by index: %v, want two indexes, one with a digest on each of 100 leaves or more", counts)
	}
	if counts[0] == 0 {
		t.Error("the first term was never tested")
	}
}

// TestEagerFields_ByResource_AreDeclaredOnes: they are the selectable fields of custom resources and the involved object of events.
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
		if got := slices.Sorted(maps.Keys(eagerFields(&c.cfg))); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
