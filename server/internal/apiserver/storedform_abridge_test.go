package apiserver

import (
	"maps"
	"math/rand"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	"k8s.io/apimachinery/pkg/api/meta"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/registry/apps/replicaset"
	"k8s.io/kubernetes/pkg/registry/core/configmap"
	"k8s.io/kubernetes/pkg/registry/core/event"
	"k8s.io/kubernetes/pkg/registry/core/node"
	"k8s.io/kubernetes/pkg/registry/core/pod"
	"k8s.io/kubernetes/pkg/registry/core/secret"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// attrsOf are upstream's functions of selectable fields, by kind; other kinds have the default.
var attrsOf = map[string]storage.AttrFunc{
	"Pod": pod.GetAttrs, "Node": node.GetAttrs, "Secret": secret.GetAttrs, "Event": event.GetAttrs, "ReplicaSet": replicaset.GetAttrs, "ConfigMap": configmap.GetAttrs,
}

// attributes are the data that selectors of labels, fields and shards evaluate.
type attributes struct {
	labels          labels.Set
	fields          fields.Set
	name, namespace string
	uid             types.UID
}

func (f *storedForm) attributes(t *testing.T, obj runtime.Object) attributes {
	t.Helper()
	getAttrs := attrsOf[f.gvk.Kind]
	if getAttrs == nil {
		getAttrs = storage.DefaultNamespaceScopedAttr
	}
	l, fs, err := getAttrs(obj)
	testcheck.NoError(t, err)
	m, err := meta.Accessor(obj)
	testcheck.NoError(t, err)
	return attributes{l, fs, m.GetName(), m.GetNamespace(), m.GetUID()}
}

// TestAbridger_EveryKind_KeepsAttributes: what selectors evaluate is the same for random objects
// and for what the abridger leaves of them, as they are, and with the defaults of this release.
func TestAbridger_EveryKind_KeepsAttributes(t *testing.T) {
	for gvk, kind := range storedKinds() {
		t.Run(gvk.Kind, func(t *testing.T) {
			short := formFor(t, gvk)
			f := newStoredForm(gvk, nil)
			var full, left, compared int
			compare := func(data []byte) {
				cut, ok := short.Abridge([]byte("before"), data)
				if !ok {
					t.Fatalf("declined: %q", data)
				}
				cut = cut[len("before"):]
				want, got := f.read(data, 7), f.read(cut, 7)
				if want == nil {
					return // not valid in upstream's decoder
				}
				if got == nil {
					t.Fatalf("cannot be decoded: %q, of %q", cut, data)
				}
				a, b := f.attributes(t, want), f.attributes(t, got)
				if !maps.Equal(a.labels, b.labels) || !maps.Equal(a.fields, b.fields) || a.name != b.name || a.namespace != b.namespace || a.uid != b.uid {
					t.Fatalf("attributes %+v, want %+v, of %q", b, a, data)
				}
				compared++
				full += len(data)
				left += len(cut)
			}
			for i := range 600 {
				fill := fuzzer.FuzzerFor(metafuzzer.Funcs, rand.NewSource(int64(i)), legacyscheme.Codecs).NilChance(1-float64(i)/600).NumElements(1, 2)
				obj := reflect.New(kind.typ).Interface().(runtime.Object)
				fillObject(fill, obj)
				compare(f.raw(t, obj))
				if internal := f.read(f.raw(t, obj), 0); internal != nil {
					again, err := runtime.Encode(f.codec, internal)
					testcheck.NoError(t, err)
					compare(again)
				}
			}
			t.Logf("%d of %d bytes left in %d objects", left, full, compared)
			if compared < 600 || left > full*9/10 {
				t.Errorf("%d of %d bytes left in %d objects", left, full, compared)
			}
		})
	}
}

// TestAbridger_OtherAndMalformedValues_AreDeclined: they are decoded as a whole, which reports the
// error.
func TestAbridger_OtherAndMalformedValues_AreDeclined(t *testing.T) {
	gvk := corev1.SchemeGroupVersion.WithKind("Pod")
	short := formFor(t, gvk)
	data := newStoredForm(gvk, nil).raw(t, richPod())
	if _, ok := short.Abridge(nil, data); !ok {
		t.Fatal("a pod is declined")
	}
	quota := newStoredForm(corev1.SchemeGroupVersion.WithKind("ResourceQuota"), nil).raw(t, &corev1.ResourceQuota{})
	for name, value := range map[string][]byte{
		"nothing": nil, "JSON": []byte(`{"kind":"Pod","apiVersion":"v1"}`), "prefix": data[:5], "head": data[:12], "another kind": quota,
		"ciphertext": []byte("k8s:enc:aescbc:v1:key:0123456789"), "long head": []byte("k8s\x00\x0a\xff\x01"),
	} {
		if got, ok := short.Abridge([]byte("before"), value); ok || string(got) != "before" {
			t.Errorf("%s: %q, %v", name, got, ok)
		}
	}
	// The last four bytes are the empty fields of runtime.Unknown behind the object.
	for n := range len(data) - 4 {
		if got, ok := short.Abridge(nil, data[:n]); ok {
			t.Fatalf("%d of %d bytes: %q", n, len(data), got)
		}
	}
}
