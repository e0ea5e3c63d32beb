package readpath

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured/unstructuredscheme"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/runtime/serializer/versioning"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

// customSerializer offers the media types of custom resources, as upstream's handler of
// them does. It encodes objects that are Unstructured, in the version that they have,
// and Status; it decodes nothing.
type customSerializer struct{ mediaTypes []runtime.SerializerInfo }

var _ runtime.NegotiatedSerializer = customSerializer{}

func newCustomSerializer() customSerializer {
	creator, typer := unstructuredscheme.NewUnstructuredCreator(), unstructuredscheme.NewUnstructuredObjectTyper()
	newJSON := func(o json.SerializerOptions) runtime.Serializer {
		return json.NewSerializerWithOptions(json.DefaultMetaFactory, creator, typer, o)
	}
	s := customSerializer{[]runtime.SerializerInfo{
		{
			MediaType: runtime.ContentTypeJSON, MediaTypeType: "application", MediaTypeSubType: "json", EncodesAsText: true,
			Serializer:       newJSON(json.SerializerOptions{StreamingCollectionsEncoding: true}),
			PrettySerializer: newJSON(json.SerializerOptions{Pretty: true}),
			StreamSerializer: &runtime.StreamSerializerInfo{
				EncodesAsText: true, Serializer: newJSON(json.SerializerOptions{}), Framer: json.Framer,
			},
		},
		{
			MediaType: runtime.ContentTypeYAML, MediaTypeType: "application", MediaTypeSubType: "yaml", EncodesAsText: true,
			Serializer: newJSON(json.SerializerOptions{Yaml: true}),
		},
		{
			MediaType: runtime.ContentTypeProtobuf, MediaTypeType: "application", MediaTypeSubType: "vnd.kubernetes.protobuf",
			Serializer: protobuf.NewSerializerWithOptions(creator, typer, protobuf.SerializerOptions{
				StreamingCollectionsEncoding: true,
			}),
			StreamSerializer: &runtime.StreamSerializerInfo{
				Serializer: protobuf.NewRawSerializer(creator, typer), Framer: protobuf.LengthDelimitedFramer,
			},
		},
	}}
	if utilfeature.DefaultFeatureGate.Enabled(features.CBORServingAndStorage) {
		s.mediaTypes = append(s.mediaTypes, cbor.NewSerializerInfo(creator, typer))
	}
	return s
}

// standard returns the media types of whole objects. Protobuf is supported only for Go types:
// metadata and errors.
func (s customSerializer) standard() []runtime.SerializerInfo {
	var infos []runtime.SerializerInfo
	for _, info := range s.mediaTypes {
		if info.MediaType != runtime.ContentTypeProtobuf {
			infos = append(infos, info)
		}
	}
	return infos
}

func (s customSerializer) SupportedMediaTypes() []runtime.SerializerInfo { return s.mediaTypes }

func (s customSerializer) EncoderForVersion(encoder runtime.Encoder, gv runtime.GroupVersioner) runtime.Encoder {
	return versioning.NewCodec(encoder, nil, unstructuredConvertor{statusScheme}, statusScheme, statusScheme, statusScheme, gv, nil, "strata-custom-resources")
}

// DecoderToVersion returns decoder unchanged; reads do not decode.
func (s customSerializer) DecoderToVersion(decoder runtime.Decoder, gv runtime.GroupVersioner) runtime.Decoder {
	return decoder
}

// statusScheme contains the unversioned objects that may be sent in place of a custom resource.
var statusScheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	v1 := schema.GroupVersion{Version: "v1"}
	metav1.AddToGroupVersion(s, v1)
	s.AddUnversionedTypes(v1, &metav1.Status{}, &metav1.WatchEvent{})
	return s
}()

// unstructuredConvertor does not convert custom resources: they were converted when they were
// decoded.
type unstructuredConvertor struct{ runtime.ObjectConvertor }

func (c unstructuredConvertor) ConvertToVersion(in runtime.Object, gv runtime.GroupVersioner) (runtime.Object, error) {
	if _, ok := in.(runtime.Unstructured); ok {
		return in, nil
	}
	return c.ObjectConvertor.ConvertToVersion(in, gv)
}
