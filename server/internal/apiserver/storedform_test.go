package apiserver

import (
	"bytes"
	"context"
	"math/rand"
	"reflect"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	"k8s.io/apimachinery/pkg/api/resource"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/features"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/transcode"
)

// storedForm encodes objects of one kind, and reads them as upstream does.
type storedForm struct {
	gvk     schema.GroupVersionKind
	codec   runtime.Codec // of the storage
	encoder runtime.Encoder
	decoder etcd3.Decoder
	tr      *transcode.Transcoder
}

func newStoredForm(gvk schema.GroupVersionKind, tr *transcode.Transcoder) *storedForm {
	gv := gvk.GroupVersion()
	pb, _ := runtime.SerializerInfoForMediaType(legacyscheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	js, _ := runtime.SerializerInfoForMediaType(legacyscheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	internal := schema.GroupVersion{Group: gv.Group, Version: runtime.APIVersionInternal}
	f := &storedForm{gvk: gvk, tr: tr, encoder: legacyscheme.Codecs.EncoderForVersion(js.Serializer, gv)}
	f.codec = legacyscheme.Codecs.CodecForVersions(pb.Serializer, legacyscheme.Codecs.UniversalDeserializer(), gv, internal)
	f.decoder = etcd3.NewDefaultDecoder(f.codec, storage.APIObjectVersioner{})
	return f
}

// raw encodes an object of the stored version as it is, without defaulting and conversion.
func (f *storedForm) raw(t *testing.T, obj runtime.Object) []byte {
	t.Helper()
	pb, _ := runtime.SerializerInfoForMediaType(legacyscheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	obj.GetObjectKind().SetGroupVersionKind(f.gvk)
	var buf bytes.Buffer
	testcheck.NoError(t, pb.Serializer.Encode(obj, &buf))
	return buf.Bytes()
}

// read decodes a stored object into the internal version, as a read does; nil if that fails.
func (f *storedForm) read(data []byte, rev int64) runtime.Object {
	obj, err := f.decoder.DecodeListItem(context.Background(), data, uint64(rev), func() runtime.Object {
		obj, err := legacyscheme.Scheme.New(schema.GroupVersionKind{Group: f.gvk.Group, Version: runtime.APIVersionInternal, Kind: f.gvk.Kind})
		if err != nil {
			panic(err)
		}
		return obj
	})
	if err != nil {
		return nil
	}
	return obj
}

// item returns the item of a stored object as upstream's path makes it.
func (f *storedForm) item(t *testing.T, data []byte, rev int64) []byte {
	t.Helper()
	obj := f.read(data, rev)
	if obj == nil {
		t.Fatalf("%s: upstream cannot decode what was transcoded: %q", f.gvk.Kind, data)
	}
	var buf bytes.Buffer
	testcheck.NoError(t, f.encoder.Encode(obj, &buf))
	head := `{"kind":` + strconv.Quote(f.gvk.Kind) + `,"apiVersion":` + strconv.Quote(f.gvk.GroupVersion().String()) + `,`
	rest, ok := bytes.CutPrefix(bytes.TrimSuffix(buf.Bytes(), []byte("\n")), []byte(head))
	if !ok {
		t.Fatalf("no head in %s", buf.Bytes())
	}
	return append(append([]byte("{"), rest...), ',')
}

// compare reports whether the stored object was transcoded, and fails if the result differs from
// upstream's.
func (f *storedForm) compare(t *testing.T, data []byte) bool {
	t.Helper()
	const rev = 1234
	got, ok := f.tr.AppendItem(nil, data, rev)
	if ok {
		if want := f.item(t, data, rev); string(got) != string(want) {
			t.Fatalf("%s: transcoded\n%s\nwant\n%s", f.gvk.Kind, got, want)
		}
	}
	if !f.tr.Canonical(data) {
		return ok
	}
	want, err := runtime.Encode(f.codec, f.read(data, 0))
	testcheck.NoError(t, err)
	if !bytes.Equal(data, want) {
		t.Fatalf("%s: canonical\n%q\nwant\n%q", f.gvk.Kind, data, want)
	}
	return ok
}

// For random objects of every transcoded kind, with and without defaults: the transcoder's bytes
// are those of upstream's path, and objects that upstream has defaulted are mostly transcoded.
func TestTranscoders_EveryKind_EqualUpstream(t *testing.T) {
	kinds := storedKinds()
	for _, often := range []schema.GroupVersionKind{
		{Version: "v1", Kind: "Pod"}, {Version: "v1", Kind: "Event"}, {Version: "v1", Kind: "Endpoints"},
		{Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"}, {Group: "coordination.k8s.io", Version: "v1", Kind: "Lease"},
	} {
		if _, ok := kinds[often]; !ok {
			t.Errorf("%v has no transcoder", often)
		}
	}
	for gvk := range kinds {
		t.Run(gvk.Kind, func(t *testing.T) {
			f := newStoredForm(gvk, formFor(t, gvk).Transcoder)
			random, defaulted, changed, rounds := 0, 0, 0, 1500
			for i := range rounds {
				// From objects with few fields to objects with most of them.
				fill := fuzzer.FuzzerFor(metafuzzer.Funcs, rand.NewSource(int64(i)), legacyscheme.Codecs).
					NilChance(1-float64(i)/float64(rounds)).NumElements(1, 2)
				obj := reflect.New(kinds[gvk].typ).Interface().(runtime.Object)
				fillObject(fill, obj)
				data := f.raw(t, obj)
				if f.compare(t, data) {
					random++
				}
				// The same object as this release stores it.
				internal := f.read(data, 0)
				if internal == nil {
					continue
				}
				again, err := runtime.Encode(f.codec, internal)
				testcheck.NoError(t, err)
				if !f.compare(t, again) {
					continue
				}
				if !f.tr.Canonical(again) {
					t.Fatalf("not canonical: %q", again)
				}
				if defaulted++; defaulted%20 == 1 {
					changed += f.compareWithout(t, again, kinds[gvk].typ)
				}
			}
			t.Logf("of %d objects, %d were transcoded as they were, %d after defaulting; with one field unset %d", rounds, random, defaulted, changed)
			if defaulted < rounds/20 || changed == 0 {
				t.Errorf("only %d of %d defaulted objects were transcoded", defaulted, rounds)
			}
		})
	}
}

// fullyCompared bounds the size of objects all of whose fields are unset in turn.
const fullyCompared = 4 << 10

// compareWithout compares a stored object with each of its fields unset in turn, and returns how
// many of those were transcoded. A default that the rules do not name shows here. It unsets a share
// of the fields of a large object, because each comparison encodes all of it.
func (f *storedForm) compareWithout(t *testing.T, data []byte, typ reflect.Type) (transcoded int) {
	t.Helper()
	random := rand.New(rand.NewSource(int64(len(data))))
	obj := reflect.New(typ)
	pb, _ := runtime.SerializerInfoForMediaType(legacyscheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if _, _, err := pb.Serializer.Decode(data, nil, obj.Interface().(runtime.Object)); err != nil {
		t.Fatal(err)
	}
	var walk func(v reflect.Value)
	walk = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer:
			if !v.IsNil() {
				walk(v.Elem())
			}
		case reflect.Slice:
			for i := range v.Len() {
				walk(v.Index(i))
			}
		case reflect.Struct:
			if v.Type() == reflect.TypeFor[metav1.ObjectMeta]() || v.NumField() == 0 || !v.Type().Field(0).IsExported() {
				return
			}
			for i := range v.NumField() {
				field := v.Field(i)
				if !field.CanSet() || field.IsZero() {
					continue
				}
				if random.Intn(1+len(data)/fullyCompared) == 0 {
					old := reflect.New(field.Type()).Elem()
					old.Set(field)
					field.SetZero()
					if f.compare(t, f.raw(t, obj.Interface().(runtime.Object))) {
						transcoded++
					}
					field.Set(old)
				}
				walk(field)
			}
		}
	}
	walk(obj.Elem())
	return transcoded
}

func fillObject(fill interface{ Fill(any) }, obj runtime.Object) {
	fill.Fill(obj)
	if m, ok := obj.(metav1.Object); ok {
		m.SetResourceVersion("")
	}
}

// richPod has a field of each kind that is defaulted.
func richPod() *corev1.Pod {
	httpGet := func() *corev1.HTTPGetAction { return &corev1.HTTPGetAction{} }
	common := corev1.Container{
		Name: "c", Image: "i", Ports: []corev1.ContainerPort{{ContainerPort: 80}},
		LivenessProbe:  &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: httpGet()}},
		ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: 1}}},
		StartupProbe:   &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{}}},
		Lifecycle:      &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{HTTPGet: httpGet()}, PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 1}}},
		Resources:      corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("1"), "memory": resource.MustParse("1024Mi")}},
		Env: []corev1.EnvVar{
			{Name: "a", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
			{Name: "b", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.cpu"}}},
			{Name: "c", ValueFrom: &corev1.EnvVarSource{FileKeyRef: &corev1.FileKeySelector{VolumeName: "v", Path: "p", Key: "k"}}},
		},
	}
	sidecar := *common.DeepCopy()
	sidecar.Name = "init"
	volumes := []corev1.VolumeSource{
		{}, {HostPath: &corev1.HostPathVolumeSource{Path: "/"}}, {Secret: &corev1.SecretVolumeSource{}}, {ConfigMap: &corev1.ConfigMapVolumeSource{}},
		{EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: resource.NewQuantity(1<<20, resource.BinarySI)}}, {Image: &corev1.ImageVolumeSource{Reference: "x:latest"}},
		{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{Path: "p", FieldRef: &corev1.ObjectFieldSelector{}}}}},
		{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{Path: "p", FieldRef: &corev1.ObjectFieldSelector{}}}}}}}},
		{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{
			Spec: corev1.PersistentVolumeClaimSpec{Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1Gi")}}}}}},
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "b", CreationTimestamp: metav1.Unix(1.7e9, 0),
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m", Operation: "Update", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:spec":{".":{},"f:nodeName":{}}}`)}}},
		Spec: corev1.PodSpec{
			NodeName: "n", ServiceAccountName: "default", Containers: []corev1.Container{common}, InitContainers: []corev1.Container{sidecar},
			EphemeralContainers: []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug", Image: "i"}}},
			Overhead:            corev1.ResourceList{"cpu": resource.MustParse("10m")},
			Tolerations:         []corev1.Toleration{{Key: "k", Operator: "Exists", TolerationSeconds: new(int64)}},
		},
		Status: corev1.PodStatus{Phase: "Running", PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}, {IP: "fd00::1"}}, HostIP: "10.1.1.1", HostIPs: []corev1.HostIP{{IP: "10.1.1.1"}}},
	}
	for i, v := range volumes {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: strconv.Itoa(i), VolumeSource: v})
	}
	return pod
}

// A pod with every defaulted field is transcoded as this release stores it. Without one of its
// fields it is declined, or has the same bytes as upstream's.
func TestTranscoders_RichPod_EqualsUpstream(t *testing.T) {
	gvk := corev1.SchemeGroupVersion.WithKind("Pod")
	f := newStoredForm(gvk, formFor(t, gvk).Transcoder)
	data := f.raw(t, richPod())
	if f.compare(t, data) {
		t.Error("a pod without defaults was transcoded")
	}
	again, err := runtime.Encode(f.codec, f.read(data, 0))
	testcheck.NoError(t, err)
	if !f.compare(t, again) || !f.tr.Canonical(again) {
		t.Fatal("a pod as this release stores it was declined")
	}
	if n := f.compareWithout(t, again, reflect.TypeFor[corev1.Pod]()); n < 20 {
		t.Errorf("with one field unset, %d pods were transcoded", n)
	}
	// Damaged, but for the empty fields at the end of the envelope.
	random, accepted := rand.New(rand.NewSource(1)), 0
	for range 20_000 {
		damaged := bytes.Clone(again)
		for range 1 + random.Intn(2) {
			damaged[random.Intn(len(damaged)-4)] = byte(random.Intn(256))
		}
		if f.compare(t, damaged) {
			accepted++
		}
	}
	if accepted == 0 {
		t.Error("no damaged pod was transcoded")
	}
}

// With a gate that adds a default, objects without it are declined.
func TestTranscoders_Gate_AddsRule(t *testing.T) {
	gvk := corev1.SchemeGroupVersion.WithKind("Pod")
	for _, on := range []bool{false, true} {
		featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.H2CContainerProbe, on)
		f := newStoredForm(gvk, formFor(t, gvk).Transcoder)
		pod := richPod()
		data, err := runtime.Encode(f.codec, f.read(f.raw(t, pod), 0))
		testcheck.NoError(t, err)
		if !f.compare(t, data) {
			t.Fatalf("gate %v: declined", on)
		}
		without := &corev1.Pod{}
		testcheck.NoError(t, runtime.DecodeInto(legacyscheme.Codecs.UniversalDeserializer(), data, without))
		without.Spec.Containers[0].LivenessProbe.HTTPGet.Protocol = nil
		if ok := f.compare(t, f.raw(t, without)); ok == on {
			t.Errorf("gate %v: without a protocol, transcoded %v", on, ok)
		}
	}
}
