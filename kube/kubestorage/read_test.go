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

// readAll returns the bytes of everything that the options select, by key.
func readAll(t testing.TB, s *Store, rep *Representation, opts storage.ListOptions) map[string][]byte {
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
			data, err := rep.Bytes(ctx, e)
			if err != nil {
				t.Fatal(err)
			}
			out[e.Key()] = data
		}
	}
	return out
}

// TestASecondListDecodesOnlyWhatChanged is what the reading side exists for.
func TestASecondListDecodesOnlyWhatChanged(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 300)
	rep := s.NewRepresentation(codecs.LegacyCodec(examplev1.SchemeGroupVersion), 1<<20)
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

// TestRepresentationKeepsNoMoreThanItMay shows the bound, and that bytes of
// entries that are gone make room again.
func TestRepresentationKeepsNoMoreThanItMay(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 100)
	codec := codecs.LegacyCodec(examplev1.SchemeGroupVersion)
	everything := storage.ListOptions{Recursive: true, Predicate: storage.Everything}
	var size int64
	for _, data := range readAll(t, s, s.NewRepresentation(codec, 0), everything) {
		size += int64(len(data))
	}
	rep := s.NewRepresentation(codec, size/2)
	kept := func() (n int64) {
		for e := range mustLatest(t, s).All("", "") {
			if enc, ok := e.Memo(rep.slot).(*encoded); ok {
				n += int64(len(enc.data))
			}
		}
		return n
	}
	if got := readAll(t, s, rep, everything); len(got) != 100 {
		t.Fatalf("listed %d objects, want 100", len(got))
	}
	if n := kept(); n > size/2 || n < size/3 {
		t.Fatalf("%d bytes are kept, want nearly %d", n, size/2)
	}
	for e := range mustLatest(t, s).All("", "") {
		if e.Memo(rep.slot) != nil {
			key := "/" + e.Key()[len(testPrefix):]
			if err := f.Delete(contextFor(t), key, &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	f.catchUp(t)
	eventually(t, "the freed room is used", func() bool {
		readAll(t, s, rep, everything)
		return kept() > size/3
	})
	if n := kept(); n > size/2 {
		t.Fatalf("%d bytes are kept, want at most %d", n, size/2)
	}
}

func mustLatest(t testing.TB, s *Store) mirror.Snapshot {
	t.Helper()
	snap, err := s.resource.Latest()
	if err != nil {
		t.Fatal(err)
	}
	return snap
}
