package readpath

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/representation"
)

// itemTargets are the tested targets: whole objects, or their metadata.
var itemTargets = []schema.GroupVersion{{}, metav1.SchemeGroupVersion, metav1beta1.SchemeGroupVersion}

// fuzzedItems is a resource that encodes arbitrary stored bytes.
type fuzzedItems struct {
	*watched
	codec   runtime.Codec
	newFunc func() runtime.Object
}

// decode decodes stored bytes as upstream's store does; nil if they cannot be decoded.
func (w *fuzzedItems) decode(stored []byte, rev int64) runtime.Object {
	obj := w.newFunc()
	if err := etcd3.NewDefaultDecoder(w.codec, storage.APIObjectVersioner{}).Decode(stored, obj, rev); err != nil {
		return nil
	}
	return obj
}

// list returns a list of the objects as upstream's handlers encode it.
func (w *fuzzedItems) list(m listMeta, target schema.GroupVersion, objs []runtime.Object) (runtime.Object, error) {
	var list runtime.Object
	switch target {
	case metav1.SchemeGroupVersion:
		l := &metav1.PartialObjectMetadataList{}
		for _, obj := range objs {
			l.Items = append(l.Items, *obj.(*metav1.PartialObjectMetadata))
		}
		list = l
	case metav1beta1.SchemeGroupVersion:
		l := &metav1beta1.PartialObjectMetadataList{}
		for _, obj := range objs {
			l.Items = append(l.Items, *obj.(*metav1.PartialObjectMetadata))
		}
		list = l
	default:
		list = w.resource.Store.Kind().NewListFunc()
		if err := meta.SetList(list, objs); err != nil {
			return nil, err
		}
	}
	acc, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	acc.SetResourceVersion(m.resourceVersion)
	acc.SetContinue(m.token)
	return list, nil
}

// addItemSeeds adds the seeds of FuzzItems: pods in the codecs, and unusual or invalid texts.
func addItemSeeds(f *testing.F, codecs ...runtime.Codec) {
	for i, pod := range []*example.Pod{
		{},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a", Labels: map[string]string{"a": "<&>\u2028", "b": ""}}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "with-all", UID: "5", Generation: -1, GenerateName: "g",
			CreationTimestamp: metav1.Unix(1e9, 0), Finalizers: []string{"f", ""}, Annotations: map[string]string{"items": `"items":[]`},
			OwnerReferences: []metav1.OwnerReference{{Kind: "Pod", Name: "o"}},
			ManagedFields:   []metav1.ManagedFieldsEntry{{Manager: "m", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:x":{}}`)}}},
			Spec: example.PodSpec{NodeName: "node", NodeSelector: map[string]string{"z": "\xff", "y": "é"}}},
	} {
		for _, codec := range codecs {
			data, err := runtime.Encode(codec, pod)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data, int64(i*1000+1), false)
		}
	}
	for _, text := range []string{
		`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"a","namespace":"ns"},"spec":{"odd<&>":[null,1.5,"",1e400,12345678901234567890]}}`,
		`{"kind":"Widget","apiVersion":"example.com/v1","items":[],"metadata":{"resourceVersion":"77","continue":"x","managedFields":[{"fieldsV1":{"f:x":{}}}]}}`,
		`{"kind":"Widget","kind":"Other","apiVersion":"example.com/v1","metadata":{"name":"twice","name":"twice"},"metadata":{}}`,
		`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"labels":{"a":1},"creationTimestamp":"x"}}`,
		`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"a","managedFields":[{"manager":"a\\"]","operation":"Apply","fieldsV1":{"f:spec":{"f:x\\\\":{}}}},{"manager":"b"}],"labels":{"managedFields":"x"}},"managedFields":1}`,
		`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"managedFields":[{"manager":"a"}]}}`,
		`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"annotations":{"a":"1"},"managedFields":[{"manager":"a"}]},"spec":{"metadata":{"managedFields":[1]}}}`,
		`{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","metadata":{"name":"a","managedFields":[{"manager":"a","fieldsV1":{"f:x":{}}},{"manager":"b","time":"2026-01-01T00:00:00Z"}]},"spec":{"nodeName":"managedFields"}}`,
		`{"apiVersion":"example.com/v1","kind":"Widget","metadata":null,"\u0000":"\ud800"}`,
		`{"apiVersion":"example.com/v1","kind":"WidgetList","items":[{"apiVersion":"v1","kind":"X"}]}`,
		`{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","metadata":{"name":"<script>","labels":{"\u2028":"\u0000"}}}`,
		"k8s\x00\n\x00\x12\x02\n\x00", "k8s\x00", "", "null", "{}", "[]",
	} {
		f.Add([]byte(text), int64(1<<62), true)
		f.Add([]byte(text), int64(5), false)
	}
}

