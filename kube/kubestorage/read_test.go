package kubestorage

import (
	"bytes"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/encoded"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// fillPods creates n pods, labelled i=0 to i=9 in turn, and waits until memory has them.
func fillPods(t testing.TB, f *fixture, n int) {
	t.Helper()
	ctx := contextFor(t)
	for i := range n {
		pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("ns-%d", i%3), Name: fmt.Sprintf("pod-%04d", i),
			Labels: map[string]string{"i": fmt.Sprint(i % 10)},
		}}
		if err := f.Create(ctx, fmt.Sprintf("/pods/%s/%s", pod.Namespace, pod.Name), pod, nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	f.catchUp(t)
}

// readAll returns the bytes of all objects that the options select, by key.
func readAll(t testing.TB, s *Store, rep *encoded.Representation, opts storage.ListOptions) map[string][]byte {
	t.Helper()
	ctx := contextFor(t)
	r, err := s.Read(ctx, "/pods", opts)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]byte{}
	for run := range r.Runs() {
		for _, e := range run.Items() {
			if r.Selective() {
				ok, err := r.Matches(ctx, e)
				if err != nil {
					t.Fatal(err)
				}
				if !ok {
					continue
				}
			}
			data, err := rep.Item(ctx, e)
			if err != nil {
				t.Fatal(err)
			}
			out[e.Key()] = data
		}
	}
	return out
}

// TestRepresentation_SecondList_DecodesOnlyChanges shows the purpose of cached items.
func TestRepresentation_SecondList_DecodesOnlyChanges(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 300)
	rep := newRepresentation(s, podItem, nil)
	defer rep.Close()
	everything := storage.ListOptions{Recursive: true, Predicate: storage.Everything}
	selected := everything
	selected.Predicate.Label = labels.SelectorFromSet(labels.Set{"i": "7"})
	selected.Predicate.GetAttrs = podAttrs

	decodes := func(list func()) int { return len(f.codec.during(list)) }
	var first, second map[string][]byte
	if n := decodes(func() { first = readAll(t, s, rep, everything) }); n != 300 {
		t.Errorf("the first list decoded %d objects, want 300", n)
	}
	if n := decodes(func() { second = readAll(t, s, rep, everything) }); n != 0 {
		t.Errorf("the second list decoded %d objects, want none", n)
	}
	if len(first) != 300 || len(second) != 300 {
		t.Fatalf("lists of %d and %d objects, want 300", len(first), len(second))
	}
	for key, data := range first {
		if !bytes.Equal(data, second[key]) {
			t.Fatalf("%s changed from %s to %s", key, data, second[key])
		}
		obj, err := runtime.Decode(codecs.UniversalDecoder(), data)
		if err != nil {
			t.Fatal(err)
		}
		e, _ := mustLatest(t, s).Get(key)
		if rv := obj.(*example.Pod).ResourceVersion; rv != fmt.Sprint(e.ModRevision()) {
			t.Errorf("%s has resource version %s, want %d", key, rv, e.ModRevision())
		}
	}
	// Selecting needs labels once more per object, and never again.
	if n := decodes(func() { readAll(t, s, rep, selected) }); n != 300 {
		t.Errorf("the first list with a selector decoded %d objects, want 300", n)
	}
	if n := decodes(func() {
		if got := readAll(t, s, rep, selected); len(got) != 30 {
			t.Errorf("the selector selects %d objects, want 30", len(got))
		}
	}); n != 0 {
		t.Errorf("the second list with a selector decoded %d objects, want none", n)
	}

	err := f.GuaranteedUpdate(contextFor(t), "/pods/ns-0/pod-0000", &example.Pod{}, false, nil,
		storage.SimpleUpdate(func(o runtime.Object) (runtime.Object, error) {
			o.(*example.Pod).Labels["changed"] = "yes"
			return o, nil
		}), nil)
	if err != nil {
		t.Fatal(err)
	}
	f.catchUp(t)
	if n := decodes(func() { second = readAll(t, s, rep, everything) }); n != 1 {
		t.Errorf("after one update the list decoded %d objects, want 1", n)
	}
	if data := second["/registry/pods/ns-0/pod-0000"]; !bytes.Contains(data, []byte(`"changed":"yes"`)) {
		t.Errorf("the updated object is listed as %s", data)
	}
}

// TestRepresentation_Budget_BoundsCachedBytes, and bytes of deleted entries are released.
func TestRepresentation_Budget_BoundsCachedBytes(t *testing.T) {
	const pods = 100
	everything := storage.ListOptions{Recursive: true, Predicate: storage.Everything}
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, pods)
	b := s.cluster.blocks
	readAll(t, s, newRepresentation(s, podItem, nil), everything)
	all := b.Stats().Used
	if all == 0 {
		t.Fatal("the cache is empty")
	}
	limit := all + all/2
	b.SetLimit(limit)
	rep := newRepresentation(s, podItem, nil)
	for range 3 {
		if got := readAll(t, s, rep, everything); len(got) != pods {
			t.Fatalf("listed %d objects, want %d", len(got), pods)
		}
	}
	if used := b.Stats().Used; used > limit {
		t.Fatalf("%d cached bytes, want at most %d", used, limit)
	}
	for e := range mustLatest(t, s).All("", "") {
		key := "/" + e.Key()[len(testPrefix):]
		if err := f.Delete(contextFor(t), key, &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	f.catchUp(t)
	eventually(t, "the cache holds no deleted objects", func() bool { return b.Stats().Used == 0 })
}

// newRepresentation returns a representation of the objects of a store, or of a type that embeds one.
func newRepresentation(s interface{ generation() *objects.Generation }, encode encoded.ItemEncoder, splice encoded.Splicer) *encoded.Representation {
	return encoded.New(s.generation(), encoded.Format{Encode: encode, Splice: splice})
}

func (s *Store) generation() *objects.Generation { return s.view.CurrentGeneration() }

// podItem is an ItemEncoder.
func podItem(dst []byte, obj runtime.Object) ([]byte, error) {
	buf := bytes.NewBuffer(dst)
	err := codecs.LegacyCodec(examplev1.SchemeGroupVersion).Encode(obj, buf)
	return buf.Bytes(), err
}

func mustLatest(t testing.TB, s *Store) mirror.Snapshot {
	t.Helper()
	snap, err := s.resource.Latest()
	if err != nil {
		t.Fatal(err)
	}
	return snap
}
