package apiserver

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/pflag"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage/cacher/consistency"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/pkg/controlplane"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/listadmission"
	"github.com/stratakube/strata/kube/loadshed"
	"github.com/stratakube/strata/kube/readpath"
)

// EngineVariable is the environment variable that AttachmentFromEnvironment reads. It has a value
// of --engine.
const EngineVariable = "STRATA_ENGINE"

// Attachment connects an engine to the configuration of one server that is assembled by other code:
//
//	Options ─▶ app.NewConfig ─▶ Chain, ControlPlane or Extensions ─▶ Complete ─▶ ... ─▶ Run returns ─▶ Close
//
// With --engine=upstream the overrides of etcd are applied, and every method does nothing else. The
// methods are called in this order, by one goroutine at a time.
type Attachment struct {
	settings   *settings
	overrides  overrides
	etcd       *genericoptions.EtcdOptions
	compaction time.Duration
	engine     *kubestorage.Engine // nil with upstream's engine, before attach, and after Close

	stopShedding func()             // set with engine
	follow       *followedInformers // set by Chain, with the engine strata
}

// AttachmentFromEnvironment returns an Attachment with default flags, except for the engine, which
// EngineVariable names (upstream if unset), and the interval of consistency checks, which is
// upstream's. Kubernetes' integration tests start their servers with it, so that one test binary
// runs on both engines. Events are cached.
func AttachmentFromEnvironment() (*Attachment, error) {
	s := newSettings()
	s.engine = engineUpstream
	if value := os.Getenv(EngineVariable); value != "" {
		if err := s.engine.Set(value); err != nil {
			return nil, fmt.Errorf("%s: %w", EngineVariable, err)
		}
	}
	s.limits.fit(&pflag.FlagSet{}, memoryLimit())
	// upstream has no flag for the interval; its tests set the variable
	s.checks.interval = consistency.CheckPeriod
	klog.InfoS("Starting a server", "engine", s.engine)
	return s.attachment(), nil
}

func (s *settings) attachment() *Attachment { return &Attachment{settings: s} }

// Options removes compaction from the completed options, since the engine does it in place of
// upstream's storage, and the exclusion of events from memory, unless the user has given a size.
// Error: an invalid override of etcd.
func (a *Attachment) Options(etcd *genericoptions.EtcdOptions) (err error) {
	if a.overrides, err = parseOverrides(etcd); err != nil {
		return err
	}
	a.etcd = etcd
	if a.settings.engine == engineStrata {
		a.compaction = takeCompaction(etcd)
		if !a.settings.sizesOfEvents {
			cacheEvents(etcd)
		}
	}
	return nil
}

// Chain attaches the engine to the server chain of kube-apiserver.
func (a *Attachment) Chain(config *app.Config) error {
	if a.settings.engine == engineStrata {
		skipBootstrapWaits(config)
		a.follow = &followedInformers{remote: newRemoteVersions()}
		a.follow.install(config)
		kube := config.KubeAPIs.ControlPlane.Generic
		if err := a.overrides.installChecks(a.etcd.StorageConfig, kube.DrainedNotify(),
			kube, &config.ApiExtensions.GenericConfig.Config, &config.Aggregator.GenericConfig.Config); err != nil {
			return err
		}
	}
	getters := []*generic.RESTOptionsGetter{
		&config.KubeAPIs.ControlPlane.Generic.RESTOptionsGetter,
		&config.Aggregator.GenericConfig.RESTOptionsGetter,
		&config.ApiExtensions.GenericConfig.RESTOptionsGetter,
		&config.ApiExtensions.ExtraConfig.CRDRESTOptionsGetter,
	}
	return a.attach(&config.Aggregator.GenericConfig.Config, getters, a.follow.converts, &config.KubeAPIs.Extra, func() readpath.ResolverOptions {
		return chainResolver(a.follow) // nil with upstream's engine
	})
}

// ControlPlane attaches the engine to a kube-apiserver without aggregator and custom resources.
func (a *Attachment) ControlPlane(config *controlplane.Config) error {
	outermost := config.ControlPlane.Generic
	return a.attach(outermost, []*generic.RESTOptionsGetter{&outermost.RESTOptionsGetter}, nil, &config.Extra, builtInResolver)
}