// FuzzItems stores arbitrary bytes as an object. If they can be decoded, the single object, the
// list and the watch event assembled from the object's item have the same bytes as the output of
// upstream's encoder. An item spliced from stored protobuf without decoding equals that item, if
// the bytes are stored in upstream's form.
func FuzzItems(f *testing.F) {
	pods := &fuzzedItems{watched: watchedPods(f), codec: resolveCodecs.LegacyCodec(examplev1.SchemeGroupVersion), newFunc: func() runtime.Object { return &example.Pod{} }}
	widgets := &fuzzedItems{watched: watchedWidgets(f)}
	widgets.codec, widgets.newFunc = widgets.watched.codec, widgets.resource.Store.Kind().NewFunc
	protobuf := protobufCodec()
	addItemSeeds(f, pods.codec, protobuf)
	f.Fuzz(func(t *testing.T, stored []byte, rev int64, custom bool) {
		if rev <= 0 {
			return
		}
		w := pods
		if custom {
			w = widgets
		}
		// For all input, splicing terminates, does not modify the prefix of its destination, and is
		// deterministic.
		before := []byte("before")
		spliced, ok := representation.SpliceItem(before, stored, rev)
		again, okAgain := representation.SpliceItem(slices.Clone(before), stored, rev)
		if ok != okAgain || !bytes.Equal(spliced, again) || !bytes.HasPrefix(spliced, before) || !ok && len(spliced) != len(before) {
			t.Fatalf("spliced %v %q, then %v %q", ok, spliced, okAgain, again)
		}
		if ok && representation.ItemLen(spliced[len(before):]) != len(spliced)-len(before) {
			t.Fatalf("an item of %d bytes reports %d", len(spliced)-len(before), representation.ItemLen(spliced[len(before):]))
		}
		if w.decode(stored, rev) == nil {
			return
		}
		for _, m := range []media{mediaJSON, mediaProtobuf} {
			for _, target := range itemTargets {
				if custom && m == mediaProtobuf && target.Empty() {
					continue
				}
				for _, cut := range []bool{false, true} {
					form := format{media: m, target: target, noManagedFields: cut}
					if err := w.compare(form, stored, rev); err != nil {
						t.Errorf("%+v: %v", form, err)
					}
				}
			}
		}
		if custom {
			return
		}
		stored, err := runtime.Encode(protobuf, w.decode(stored, 0))
		if err != nil {
			return
		}
		enc, err := w.resource.encodings.get(w.resource, format{media: mediaProtobuf})
		testcheck.NoError(t, err)
		item, err := enc.appendItem(nil, w.decode(stored, rev))
		testcheck.NoError(t, err)
		if spliced, ok := representation.SpliceItem(nil, stored, rev); !ok || !bytes.Equal(spliced, item) {
			t.Fatalf("spliced %v %q, encoded %q", ok, spliced, item)
		}
		enc, err = w.resource.encodings.get(w.resource, format{media: mediaProtobuf, noManagedFields: true})
		testcheck.NoError(t, err)
		if item, err = enc.appendItem(nil, w.decode(stored, rev)); err != nil {
			t.Fatal(err)
		}
		if spliced, ok := representation.WithoutManagedFields(representation.SpliceItem)(nil, stored, rev); !ok || !bytes.Equal(spliced, item) {
			t.Fatalf("spliced without managed fields %v %q, encoded %q", ok, spliced, item)
		}
	})
}

