package apiserver

import (
	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/peerproxy"
	"k8s.io/client-go/tools/cache"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/pkg/api/legacyscheme"

	"github.com/stratakube/strata/kube/readpath"
)

// chainResolver returns how the byte read path resolves requests of the chain of servers that is kube-apiserver. The path
// stands in the chain of handlers of the outermost server, the aggregator: behind its filters, and in front of its choice
// between itself, the servers behind it and those that APIServices name.
func chainResolver(config *app.Config) (readpath.ResolverConfig, error) {
	decorators, err := readDecorators(config.KubeAPIs.Extra)
	if err != nil {
		return readpath.ResolverConfig{}, err
	}
	follow := &followedInformers{remote: newRemoteVersions()}
	follow.install(config)
	return readpath.ResolverConfig{
		BuiltIn:    builtInKinds(),
		Definition: follow.definition,
		Local:      follow.remote.local,
		Decorators: decorators,
	}, nil
}

// builtInKinds returns what upstream's three servers install.
func builtInKinds() []readpath.Kinds {
	return []readpath.Kinds{
		kindsOf(legacyscheme.Scheme, legacyscheme.Codecs),
		kindsOf(apiextensionsapiserver.Scheme, apiextensionsapiserver.Codecs),
		kindsOf(aggregatorscheme.Scheme, aggregatorscheme.Codecs),
	}
}

// kindsOf returns what upstream's servers install for the kinds of a scheme.
func kindsOf(scheme *runtime.Scheme, codecs serializer.CodecFactory) readpath.Kinds {
	info := genericapiserver.NewDefaultAPIGroupInfo("", scheme, metav1.ParameterCodec, codecs)
	return readpath.Kinds{Scheme: scheme, Serializer: info.NegotiatedSerializer}
}

// followedInformers are the caches by which upstream's servers decide what they serve: of CustomResourceDefinitions and
// of APIServices. They are made, and not shown, inside of app.CreateServerChain, and informers of our own could be behind
// them: then the byte path would go on with what upstream has just stopped to serve. There is one place where both are
// handed out. The aggregator tells the proxy to peers about them, so followedInformers stands in for that proxy, and in
// front of it if there is one. (To take app.CreateServerChain apart instead would mean to copy the table of
// priorities that it keeps, and to keep up with it.)
type followedInformers struct {
	peerproxy.Interface

	definitions cache.Indexer
	remote      *remoteVersions
}

// install takes the proxy's place. Before the server serves, both methods below will have been called.
func (f *followedInformers) install(config *app.Config) {
	extra := &config.Aggregator.ExtraConfig
	f.Interface = extra.PeerProxy
	if f.Interface == nil { // without --peer-ca-file
		f.Interface = noPeers{}
	}
	extra.PeerProxy = f
}

// noPeers is the proxy of a server that has no peers. The aggregator asks it for their discovery documents, and merges
// none into its own; nobody else has it.
type noPeers struct{ peerproxy.Interface }

// GetPeerResources implements peerproxy.Interface.
func (noPeers) GetPeerResources() map[string][]apidiscoveryv2.APIGroupDiscovery { return nil }

// RegisterCacheInvalidationCallback implements peerproxy.Interface: what there is of peers never changes.
func (noPeers) RegisterCacheInvalidationCallback(func()) {}

// RegisterCRDInformerHandlers implements peerproxy.Interface.
func (noPeers) RegisterCRDInformerHandlers(cache.SharedIndexInformer, peerproxy.GVExtractor) error {
	return nil
}

// RegisterAPIServiceInformerHandlers implements peerproxy.Interface.
func (noPeers) RegisterAPIServiceInformerHandlers(cache.SharedIndexInformer, peerproxy.GVExtractor) error {
	return nil
}

// RegisterCRDInformerHandlers implements peerproxy.Interface.
func (f *followedInformers) RegisterCRDInformerHandlers(informer cache.SharedIndexInformer, extractor peerproxy.GVExtractor) error {
	f.definitions = informer.GetIndexer()
	return f.Interface.RegisterCRDInformerHandlers(informer, extractor)
}

// RegisterAPIServiceInformerHandlers implements peerproxy.Interface.
func (f *followedInformers) RegisterAPIServiceInformerHandlers(informer cache.SharedIndexInformer, extractor peerproxy.GVExtractor) error {
	if err := f.remote.follow(informer); err != nil {
		return err
	}
	return f.Interface.RegisterAPIServiceInformerHandlers(informer, extractor)
}

// definition returns a definition as upstream's handler of custom resources sees it, or nil.
func (f *followedInformers) definition(name string) *apiextensionsv1.CustomResourceDefinition {
	obj, ok, err := f.definitions.GetByKey(name)
	if err != nil || !ok {
		return nil
	}
	return obj.(*apiextensionsv1.CustomResourceDefinition)
}
