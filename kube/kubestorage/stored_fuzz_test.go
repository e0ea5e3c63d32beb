package kubestorage

import (
	"bytes"
	"context"
	"crypto/aes"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
	aestransformer "k8s.io/apiserver/pkg/storage/value/encrypt/aes"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/kube/transcode"
	"github.com/stratakube/strata/mirror"
)

// storedCodecs store as JSON, protobuf or CBOR, and decode all of them.
func storedCodecs() map[string]runtime.Codec {
	factory := serializer.NewCodecFactory(scheme, serializer.WithSerializer(cbor.NewSerializerInfo))
	made := map[string]runtime.Codec{}
	for _, info := range factory.SupportedMediaTypes() {
		made[info.MediaType] = factory.CodecForVersions(info.Serializer, factory.UniversalDeserializer(), examplev1.SchemeGroupVersion, example.SchemeGroupVersion)
	}
	return made
}

// aesTransformer encrypts as a provider of secrets does, with a prefix that names the key.
func aesTransformer(t testing.TB, name string) value.PrefixTransformer {
	t.Helper()
	block, err := aes.NewCipher(fmt.Appendf(nil, "%-32s", name))
	testcheck.NoError(t, err)
	transformer, err := aestransformer.NewGCMTransformer(block)
	testcheck.NoError(t, err)
	return value.PrefixTransformer{Prefix: []byte("k8s:enc:aesgcm:v1:" + name + ":"), Transformer: transformer}
}

// storedIn is a storage, and upstream's store on the same keys.
type storedIn struct {
	*fixture
	key     string
	newFunc func() runtime.Object
	newList func() runtime.Object
}

func storedPods(f *testing.F, codec runtime.Codec, change ...func(*options)) *storedIn {
	s := &storedIn{key: "/pods/ns/fuzzed", newFunc: newExamplePod, newList: newExamplePodList}
	s.fixture = setup(f, append([]func(*options){func(o *options) {
		o.store.Codec = codec
		o.engine.Window = mirror.Window{MaxBytes: 1 << 20}
	}}, change...)...)
	return s
}

// counted counts the values that a finder finds.
func counted(found *atomic.Int64, find transcode.Find) func([]byte) ([]byte, bool, bool) {
	if find == nil {
		return nil
	}
	return func(stored []byte) (value []byte, present, ok bool) {
		if value, present, ok = find(stored); ok {
			found.Add(1)
		}
		return value, present, ok
	}
}

// withPodFinder finds values in pods that are stored as protobuf.
func withPodFinder(f *testing.F, found *atomic.Int64) func(*options) {
	f.Helper()
	finder, err := transcode.NewFinder(examplev1.SchemeGroupVersion.WithKind("Pod"), reflect.TypeFor[examplev1.Pod](), []string{"metadata.name"}, nil)
	if err != nil {
		f.Fatal(err)
	}
	return func(o *options) {
		o.engine.Kinds = formOf(kind.Form{Find: func(label bool, name string) transcode.Find { return counted(found, finder.Find(label, name)) }})
	}
}

// converting decodes custom resources to example.com/v1, as a webhook would convert them.
type converting struct{ runtime.Codec }

func (c converting) Decode(data []byte, kind *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, was, err := c.Codec.Decode(data, kind, into)
	if u, ok := obj.(*unstructured.Unstructured); ok && err == nil {
		u.SetAnnotations(map[string]string{"was": u.GetAPIVersion()})
		u.SetAPIVersion("example.com/v1")
	}
	return obj, was, err
}