// compareCut compares an item without managed fields with the one that is cut from the whole item.
func (w *fuzzedItems) compareCut(form format, want, stored []byte, rev int64) error {
	if !form.noManagedFields {
		return nil
	}
	form.noManagedFields = false
	enc, err := w.resource.encodings.get(w.resource, form)
	if err != nil {
		return err
	}
	whole, err := enc.appendItem(nil, w.decode(stored, rev))
	if err != nil {
		return err
	}
	cutter := representation.CutJSONItem
	if form.media == mediaProtobuf {
		cutter = representation.CutProtobufItem
	}
	if cut, ok := cutter([]byte("before"), whole); ok && string(cut) != "before"+string(want) || !ok && bytes.Contains(whole, []byte(`"managedFields":[{`)) {
		return fmt.Errorf("cut %v %q\nfrom %q,\nwant %q", ok, cut, whole, want)
	}
	return nil
}

// compare compares assembled responses with upstream's encoding.
func (w *fuzzedItems) compare(form format, stored []byte, rev int64) error {
	enc, err := w.resource.encodings.get(w.resource, form)
	if err != nil {
		return err
	}
	object := func() runtime.Object {
		obj := w.decode(stored, rev)
		if form.noManagedFields {
			if m, err := meta.Accessor(obj); err == nil {
				m.SetManagedFields(nil)
			}
		}
		if form.target.Empty() {
			return obj
		}
		m, err := meta.Accessor(obj)
		if err != nil {
			return nil
		}
		partial := meta.AsPartialObjectMetadata(m)
		partial.SetGroupVersionKind(form.target.WithKind("PartialObjectMetadata"))
		return partial
	}
	want, wantErr := runtime.Encode(enc.encoder, object())
	item, err := enc.appendItem(nil, w.decode(stored, rev))
	if (err != nil) != (wantErr != nil) {
		return fmt.Errorf("an item has %v, the object has %v", err, wantErr)
	}
	if err != nil {
		return nil
	}
	if got := bytes.Join(enc.object(item), nil); !bytes.Equal(got, want) {
		return fmt.Errorf("an object is\n%q, want\n%q", got, want)
	}
	if err := w.compareCut(form, item, stored, rev); err != nil {
		return err
	}
	// Watch events.
	frames := enc.framer()
	got, body, _ := frames.Begin(nil, watch.Modified, item)
	got = frames.End(append(got, body...))
	if want, _ := frames.Whole(nil, watch.Modified, want); !bytes.Equal(got, want) {
		return fmt.Errorf("an event is\n%q, want\n%q", got, want)
	}
	if form.media == mediaJSON {
		var event struct {
			Type   string
			Object json.RawMessage
		}
		if err := json.Unmarshal(got, &event); err != nil || event.Type != "MODIFIED" || !bytes.Equal(event.Object, bytes.TrimSpace(want)) {
			return fmt.Errorf("an event is %v %q", err, got)
		}
	}
	// Lists.
	m := listMeta{resourceVersion: "12345", token: "token"}
	for n := range 3 {
		var objs []runtime.Object
		var items []byte
		for range n {
			objs, items = append(objs, object()), append(items, item...)
		}
		list, err := w.list(m, form.target, objs)
		if err != nil {
			return err
		}
		if n == 0 && form.target.Empty() { // upstream has no null here
			if err := meta.SetList(list, []runtime.Object{}); err != nil {
				return err
			}
		}
		want, err := runtime.Encode(enc.encoder, list)
		if err != nil {
			return err
		}
		head, tail, err := enc.envelope(m, n, int64(len(items)))
		if err != nil {
			return err
		}
		if n > 0 {
			items = items[:len(items)-enc.trailing()]
		}
		if got := slices.Concat(head, items, tail); !bytes.Equal(got, want) {
			return fmt.Errorf("a list of %d is\n%q, want\n%q", n, got, want)
		}
	}
	return nil
}

// protobufCodec is the storage codec of built-in resources.
func protobufCodec() runtime.Codec {
	info, ok := runtime.SerializerInfoForMediaType(resolveCodecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		panic("no protobuf")
	}
	return resolveCodecs.CodecForVersions(info.Serializer, resolveCodecs.UniversalDeserializer(), examplev1.SchemeGroupVersion, example.SchemeGroupVersion)
}
