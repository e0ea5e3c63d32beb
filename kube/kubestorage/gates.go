package kubestorage

import "k8s.io/component-base/featuregate"

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