func storedWidgets(f *testing.F, codec runtime.Codec, found *atomic.Int64) *storedIn {
	gvk := schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"}
	s := storedPods(f, codec, func(o *options) {
		o.store.GroupResource = schema.GroupResource{Group: "example.com", Resource: "widgets"}
		o.store.ResourcePrefix = "/example.com/widgets"
		o.store.NewFunc = func() runtime.Object {
			u := &unstructured.Unstructured{}
			u.SetGroupVersionKind(gvk)
			return u
		}
		o.store.NewListFunc = func() runtime.Object {
			u := &unstructured.UnstructuredList{}
			u.SetGroupVersionKind(gvk.GroupVersion().WithKind("WidgetList"))
			return u
		}
		o.store.GetAttrs = storage.DefaultNamespaceScopedAttr
		o.engine.Kinds = formOf(kind.Form{Find: func(label bool, name string) transcode.Find {
			if label {
				return counted(found, transcode.FindJSONLabel(gvk, name))
			}
			return counted(found, transcode.FindJSONField(gvk, name))
		}})
	})
	store := s.engine(f)
	s.key, s.newFunc, s.newList = "/example.com/widgets/ns/fuzzed", store.Kind().NewFunc, store.Kind().NewListFunc
	return s
}

// answer is the outcome of a read, for comparison.
type answer struct {
	obj runtime.Object
	err error
}

func (a answer) differs(b answer) string {
	switch {
	case (a.err == nil) != (b.err == nil), a.err != nil && a.err.Error() != b.err.Error():
		return fmt.Sprintf("error %v, upstream's %v", a.err, b.err)
	case a.err == nil && !same(a.obj, b.obj):
		return fmt.Sprintf("%+v, upstream's %+v", a.obj, b.obj)
	}
	return ""
}

// same compares objects; custom resources by their form for clients.
func same(a, b runtime.Object) bool {
	if _, custom := a.(runtime.Unstructured); !custom {
		return equality.Semantic.DeepEqual(a, b)
	}
	x, errA := runtime.Encode(unstructured.UnstructuredJSONScheme, a)
	y, errB := runtime.Encode(unstructured.UnstructuredJSONScheme, b)
	return errA == nil && errB == nil && bytes.Equal(x, y) || errA != nil && errB != nil
}

func (s *storedIn) get(from storage.Interface) answer {
	obj := s.newFunc()
	err := from.Get(context.Background(), s.key, storage.GetOptions{}, obj)
	return answer{obj, err}
}

// list lists the namespace of the fuzzed object, or all namespaces.
func (s *storedIn) list(from storage.Interface, all bool, opts storage.ListOptions) answer {
	list, key := s.newList(), strings.TrimSuffix(s.key, "fuzzed")
	if all {
		key = strings.TrimSuffix(key, "ns/")
	}
	opts.Recursive = true
	err := from.GetList(context.Background(), key, opts, list)
	for n := 0; apierrors.IsTooManyRequests(err) && n < 10; n++ { // memory is late
		err = from.GetList(context.Background(), key, opts, list)
	}
	return answer{list, err}
}

// addOthers stores objects in another namespace that do not change, one more than a list examines
// without a plan.
func (s *storedIn) addOthers(f *testing.F, codec runtime.Codec, sealer value.Transformer) {
	f.Helper()
	for i := range 65 {
		obj := s.newFunc()
		m, err := meta.Accessor(obj)
		if err != nil {
			f.Fatal(err)
		}
		m.SetNamespace("others")
		m.SetName(fmt.Sprintf("other-%02d", i))
		m.SetLabels(map[string]string{"a": []string{"b", "c", ""}[i%3], "": "x"})
		data, err := runtime.Encode(codec, obj)
		if err != nil {
			f.Fatal(err)
		}
		s.putAs(f, strings.TrimSuffix(s.key, "ns/fuzzed")+"others/"+m.GetName(), data, sealer)
	}
	s.catchUp(f)
}

// storedTexts are seeds of FuzzStored for each kind: objects of other kinds and versions, and
// garbage.
var storedTexts = []string{
	"", "null", "{}", "[]", "\x00", "k8s\x00", "\xd9\xd9\xf7", "\xd9\xd9\xf7\xa0", "k8s:enc:aesgcm:v1:fuzz:", "k8s:enc:aesgcm:v1:other:x", "k8s:enc:aescbc:v1:x:",
	`{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","metadata":{"name":"other","resourceVersion":"7","uid":"u"}}`,
	`{"kind":"PodList","apiVersion":"example.apiserver.k8s.io/v1","items":[{}]}`,
	`{"kind":"Pod","apiVersion":"nowhere/v7","metadata":{}}`,
	`{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","METADATA":{"labels":{"a":"b"}},"metadata":{"labels":{"a":null},"creationTimestamp":5}}`,
	`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"fuzzed","labels":{"a":"b"}},"spec":{"n":1e30,"m":[1,1.0,-0]}}`,
	`{"apiVersion":"example.com/v2","kind":"Widget","metadata":{"labels":{"a":5}}}`,
	`{"apiVersion":"example.com/v1","kind":"WidgetList","items":[{"apiVersion":"example.com/v1","kind":"Widget"}]}`,
	`{"apiVersion":"v1","kind":"X","metadata":"none"}`, `{"kind":5}`, `{"apiVersion":"example.com/v1","kind":"Widget"} {}`,
}

