package samebytes

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stratakube/strata/test/harness"
)

// mediaType is an Accept header, for an object and for a list.
type mediaType struct {
	name         string
	object, list string
}

// transformed returns a media type that asks for another kind of object.
func transformed(name, encoding, object, list, version string) mediaType {
	as := func(kind string) string { return fmt.Sprintf("%s;as=%s;v=%s;g=meta.k8s.io", encoding, kind, version) }
	return mediaType{name, as(object), as(list)}
}

const (
	jsonType     = "application/json"
	yamlType     = "application/yaml"
	cborType     = "application/cbor"
	protobufType = "application/vnd.kubernetes.protobuf"
)

// media are all media types that the tests accept.
var media = []mediaType{
	{"json", jsonType, jsonType},
	{"protobuf", protobufType, protobufType},
	{"yaml", yamlType, yamlType},
	{"cbor", cborType, cborType},
	{"unsaid", "", ""},
	transformed("metadata-v1-json", jsonType, "PartialObjectMetadata", "PartialObjectMetadataList", "v1"),
	transformed("metadata-v1-protobuf", protobufType, "PartialObjectMetadata", "PartialObjectMetadataList", "v1"),
	transformed("metadata-v1-yaml", yamlType, "PartialObjectMetadata", "PartialObjectMetadataList", "v1"),
	transformed("metadata-v1beta1-json", jsonType, "PartialObjectMetadata", "PartialObjectMetadataList", "v1beta1"),
	transformed("metadata-v1beta1-protobuf", protobufType, "PartialObjectMetadata", "PartialObjectMetadataList", "v1beta1"),
	transformed("table-v1", jsonType, "Table", "Table", "v1"),
	transformed("table-v1beta1", jsonType, "Table", "Table", "v1beta1"),
	transformed("table-v1-yaml", yamlType, "Table", "Table", "v1"),
	transformed("table-protobuf", protobufType, "Table", "Table", "v1"),
}

// fewMedia are the encodings of the byte path.
var fewMedia = slices.DeleteFunc(slices.Clone(media), func(m mediaType) bool {
	return !slices.Contains([]string{"json", "protobuf", "yaml", "metadata-v1-json", "metadata-v1-protobuf", "table-v1"}, m.name)
})

// media returns the media types for tests of the resource: all for a custom resource, for a subject
// of other tests, or in the long form. For other resources the encoders treat all types alike, so
// few media types suffice.
func (r resource) media() []mediaType {
	if harness.Long() || r.custom || slices.ContainsFunc(subjects, func(s subject) bool { return s.gvr == r.gvr }) {
		return media
	}
	return fewMedia
}

// moreMedia are further Accept headers of clients, for some resources.
var moreMedia = []mediaType{
	same("any", "*/*"),
	same("any-application", "application/*"),
	same("garbage", "garbage"),
	same("empty-element", ","),
	same("html", "text/html"),
	same("browser", "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"),
	same("client-go", "application/vnd.kubernetes.protobuf, */*"),
	same("client-go-dynamic", "application/json, */*"),
	same("protobuf-first", "application/vnd.kubernetes.protobuf,application/json"),
	same("json-first", "application/json,application/vnd.kubernetes.protobuf"),
	same("quality-prefers-protobuf", "application/json;q=0.5,application/vnd.kubernetes.protobuf;q=0.9"),
	same("quality-prefers-json", "application/json;q=0.9,application/vnd.kubernetes.protobuf;q=0.5"),
	same("quality-zero", "application/json;q=0"),
	same("quality-garbage", "application/json;q=x"),
	same("charset", "application/json;charset=utf-8"),
	same("upper-case", "APPLICATION/JSON"),
	same("pretty", "application/json;pretty=1"),
	same("pretty-0", "application/json;pretty=0"),
	same("stream", "application/json;stream=watch"),
	same("stream-protobuf", "application/vnd.kubernetes.protobuf;stream=watch"),
	same("stream-other", "application/json;stream=other"),
	same("unknown-parameter", "application/json;unknown=1"),
	same("profile", "application/json;profile=x"),
	same("yaml-then-json", "application/yaml,application/json"),
	same("cbor-then-json", "application/cbor,application/json;q=0.9"),
	same("cbor-sequence", "application/cbor-seq"),
	same("kubectl", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json"),
	same("metadata-client", "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"),
	same("as-unknown", "application/json;as=Foo;v=v1;g=meta.k8s.io"),
	same("as-unknown-then-json", "application/json;as=Foo;v=v1;g=meta.k8s.io,application/json"),
	same("as-unknown-version", "application/json;as=Table;v=v2;g=meta.k8s.io"),
	same("as-unknown-group", "application/json;as=Table;v=v1;g=example.com"),
	same("as-without-group", "application/json;as=Table"),
	same("as-without-version", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io"),
	same("any-as-metadata", "*/*;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"),
	{"wrong-metadata", transformedList, transformedObject},
	same("versioned", "application/json;g=apps;v=v1"),
}

const (
	tableObject       = "application/json;as=Table;g=meta.k8s.io;v=v1"
	transformedObject = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	transformedList   = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

func same(name, accept string) mediaType { return mediaType{name, accept, accept} }

// wire is the HTTP version and the compression of a request.
type wire struct {
	name  string
	http1 bool
	gzip  bool
}

// wires are two combinations that cover both versions of HTTP, and both encodings.
var wires = []wire{{"http2", false, false}, {"http1-gzip", true, true}}

// allWires are all combinations.
var allWires = append(wires, wire{"http1", true, false}, wire{"http2-gzip", false, true})

func (v wire) on(r request) request {
	r.http1, r.gzip = v.http1, v.gzip
	return r
}

// named joins the parts of a case's name.
func named(parts ...string) string { return strings.Join(parts, "/") }
