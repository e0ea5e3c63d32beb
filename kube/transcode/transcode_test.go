package transcode_test

import (
	"bytes"
	"encoding/json"
	"math/rand"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/kube/transcode"
)

// stored returns an object in its stored form.
func stored(t testing.TB, obj runtime.Object, gvk schema.GroupVersionKind) []byte {
	t.Helper()
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	var buf bytes.Buffer
	testcheck.NoError(t, protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(obj, &buf))
	return buf.Bytes()
}

// item decodes a stored object into its Go type, and encodes it as upstream's JSON serializer does.
func item(t testing.TB, data []byte, rev string) []byte {
	t.Helper()
	obj, _, err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Decode(data, nil, nil)
	testcheck.NoError(t, err)
	obj.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	m, err := meta.Accessor(obj)
	testcheck.NoError(t, err)
	m.SetResourceVersion(rev)
	var buf bytes.Buffer
	testcheck.NoError(t, json.NewEncoder(&buf).Encode(obj))
	return append(bytes.TrimSuffix(buf.Bytes(), []byte("\n")), ',')
}

// encodedAgain decodes and encodes a stored object.
func encodedAgain(t testing.TB, data []byte, gvk schema.GroupVersionKind) []byte {
	t.Helper()
	obj, _, err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Decode(data, nil, nil)
	testcheck.NoError(t, err)
	return stored(t, obj, gvk)
}

// Every kind of the client's scheme that can be described is transcoded to the bytes of
// encoding/json, for random objects.
func TestTranscoder_EveryKind_EqualsEncodingJSON(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	fill := fuzzer.FuzzerFor(fuzzer.MergeFuzzerFuncs(metafuzzer.Funcs), rand.NewSource(1), serializer.NewCodecFactory(scheme.Scheme)).
		NilChance(0.5).NumElements(1, 2).MaxDepth(12)
	kinds, accepted := 0, 0
	for gvk, typ := range scheme.Scheme.AllKnownTypes() {
		if gvk.Version == runtime.APIVersionInternal || strings.HasSuffix(gvk.Kind, "List") {
			continue
		}
		tr, err := transcode.New(gvk, typ, nil)
		if err != nil {
			if _, ok := reflect.New(typ).Interface().(metav1.ObjectMetaAccessor); ok {
				t.Logf("%s: %v", gvk, err)
			}
			continue
		}
		kinds++
		ok := 0
		for range testrace.Count(50, 8) {
			obj := reflect.New(typ).Interface().(runtime.Object)
			fill.Fill(obj)
			if m, err := meta.Accessor(obj); err == nil {
				m.SetResourceVersion("")
			}
			data := stored(t, obj, gvk)
			got, did := tr.AppendItem([]byte("x"), data, 12345)
			if !did {
				if string(got) != "x" {
					t.Fatalf("%s: declined with %q", gvk, got)
				}
				continue
			}
			ok++
			if canonical := tr.Canonical(data); canonical != bytes.Equal(encodedAgain(t, data, gvk), data) {
				t.Fatalf("%s: canonical is %v: %q", gvk, canonical, data)
			}
			if want := item(t, data, "12345"); string(got[1:]) != string(want) {
				t.Fatalf("%s: transcoded\n%s, want\n%s", gvk, got[1:], want)
			}
		}
		if ok > 0 {
			accepted++
		} else {
			t.Logf("%s: every object was declined", gvk)
		}
	}
	if kinds < 60 || accepted < kinds*3/4 {
		t.Errorf("%d kinds described, of which %d had objects that were transcoded", kinds, accepted)
	}
}

func podTranscoder(t testing.TB) *transcode.Transcoder {
	tr, err := transcode.New(corev1.SchemeGroupVersion.WithKind("Pod"), reflect.TypeFor[corev1.Pod](), nil)
	testcheck.NoError(t, err)
	return tr
}

