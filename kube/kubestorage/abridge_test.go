package kubestorage

import (
	"encoding/json"
	"fmt"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// abridgePod leaves the fields of a stored pod that podAttrs reads, and its UID.
func abridgePod(dst, value []byte) ([]byte, bool) {
	type meta struct {
		Name      string            `json:"name"`
		Namespace string            `json:"namespace"`
		UID       string            `json:"uid"`
		Labels    map[string]string `json:"labels"`
	}
	var pod struct {
		Kind       string `json:"kind"`
		APIVersion string `json:"apiVersion"`
		Metadata   meta   `json:"metadata"`
		Spec       struct {
			NodeName      string `json:"nodeName"`
			RestartPolicy string `json:"restartPolicy"`
		} `json:"spec"`
		Status struct {
			Phase string `json:"phase"`
		} `json:"status"`
	}
	if err := json.Unmarshal(value, &pod); err != nil {
		return dst, false
	}
	short, err := json.Marshal(pod)
	return append(dst, short...), err == nil
}

// TestAbridge_AnyResult_SelectsWholeObjects: lists and watches by labels and fields return whole objects, whether values are cut down before selectors
// are evaluated, or cannot be, or the rest cannot be decoded.
func TestAbridge_AnyResult_SelectsWholeObjects(t *testing.T) {
	t.Parallel()
	for name, abridge := range map[string]func(dst, value []byte) ([]byte, bool){
		"cut down":           abridgePod,
		"declined":           func(dst, _ []byte) ([]byte, bool) { return dst, false },
		"cannot be decoded":  func(dst, _ []byte) ([]byte, bool) { return append(dst, "{"...), true },
		"of another kind":    func(dst, _ []byte) ([]byte, bool) { return append(dst, `{"kind":"Other","apiVersion":"v1"}`...), true },
		"without the option": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var cut atomic.Int64
			f := setup(t, func(o *options) {
				if abridge != nil {
					o.engine.Abridge = func(dst, value []byte) ([]byte, bool) {
						cut.Add(1)
						return abridge(dst, value)
					}
				}
			})
			add := func(i int) {
				pod := newPod(fmt.Sprintf("pod-%03d", i))
				pod.Labels, pod.Annotations = map[string]string{"tier": fmt.Sprint(i % 10)}, map[string]string{"whole": fmt.Sprint(i)}
				pod.Spec.NodeName = fmt.Sprint("node-", i%20)
				f.create(t, pod)
			}
			for i := range 100 {
				add(i)
			}
			f.catchUp(t)
			opts := everything()
			opts.Predicate = storage.SelectionPredicate{
				Label: labels.SelectorFromSet(labels.Set{"tier": "3"}), Field: fields.OneTermEqualSelector("spec.nodeName", "node-3"), GetAttrs: podAttrs,
			}
			var at string
			for range 3 { // the later ones with an index
				list := f.list(t, opts)
				at = list.ResourceVersion
				if got, want := podNames(list), "pod-003 pod-023 pod-043 pod-063 pod-083"; got != want {
					t.Fatalf("selected %s, want %s", got, want)
				}
				for i := range list.Items {
					if p := &list.Items[i]; p.Annotations["whole"] == "" || p.ResourceVersion == "" {
						t.Fatalf("selected a part of an object: %+v", p)
					}
				}
			}
			opts.ResourceVersion = at
			w := f.watchPods(t, opts)
			for _, i := range []int{103, 104, 123} {
				add(i)
			}
			for _, want := range []string{"pod-103", "pod-123"} {
				select {
				case ev := <-w.ResultChan():
					obj := ev.Object
					if shared, ok := obj.(runtime.CacheableObject); ok {
						obj = shared.GetObject()
					}
					pod, ok := obj.(*example.Pod)
					if !ok || ev.Type != watch.Added || pod.Name != want || pod.Annotations["whole"] == "" {
						t.Fatalf("watch received %s %+v, want %s as a whole", ev.Type, ev.Object, want)
					}
				case <-contextFor(t).Done():
					t.Fatalf("no event of %s", want)
				}
			}
			if (abridge != nil) != (cut.Load() > 0) {
				t.Errorf("values were cut down %d times", cut.Load())
			}
		})
	}
}