// Extensions attaches the engine to a standalone server of custom resources. Before the server
// runs, its CustomResourceDefinition informer must be passed to setDefinitions.
func (a *Attachment) Extensions(config *apiextensionsapiserver.Config) (setDefinitions func(cache.SharedIndexInformer), err error) {
	outermost := &config.GenericConfig.Config
	getters := []*generic.RESTOptionsGetter{&outermost.RESTOptionsGetter, &config.ExtraConfig.CRDRESTOptionsGetter}
	follow := &followedInformers{}
	err = a.attach(outermost, getters, follow.converts, nil, func() readpath.ResolverOptions {
		return readpath.ResolverOptions{BuiltIn: builtInKinds(), Definition: follow.definition}
	})
	return func(informer cache.SharedIndexInformer) { follow.definitions = informer.GetIndexer() }, err
}

// attach creates the engine, makes the getters return storages of the engine, and installs load
// shedding and the read path in front of the handlers of outermost, the server that all requests
// pass first. getters must contain all getters from which the server creates storages; the getters
// of the uncompleted configuration are complete.
//
// The allocators of service addresses and node ports, and the leases of API server endpoints, are
// not resources. They use etcd directly, as upstream does (generic.NewRawStorage and
// reconcilers.NewLeases).
//
// converts is kubestorage.Options.Converts; extra configures the registries of built-in kinds, nil
// if the server has none.
func (a *Attachment) attach(outermost *genericapiserver.Config, getters []*generic.RESTOptionsGetter, converts func(schema.GroupResource) bool,
	extra *controlplane.Extra, resolver func() readpath.ResolverOptions) error {
	s := a.settings
	for _, getter := range getters {
		// also with upstream's engine, which would otherwise read custom resources from another
		// etcd
		*getter = a.overrides.getter(*getter)
	}
	if s.engine != engineStrata {
		return nil
	}
	transformer, err := secretsTransformer(*getters[0])
	if err != nil {
		return err
	}
	options, err := s.engineOptions(a.etcd, transformer, a.overrides.deferrable)
	if err != nil {
		return err
	}
	options.Converts = converts
	if options.Kinds, err = kinds(extra); err != nil {
		return err
	}
	a.engine = kubestorage.New(options)
	for _, getter := range getters {
		*getter = a.engine.RESTOptionsGetter(compacted{*getter, a.compaction})
	}
	a.stopShedding = loadshed.Install(outermost)
	lists := listadmission.New(s.limits.listBytes.Value())
	if s.gates.Enabled(kubestorage.ByteReadPath) {
		config := resolver()
		config.Engine = a.engine
		readpath.New(readpath.Options{Lists: lists, Resolver: readpath.NewResolver(config)}).Mount(outermost)
	} else {
		readpath.BoundDecoded(outermost, lists)
	}
	if s.sessions != nil {
		// after the read path, which replaces upstream's chain only
		attachSessions(outermost, s.sessions)
	}
	readpath.DrainOnShutdown(outermost, a.engine, s.limits.progressTimeout)
	return nil
}

// Mount installs the endpoints of consistency checks and of the status, and the console, in the
// outermost server of a chain.
func (a *Attachment) Mount(chain *aggregatorapiserver.APIAggregator) {
	if a.engine != nil {
		mountConsistency(chain, a.engine)
		mountStatus(chain, a.engine)
		mountConsole(chain, a.settings.sessions)
	}
}

// AwaitMemory returns when the cache is loaded, when a load has failed, after loadPatience without
// data from etcd, or when ctx ends. The server then also starts while etcd is down, and serves
// requests that do not need etcd.
func (a *Attachment) AwaitMemory(ctx context.Context) {
	if a.engine == nil {
		return
	}
	if err := a.engine.WaitLoaded(ctx, loadPatience); err != nil {
		klog.InfoS("Starting to serve before the cache is loaded", "err", err)
	}
}

// loadPatience is longer than the time in which a busy etcd sends the first event of a long
// history, and shorter than the 10 s limit of hooks.
const loadPatience = 5 * time.Second

// Close closes the engine. The server must have stopped before, because stopping it destroys its
// storages. A second call has no effect.
func (a *Attachment) Close() {
	if a.engine != nil {
		a.engine.Close()
		a.stopShedding()
	}
	*a = Attachment{settings: a.settings} // who keeps it keeps nothing of the server
}