// seedPods adds an encoded pod, whole, cut off, and with the prefix of an encrypted value.
func seedPods(f *testing.F, codecs map[string]runtime.Codec, prefix []byte) {
	pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "fuzzed", UID: "u", ResourceVersion: "", Labels: map[string]string{"a": "b", "": "\xff"},
		CreationTimestamp: metav1.Unix(1e9, 0), Annotations: map[string]string{"x": strings.Repeat("y", 200)}}, Spec: example.PodSpec{NodeName: "n"}}
	for _, codec := range codecs {
		data, err := runtime.Encode(codec, pod)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, byte(0), false)
		f.Add(data, byte(1), true)
		f.Add(data[:len(data)-1], byte(0), false)
		f.Add(data[:len(data)/2], byte(1), true)
		f.Add(slices.Concat(prefix, data), byte(1), false)
	}
}

// put stores the bytes in etcd, encrypted unless sealer is nil, and waits until memory has them.
func (s *storedIn) put(t *testing.T, stored []byte, sealer value.Transformer) {
	t.Helper()
	s.putAs(t, s.key, stored, sealer)
	s.catchUp(t)
}

func (s *storedIn) putAs(t testing.TB, key string, stored []byte, sealer value.Transformer) {
	t.Helper()
	key = testPrefix + strings.TrimPrefix(key, "/")
	if sealer != nil {
		sealed, err := sealer.TransformToStorage(context.Background(), stored, value.DefaultContext(key))
		testcheck.NoError(t, err)
		stored = sealed
	}
	if _, err := s.client.Put(context.Background(), key, string(stored)); err != nil {
		t.Fatal(err)
	}
}

// compareReads compares GET and LIST of memory, with empty and with filled caches, with upstream's
// store. It returns upstream's answer to the GET.
func (s *storedIn) compareReads(t *testing.T, stored []byte) answer {
	t.Helper()
	store := s.engine(t)
	everything := storage.ListOptions{Predicate: storage.Everything}
	got, want := s.get(store), s.get(store.etcd)
	if d := got.differs(want); d != "" {
		t.Fatalf("%q: GET %s", stored, d)
	}
	for range 2 {
		if d := s.list(store, false, everything).differs(s.list(store.etcd, false, everything)); d != "" {
			t.Fatalf("%q: LIST %s", stored, d)
		}
	}
	if again := s.get(store); again.differs(want) != "" {
		t.Fatalf("%q: GET, again: %s", stored, again.differs(want))
	}
	return want
}

// compareSelections compares lists by the name, the namespace, a label of the others and up to two
// labels of the object with upstream's store.
func (s *storedIn) compareSelections(t *testing.T, stored []byte, obj runtime.Object) {
	t.Helper()
	store := s.engine(t)
	m, err := meta.Accessor(obj)
	testcheck.NoError(t, err)
	// First those by labels: without an index for the name, a list decodes all objects, and their
	// values are known from then on.
	selections := []storage.SelectionPredicate{{Label: labels.SelectorFromSet(labels.Set{"a": "b"}), Field: fields.Everything()}}
	own := m.GetLabels()
	for _, name := range slices.Sorted(maps.Keys(own))[:min(2, len(own))] {
		selections = append(selections, storage.SelectionPredicate{Label: labels.SelectorFromSet(labels.Set{name: own[name]}), Field: fields.Everything()})
	}
	selections = append(selections, storage.SelectionPredicate{Label: labels.Everything(), Field: fields.OneTermEqualSelector("metadata.name", m.GetName())},
		storage.SelectionPredicate{Label: labels.Everything(), Field: fields.OneTermNotEqualSelector("metadata.namespace", m.GetNamespace())})
	for _, pred := range selections {
		pred.GetAttrs = storage.DefaultNamespaceScopedAttr
		opts := storage.ListOptions{Predicate: pred}
		if d := s.list(store, true, opts).differs(s.list(store.etcd, true, opts)); d != "" {
			t.Fatalf("%q: LIST of %s %s: %s", stored, pred.Label, pred.Field, d)
		}
	}
}

