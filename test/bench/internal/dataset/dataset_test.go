package dataset

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/kubernetes/pkg/apis/core"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// decode reads a stored value as kube-apiserver does.
func decode(t *testing.T, value []byte) runtime.Object {
	t.Helper()
	if !bytes.HasPrefix(value, []byte("k8s\x00")) {
		t.Fatalf("value begins with %q, want k8s and a zero byte", value[:4])
	}
	obj, err := runtime.Decode(storageCodec, value)
	testcheck.NoError(t, err)
	return obj
}

func TestEncode_ConfigMap_RoundTrips(t *testing.T) {
	want := ConfigMap(123, 0)
	value, err := Encode(want)
	testcheck.NoError(t, err)
	got, ok := decode(t, value).(*core.ConfigMap)
	if !ok {
		t.Fatalf("decoded a %T", decode(t, value))
	}
	if got.Name != "cm-000123" || got.Namespace != Namespace || got.UID != want.UID || got.Labels["app"] != "app-23" {
		t.Errorf("decoded %+v", got.ObjectMeta)
	}
	if got.Data["data"] != want.Data["data"] || len(got.Data["data"]) != payloadBytes {
		t.Errorf("data differs: %d bytes, want %d", len(got.Data["data"]), payloadBytes)
	}
	if got.ResourceVersion != "" {
		t.Errorf("stored with resource version %q", got.ResourceVersion)
	}
}

// The released client's scheme must read it too, because other components read protobuf with it.
func TestEncode_ConfigMap_IsVersionedProtobuf(t *testing.T) {
	want := ConfigMap(7, 0)
	value, err := Encode(want)
	testcheck.NoError(t, err)
	obj, _, err := scheme.Codecs.UniversalDeserializer().Decode(value, nil, nil)
	testcheck.NoError(t, err)
	if got, ok := obj.(*corev1.ConfigMap); !ok || got.Name != want.Name || got.Data["data"] != want.Data["data"] {
		t.Fatalf("decoded %T %v", obj, obj)
	}
}

func TestEncode_Pod_AppliesDefaults(t *testing.T) {
	value, err := Encode(Pod(5, 2, 1))
	testcheck.NoError(t, err)
	got, ok := decode(t, value).(*core.Pod)
	if !ok {
		t.Fatalf("decoded a %T", decode(t, value))
	}
	if got.Spec.NodeName != "node-00001" || got.Status.Phase != core.PodRunning {
		t.Errorf("decoded %+v", got)
	}
	if got.Spec.RestartPolicy != core.RestartPolicyAlways || got.Spec.Containers[0].ImagePullPolicy != core.PullIfNotPresent {
		t.Errorf("not defaulted: restart policy %q, image pull policy %q", got.Spec.RestartPolicy, got.Spec.Containers[0].ImagePullPolicy)
	}
}

func TestConfigMap_Variants_ShareIdentityOnly(t *testing.T) {
	first, again, second := ConfigMap(1, 0), ConfigMap(1, 0), ConfigMap(1, 1)
	if first.Data["data"] != again.Data["data"] {
		t.Error("the same variant has other data")
	}
	if first.UID != second.UID || first.Data["data"] == second.Data["data"] {
		t.Errorf("variants: UIDs %s and %s, same data %v", first.UID, second.UID, first.Data["data"] == second.Data["data"])
	}
	if other := ConfigMap(2, 0); other.UID == first.UID || other.Data["data"] == first.Data["data"] {
		t.Error("two objects are the same")
	}
}

func TestStampedConfigMap_ContainsSendTime(t *testing.T) {
	sent := time.Unix(1, 5)
	if got := StampedConfigMap(1, 0, sent).Data[SentKey]; got != fmt.Sprint(sent.UnixNano()) {
		t.Fatalf("got %q", got)
	}
}

func TestSpec_HasEveryObjectOnce(t *testing.T) {
	s := Spec{ConfigMaps: 30, Pods: 20, Things: 10, Nodes: 5, Namespaces: 4}
	keys := map[string]bool{}
	perResource := map[string]int{}
	for i := range s.Len() {
		key, obj := s.object(i)
		if keys[key] {
			t.Errorf("%s twice", key)
		}
		keys[key] = true
		perResource[strings.Split(key, "/")[2]]++
		// A pod or ConfigMap without its namespace object could be read but not written.
		if accessor, ok := obj.(interface{ GetNamespace() string }); ok && accessor.GetNamespace() != "" {
			if ns := "/registry/namespaces/" + accessor.GetNamespace(); !keys[ns] {
				t.Errorf("%s is not preceded by %s", key, ns)
			}
		}
		if obj.GetObjectKind().GroupVersionKind().Kind == "" {
			t.Errorf("%s has no kind", key)
		}
	}
	if len(keys) != s.Len() || perResource["configmaps"] != 30 || perResource["pods"] != 20 || perResource["namespaces"] != 5 || perResource[group] != 10 {
		t.Errorf("%d keys (Len is %d): %v", len(keys), s.Len(), perResource)
	}
}

func TestPodAndThing_HaveTypicalSize(t *testing.T) {
	for name, o := range map[string]runtime.Object{"pod": Pod(5, 5_000, 100), "custom resource": Thing(5, 100)} {
		value, err := Encode(o)
		testcheck.NoError(t, err)
		if len(value) < 2_300 || len(value) > 2_700 {
			t.Errorf("a %s has %d bytes, want about 2,500", name, len(value))
		}
		if metadata, err := meta.Accessor(o); err != nil || len(metadata.GetManagedFields()) != 3 {
			t.Errorf("a %s: %v, managed fields %v", name, err, metadata.GetManagedFields())
		}
	}
}
