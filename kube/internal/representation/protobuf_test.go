package representation

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// protobufPods are pods in the forms in which they are stored and sent: with the resource version 7
// in lists.
func protobufPods() (pods []*examplev1.Pod) {
	for i := range 4 {
		pod := &examplev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("pod-", i), Namespace: strings.Repeat("n", i), Labels: map[string]string{"a": strings.Repeat("é", 50*i)}}}
		if i%2 == 1 {
			pod.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "m", FieldsV1: metav1.NewFieldsV1(`{"f:x":{}}`)}, {Manager: strings.Repeat("n", 200)}}
		}
		pods = append(pods, pod)
	}
	return pods
}

// storedProtobuf returns the stored value of a pod.
func storedProtobuf(t *testing.T, pod *examplev1.Pod) []byte {
	t.Helper()
	raw, err := pod.Marshal()
	testcheck.NoError(t, err)
	before, after := Envelope(examplev1.SchemeGroupVersion.WithKind("Pod"))
	data := append(bytes.Clone(before), UnknownRaw)
	return append(append(binary.AppendUvarint(data, uint64(len(raw))), raw...), after...)
}

// protobufItem returns the item of a pod in a list.
func protobufItem(t *testing.T, pod *examplev1.Pod) []byte {
	t.Helper()
	raw, err := pod.Marshal()
	testcheck.NoError(t, err)
	return append(binary.AppendUvarint([]byte{ItemsTag}, uint64(len(raw))), raw...)
}

// TestSpliceItem_StoredProtobuf_EqualsEncodedItem, with and without managed fields, and an item is
// cut to the same bytes.
func TestSpliceItem_StoredProtobuf_EqualsEncodedItem(t *testing.T) {
	for _, pod := range protobufPods() {
		stored := storedProtobuf(t, pod)
		var u runtime.Unknown
		if err := u.Unmarshal(stored[len(protobufPreamble):]); err != nil || u.Kind != "Pod" {
			t.Fatalf("the envelope is of %q: %v", u.Kind, err)
		}
		sent := pod.DeepCopy()
		sent.ResourceVersion = "7"
		whole := protobufItem(t, sent)
		if got, ok := SpliceItem([]byte("x"), stored, 7); !ok || string(got) != "x"+string(whole) || ItemLen(whole) != len(whole) {
			t.Errorf("%s: spliced %v %q, want %q", pod.Name, ok, got, whole)
		}
		sent.ManagedFields = nil
		want := protobufItem(t, sent)
		if got, ok := WithoutManagedFields(SpliceItem)(nil, stored, 7); !ok || !bytes.Equal(got, want) {
			t.Errorf("%s: spliced without managed fields %v %q, want %q", pod.Name, ok, got, want)
		}
		if got, ok := CutProtobufItem([]byte("x"), whole); !ok || string(got) != "x"+string(want) {
			t.Errorf("%s: cut %v %q, want %q", pod.Name, ok, got, want)
		}
		// Every prefix is malformed, or has no whole object.
		for n := range stored {
			if got, ok := SpliceItem([]byte("x"), stored[:n], 7); ok && !bytes.HasPrefix(got, []byte("x")) || !ok && string(got) != "x" {
				t.Fatalf("%s: the first %d bytes: %v %q", pod.Name, n, ok, got)
			}
		}
		for n := range whole {
			if got, ok := CutProtobufItem(nil, whole[:n]); ok {
				t.Fatalf("%s: the first %d bytes are cut to %q", pod.Name, n, got)
			}
		}
	}
}

// TestCutJSONItem_ManagedFields_AreOmitted wherever the field stands, and nothing else is.
func TestCutJSONItem_ManagedFields_AreOmitted(t *testing.T) {
	for item, want := range map[string]string{
		`{"metadata":{"name":"a","managedFields":[{"m":"\"}]"}]},"spec":1},`:        `{"metadata":{"name":"a"},"spec":1},`,
		`{"metadata":{"managedFields":[],"name":"a"}}`:                              `{"metadata":{"name":"a"}}`,
		`{"metadata":{"managedFields":[{"f":{"f:x":{}}}]}}`:                         `{"metadata":{}}`,
		`{"managedFields":1,"metadata":{"labels":{"managedFields":"x"}}}`:           `{"managedFields":1,"metadata":{"labels":{"managedFields":"x"}}}`,
		`{"spec":{"metadata":{"managedFields":[1]}},"metadata":{"annotations":{}}}`: `{"spec":{"metadata":{"managedFields":[1]}},"metadata":{"annotations":{}}}`,
		`{"metadata":null}`: "", `[]`: "", ``: "", `{"metadata":{"managedFields":[`: "", `{"metadata":{"a":"`: "",
	} {
		got, ok := CutJSONItem([]byte("x"), []byte(item))
		if ok != (want != "") || string(got) != "x"+want {
			t.Errorf("%s: %v %s, want %s", item, ok, got, want)
		}
	}
}

// TestCutJSONMetadata_Objects_LeaveTheirMetadata wherever it stands; others are declined.
func TestCutJSONMetadata_Objects_LeaveTheirMetadata(t *testing.T) {
	cut := CutJSONMetadata([]byte(`{"kind":"K",`))
	for item, want := range map[string]string{
		`{"metadata":{"name":"a"},"spec":{"metadata":1}},`:    `x{"kind":"K","metadata":{"name":"a"}},`,
		`{"spec":{"metadata":{}},"metadata":{"name":"}\""}},`: `x{"kind":"K","metadata":{"name":"}\""}},`,
		`{"spec":{}},`: "",
		`[]`:           "",
		``:             "",
	} {
		got, ok := cut([]byte("x"), []byte(item))
		if ok != (want != "") || ok && string(got) != want || !ok && string(got) != "x" {
			t.Errorf("%s: %s, %v, want %s", item, got, ok, want)
		}
	}
}
