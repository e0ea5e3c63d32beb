package objects

import (
	"bytes"
	"io"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
)

// TestCachingObject_CBOR_VariesPerWatch: JSON is encoded once for all watches, CBOR for each, with
// keys in an order that varies.
func TestCachingObject_CBOR_VariesPerWatch(t *testing.T) {
	scheme := runtime.NewScheme()
	utilruntime.Must(example.AddToScheme(scheme))
	utilruntime.Must(examplev1.AddToScheme(scheme))
	codecs := serializer.NewCodecFactory(scheme)
	encode := func(s runtime.Serializer) (encoded [][]byte, times int) {
		encoder := codecs.EncoderForVersion(runtime.UseNondeterministicEncoding(s), examplev1.SchemeGroupVersion)
		pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: "shared", Annotations: map[string]string{"hello": "world", "foo": "bar"}}}
		obj := share(pod).(*CachingObject)
		for range 64 {
			var buf bytes.Buffer
			err := obj.CacheEncode(encoder.Identifier(), func(obj runtime.Object, w io.Writer) error {
				times++
				return encoder.Encode(obj, w)
			}, &buf)
			if err != nil {
				t.Fatal(err)
			}
			encoded = append(encoded, buf.Bytes())
		}
		return encoded, times
	}
	varies := func(encoded [][]byte) bool {
		for _, data := range encoded {
			if !bytes.Equal(data, encoded[0]) {
				return true
			}
		}
		return false
	}
	if encoded, _ := encode(cbor.NewSerializer(scheme, scheme)); !varies(encoded) {
		t.Error("all watches get the same CBOR")
	}
	encoded, times := encode(json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, json.SerializerOptions{}))
	if varies(encoded) || times != 1 {
		t.Errorf("JSON was encoded %d times", times)
	}
}
