package apiserver

import (
	"maps"
	"math/rand"
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-aggregator/pkg/apis/apiregistration"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/apps"
	"k8s.io/kubernetes/pkg/apis/batch"
	"k8s.io/kubernetes/pkg/apis/core"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/kube/transcode"
)

// foundForm compares the values that are found in stored objects of one kind with the attributes of
// upstream's decoder.
type foundForm struct {
	*storedForm
	kind   storedKind
	find   func(label bool, name string) transcode.Find
	fields map[string]transcode.Find
	found  map[string]int // values by field, "" for labels
}

func newFoundForm(t testing.TB, gvk schema.GroupVersionKind) *foundForm {
	t.Helper()
	f := &foundForm{storedForm: newStoredForm(gvk, nil), kind: storedKinds()[gvk], find: formFor(t, gvk).Find, fields: map[string]transcode.Find{}, found: map[string]int{}}
	for _, name := range slices.Concat(f.kind.copied, f.kind.filled, []string{"metadata.name"}) {
		f.fields[name] = f.find(false, name)
	}
	return f
}

// formFor returns the form of one of storedKinds.
func formFor(t testing.TB, gvk schema.GroupVersionKind) kind.Form {
	t.Helper()
	f, err := formOf(gvk, storedKinds()[gvk])
	testcheck.NoError(t, err)
	return f
}

// compare fails if a value that is found is not the one that upstream's selectors evaluate. A value
// of a valid object must be found, unless it is empty and may have a default.
func (f *foundForm) compare(t *testing.T, data []byte, valid bool) {
	t.Helper()
	obj := f.read(data, 7)
	if obj == nil {
		return // upstream reports an error
	}
	want := f.attributes(t, obj)
	for name, find := range f.fields {
		value, present, ok := find(data)
		switch {
		case ok && (!present || string(value) != want.fields[name]):
			t.Fatalf("%s: found %q, want %q, in %q", name, value, want.fields[name], data)
		case !ok && valid && !slices.Contains(f.kind.filled, name):
			t.Fatalf("%s: declined, value %q, in %q", name, want.fields[name], data)
		case ok:
			f.found[name]++
		}
	}
	keys := append(slices.Collect(maps.Keys(want.labels)), "none", "")
	for _, key := range keys {
		value, present, ok := f.find(true, key)(data)
		is, has := want.labels[key]
		switch {
		case ok && (present != has || string(value) != is):
			t.Fatalf("label %q: found %q, %t, want %q, %t, in %q", key, value, present, is, has, data)
		case !ok && valid:
			t.Fatalf("label %q: declined, in %q", key, data)
		case ok && has:
			f.found[""]++
		}
	}
}

// joined returns a stored object whose message has the fields of both: the later ones replace or
// extend the former.
func joined(t *testing.T, a, b []byte) []byte {
	t.Helper()
	var first, second runtime.Unknown
	for data, into := range map[*byte]*runtime.Unknown{&a[4]: &first, &b[4]: &second} {
		stored := a
		if data == &b[4] {
			stored = b
		}
		testcheck.NoError(t, into.Unmarshal(stored[4:]))
	}
	first.Raw = append(first.Raw, second.Raw...)
	data, err := first.Marshal()
	testcheck.NoError(t, err)
	return append(slices.Clone(a[:4]), data...)
}

// TestFinders_EveryKind_EqualAttributes: the values that are found in random objects, as they are,
// with the defaults of this release, with fields that occur twice, and with changed bytes, are
// those that upstream's selectors evaluate.
func TestFinders_EveryKind_EqualAttributes(t *testing.T) {
	for gvk, kind := range storedKinds() {
		t.Run(gvk.Kind, func(t *testing.T) {
			f := newFoundForm(t, gvk)
			var last []byte
			for i := range 400 {
				rnd := rand.New(rand.NewSource(int64(i)))
				fill := fuzzer.FuzzerFor(metafuzzer.Funcs, rnd, legacyscheme.Codecs).NilChance(1-float64(i)/400).NumElements(1, 2)
				obj := reflect.New(kind.typ).Interface().(runtime.Object)
				fillObject(fill, obj)
				data := f.raw(t, obj)
				f.compare(t, data, true)
				if internal := f.read(data, 0); internal != nil {
					again, err := runtime.Encode(f.codec, internal)
					testcheck.NoError(t, err)
					f.compare(t, again, true)
				}
				if last != nil {
					f.compare(t, joined(t, last, data), false)
				}
				for range 20 {
					changed := slices.Clone(data)
					for range 1 + rnd.Intn(3) {
						changed[rnd.Intn(len(changed))] = byte(rnd.Intn(256))
					}
					f.compare(t, changed, false)
				}
				last = data
			}
			t.Logf("found %v", f.found)
			for _, name := range append(slices.Collect(maps.Keys(f.fields)), "") {
				if f.found[name] < 50 {
					t.Errorf("%d values of %q were found", f.found[name], name)
				}
			}
		})
	}
}

