package readpath_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	generatedopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/apis/example/install"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/authentication/request/anonymous"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/util/compatibility"
	clientrest "k8s.io/client-go/rest"
	openapi "k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
)

// Put an API server on the engine with one statement: storages, reads with cached bytes in front of
// the handlers, and an orderly end of watches on shutdown. kube/examples/apiserver is a whole
// server.
func ExampleAttach() {
	config, group, stop := newServerConfig() // of an API server with the resource pods, on an etcd
	defer stop()

	engine := readpath.Attach(&config.Config, kubestorage.Options{}, readpath.Kinds{Scheme: group.Scheme, Serializer: group.NegotiatedSerializer})
	defer engine.Close()

	// Everything else is as before: complete the configuration, install the API group, serve.
	server := newServer(config, group)
	defer server.Destroy()
	const pods = "/apis/example.apiserver.k8s.io/v1/namespaces/default/pods"
	fmt.Println("create:", send(server, "POST", pods, `{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","metadata":{"name":"web"}}`).Code)
	list := send(server, "GET", pods, "")
	fmt.Println("list:", list.Code, strings.Contains(list.Body.String(), `"name":"web"`))
	// Output:
	// create: 201
	// list: 200 true
}

// newServerConfig starts an etcd and returns the configuration of an API server on it.
func newServerConfig() (config *genericapiserver.RecommendedConfig, group *genericapiserver.APIGroupInfo, stop func()) {
	dir, err := os.MkdirTemp("", "strata-example-")
	must(err)
	socket := filepath.Join(dir, "client.sock")
	etcd := embed.NewConfig()
	etcd.Dir, etcd.UnsafeNoFsync = filepath.Join(dir, "data"), true
	etcd.ListenPeerUrls = nil
	etcd.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	// there are no peers
	etcd.AdvertiseClientUrls = []url.URL{{Scheme: "unix", Host: "localhost:0"}}
	etcd.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	server, err := embed.StartEtcd(etcd)
	must(err)
	<-server.Server.ReadyNotify()

	scheme := runtime.NewScheme()
	install.Install(scheme)
	scheme.AddKnownTypes(example.SchemeGroupVersion, &example.PodList{}) // which install leaves out
	scheme.AddKnownTypes(examplev1.SchemeGroupVersion, &examplev1.PodList{})
	metav1.AddToGroupVersion(scheme, metav1.Unversioned)
	scheme.AddUnversionedTypes(metav1.Unversioned, &metav1.Status{})
	codecs := serializer.NewCodecFactory(scheme)
	config = genericapiserver.NewRecommendedConfig(codecs)
	config.EffectiveVersion = compatibility.DefaultBuildEffectiveVersion()
	config.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(definitions, openapinamer.NewDefinitionNamer(scheme))
	config.ExternalAddress, config.LoopbackClientConfig = "127.0.0.1:443", &clientrest.Config{}
	config.Authentication.Authenticator = anonymous.NewAuthenticator(nil)
	config.Authorization.Authorizer = authorizerfactory.NewAlwaysAllowAuthorizer()
	options := genericoptions.NewEtcdOptions(storagebackend.NewDefaultConfig("/registry", codecs.LegacyCodec(examplev1.SchemeGroupVersion)))
	options.StorageConfig.Transport.ServerList = []string{"unix://" + socket}
	must(options.ApplyTo(&config.Config))
	info := genericapiserver.NewDefaultAPIGroupInfo(example.GroupName, scheme, metav1.ParameterCodec, codecs)
	return config, &info, func() {
		server.Close()
		_ = os.RemoveAll(dir)
	}
}

// definitions are the schemas of the resource, which a real server generates, and the common ones.
func definitions(ref openapi.ReferenceCallback) map[string]openapi.OpenAPIDefinition {
	all := generatedopenapi.GetOpenAPIDefinitions(ref)
	for _, kind := range []string{"Pod", "PodList"} {
		anything := openapi.OpenAPIDefinition{Schema: spec.Schema{SchemaProps: spec.SchemaProps{Type: spec.StringOrArray{"object"}}}}
		all["io.k8s.apiserver.pkg.apis.example.v1."+kind] = anything // since v0.37
		all["k8s.io/apiserver/pkg/apis/example/v1."+kind] = anything
	}
	return all
}

// newServer completes the configuration and installs the resource pods, as in any other API server.
func newServer(config *genericapiserver.RecommendedConfig, group *genericapiserver.APIGroupInfo) *genericapiserver.GenericAPIServer {
	server, err := config.Complete().New("example", genericapiserver.NewEmptyDelegate())
	must(err)
	strategy := podStrategy{group.Scheme, names.SimpleNameGenerator}
	pods := &genericregistry.Store{
		NewFunc:                   func() runtime.Object { return &example.Pod{} },
		NewListFunc:               func() runtime.Object { return &example.PodList{} },
		DefaultQualifiedResource:  example.Resource("pods"),
		SingularQualifiedResource: example.Resource("pod"),
		CreateStrategy:            strategy,
		DeleteStrategy:            strategy,
		TableConvertor:            rest.NewDefaultTableConvertor(example.Resource("pods")),
	}
	must(pods.CompleteWithOptions(&generic.StoreOptions{RESTOptions: config.RESTOptionsGetter, AttrFunc: storage.DefaultNamespaceScopedAttr}))
	group.VersionedResourcesStorageMap["v1"] = map[string]rest.Storage{"pods": struct{ podVerbs }{pods}}
	must(server.InstallAPIGroup(group))
	return server
}

// podVerbs are the verbs of the resource.
type podVerbs interface {
	rest.Storage
	rest.Scoper
	rest.SingularNameProvider
	rest.Creater
	rest.Getter
	rest.Lister
}

// podStrategy accepts every pod.
type podStrategy struct {
	runtime.ObjectTyper
	names.NameGenerator
}

func (podStrategy) NamespaceScoped() bool                                     { return true }
func (podStrategy) Canonicalize(runtime.Object)                               {}
func (podStrategy) PrepareForCreate(context.Context, runtime.Object)          {}
func (podStrategy) Validate(context.Context, runtime.Object) field.ErrorList  { return nil }
func (podStrategy) WarningsOnCreate(context.Context, runtime.Object) []string { return nil }

// send sends a request to the handlers of the server, which does not listen.
func send(server *genericapiserver.GenericAPIServer, method, path, body string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(method, path, strings.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	response := httptest.NewRecorder()
	server.Handler.ServeHTTP(response, req)
	// Again while the server is loading.
	for n := 0; method == http.MethodGet && response.Code == http.StatusTooManyRequests && n < 10; n++ {
		response = httptest.NewRecorder()
		server.Handler.ServeHTTP(response, req)
	}
	return response
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
