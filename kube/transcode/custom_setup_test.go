package transcode_test

import (
	"bytes"
	"testing"

	"go.opentelemetry.io/otel/trace/noop"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/fake"
	"k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/upstream"
	"github.com/stratakube/strata/kube/transcode"
)

var widget = schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"}

// customKind is a kind of custom resources, with upstream's codec of its storage.
type customKind struct {
	*transcode.Custom
	codec runtime.Codec
}

// newCustomKind returns the kind of widgets with a schema.
func newCustomKind(t testing.TB, props *apiextensionsv1.JSONSchemaProps) customKind {
	t.Helper()
	def := &apiextensionsv1.CustomResourceDefinition{}
	def.Name, def.UID = "widgets.example.com", "1"
	def.Spec = apiextensionsv1.CustomResourceDefinitionSpec{
		Group: widget.Group, Scope: apiextensionsv1.NamespaceScoped,
		Names:      apiextensionsv1.CustomResourceDefinitionNames{Plural: "widgets", Singular: "widget", Kind: widget.Kind, ListKind: "WidgetList"},
		Conversion: &apiextensionsv1.CustomResourceConversion{Strategy: apiextensionsv1.NoneConverter},
		Versions: []apiextensionsv1.CustomResourceDefinitionVersion{
			{Name: "v1", Served: true, Storage: true, Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: props}},
		},
	}
	def.Status.AcceptedNames = def.Spec.Names
	informer := externalversions.NewSharedInformerFactory(fake.NewClientset(), 0).Apiextensions().V1().CustomResourceDefinitions()
	testcheck.NoError(t, informer.Informer().GetIndexer().Add(def))
	options := &capturedOptions{}
	handler, err := apiserver.NewCustomResourceDefinitionHandler(nil, nil, informer, nil, options, nil, nil,
		webhook.NewDefaultServiceResolver(), webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, nil, nil, noop.NewTracerProvider()), 1, nil, 0, 0, nil, 1<<20)
	testcheck.NoError(t, err)
	if _, err := handler.GetCustomResourceListerCollectionDeleter(def); err != nil {
		t.Fatal(err)
	}
	custom, err := transcode.NewCustom(widget, props)
	testcheck.NoError(t, err)
	return customKind{custom, options.codec}
}

// capturedOptions keeps the codec of the storage that upstream's handler would open.
type capturedOptions struct{ codec runtime.Codec }

// GetRESTOptions implements generic.RESTOptionsGetter.
func (o *capturedOptions) GetRESTOptions(resource schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return generic.RESTOptions{
		StorageConfig:  &storagebackend.ConfigForResource{Config: storagebackend.Config{Codec: unstructured.UnstructuredJSONScheme}, GroupResource: resource},
		ResourcePrefix: resource.String(),
		Decorator: upstream.Decorator(func(config *storagebackend.ConfigForResource, _ string, _ upstream.ReverseKeyFunc, _, _ func() runtime.Object,
			_ storage.AttrFunc, _ *cache.Indexers) (storage.Interface, factory.DestroyFunc, error) {
			o.codec = config.Codec
			return nil, func() {}, nil
		}),
	}, nil
}

// served returns a stored object as an item of a list, as upstream decodes and encodes it. Not ok:
// it cannot be decoded.
func (k customKind) served(t testing.TB, stored []byte, rev int64) (item []byte, ok bool) {
	t.Helper()
	obj := &unstructured.Unstructured{}
	obj.SetGroupVersionKind(widget)
	if err := etcd3.NewDefaultDecoder(k.codec, storage.APIObjectVersioner{}).Decode(stored, obj, rev); err != nil {
		return nil, false
	}
	data, err := runtime.Encode(unstructured.UnstructuredJSONScheme, obj)
	testcheck.NoError(t, err)
	return append(bytes.TrimSuffix(data, []byte("\n")), ','), true
}

// transcoded returns the item that Custom makes of a stored object, "" if it is declined. It fails
// if the item differs from upstream's.
func (k customKind) transcoded(t testing.TB, stored []byte) string {
	t.Helper()
	got, ok := k.AppendItem([]byte("x"), stored, 12345)
	if !ok {
		if string(got) != "x" {
			t.Fatalf("declined with %q", got)
		}
		return ""
	}
	if want, ok := k.served(t, stored, 12345); !ok || string(got[1:]) != string(want) {
		t.Fatalf("%s is transcoded to\n%s, want %v\n%s", stored, got[1:], ok, want)
	}
	return string(got[1:])
}