// FuzzFinders compares the values that are found in any bytes with the attributes of upstream's
// decoder.
func FuzzFinders(f *testing.F) {
	forms := map[schema.GroupVersionKind]*foundForm{}
	for gvk, kind := range storedKinds() {
		forms[gvk] = newFoundForm(f, gvk)
		obj := reflect.New(kind.typ).Interface().(runtime.Object)
		obj.(metav1.Object).SetLabels(map[string]string{"a": "b", "": ""})
		obj.(metav1.Object).SetName("fuzzed")
		obj.GetObjectKind().SetGroupVersionKind(gvk)
		pb, _ := runtime.SerializerInfoForMediaType(legacyscheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
		data, err := runtime.Encode(pb.Serializer, obj)
		testcheck.NoError(f, err)
		f.Add(data)
		f.Add(data[:len(data)-1])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, form := range forms {
			form.compare(t, data, false)
		}
	})
}

// TestFinder_AnyResource_FindsOwnForm: built-in kinds are stored as protobuf, custom resources as
// JSON. Kinds that are not among storedKinds have no finder, so that no value of theirs is
// decrypted for one.
func TestFinder_AnyResource_FindsOwnForm(t *testing.T) {
	table, err := kinds(nil)
	testcheck.NoError(t, err)
	find := func(obj runtime.Object, label bool, name string) transcode.Find {
		if f := table(schema.GroupResource{}, obj); f.Find != nil {
			return f.Find(label, name)
		}
		return nil
	}
	custom := &unstructured.Unstructured{}
	custom.SetAPIVersion("example.com/v1")
	custom.SetKind("Thing")
	pod := richPod()
	pod.Labels, pod.Spec.NodeName = map[string]string{"a": "b"}, "node"
	stored := newStoredForm(corev1.SchemeGroupVersion.WithKind("Pod"), nil).raw(t, pod)
	thing := []byte(`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{"a":"b"}},"spec":{"color":"node"}}`)
	for _, c := range []struct {
		obj    runtime.Object
		label  bool
		name   string
		stored []byte
		want   string
	}{
		{&core.Pod{}, true, "a", stored, "b"}, {&core.Pod{}, false, "spec.nodeName", stored, "node"},
		{custom, true, "a", thing, "b"}, {custom, false, "spec.color", thing, "node"},
	} {
		if value, present, ok := find(c.obj, c.label, c.name)(c.stored); !ok || !present || string(value) != c.want {
			t.Errorf("%T, %s: %q, %t, %t", c.obj, c.name, value, present, ok)
		}
	}
	if find(&core.Pod{}, false, "spec.none") != nil || find(custom, false, "metadata.name") != nil {
		t.Error("a field that no kind has is found")
	}
	for _, obj := range []runtime.Object{&core.Service{}, &apps.Deployment{}, &batch.Job{}, &core.PersistentVolumeClaim{}, &apiregistration.APIService{}} {
		if find(obj, true, "a") != nil || find(obj, false, "metadata.name") != nil {
			t.Errorf("%T has a finder", obj)
		}
	}
	for gvk := range storedKinds() { // by the types of their storages
		internal, err := legacyscheme.Scheme.New(gvk.GroupKind().WithVersion(runtime.APIVersionInternal))
		testcheck.NoError(t, err)
		if find(internal, true, "a") == nil || find(internal, false, "metadata.name") == nil {
			t.Errorf("%s has no finder", gvk)
		}
	}
}
