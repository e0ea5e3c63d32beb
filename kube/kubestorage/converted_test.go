package kubestorage

import (
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// TestConverted_EntryDropped_IsReleased: a custom resource converted by a webhook is cached while the
// object is unchanged, and for its deletion event while the history has that.
func TestConverted_EntryDropped_IsReleased(t *testing.T) {
	w := newTwinWith(t, mirror.Window{MaxBytes: 20_000}, func(cfg *storeConfig) {
		cfg.Codec = converting{unstructured.UnstructuredJSONScheme}
		cfg.GroupResource = schema.GroupResource{Group: "example.com", Resource: "widgets"}
		cfg.NewFunc = func() runtime.Object {
			u := &unstructured.Unstructured{}
			u.SetGroupVersionKind(schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"})
			return u
		}
		cfg.NewListFunc = func() runtime.Object {
			u := &unstructured.UnstructuredList{}
			u.SetGroupVersionKind(schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "WidgetList"})
			return u
		}
		cfg.GetAttrs = storage.DefaultNamespaceScopedAttr
	})
	const key, path = testPrefix + "pods/ns/a", "/pods/ns/a"
	get := func() {
		t.Helper()
		u := w.newFunc().(*unstructured.Unstructured)
		if err := w.Get(contextFor(t), path, storage.GetOptions{ResourceVersion: "0"}, u); err != nil {
			t.Fatal(err)
		}
		if u.GetAPIVersion() != "example.com/v1" {
			t.Fatalf("got %v", u.Object)
		}
	}
	var one int64
	for i := range 50 {
		w.etcd.Put(key, fmt.Sprintf(`{"apiVersion":"example.com/v2","kind":"Widget","metadata":{"name":"a","namespace":"ns","labels":{"n":"%02d"}}}`, i))
		w.catchUp(t)
		get()
		switch used := w.cluster.blocks.Stats().Used; {
		case used == 0:
			t.Fatal("the cache is empty")
		case i == 0:
			one = used
		}
		// The writer moves the published revision before it removes the memo of the previous entry.
		eventually(t, fmt.Sprintf("after %d updates the cache holds one object", i), func() bool { return w.cluster.blocks.Stats().Used == one })
	}
	stream := w.open(t, contextFor(t), storage.ListOptions{ResourceVersion: fmt.Sprint(w.mirror.PublishedRevision()), Recursive: true, Predicate: storage.Everything})
	w.etcd.Delete(key)
	w.catchUp(t)
	if used := w.cluster.blocks.Stats().Used; used != one {
		t.Errorf("after the deletion %d cached bytes, want %d for its event", used, one)
	}
	b := take(t, stream)
	if what, err := stream.translate(b.events[0]); err != nil || what != watch.Deleted {
		t.Errorf("the event is %s, %v", what, err)
	}
	if prev := b.events[0].Prev; !slices.ContainsFunc(w.view.CurrentGeneration().MemoKeys(), func(memoKey *memo.Key) bool { return prev.Memo(memoKey) != nil }) {
		t.Error("the event needs another conversion")
	}
	for i := range 100 { // more history than the window holds
		w.etcd.Put(testPrefix+"pods/ns/b", fmt.Sprintf(`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"b","namespace":"ns","annotations":{"n":"%0500d"}}}`, i))
	}
	w.catchUp(t)
	eventually(t, "the cache is empty when history has dropped the deletion", func() bool { return w.cluster.blocks.Stats().Used == 0 })
}
