package kubestorage

import (
	"log/slog"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// Options configures an Engine. The zero value serves every resource from memory.
type Options struct {
	// Uncached reports whether a resource is served from etcd and kept out of memory; nil means
	// none is.
	Uncached func(schema.GroupResource) bool
	// Kinds returns what the server knows of the kind of a storage. It is called when a storage is
	// made. nil means nothing is known: objects are decoded as a whole, and none is decorated.
	Kinds kind.Table
	// Converts reports whether reads of a custom resource may call a conversion webhook; nil means
	// that reads of all may. It is called when a storage is made. Conversions of such a resource
	// are detached from its requests.
	Converts func(schema.GroupResource) bool
	// Deferrable reports whether storages of an etcd cluster may be made while it does not answer.
	// Their requests then fail with 503 until it answers. nil means that the creation of a storage
	// fails without its etcd.
	Deferrable func(storagebackend.TransportConfig) bool
	// Window bounds the history kept in memory, per etcd cluster. A zero field means that of
	// mirror.DefaultWindow.
	Window mirror.Window
	// Replay bounds the history that is restored from etcd at the start, per etcd cluster; see
	// mirror.Options. A zero field means that of mirror.DefaultReplay. Negative Revisions or Bytes
	// disable the restore; a negative Pause is no bound.
	Replay driver.ReplayBounds
	// UnclaimedBytes bounds the values kept for resources without a storage so far, per etcd
	// cluster; 0 means mirror.DefaultUnclaimedBytes.
	UnclaimedBytes int64
	// RepresentationBytes bounds the cached representations of objects, for all resources together;
	// 0 means DefaultRepresentationBytes. Beyond that default, they are dropped within a minute
	// after their last read.
	RepresentationBytes int64
	// ProgressInterval is the interval of progress requests to etcd while no events arrive and
	// there are watches with bookmarks; 0 means mirror.DefaultIdleProgress, a negative one disables
	// them.
	ProgressInterval time.Duration
	// ConsistencyCheckInterval is how often each resource in memory is compared with etcd, keys
	// only; up to a half is added at random. 0 means consistency.DefaultInterval, a negative one
	// disables the schedule; see Engine.Checkers.
	ConsistencyCheckInterval time.Duration
	// TokenTransformer encrypts the keys of continue tokens in etcd (gate SealedContinueTokens).
	// Use the transformer of secrets. nil stores the keys in plain text.
	TokenTransformer value.Transformer
	// TokenKeyRotation is the period for which a key seals continue tokens before another is made;
	// 0 disables rotation.
	TokenKeyRotation time.Duration
	// RefusePlainTokens refuses continue tokens that are not sealed.
	RefusePlainTokens bool
	// ReadOnly makes an engine that changes nothing in etcd: writes of its storages return
	// ErrReadOnly, it does not compact, and it makes no keys of continue tokens. Its client of etcd
	// sends no other request than reads. Engine.Lags then reports how far memory is behind.
	ReadOnly bool
	// FeedServer, unless nil, serves the memory of the first etcd cluster that is opened to further
	// engines, in place of that etcd.
	FeedServer *etcdfeed.Server
	// Gates turns behaviour off; it must include Gates(). It is read when a storage is made. nil
	// means the defaults.
	Gates featuregate.FeatureGate
	// Logger receives messages for the operator. Default: slog.Default().
	Logger *slog.Logger
}

// DefaultRepresentationBytes is the default bound of the derived data of all resources of an
// engine.
const DefaultRepresentationBytes = 384 << 20

// Gates of the engine. With a gate off the server is correct, only slower: with the gates of the
// KEPs off, etcd serves reads that memory could have served, or clients relist.
const (
	// ConsistentListFromCache serves a LIST without resource version, and the initial events of
	// watches, from memory (KEP-2340).
	ConsistentListFromCache featuregate.Feature = "ConsistentListFromCache"
	// ConsistentGetFromCache serves a GET without resource version from memory.
	ConsistentGetFromCache featuregate.Feature = "ConsistentGetFromCache"
	// APIListChunking returns lists in pages (KEP-365). Off, limit and continue are ignored, and no
	// token is returned.
	APIListChunking featuregate.Feature = "APIListChunking"
	// ListFromCacheSnapshot serves a LIST at an exact revision, and all pages of a list but the
	// first, from memory (KEP-4988).
	ListFromCacheSnapshot featuregate.Feature = "ListFromCacheSnapshot"
	// SealedContinueTokens encrypts the returned continue tokens, so that they reveal no data and
	// cannot be forged. Servers without this format reject them. This server accepts them
	// regardless of the gate.
	SealedContinueTokens featuregate.Feature = "SealedContinueTokens"
	// DetectCacheInconsistency compares memory with etcd, on a schedule and on demand, and repairs
	// differences (KEP-4988).
	DetectCacheInconsistency featuregate.Feature = "DetectCacheInconsistency"
	// WatchBookmark sends bookmarks to watches that request them: periodically, shortly before the
	// server ends a watch, and when it shuts down (KEP-956). The bookmark that closes initial
	// events is always sent.
	WatchBookmark featuregate.Feature = "WatchBookmark"
	// EfficientWatchResumption lets the published revision follow etcd's progress, so that it
	// advances while no cached key changes (KEP-1904). Off, only events advance it, and reads of
	// the latest revision, which depend on the published revision, go to etcd.
	EfficientWatchResumption featuregate.Feature = "EfficientWatchResumption"
	// WatchHistoryRestore restores history from etcd at the start, so that watches and lists of
	// earlier revisions can be served (the alternative that KEP-1904 set aside).
	WatchHistoryRestore featuregate.Feature = "WatchHistoryRestore"
	// ByteReadPath answers GET, LIST and WATCH with cached bytes, in front of the API server's own
	// handlers (package readpath). The server that mounts package readpath reads this gate;
	// storages do not.
	ByteReadPath featuregate.Feature = "ByteReadPath"
	// ManagedFieldsOptOut lets clients request objects without metadata.managedFields, with the
	// parameter drop=metadata.managedFields of a media type in the Accept header of a GET, LIST or
	// WATCH (KEP-5958). Package readpath reads this gate. It is off until the syntax is final in
	// Kubernetes; without it the parameter has no effect.
	ManagedFieldsOptOut featuregate.Feature = "ManagedFieldsOptOut"
)

// Gates returns the gates of the engine with their defaults, to be added to a feature gate.
func Gates() map[featuregate.Feature]featuregate.FeatureSpec {
	return map[featuregate.Feature]featuregate.FeatureSpec{
		ConsistentListFromCache:  {Default: true, PreRelease: featuregate.Beta},
		ConsistentGetFromCache:   {Default: true, PreRelease: featuregate.Beta},
		APIListChunking:          {Default: true, PreRelease: featuregate.Beta},
		ListFromCacheSnapshot:    {Default: true, PreRelease: featuregate.Beta},
		DetectCacheInconsistency: {Default: true, PreRelease: featuregate.Beta},
		SealedContinueTokens:     {Default: false, PreRelease: featuregate.Beta},
		WatchBookmark:            {Default: true, PreRelease: featuregate.Beta},
		EfficientWatchResumption: {Default: true, PreRelease: featuregate.Beta},
		WatchHistoryRestore:      {Default: true, PreRelease: featuregate.Beta},
		ByteReadPath:             {Default: true, PreRelease: featuregate.Beta},
		ManagedFieldsOptOut:      {Default: false, PreRelease: featuregate.Alpha},
	}
}

// enabled reads a gate; without a feature gate the defaults apply.
func (o *Options) enabled(f featuregate.Feature) bool {
	if o.Gates == nil {
		return Gates()[f].Default
	}
	return o.Gates.Enabled(f)
}

// window returns the bounds of history, with at least the age that upstream's watch cache keeps.
func (o *Options) window(upstream time.Duration) mirror.Window {
	w := o.Window
	if w.MaxAge == 0 {
		w.MaxAge = mirror.DefaultWindow.MaxAge
	}
	if w.MaxBytes == 0 {
		w.MaxBytes = mirror.DefaultWindow.MaxBytes
	}
	w.MaxAge = max(w.MaxAge, upstream)
	return w
}

// replayBounds returns the bounds of the restored history.
func (o *Options) replayBounds() driver.ReplayBounds {
	if !o.enabled(WatchHistoryRestore) {
		return driver.ReplayBounds{Revisions: -1}
	}
	return o.Replay
}

// latestReads are the linearizable reads (no resource version) that are served from memory: LISTs
// with watches' initial events, and GETs. They require that the published revision follows etcd.
type latestReads struct{ lists, gets bool }

// latestReads reads the gates.
func (o *Options) latestReads() latestReads {
	return latestReads{lists: o.enabled(ConsistentListFromCache), gets: o.enabled(ConsistentGetFromCache)}
}

// demanded reports whether the gate was set explicitly, or is locked to its default.
func (o *Options) demanded(f featuregate.Feature) bool {
	if gates, ok := o.Gates.(interface {
		ExplicitlySet(featuregate.Feature) bool
	}); ok && gates.ExplicitlySet(f) {
		return true
	}
	gates, ok := o.Gates.(interface {
		GetAll() map[featuregate.Feature]featuregate.FeatureSpec
	})
	return ok && gates.GetAll()[f].LockToDefault
}
