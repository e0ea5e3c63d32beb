package main

import (
	"context"
	"fmt"
	"net"

	generatedopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
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
	openapi "k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
)

var (
	scheme = runtime.NewScheme()
	codecs = serializer.NewCodecFactory(scheme)
)

func init() {
	install.Install(scheme)
	scheme.AddKnownTypes(example.SchemeGroupVersion, &example.PodList{}) // which install leaves out
	scheme.AddKnownTypes(examplev1.SchemeGroupVersion, &examplev1.PodList{})
	v1 := schema.GroupVersion{Version: "v1"} // where every API server has these
	metav1.AddToGroupVersion(scheme, v1)
	scheme.AddUnversionedTypes(v1, &metav1.Status{}, &metav1.APIVersions{}, &metav1.APIGroupList{}, &metav1.APIGroup{}, &metav1.APIResourceList{})
}

// server is the API server and the engine of its storages.
type server struct {
	*genericapiserver.GenericAPIServer
	engine *kubestorage.Engine
}

func newServer(etcdServers []string, listener net.Listener, kubeconfig string) (*server, error) {
	config := genericapiserver.NewRecommendedConfig(codecs)
	config.EffectiveVersion = compatibility.DefaultBuildEffectiveVersion()
	config.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(definitions, openapinamer.NewDefinitionNamer(scheme))

	serving := genericoptions.NewSecureServingOptions().WithLoopback()
	serving.Listener, serving.BindPort = listener, listener.Addr().(*net.TCPAddr).Port
	serving.ServerCert.CertDirectory = "" // in memory
	if err := serving.MaybeDefaultWithSelfSignedCerts("localhost", nil, []net.IP{net.IPv4(127, 0, 0, 1)}); err != nil {
		return nil, fmt.Errorf("create certificate: %w", err)
	}
	if err := serving.ApplyTo(&config.SecureServing, &config.LoopbackClientConfig); err != nil {
		return nil, err
	}
	if err := protect(&config.Config, kubeconfig); err != nil {
		return nil, err
	}
	etcd := genericoptions.NewEtcdOptions(storagebackend.NewDefaultConfig("/registry/example", codecs.LegacyCodec(examplev1.SchemeGroupVersion)))
	etcd.StorageConfig.Transport.ServerList = etcdServers
	if err := etcd.ApplyTo(&config.Config); err != nil {
		return nil, err
	}
	group := genericapiserver.NewDefaultAPIGroupInfo(example.GroupName, scheme, metav1.ParameterCodec, codecs)

	// The one statement that other API servers do not have: from here on, the engine makes the
	// storages and answers reads.
	engine := readpath.Attach(&config.Config, kubestorage.Options{}, readpath.Kinds{Scheme: scheme, Serializer: group.NegotiatedSerializer})

	s := &server{engine: engine}
	var err error
	if s.GenericAPIServer, err = config.Complete().New("example", genericapiserver.NewEmptyDelegate()); err != nil {
		engine.Close()
		return nil, err
	}
	pods, err := newPods(config.RESTOptionsGetter)
	if err != nil {
		s.close()
		return nil, err
	}
	group.VersionedResourcesStorageMap["v1"] = map[string]rest.Storage{"pods": struct{ podStorage }{pods}}
	if err := s.InstallAPIGroup(&group); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// protect delegates authentication and authorization to the API server of kubeconfig, which
// forwards requests in the name of their users, as any aggregated API server does. Without a
// kubeconfig all requests are allowed.
func protect(config *genericapiserver.Config, kubeconfig string) error {
	if kubeconfig == "" {
		config.Authentication.Authenticator = anonymous.NewAuthenticator(nil)
		config.Authorization.Authorizer = authorizerfactory.NewAlwaysAllowAuthorizer()
		return nil
	}
	authentication := genericoptions.NewDelegatingAuthenticationOptions()
	authentication.RemoteKubeConfigFile = kubeconfig
	if err := authentication.ApplyTo(&config.Authentication, config.SecureServing, config.OpenAPIConfig); err != nil {
		return fmt.Errorf("delegate authentication: %w", err)
	}
	authorization := genericoptions.NewDelegatingAuthorizationOptions().WithAlwaysAllowPaths("/healthz", "/livez", "/readyz")
	authorization.RemoteKubeConfigFile = kubeconfig
	if err := authorization.ApplyTo(&config.Authorization); err != nil {
		return fmt.Errorf("delegate authorization: %w", err)
	}
	return nil
}

// definitions are the schemas of the resource, which a real server generates, and the common ones.
func definitions(ref openapi.ReferenceCallback) map[string]openapi.OpenAPIDefinition {
	all := generatedopenapi.GetOpenAPIDefinitions(ref)
	anything := spec.Schema{
		SchemaProps:      spec.SchemaProps{Type: spec.StringOrArray{"object"}},
		VendorExtensible: spec.VendorExtensible{Extensions: spec.Extensions{"x-kubernetes-preserve-unknown-fields": true}},
	}
	for _, kind := range []string{"Pod", "PodList"} {
		// Since v0.37 the types name their models themselves; before, it was by package.
		all["io.k8s.apiserver.pkg.apis.example.v1."+kind] = openapi.OpenAPIDefinition{Schema: anything}
		all["k8s.io/apiserver/pkg/apis/example/v1."+kind] = openapi.OpenAPIDefinition{Schema: anything}
	}
	return all
}

// close is for a server that is never run.
func (s *server) close() {
	s.Destroy()
	s.engine.Close()
}

// podStorage is the set of verbs that pods support: all but updates.
type podStorage interface {
	rest.Storage
	rest.Scoper
	rest.SingularNameProvider
	rest.Creater
	rest.Getter
	rest.Lister
	rest.Watcher
	rest.GracefulDeleter
}

// newPods returns the registry of pods, as in any other API server.
func newPods(options generic.RESTOptionsGetter) (podStorage, error) {
	gr := schema.GroupResource{Group: example.GroupName, Resource: "pods"}
	strategy := podStrategy{scheme, names.SimpleNameGenerator}
	store := &genericregistry.Store{
		NewFunc:                   func() runtime.Object { return &example.Pod{} },
		NewListFunc:               func() runtime.Object { return &example.PodList{} },
		PredicateFunc:             matchPod,
		DefaultQualifiedResource:  gr,
		SingularQualifiedResource: schema.GroupResource{Group: gr.Group, Resource: "pod"},
		CreateStrategy:            strategy,
		DeleteStrategy:            strategy,
		TableConvertor:            rest.NewDefaultTableConvertor(gr),
	}
	err := store.CompleteWithOptions(&generic.StoreOptions{RESTOptions: options, AttrFunc: storage.DefaultNamespaceScopedAttr})
	if err != nil {
		return nil, fmt.Errorf("create registry of %s: %w", gr, err)
	}
	return store, nil
}

func matchPod(label labels.Selector, field fields.Selector) storage.SelectionPredicate {
	return storage.SelectionPredicate{Label: label, Field: field, GetAttrs: storage.DefaultNamespaceScopedAttr}
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
