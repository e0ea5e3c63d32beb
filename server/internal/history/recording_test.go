package history

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func recordedEvent(kind string, seconds int, object *unstructured.Unstructured) recorded {
	gvk := object.GroupVersionKind()
	resource := strings.ToLower(gvk.Kind) + "s"
	return recorded{window: window{target: target{mapping: &meta.RESTMapping{Resource: gvk.GroupVersion().WithResource(resource), GroupVersionKind: gvk}}},
		event: event{kind, 40, object}, at: noon.Add(time.Duration(seconds) * time.Second)}
}

// TestRecorder_Events_AreInTheFormOfKwok has the whole text, because kwok replaces the offsets in it before it is decoded.
func TestRecorder_Events_AreInTheFormOfKwok(t *testing.T) {
	var out bytes.Buffer
	r := newRecorder(&out, noon)
	first := configMap("u", 31, map[string]any{"x": "1", "since": "2026-01-01T11:00:00Z"})
	first.Object["metadata"].(map[string]any)["creationTimestamp"] = "2026-01-01T11:59:59Z"
	second := first.DeepCopy()
	second.Object["data"].(map[string]any)["x"] = "2"
	widget := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Widget", "spec": map[string]any{"parts": []any{"a"}},
		"metadata": map[string]any{"name": "w", "namespace": "n", "creationTimestamp": "2026-01-01T12:00:02.5Z"}}}
	bigger := widget.DeepCopy()
	bigger.Object["spec"].(map[string]any)["parts"] = []any{"a", "b"}

	if err := r.object(recordedEvent("", 0, first).target, first); err != nil {
		t.Fatal(err)
	}
	for _, e := range []recorded{
		recordedEvent("MODIFIED", 1, second), recordedEvent("DELETED", 1, second), recordedEvent("ADDED", 2, widget),
		{window: recordedEvent("", 0, bigger).window, event: event{"MODIFIED", 41, bigger}}, // without a time
	} {
		if err := r.event(e); err != nil {
			t.Fatal(err)
		}
	}
	const want = `apiVersion: v1
data:
  since: "2026-01-01T11:00:00Z"
  x: "1"
kind: ConfigMap
metadata:
  creationTimestamp: "$(time-offset-nanosecond -1000000000)"
  name: a
  uid: u
---
apiVersion: action.kwok.x-k8s.io/v1alpha1
durationNanosecond: 1000000000
kind: ResourcePatch
method: patch
resource:
  resource: configmaps
  version: v1
target:
  name: a
template:
  data:
    x: "2"
---
apiVersion: action.kwok.x-k8s.io/v1alpha1
durationNanosecond: 1000001000
kind: ResourcePatch
method: delete
resource:
  resource: configmaps
  version: v1
target:
  name: a
---
apiVersion: action.kwok.x-k8s.io/v1alpha1
durationNanosecond: 2000000000
kind: ResourcePatch
method: create
resource:
  group: example.com
  resource: widgets
  version: v1
target:
  name: w
  namespace: "n"
template:
  apiVersion: example.com/v1
  kind: Widget
  metadata:
    creationTimestamp: "$(time-offset-nanosecond 2500000000)"
    name: w
    namespace: "n"
  spec:
    parts:
    - a
---
apiVersion: action.kwok.x-k8s.io/v1alpha1
durationNanosecond: 2000001000
kind: ResourcePatch
method: patch
resource:
  group: example.com
  resource: widgets
  version: v1
target:
  name: w
  namespace: "n"
template:
  spec:
    parts:
    - a
    - b
`
	if out.String() != want {
		t.Errorf("recording\n%s\nwant\n%s", out.String(), want)
	}
}

func TestPatchOf_ListsOfBuiltInKinds_AreMergedByKey(t *testing.T) {
	pod := func(images ...string) *unstructured.Unstructured {
		var containers []any
		for _, image := range images {
			containers = append(containers, map[string]any{"name": "c-" + image[:1], "image": image})
		}
		return &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Pod", "spec": map[string]any{"containers": containers}}}
	}
	before, after := pod("a:1", "b:1"), pod("a:1", "b:2")
	patch, err := patchOf(before.Object, after.Object, after)
	if err != nil {
		t.Fatal(err)
	}
	if got := value(patch); !strings.Contains(got, `{"image":"b:2","name":"c-b"}`) || strings.Contains(got, "a:1") {
		t.Errorf("patch %s", got)
	}
	if gvk := (schema.GroupVersionKind{Version: "v1", Kind: "Pod"}); after.GroupVersionKind() != gvk {
		t.Errorf("kind %v", after.GroupVersionKind())
	}
}
