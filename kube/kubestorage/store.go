package kubestorage

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/keyrotation"
	"github.com/stratakube/strata/kube/internal/list"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/kube/internal/upstream"
	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/mirror"
)

// storeConfig describes one storage: one resource in one served version.
type storeConfig struct {
	Codec          runtime.Codec
	ResourcePrefix string                  // begins with a slash
	ReverseKey     upstream.ReverseKeyFunc // may be nil
	kind.Kind
	// Transformer decrypts values. Decrypted data is cached: a transformer whose keys change must
	// be that of Kubernetes' encryption configuration, or implement Rekeyed.
	Transformer value.Transformer
	Leases      etcd3.LeaseManagerConfig
	Uncached    bool // serve from etcd, cache no objects
}

// Store is a storage.Interface on one resource of a mirror. Writes go to etcd through upstream's
// store, reads and watches are served from memory.
type Store struct {
	cluster  *cluster
	etcd     storage.Interface // upstream's store: writes, and reads that memory cannot answer
	group    schema.GroupResource
	keys     pages.Keys
	mirror   *mirror.Mirror
	resource *mirror.Resource
	fresh    *freshness.Waiter
	view     *objects.View
	// selections are the indexes and shards.
	selections *index.Selections
	lists      *list.Env
	watches    *watch.Env
	sizes      bool            // the gate SizeBasedListCostEstimate
	ctx        context.Context // ends when the store is destroyed
	cancel     context.CancelFunc
	goroutines watchset.Group // watches, and goroutines that build indexes
}

var _ storage.Interface = (*Store)(nil)

// stop ends all watches and releases the resource.
func (s *Store) stop() {
	s.cancel()
	s.goroutines.End()
	s.selections.EndShards()
	s.view.Close()
	s.selections.DropIndexes()
	s.resource.Release()
}

// Kind returns the kind of the storage's objects.
func (s *Store) Kind() *kind.Kind { return s.view.Kind() }

// Enabled reads a gate of the engine.
func (s *Store) Enabled(f featuregate.Feature) bool { return s.cluster.opts.enabled(f) }

// ResourcePrefix returns the prefix of the keys of storage.Interface, for example /pods.
func (s *Store) ResourcePrefix() string { return s.keys.ResourcePrefix }

// Representation returns the representation with the key name, any comparable value. It is made in
// the format f on the first call, and again when the keys that decrypt values change
// (Representation.Fresh).
func (s *Store) Representation(name any, f representation.Format) *representation.Representation {
	return representation.Of(s.view.CurrentGeneration(), name, f)
}

// Versioner implements storage.Interface.
func (s *Store) Versioner() storage.Versioner { return storage.APIObjectVersioner{} }

// Read resolves a LIST; see list.Env.Read. Errors: ErrReadEtcd, and API errors for the client (400,
// 410, 429, 504).
func (s *Store) Read(ctx context.Context, key string, opts storage.ListOptions) (*list.Read, error) {
	return s.lists.Read(ctx, key, opts)
}

// EstimateList estimates the result of Read; see list.Env.Estimate.
func (s *Store) EstimateList(key string, opts storage.ListOptions) (x list.Estimate, ok bool) {
	return s.lists.Estimate(key, opts)
}

// GetList implements storage.Interface.
func (s *Store) GetList(ctx context.Context, key string, opts storage.ListOptions, listObj runtime.Object) error {
	endProbe(ctx, s, key, &opts.Predicate)
	return s.lists.GetList(ctx, key, opts, listObj)
}

// OpenStreamFor opens a watch that ends after timeout at the latest; see watch.Env.Open.
func (s *Store) OpenStreamFor(ctx context.Context, timeout time.Duration, key string, opts storage.ListOptions) (*watch.Stream, error) {
	return s.watches.OpenFor(ctx, timeout, key, opts)
}

// Watch implements storage.Interface; see watch.Env.Watch.
func (s *Store) Watch(ctx context.Context, key string, opts storage.ListOptions) (apiwatch.Interface, error) {
	endProbe(ctx, s, key, &opts.Predicate)
	return s.watches.Watch(ctx, key, opts)
}

// Stats implements storage.Interface: the number of objects in memory and, if the
// gate SizeBasedListCostEstimate is on, their average stored size.
func (s *Store) Stats(ctx context.Context) (storage.Stats, error) {
	snap, err := s.resource.Latest()
	if err != nil {
		return s.etcd.Stats(ctx)
	}
	n, bytes := snap.Count("", "")
	stats := storage.Stats{ObjectCount: int64(n)}
	if n > 0 && s.sizes {
		stats.EstimatedAverageObjectSizeBytes = bytes / int64(n)
	}
	return stats, nil
}

