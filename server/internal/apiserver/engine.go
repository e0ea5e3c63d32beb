package apiserver

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apiserver/pkg/registry/generic"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/component-base/featuregate"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// engineKind is the value of --engine.
type engineKind string

const (
	engineStrata   engineKind = "strata"
	engineUpstream engineKind = "upstream"
)

func (k *engineKind) String() string { return string(*k) }

func (k *engineKind) Type() string { return "strata|upstream" }

func (k *engineKind) Set(s string) error {
	switch kind := engineKind(s); kind {
	case engineStrata, engineUpstream:
		*k = kind
		return nil
	}
	return fmt.Errorf("must be %s or %s", engineStrata, engineUpstream)
}

// engineOptions returns the options of an engine that does not cache the resources excluded by the
// --watch-cache flags, and that logs with klog. The transformer encrypts the keys of continue
// tokens; deferrable is kubestorage.Options.Deferrable.
func (s *settings) engineOptions(etcd *genericoptions.EtcdOptions, transformer value.Transformer,
	deferrable func(storagebackend.TransportConfig) bool) (kubestorage.Options, error) {
	limits, checks, tokens := s.limits, s.checks, s.tokens
	uncached, err := uncachedResources(etcd)
	if err != nil {
		return kubestorage.Options{}, err
	}
	progress := limits.progressInterval
	if progress == 0 {
		progress = -1 // never
	}
	replay := driver.ReplayBounds{Revisions: limits.replayRevisions, Bytes: limits.replayBytes.Value()}
	if replay.Revisions == 0 {
		replay.Revisions = -1 // none
	}
	options := kubestorage.Options{
		Uncached:   uncached,
		Deferrable: deferrable,
		Window:     mirror.Window{MaxAge: limits.historyAge, MaxBytes: limits.historyBytes.Value()},
		Replay:     replay,

		ConsistencyCheckInterval: checks.orNever(),

		UnclaimedBytes: limits.unclaimedBytes.Value(),

		RepresentationBytes: limits.keptBytes.Value(),
		ProgressInterval:    progress,

		TokenTransformer:  transformer,
		TokenKeyRotation:  tokens.keyRotation,
		RefusePlainTokens: tokens.refusePlain,

		Gates:  s.gates,
		Logger: slog.New(logr.ToSlogHandler(klog.Background())),
	}
	if s.hooks.Engine != nil {
		s.hooks.Engine(&options)
	}
	return options, nil
}

// uncachedResources returns a function that reports whether a resource is served from etcd: all
// resources without --watch-cache, otherwise the resources of size zero in --watch-cache-sizes
// (completion adds events to those, and cacheEvents removes them). Upstream decides this when it
// chooses a storage decorator, which the engine replaces.
func uncachedResources(etcd *genericoptions.EtcdOptions) (func(schema.GroupResource) bool, error) {
	if !etcd.EnableWatchCache {
		return func(schema.GroupResource) bool { return true }, nil
	}
	sizes, err := genericoptions.ParseWatchCacheSizes(etcd.WatchCacheSizes)
	if err != nil {
		return nil, err
	}
	return func(gr schema.GroupResource) bool {
		size, given := sizes[gr]
		return given && size == 0
	}, nil
}

// eventResources are the two names of one resource.
var eventResources = []schema.GroupResource{{Resource: "events"}, {Group: "events.k8s.io", Resource: "events"}}

// namesEvents reports whether sizes, a value of --watch-cache-sizes before completion, contain a
// size of events.
func namesEvents(sizes []string) bool {
	parsed, err := genericoptions.ParseWatchCacheSizes(sizes)
	return err == nil && slices.ContainsFunc(eventResources, func(gr schema.GroupResource) bool { _, ok := parsed[gr]; return ok })
}

// cacheEvents removes the sizes of events from completed options, so that they are held in memory
// as all resources are. Upstream's completion has added a size of zero.
func cacheEvents(etcd *genericoptions.EtcdOptions) {
	etcd.WatchCacheSizes = slices.DeleteFunc(etcd.WatchCacheSizes, func(size string) bool { return namesEvents([]string{size}) })
}

// takeCompaction returns the compaction interval and sets it to 0 in the options, so that only
// getters wrapped by compacted use it. Otherwise each storage that upstream opens itself would
// start upstream's compactor in addition to the engine's.
func takeCompaction(etcd *genericoptions.EtcdOptions) time.Duration {
	interval := etcd.StorageConfig.CompactionInterval
	etcd.StorageConfig.CompactionInterval = 0
	return interval
}

// compacted is a getter that restores the interval removed by takeCompaction.
type compacted struct {
	inner    generic.RESTOptionsGetter
	interval time.Duration
}

func (c compacted) GetRESTOptions(resource schema.GroupResource, example runtime.Object) (generic.RESTOptions, error) {
	opts, err := c.inner.GetRESTOptions(resource, example)
	if err == nil {
		config := *opts.StorageConfig
		config.CompactionInterval = c.interval
		opts.StorageConfig = &config
	}
	return opts, err
}

// gateSet is a feature gate that is also the value of a flag.
type gateSet interface {
	featuregate.MutableFeatureGate
	String() string
	Type() string
}

// newGates returns Strata's own gates, which the engine defines, with their defaults. They are read
// when the engine creates its storages and when the read path is mounted, and not later.
func newGates() gateSet {
	gates := featuregate.NewFeatureGate()
	utilruntime.Must(gates.Add(kubestorage.Gates()))
	return gates
}

func gatesUsage(gates featuregate.FeatureGate) string {
	return "Comma-separated Name=true|false pairs that turn behaviour of the engine on or off. " +
		"Responses are correct with any gate off, and cost more. Options are:\n" +
		strings.Join(gates.KnownFeatures(), "\n")
}
