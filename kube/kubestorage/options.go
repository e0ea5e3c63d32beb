package kubestorage

import (
	"log/slog"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/mirror"
)

// Options configures an Engine. The zero value serves every resource from memory.
type Options struct {
	// Uncached says which resources are served from etcd and kept out of memory;
	// nil means none.
	Uncached func(schema.GroupResource) bool
	// Decorated says of which resources the registry changes objects when it reads them
	// (registry.Store.Decorator): those who watch such a resource through storage.Interface
	// get objects of their own, which it can change; others share them. nil means none.
	Decorated func(schema.GroupResource) bool
	// Window bounds the history kept in memory, per etcd cluster. A field that is zero means
	// that of mirror.DefaultWindow.
	Window mirror.Window
	// Replay bounds the history that is restored from etcd at the start, per etcd cluster;
	// see mirror.Options. A field that is zero means that of mirror.DefaultReplay, a
	// negative one that none is restored.
	Replay mirror.ReplayBounds
	// UnclaimedBytes bounds the values kept for resources that nobody has asked for
	// yet, per etcd cluster; 0 means mirror.DefaultUnclaimedBytes.
	UnclaimedBytes int64
	// RepresentationBytes bounds what is kept of objects in the forms that clients ask
	// for, of all resources together; 0 means DefaultRepresentationBytes.
	RepresentationBytes int64
	// ProgressInterval is how often etcd is asked how far it has come while no events
	// come and there are watches that want bookmarks; 0 means
	// mirror.DefaultIdleProgress, a negative one never.
	ProgressInterval time.Duration
	// ConsistencyCheckInterval is how often each resource in memory is compared with etcd, keys only;
	// up to a half is added at random. 0 means consistency.DefaultInterval, a negative
	// one that it is done on demand only; see Engine.Checkers.
	ConsistencyCheckInterval time.Duration
	// TokenTransformer encrypts the keys of continue tokens in etcd (gate
	// SealedContinueTokens), like secrets: it is theirs. nil stores the keys as they are.
	TokenTransformer value.Transformer
	// TokenKeyRotation is how long a key seals continue tokens before another is made; 0
	// means for ever.
	TokenKeyRotation time.Duration
	// RefusePlainTokens refuses continue tokens that are not sealed.
	RefusePlainTokens bool
	// Gates turns behaviour off; it has to know Gates(). It is read when a storage is
	// made. nil means the defaults.
	Gates featuregate.FeatureGate
	// Logger receives what an operator should know. Default: slog.Default().
	Logger *slog.Logger
}

// DefaultRepresentationBytes bounds, unless Options say otherwise, the derived data of all resources of an engine.
const DefaultRepresentationBytes = 384 << 20

// Gates of the engine. Off, the server is correct, only slower: those of the KEPs let
// etcd answer what memory would have answered, or let clients start over.
const (
	// ConsistentListFromCache answers a LIST without resource version from memory, and
	// with it what watches begin with (KEP-2340).
	ConsistentListFromCache featuregate.Feature = "ConsistentListFromCache"
	// ConsistentGetFromCache answers a GET without resource version from memory.
	ConsistentGetFromCache featuregate.Feature = "ConsistentGetFromCache"
	// APIListChunking hands lists out in pages (KEP-365). Off, limit and continue are ignored,
	// and no token is ever returned.
	APIListChunking featuregate.Feature = "APIListChunking"
	// ListFromCacheSnapshot answers a LIST at an exact revision, and all pages of a
	// list but the first, from memory (KEP-4988).
	ListFromCacheSnapshot featuregate.Feature = "ListFromCacheSnapshot"
	// SealedContinueTokens encrypts the tokens that are returned, so that they tell nothing and
	// cannot be forged. A server that does not know the form refuses them, and this one accepts
	// them whatever the gate says.
	SealedContinueTokens featuregate.Feature = "SealedContinueTokens"
	// DetectCacheInconsistency compares memory with etcd, on a schedule and on demand, and mends what
	// differs (KEP-4988).
	DetectCacheInconsistency featuregate.Feature = "DetectCacheInconsistency"
	// WatchBookmark sends bookmarks to watches that ask for them: now and then, shortly before
	// the server ends a watch, and when it shuts down (KEP-956). The bookmark that closes
	// initial events is sent in any case.
	WatchBookmark featuregate.Feature = "WatchBookmark"
	// EfficientWatchResumption lets the clock follow etcd's progress, so that it moves when
	// nothing that is cached changes (KEP-1904). Off, it moves by events only, and reads of
	// the present, which need to know how far it has come, go to etcd.
	EfficientWatchResumption featuregate.Feature = "EfficientWatchResumption"
	// WatchHistoryRestore restores history from etcd at the start, so that watches and lists
	// of revisions from before are answered (the alternative that KEP-1904 set aside).
	WatchHistoryRestore featuregate.Feature = "WatchHistoryRestore"
	// ByteReadPath answers GET, LIST and WATCH with bytes that are kept, in front of the
	// API server's own handlers (package readpath). Who mounts that package asks for it;
	// storages do not.
	ByteReadPath featuregate.Feature = "ByteReadPath"
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
	}
}

// enabled reads a gate; without a feature gate the defaults hold.
func (o *Options) enabled(f featuregate.Feature) bool {
	if o.Gates == nil {
		return Gates()[f].Default
	}
	return o.Gates.Enabled(f)
}

// window returns the bounds of history, which is kept for as long as upstream's watch cache would
// keep it, or for longer.
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

// replay returns the bounds of the history that is restored.
func (o *Options) replay() mirror.ReplayBounds {
	if !o.enabled(WatchHistoryRestore) {
		return mirror.ReplayBounds{Revisions: -1}
	}
	return o.Replay
}

// present says which reads of the present memory answers: those need to know how far the
// feed has come.
type present struct{ lists, gets bool }

// present reads the gates.
func (o *Options) present() present {
	return present{lists: o.enabled(ConsistentListFromCache), gets: o.enabled(ConsistentGetFromCache)}
}

// demanded reports whether the gate is what it is because somebody has said so, or because
// it is locked.
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
