package kubestorage

import (
	"bytes"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
)

func TestCreatedAt(t *testing.T) {
	created := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	with := &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{"l": "v"}, CreationTimestamp: metav1.NewTime(created)}}
	without := with.DeepCopy()
	without.CreationTimestamp = metav1.Time{}
	encode := func(s runtime.Serializer, obj runtime.Object) []byte {
		var buf bytes.Buffer
		if err := s.Encode(obj, &buf); err != nil {
			t.Fatal(err)
		}
		return buf.Bytes()
	}
	pb := protobuf.NewSerializer(clientscheme.Scheme, clientscheme.Scheme)
	js := json.NewSerializerWithOptions(json.DefaultMetaFactory, clientscheme.Scheme, clientscheme.Scheme, json.SerializerOptions{})
	for name, s := range map[string]runtime.Serializer{"protobuf": pb, "JSON": js} {
		if at, ok := createdAt(encode(s, with)); !ok || !at.Equal(created.Add(time.Second)) {
			t.Errorf("%s: created at %s, %v", name, at, ok)
		}
		if at, ok := createdAt(encode(s, without)); ok {
			t.Errorf("%s without a time: created at %s", name, at)
		}
	}
	whole := encode(pb, with)
	for n := range whole { // cut off anywhere
		if at, ok := createdAt(whole[:n]); ok && !at.Equal(created.Add(time.Second)) {
			t.Errorf("of %d bytes: created at %s", n, at)
		}
	}
	for _, odd := range []string{"", "{", "k8s\x00", "k8s:enc:aescbc:v1:key1:\x01\x02", "null", `{"metadata":1}`} {
		if at, ok := createdAt([]byte(odd)); ok {
			t.Errorf("%q: created at %s", odd, at)
		}
	}
}