// FuzzStored stores any bytes in etcd in place of an object: JSON, protobuf, CBOR, encrypted, or
// garbage. Memory answers as upstream's store answers from etcd, including errors and with filled
// caches; selectors use the object's own labels and fields.
func FuzzStored(f *testing.F) {
	codecs := storedCodecs()
	encrypted := aesTransformer(f, "fuzz")
	sealer := value.NewPrefixTransformers(errors.New("no key fits"), encrypted)
	var found [4]atomic.Int64 // values by kind
	kinds := []*storedIn{
		storedPods(f, codecs[runtime.ContentTypeJSON]),
		storedPods(f, codecs[runtime.ContentTypeProtobuf], withTransformer(sealer), withPodFinder(f, &found[1])),
		storedWidgets(f, unstructured.UnstructuredJSONScheme, &found[2]),
		storedWidgets(f, converting{unstructured.UnstructuredJSONScheme}, &found[3]),
	}
	kinds[0].addOthers(f, codecs[runtime.ContentTypeJSON], nil)
	kinds[1].addOthers(f, codecs[runtime.ContentTypeProtobuf], sealer)
	kinds[2].addOthers(f, unstructured.UnstructuredJSONScheme, nil)
	kinds[3].addOthers(f, unstructured.UnstructuredJSONScheme, nil)
	var selected [4]atomic.Int64 // objects by kind, by whose values lists were compared
	f.Cleanup(func() {
		for kind := range selected {
			if kind > 0 && selected[kind].Load() > 0 && found[kind].Load() == 0 {
				f.Errorf("kind %d: no value was found for lists by the values of %d objects", kind, selected[kind].Load())
			}
		}
	})
	seedPods(f, codecs, encrypted.Prefix)
	for _, text := range storedTexts {
		for kind := range kinds {
			f.Add([]byte(text), byte(kind), false)
		}
	}
	f.Fuzz(func(t *testing.T, stored []byte, kind byte, encrypt bool) {
		if len(stored) > 1<<20 {
			return
		}
		kind %= byte(len(kinds))
		s := kinds[kind]
		if encrypt && s == kinds[1] {
			s.put(t, stored, sealer)
		} else {
			s.put(t, stored, nil)
		}
		if want := s.compareReads(t, stored); want.err == nil {
			s.compareSelections(t, stored, want.obj)
			selected[kind].Add(1)
		}
	})
}

// selectedPods creates pods whose labels and nodes have the values, changes some of them, and
// returns revisions between the changes.
func selectedPods(f *testing.F, fix *fixture, values []string) (revs []mirror.Revision) {
	f.Helper()
	mirrored := fix.engine(f).mirror
	for i, v := range values {
		for j := range 9 { // more objects than a list examines without an index
			pod := newPod(fmt.Sprintf("p-%02d-%d", i, j))
			pod.Namespace = []string{"ns", "other", "ns-2"}[j%3]
			pod.Labels = map[string]string{"zone": v, "n": fmt.Sprint(i * j)}
			if j%3 == 1 {
				delete(pod.Labels, "zone")
			}
			pod.Spec.NodeName = values[(i+j)%len(values)]
			fix.create(f, pod)
		}
	}
	fix.catchUp(f)
	// Some of the objects change at the revisions that follow.
	revs = append(revs, mirrored.PublishedRevision())
	for i, v := range values {
		for j := range 4 {
			pod := newPod(fmt.Sprintf("p-%02d-%d", i, j))
			pod.Namespace = []string{"ns", "other", "ns-2"}[j%3]
			change := storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
				pod := obj.(*example.Pod)
				pod.Labels, pod.Spec.NodeName = map[string]string{"zone": values[(i+j+1)%len(values)]}, v
				return pod, nil
			})
			if err := fix.GuaranteedUpdate(contextFor(f), podKey(pod), &example.Pod{}, false, nil, change, nil); err != nil {
				f.Fatal(err)
			}
		}
		fix.catchUp(f)
		revs = append(revs, mirrored.PublishedRevision())
	}
	return revs
}

