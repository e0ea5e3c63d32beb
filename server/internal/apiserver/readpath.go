package apiserver

import (
	"context"
	"fmt"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/peerproxy"
	"k8s.io/client-go/tools/cache"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/flowcontrol"
	"k8s.io/kubernetes/pkg/apis/storage"
	"k8s.io/kubernetes/pkg/printers"
	printersinternal "k8s.io/kubernetes/pkg/printers/internalversion"
	printerstorage "k8s.io/kubernetes/pkg/printers/storage"

	"github.com/stratakube/strata/kube/readpath"
)

// chainResolver returns the resolver configuration of the byte read path for the server chain of
// kube-apiserver. The read path is a handler of the outermost server, the aggregator. It runs after
// the aggregator's filters and before its routing between itself, the delegated servers and the
// servers named by APIServices.
func chainResolver(follow *followedInformers) readpath.ResolverOptions {
	resolver := builtInResolver()
	resolver.Definition, resolver.Local = follow.definition, follow.remote.local
	return resolver
}

// builtInResolver returns the resolver configuration of built-in kinds.
func builtInResolver() readpath.ResolverOptions {
	tables := rowTables{printerstorage.TableConvertor{TableGenerator: printers.NewTableGenerator().With(printersinternal.AddHandlers)}}
	return readpath.ResolverOptions{BuiltIn: builtInKinds(), Tables: tables}
}

// rowTables makes tables of the kinds whose registries print lists row by row.
type rowTables struct{ printerstorage.TableConvertor }

// ConvertToTable implements rest.TableConvertor.
func (t rowTables) ConvertToTable(ctx context.Context, obj, opts runtime.Object) (*metav1.Table, error) {
	switch obj.(type) {
	case *flowcontrol.FlowSchemaList: // sorted
	case *storage.CSIStorageCapacityList: // the registry has the default columns
	default:
		return t.TableConvertor.ConvertToTable(ctx, obj, opts)
	}
	return nil, fmt.Errorf("%T is not printed row by row", obj)
}

// builtInKinds returns the kinds that upstream's three servers install.
func builtInKinds() []readpath.Kinds {
	return []readpath.Kinds{
		kindsOf(legacyscheme.Scheme, legacyscheme.Codecs),
		kindsOf(apiextensionsapiserver.Scheme, apiextensionsapiserver.Codecs),
		kindsOf(aggregatorscheme.Scheme, aggregatorscheme.Codecs),
	}
}

// kindsOf returns the kinds of a scheme with the serializer that upstream's servers install for
// them.
func kindsOf(scheme *runtime.Scheme, codecs serializer.CodecFactory) readpath.Kinds {
	info := genericapiserver.NewDefaultAPIGroupInfo("", scheme, metav1.ParameterCodec, codecs)
	return readpath.Kinds{Scheme: scheme, Serializer: info.NegotiatedSerializer}
}

// followedInformers gives access to the informer caches that determine the resources served by
// upstream's servers: those of CustomResourceDefinitions and of APIServices. They are created
// inside of app.CreateServerChain and not exported. Separate informers could lag behind them, and
// the byte path would then continue to serve a resource that upstream has just stopped serving.
// Both informers are exposed in one place: the aggregator registers handlers on them with the peer
// proxy. Therefore followedInformers takes the place of that proxy, and forwards to it if there is
// one. (Reimplementing app.CreateServerChain instead would mean copying and maintaining its table
// of priorities.)
type followedInformers struct {
	peerproxy.Interface

	definitionInformer cache.SharedIndexInformer
	definitions        cache.Indexer // of definitionInformer
	remote             *remoteVersions
	changed            []func() // see onChange
}

// install replaces the peer proxy. The two Register methods of followedInformers are called before
// the server serves.
func (f *followedInformers) install(config *app.Config) {
	extra := &config.Aggregator.ExtraConfig
	f.Interface = extra.PeerProxy
	if f.Interface == nil { // without --peer-ca-file
		f.Interface = noPeers{}
	}
	extra.PeerProxy = f
}

// noPeers is the peer proxy of a server without peers. Only the aggregator uses it: it reads the
// peers' discovery documents, of which there are none to merge.
type noPeers struct{ peerproxy.Interface }

// GetPeerResources implements peerproxy.Interface.
func (noPeers) GetPeerResources() map[string][]apidiscoveryv2.APIGroupDiscovery { return nil }

// RegisterCacheInvalidationCallback implements peerproxy.Interface. The callback is never called:
// the empty set of peers does not change.
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
	f.definitionInformer, f.definitions = informer, informer.GetIndexer()
	if err := f.notify(informer); err != nil {
		return err
	}
	return f.Interface.RegisterCRDInformerHandlers(informer, extractor)
}

// RegisterAPIServiceInformerHandlers implements peerproxy.Interface.
func (f *followedInformers) RegisterAPIServiceInformerHandlers(informer cache.SharedIndexInformer, extractor peerproxy.GVExtractor) error {
	if err := f.remote.follow(informer); err != nil {
		return err
	}
	if err := f.notify(informer); err != nil {
		return err
	}
	return f.Interface.RegisterAPIServiceInformerHandlers(informer, extractor)
}

// onChange adds a function to call when an informer has seen a change. It must be called before the
// informers are registered.
func (f *followedInformers) onChange(changed func()) { f.changed = append(f.changed, changed) }

// notify calls the functions of onChange for each event of an informer.
func (f *followedInformers) notify(informer cache.SharedIndexInformer) error {
	if len(f.changed) == 0 {
		return nil
	}
	call := func() {
		for _, changed := range f.changed {
			changed()
		}
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { call() }, UpdateFunc: func(any, any) { call() }, DeleteFunc: func(any) { call() },
	})
	if err != nil {
		return fmt.Errorf("watch definitions: %w", err)
	}
	return nil
}

// converts reports whether the definition of a custom resource names a conversion webhook, or is
// not known. Upstream makes the storages of a definition again when that changes.
func (f *followedInformers) converts(resource schema.GroupResource) bool {
	if f.definitions == nil {
		return true
	}
	def := f.definition(resource.String())
	return def == nil || def.Spec.Conversion != nil && def.Spec.Conversion.Strategy == apiextensionsv1.WebhookConverter
}

// definition returns a definition from the cache that upstream's custom resource handler uses, or
// nil.
func (f *followedInformers) definition(name string) *apiextensionsv1.CustomResourceDefinition {
	obj, ok, err := f.definitions.GetByKey(name)
	if err != nil || !ok {
		return nil
	}
	return obj.(*apiextensionsv1.CustomResourceDefinition)
}