// History describes the revisions of a resource in memory.
type History struct {
	Oldest, Latest mirror.Revision       // that can be listed
	WatchFrom      mirror.Revision       // the oldest one from which a watch can begin
	Times          []mirror.RevisionTime // of the whole cluster
}

// History returns the revisions in memory. Errors: storage.ErrStorageNotReady. Cost is that of
// mirror.Mirror.Times.
func (s *Store) History() (h History, err error) {
	latest, err := s.resource.Latest()
	if err == nil {
		h.Oldest, h.WatchFrom, err = s.resource.Oldest()
	}
	if err != nil {
		return History{}, storage.ErrStorageNotReady
	}
	h.Latest, h.Times = latest.Rev, s.mirror.Times()
	return h, nil
}

// EnableResourceSizeEstimation implements storage.Interface. It has no effect, because sizes are
// known.
func (s *Store) EnableResourceSizeEstimation(storage.KeysFunc) error { return nil }

// ReadinessCheck implements storage.Interface.
func (s *Store) ReadinessCheck() error {
	if !s.resource.Ready() {
		return storage.ErrStorageNotReady
	}
	return nil
}

// RequestWatchProgress implements storage.Interface.
func (s *Store) RequestWatchProgress(ctx context.Context) error {
	return s.etcd.RequestWatchProgress(ctx)
}

// GetCurrentResourceVersion implements storage.Interface, with a read of etcd that
// all concurrent callers share.
func (s *Store) GetCurrentResourceVersion(ctx context.Context) (uint64, error) {
	rev, err := s.mirror.ReadRevision(ctx)
	return uint64(rev), err
}

// CompactRevision implements storage.Interface.
func (s *Store) CompactRevision() int64 { return s.etcd.CompactRevision() }

// Rekeyed is implemented by a transformer whose keys change while it is in use. Derived data is
// dropped when they change. The transformers of an automatically reloaded EncryptionConfiguration
// need not implement it.
type Rekeyed = keyrotation.Transformer

// dropReplaced drops derived data of retired keys, concurrently with readers, so that data
// decrypted with removed keys does not stay in memory until its entry is replaced. The view's mutex
// is held.
func dropReplaced(s *Store) {
	s.selections.KeysReplaced()
	s.goroutines.Start(func() {
		s.selections.DropEnded()
		for memos := range s.resource.Memos(s.ctx) {
			memos.DropClosed()
		}
	})
}

// Create implements storage.Interface.
func (s *Store) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return s.etcd.Create(ctx, key, obj, out, ttl)
}

// Delete implements storage.Interface. It passes the object in memory as the suggestion, which
// saves a read.
func (s *Store) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validateDeletion storage.ValidateObjectFunc, _ runtime.Object, opts storage.DeleteOptions) error {
	var suggestion runtime.Object
	if opts == (storage.DeleteOptions{}) { // otherwise the deletion is of an undecodable object
		suggestion = suggest(ctx, s, key)
	}
	return s.etcd.Delete(ctx, key, out, preconditions, validateDeletion, suggestion, opts)
}

// GuaranteedUpdate implements storage.Interface. It passes the object in memory as the suggestion,
// so that an update without a conflict costs one etcd transaction.
func (s *Store) GuaranteedUpdate(ctx context.Context, key string, destination runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, _ runtime.Object) error {
	return s.etcd.GuaranteedUpdate(ctx, key, destination, ignoreNotFound, preconditions, tryUpdate, suggest(ctx, s, key))
}

// suggest returns a private copy of the cached object, decoded by the codec that encodes it again,
// or nil if it cannot be decoded: then the caller reads etcd, which reports the error.
func suggest(ctx context.Context, s *Store, key string) runtime.Object {
	key, err := s.keys.Prepare(key, false)
	if err != nil {
		return nil
	}
	snap, err := s.resource.Latest()
	if err != nil {
		return nil
	}
	e, ok := snap.Get(key)
	if !ok {
		return nil
	}
	obj, err := s.view.CurrentGeneration().Decode(ctx, e, e.ModRevision())
	if err != nil {
		s.cluster.opts.Logger.Debug("Failed to decode cached object; reading it from etcd", "key", key, "err", err)
		return nil
	}
	return obj
}