// typicalPod is a pod of about 2 KB.
func typicalPod() *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "web-6d4b75cb6d-x2x7k", Namespace: "default", UID: "5f7b7ab0-2f51-4b1c-8b0b-0d4c5f4b4b1e", Generation: 1,
			CreationTimestamp: metav1.Unix(1.7e9, 0), Labels: map[string]string{"app": "web", "pod-template-hash": "6d4b75cb6d"},
			Annotations:     map[string]string{"note": "two\nlines & é"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-6d4b75cb6d", UID: "a", Controller: new(bool)}},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kube-controller-manager", Operation: "Update", APIVersion: "v1", FieldsType: "FieldsV1",
				FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{".":{},"f:app":{}}},"f:spec":{"f:containers":{"k:{\"name\":\"web\"}":{".":{},"f:image":{}}}}}`)}},
		},
		Spec: corev1.PodSpec{
			NodeName: "node-17", RestartPolicy: "Always", DNSPolicy: "ClusterFirst", SchedulerName: "default-scheduler", SecurityContext: &corev1.PodSecurityContext{},
			Containers: []corev1.Container{{
				Name: "web", Image: "web:1.2.3", ImagePullPolicy: "IfNotPresent", TerminationMessagePath: "/dev/termination-log", TerminationMessagePolicy: "File",
				Ports: []corev1.ContainerPort{{ContainerPort: 8080, Protocol: "TCP"}},
				Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
					"cpu": resource.MustParse("100m"), "memory": resource.MustParse("131072Ki")}},
				Env: []corev1.EnvVar{{Name: "A", Value: "b"}, {Name: "C", Value: "<d>"}},
			}},
		},
		Status: corev1.PodStatus{Phase: "Running", PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}},
			Conditions: []corev1.PodCondition{{Type: "Ready", Status: "True", LastTransitionTime: metav1.Unix(1.7e9, 0)}}},
	}
}

// FuzzTranscoder_Bytes: arbitrary bytes are either declined, or decoded and encoded to the same
// bytes.
func FuzzTranscoder_Bytes(f *testing.F) {
	gvk := corev1.SchemeGroupVersion.WithKind("Pod")
	tr := podTranscoder(f)
	typical := stored(f, typicalPod(), gvk)
	f.Add(typical, uint16(0), byte(0))
	// A scalar with another field than its own, of the same length.
	for _, c := range [][2]string{
		{"\n\x05128Mi", "\x12\x05128Mi"}, {"\n\x05128Mi", "\x08\x00\n\x0312"}, {"\b\b\x80", "\b\n\x80"}, {"Bz\nx{", "Bz\x12x{"},
	} {
		f.Add(bytes.Replace(typical, []byte(c[0]), []byte(c[1]), 1), uint16(0), byte(0))
	}
	deep := typicalPod()
	deep.ManagedFields[0].FieldsV1 = metav1.NewFieldsV1(strings.Repeat(`{"a":`, 10_001) + "{}" + strings.Repeat("}", 10_001))
	f.Add(stored(f, deep, gvk), uint16(0), byte(0))
	f.Fuzz(func(t *testing.T, data []byte, at uint16, b byte) {
		if len(data) > 0 {
			data = bytes.Clone(data)
			data[int(at)%len(data)] ^= b
		}
		got, ok := tr.AppendItem(nil, data, 7)
		if ok {
			if want := item(t, data, "7"); string(got) != string(want) {
				t.Errorf("transcoded\n%s, want\n%s", got, want)
			}
		}
		if !tr.Canonical(data) {
			return
		}
		again := encodedAgain(t, data, gvk)
		raw, _, _, err := representation.OpenUnknown(data)
		want, _, _, errAgain := representation.OpenUnknown(again)
		if err != nil || errAgain != nil || string(raw) != string(want) {
			t.Errorf("canonical\n%q, want\n%q", data, again)
		}
	})
}

// Texts are escaped as encoding/json does.
func FuzzTranscoder_Text(f *testing.F) {
	gvk := corev1.SchemeGroupVersion.WithKind("Pod")
	tr := podTranscoder(f)
	for _, s := range []string{"", "a\"\\<>&\b\f\n\r\t\x00\x1f\x7f", "é\u2028\u2029\xff\xc3", "\ufffd"} {
		f.Add(s, `{"f:a":{}}`)
	}
	for _, s := range []string{`{}`, `{"a":{},}`, `{"a":{}"b":{}}`, `{"a":{}}}`, `{"a\u0041":{}}`, `{"a": {}}`, `{"a":{},"b":{"c":{}}}`, `{"<":{}}`, `{"a":1}`, `[]`, `null`, "\xa0"} {
		f.Add("a", s)
	}
	f.Fuzz(func(t *testing.T, s, fields string) {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: s, Labels: map[string]string{s: s},
			ManagedFields: []metav1.ManagedFieldsEntry{{FieldsV1: metav1.NewFieldsV1(fields)}}}}
		data := stored(t, pod, gvk)
		got, ok := tr.AppendItem(nil, data, 7)
		if _, err := json.Marshal(pod); err != nil {
			if ok {
				t.Fatalf("transcoded %s, but encoding/json fails with %v", got, err)
			}
			return
		}
		if !ok {
			if fields != "" && fields[0] == '{' {
				t.Fatalf("declined %q", fields)
			}
			return
		}
		if want := item(t, data, "7"); string(got) != string(want) {
			t.Errorf("transcoded\n%s, want\n%s", got, want)
		}
	})
}

// An object that does not satisfy a rule, or is not in the form of its kind, is declined.
func TestTranscoder_Rules_Decline(t *testing.T) {
	gvk := corev1.SchemeGroupVersion.WithKind("Pod")
	rules := transcode.Rules{
		reflect.TypeFor[corev1.PodSpec](): {
			{Set: []string{"dnsPolicy"}, Unset: []string{"hostNetwork"}, NotNegative: []string{"terminationGracePeriodSeconds"}},
			{Set: []string{"securityContext"}, Equal: [][2]string{{"serviceAccountName", "serviceAccount"}}},
		},
		reflect.TypeFor[corev1.PodStatus]():            {{First: [][2]string{{"podIP", "podIPs"}}}},
		reflect.TypeFor[corev1.Volume]():               {{Set: []string{"name"}}},
		reflect.TypeFor[corev1.VolumeSource]():         {{OneOf: true}},
		reflect.TypeFor[corev1.ResourceRequirements](): {{Covered: [][2]string{{"limits", "requests"}}}},
	}
	tr, err := transcode.New(gvk, reflect.TypeFor[corev1.Pod](), rules)
	testcheck.NoError(t, err)
	negative := int64(-1)
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		ok     bool
	}{
		"typical":       {func(*corev1.Pod) {}, true},
		"set scalar":    {func(p *corev1.Pod) { p.Spec.DNSPolicy = "" }, false},
		"set pointer":   {func(p *corev1.Pod) { p.Spec.SecurityContext = nil }, false},
		"unset":         {func(p *corev1.Pod) { p.Spec.HostNetwork = true }, false},
		"negative":      {func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = &negative }, false},
		"equal":         {func(p *corev1.Pod) { p.Spec.ServiceAccountName, p.Spec.DeprecatedServiceAccount = "a", "a" }, true},
		"not equal":     {func(p *corev1.Pod) { p.Spec.ServiceAccountName = "a" }, false},
		"not the first": {func(p *corev1.Pod) { p.Status.PodIPs[0].IP = "10.0.0.2" }, false},
		"no list":       {func(p *corev1.Pod) { p.Status.PodIPs = nil }, false},
		"neither":       {func(p *corev1.Pod) { p.Status.PodIPs, p.Status.PodIP = nil, "" }, true},
		"a volume": {func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		}, true},
		"an empty volume": {func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v"}} }, false},
		"covered": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("1Gi")}
		}, true},
		"not covered": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"gpu": resource.MustParse("1")}
		}, false},
		"precise": {func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests["cpu"] = resource.MustParse("1u") }, false},
	} {
		pod := typicalPod()
		c.change(pod)
		data := stored(t, pod, gvk)
		got, ok := tr.AppendItem(nil, data, 7)
		if ok != c.ok || ok && string(got) != string(item(t, data, "7")) {
			t.Errorf("%s: %v %s", name, ok, got)
		}
	}
	data := stored(t, typicalPod(), gvk)
	for name, bad := range map[string][]byte{
		"quantity":        bytes.Replace(data, []byte("\n\x05128Mi"), []byte("\x12\x05128Mi"), 1),
		"another version": bytes.Replace(data, []byte("v1"), []byte("v2"), 1),
		"JSON":            []byte(`{"kind":"Pod","apiVersion":"v1"}`),
		"cut":             data[:len(data)/2],
		"encrypted":       append([]byte("k8s:enc:aescbc:v1:key1:"), data...),
	} {
		if got, ok := tr.AppendItem(nil, bad, 7); ok {
			t.Errorf("%s: %s", name, got)
		}
	}
	if _, err := transcode.New(gvk, reflect.TypeFor[corev1.Pod](), transcode.Rules{reflect.TypeFor[corev1.PodSpec](): {{Set: []string{"odd"}}}}); err == nil {
		t.Error("a rule for an unknown field was accepted")
	}
}

func BenchmarkAppendItem(b *testing.B) {
	gvk := corev1.SchemeGroupVersion.WithKind("Pod")
	data := stored(b, typicalPod(), gvk)
	tr := podTranscoder(b)
	b.Run("transcode", func(b *testing.B) {
		b.ReportAllocs()
		var dst []byte
		for b.Loop() {
			var ok bool
			if dst, ok = tr.AppendItem(dst[:0], data, 7); !ok {
				b.Fatal("declined")
			}
		}
		b.SetBytes(int64(len(dst)))
	})
	b.Run("canonical", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if !tr.Canonical(data) {
				b.Fatal("declined")
			}
		}
	})
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			item(b, data, "7")
		}
	})
}
