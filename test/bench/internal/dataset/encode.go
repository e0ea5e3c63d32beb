package dataset

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	// registers the types, their conversions and defaults
	_ "k8s.io/kubernetes/pkg/apis/core/install"
)

// storageCodec is the codec with which kube-apiserver stores the core group: protobuf of version v1
// behind the four bytes "k8s\0".
var storageCodec = legacyscheme.Codecs.CodecForVersions(
	protobuf.NewSerializer(legacyscheme.Scheme, legacyscheme.Scheme),
	legacyscheme.Codecs.UniversalDeserializer(),
	corev1.SchemeGroupVersion, runtime.InternalGroupVersioner,
)

// Encode returns obj, a versioned object of the core group, as kube-apiserver stores it in etcd:
// defaulted, in protobuf, and without a resource version, which in etcd is the key's revision. It
// sets the defaults in obj. An unstructured object is stored in JSON, as custom resources and their
// definitions are.
func Encode(obj runtime.Object) ([]byte, error) {
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return runtime.Encode(unstructured.UnstructuredJSONScheme, u)
	}
	legacyscheme.Scheme.Default(obj)
	data, err := runtime.Encode(storageCodec, obj)
	if err != nil {
		return nil, fmt.Errorf("encode %T for storage: %w", obj, err)
	}
	return data, nil
}