// FuzzSelectors sends any selectors, limit, order of pages and revision, over objects with odd
// labels and fields. Memory selects the same objects as upstream's store, with the indexes that a
// registry declares and without them, page by page.
func FuzzSelectors(f *testing.F) {
	var found atomic.Int64
	fix := setup(f, withFinder(&found))
	store := fix.engine(f)
	values := []string{"", "a", "b", "A", "a/b", "node-1", "node-10", "\x00", "é", "1", "10", "-5", strings.Repeat("v", 300)}
	revs := selectedPods(f, fix, values)
	walks := 0
	f.Cleanup(func() {
		if walks > 0 && found.Load() == 0 {
			f.Errorf("no value was found for %d selectors", walks)
		}
	})
	for _, label := range []string{"", "zone=a", "zone=", "zone!=a", "zone in (a,b,)", "zone notin (a)", "zone", "!zone", "n>3,n<20", "zone==a,zone==b", "zone=a,n=0", "x=y",
		"zone=node-1", "zone in ()", "n>x", "=", ",", "zone=a b", "in", "notin in (in)"} {
		for _, field := range []string{"", "spec.nodeName=node-1", "spec.nodeName!=a,metadata.namespace=ns", "metadata.name=p-01-0", "spec.nodeName=", `spec.nodeName=a\,b`, "spec.nodeName=a,spec.nodeName=b", "x=y", "=", "spec.nodeName"} {
			f.Add(label, field, int64(len(label)%7), len(field)%2 == 0, uint8(len(label)+len(field)))
		}
	}
	f.Fuzz(func(t *testing.T, label, field string, limit int64, indexed bool, at uint8) {
		pred := storage.SelectionPredicate{GetAttrs: podAttrs, Limit: max(0, limit)}
		var err error
		if pred.Label, err = labels.Parse(label); err != nil {
			return
		}
		if pred.Field, err = fields.ParseSelector(field); err != nil {
			return
		}
		if indexed {
			pred.IndexFields, pred.IndexLabels = []string{"spec.nodeName"}, []string{"zone"}
		}
		first := storage.ListOptions{Recursive: true} // of the latest revision
		if i := int(at) % (len(revs) + 1); i < len(revs) {
			first.ResourceVersion, first.ResourceVersionMatch = fmt.Sprint(revs[i]), metav1.ResourceVersionMatchExact
		}
		// The number of empty pages may differ: an index shows whether more objects follow.
		walk := func(from storage.Interface) answer {
			all, opts := &example.PodList{}, first
			opts.Predicate = pred
			for range 200 {
				page := &example.PodList{}
				if err := getList(contextFor(t), from, "/pods/", opts, page); err != nil {
					return answer{err: err}
				}
				if n := len(page.Items); pred.Limit > 0 && int64(n) > pred.Limit {
					t.Fatalf("%q %q: %d objects, limit %d", label, field, n, pred.Limit)
				}
				all.ResourceVersion = page.ResourceVersion
				all.Items = append(all.Items, page.Items...)
				opts.ResourceVersion, opts.ResourceVersionMatch, opts.Predicate.Continue = "", "", page.Continue
				if page.Continue == "" {
					return answer{obj: all}
				}
			}
			t.Fatalf("%q %q, limit %d: no end of pages", label, field, pred.Limit)
			return answer{}
		}
		walks++
		if d := walk(store).differs(walk(store.etcd)); d != "" {
			t.Fatalf("%q %q at %s, limit %d, indexed %v: %s", label, field, first.ResourceVersion, limit, indexed, d)
		}
	})
}
