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
			data, err := rep.Item(ctx, e)
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
	rep := s.NewRepresentation(podItem, nil)
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

// TestBudgetBoundsWhatIsKept, and bytes of entries that are gone make room again.
func TestBudgetBoundsWhatIsKept(t *testing.T) {
	const pods = 100
	everything := storage.ListOptions{Recursive: true, Predicate: storage.Everything}
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, pods)
	b := s.cluster.budget
	readAll(t, s, s.NewRepresentation(podItem, nil), everything)
	all := b.used.Load()
	if all == 0 {
		t.Fatal("nothing is kept")
	}
	b.limit = all + all/2
	rep := s.NewRepresentation(podItem, nil)
	for range 3 {
		if got := readAll(t, s, rep, everything); len(got) != pods {
			t.Fatalf("listed %d objects, want %d", len(got), pods)
		}
	}
	if used := b.used.Load(); used > b.limit {
		t.Fatalf("%d bytes are kept, want at most %d", used, b.limit)
	}
	for e := range mustLatest(t, s).All("", "") {
		key := "/" + e.Key()[len(testPrefix):]
		if err := f.Delete(contextFor(t), key, &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	f.catchUp(t)
	eventually(t, "nothing is kept of what is gone", func() bool { return b.used.Load() == 0 })
}

// TestIdleBytesMakeRoom: what nobody has read for a while is replaced by what somebody
// reads, and nothing that is being read is.
func TestIdleBytesMakeRoom(t *testing.T) {
	b := newBudget(10 * (1000 + blockOverhead))
	slot := &mirror.Slot{}
	first := b.add(payload{data: make([]byte, 1000)}, 1000, slot)
	for range 9 {
		if b.add(payload{}, 1000, slot) == nil {
			t.Fatal("no room in an empty budget")
		}
	}
	if b.add(payload{}, 1000, slot) != nil {
		t.Error("what was read a moment ago made room")
	}
	if n := b.refusals.Load(); n != 1 {
		t.Errorf("%d refusals, want 1", n)
	}
	b.start = b.start.Add(-2 * idleTime) // time passes
	first.load(b.now())
	for range 9 {
		if b.add(payload{}, 1000, slot) == nil {
			t.Fatal("what is idle made no room")
		}
	}
	if b.add(payload{}, 1000, slot) != nil || first.payload.Load() == nil {
		t.Error("what is read made room")
	}
	if used := b.used.Load(); used > b.limit {
		t.Errorf("%d bytes are kept, want at most %d", used, b.limit)
	}
	first.read.Store(b.now() + 1) // while room is looked for
	if b.add(payload{}, 1000, slot) != nil || first.payload.Load() == nil {
		t.Error("what was read a moment later made room")
	}
}

// TestIdleObjectsMakeRoomForOthers within their share, though there is room for more bytes.
func TestIdleObjectsMakeRoomForOthers(t *testing.T) {
	b := newBudget(objectShare * 10 * (1000 + blockOverhead))
	slot := &mirror.Slot{}
	first := b.add(payload{}, 1000, slot)
	for range 10 {
		if b.addObject(b, 1000, slot) == nil {
			t.Fatal("no room in an empty budget")
		}
	}
	if b.addObject(b, 1000, slot) != nil {
		t.Error("an object that was read a moment ago made room")
	}
	b.start = b.start.Add(-2 * idleTime) // time passes
	for range 10 {
		if b.addObject(b, 1000, slot) == nil {
			t.Fatal("objects that are idle made no room")
		}
	}
	if b.addObject(b, 1000, slot) != nil || first.payload.Load() == nil {
		t.Error("something else made room for objects")
	}
	if n := b.objects.Load(); n > b.limit/objectShare {
		t.Errorf("%d bytes of objects are kept, want at most %d", n, b.limit/objectShare)
	}
}

// TestManySmallBlocksMakeRoomForALargeOne.
func TestManySmallBlocksMakeRoomForALargeOne(t *testing.T) {
	const large = 1 << 20
	b := newBudget(large + blockOverhead)
	slot := &mirror.Slot{}
	for b.add(payload{}, 1000, slot) != nil {
	}
	b.start = b.start.Add(-2 * idleTime) // time passes
	if b.add(payload{}, large, slot) == nil {
		t.Error("no room was made for a large block")
	}
}

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
