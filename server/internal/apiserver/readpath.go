package apiserver

import (
	"net/http"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	genericfeatures "k8s.io/apiserver/pkg/features"
	genericapiserver "k8s.io/apiserver/pkg/server"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/util/peerproxy"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/pkg/api/legacyscheme"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
)

// mountReadPath puts the byte read path into the chain of handlers of config's outermost server, the aggregator, which
// all requests pass: behind its filters, and in front of its choice between itself, the servers behind it and those that
// APIServices name.
func mountReadPath(config *app.Config, engine *kubestorage.Engine) error {
	decorators, err := readDecorators(config.KubeAPIs.Extra)
	if err != nil {
		return err
	}
	follow := &followedInformers{remote: newRemoteVersions()}
	if !follow.install(config) {
		klog.InfoS("Reads are answered by upstream's handlers, because of the feature gate UnknownVersionInteroperabilityProxy without --peer-ca-file")
		return nil
	}
	generic := &config.Aggregator.GenericConfig.Config
	reads := readpath.New(readpath.Config{
		Resolver: readpath.NewResolver(readpath.ResolverConfig{
			Engine: engine,
			BuiltIn: []readpath.Kinds{
				kindsOf(legacyscheme.Scheme, legacyscheme.Codecs),
				kindsOf(apiextensionsapiserver.Scheme, apiextensionsapiserver.Codecs),
				kindsOf(aggregatorscheme.Scheme, aggregatorscheme.Codecs),
			},
			Definition: follow.definition,
			Local:      follow.remote.local,
			Decorators: decorators,
		}),
		MinRequestTimeout: time.Duration(generic.MinRequestTimeout) * time.Second,
	})
	full := generic.BuildHandlerChainFunc
	generic.BuildHandlerChainFunc = func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		return readpath.BuildHandlerChain(apiHandler, c, readpath.ChainOptions{Full: full, Mount: reads.Handler})
	}
	return nil
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
	peerproxy.Interface // nil without --peer-ca-file

	definitions cache.Indexer
	remote      *remoteVersions
}

// install takes the proxy's place, and reports whether that can be done. Before the server serves, both methods below
// will have been called.
func (f *followedInformers) install(config *app.Config) bool {
	extra := &config.Aggregator.ExtraConfig
	if extra.PeerProxy == nil && utilfeature.DefaultFeatureGate.Enabled(genericfeatures.UnknownVersionInteroperabilityProxy) {
		return false // the aggregator takes that gate and a proxy for a whole one, and asks it for more
	}
	f.Interface = extra.PeerProxy
	extra.PeerProxy = f
	return true
}

// RegisterCRDInformerHandlers implements peerproxy.Interface.
func (f *followedInformers) RegisterCRDInformerHandlers(informer cache.SharedIndexInformer, extractor peerproxy.GVExtractor) error {
	f.definitions = informer.GetIndexer()
	if f.Interface == nil {
		return nil
	}
	return f.Interface.RegisterCRDInformerHandlers(informer, extractor)
}

// RegisterAPIServiceInformerHandlers implements peerproxy.Interface.
func (f *followedInformers) RegisterAPIServiceInformerHandlers(informer cache.SharedIndexInformer, extractor peerproxy.GVExtractor) error {
	if err := f.remote.follow(informer); err != nil {
		return err
	}
	if f.Interface == nil {
		return nil
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
