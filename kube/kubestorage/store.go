package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/kube/internal/encoded"
	"github.com/stratakube/strata/kube/internal/guard"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Store is a storage.Interface on one resource of a mirror. Writes go to etcd
// through upstream's store, reads and watches are answered from memory.
type Store struct {
	cluster *cluster
	etcd    storage.Interface // upstream's store: writes, and what memory cannot answer

	mirror   *mirror.Mirror
	resource *mirror.Resource
	view     *objects.View
	// unsafeDelete is AllowUnsafeMalformedObjectDeletion: LISTs report all corrupt objects instead of the first.
	unsafeDelete bool
	// retryFor is how long a watch retries to decode an event.
	retryFor    time.Duration
	keys        keys
	newFunc     func() runtime.Object
	newListFunc func() runtime.Object
	versioner   storage.Versioner
	group       schema.GroupResource
	decorated   bool // see Options.Decorated; written before the store is used
	// present and pastLists (the gate ListFromCacheSnapshot) say what memory answers.
	present   present
	pastLists bool
	bookmarks bool // the gate WatchBookmark
	pages     pages
	metrics   readMetrics
	lists     listMetrics
	streams   watchMetrics

	indexMu      sync.Mutex // leaf; guards indexes, indexTimer and shardWatches
	indexes      map[string]*index
	indexTimer   *time.Timer // drops indexes that are not read; nil if none is kept
	shardWatches [objects.ShardKeys]*shardWatches
	shards       shards

	unready outage
	ctx     context.Context // ends when the store is destroyed
	cancel  context.CancelFunc
	watches watches
}

var _ storage.Interface = (*Store)(nil)

func newStore(c *cluster, etcd storage.Interface, r *mirror.Resource, cfg StoreConfig, view objects.Config, unsafeDelete bool) *Store {
	s := &Store{
		cluster:      c,
		etcd:         etcd,
		mirror:       c.mirror,
		resource:     r,
		unsafeDelete: unsafeDelete,
		retryFor:     undecodableFor,
		keys:         keys{c.prefix, cfg.ResourcePrefix},
		newFunc:      cfg.NewFunc,
		newListFunc:  cfg.NewListFunc,
		versioner:    storage.APIObjectVersioner{},
		group:        cfg.GroupResource,
		present:      c.present,
		pastLists:    c.opts.enabled(ListFromCacheSnapshot),
		bookmarks:    c.opts.enabled(WatchBookmark),
		pages:        c.pages(cfg.GroupResource),
		metrics:      newReadMetrics(cfg.GroupResource),
		lists:        newListMetrics(cfg.GroupResource),
		streams:      newWatchMetrics(cfg.GroupResource),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	context.AfterFunc(s.ctx, s.endStreams)
	s.view = objects.New(view, s.keysReplaced)
	return s
}

// stop ends all watches and gives the resource back.
func (s *Store) stop() {
	s.cancel()
	s.watches.end()
	s.shards.end()
	s.view.Close()
	s.dropIndexes()
	s.resource.Release()
}

// endStreams ends the streams of a store that is being destroyed.
func (s *Store) endStreams() {
	s.cluster.watches.every(func(w ender) {
		if st, ok := w.(*Stream); ok && st.store == s {
			st.cut(endedByStorage)
		}
	})
}

// parseRevision returns the revision that a client has sent, 0 for none and "0". A
// number that no revision can reach is the highest there is: always in the future.
// Error: 400.
func (s *Store) parseRevision(resourceVersion string) (mirror.Revision, error) {
	rev, err := s.versioner.ParseResourceVersion(resourceVersion)
	if err != nil {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("invalid resource version: %v", err))
	}
	return mirror.Revision(min(rev, math.MaxInt64)), nil
}

// ResourcePrefix returns what the keys of storage.Interface begin with, for example /pods.
func (s *Store) ResourcePrefix() string { return s.keys.resourcePrefix }

// Representation returns the store's representation of a name, which must be comparable. It is made with encode and splice
// when it is first asked for, and again when the keys that decrypt values change (Representation.Fresh).
func (s *Store) Representation(name any, encode encoded.ItemEncoder, splice encoded.Splicer) *encoded.Representation {
	return encoded.Of(s.view.Now(), name, encode, splice)
}

// NewFunc returns an empty object of the kind that the store holds, as the registry
// knows it: of the internal version for built-in resources.
func (s *Store) NewFunc() runtime.Object { return s.newFunc() }

// NewListFunc is NewFunc for a list.
func (s *Store) NewListFunc() runtime.Object { return s.newListFunc() }

// Versioner implements storage.Interface.
func (s *Store) Versioner() storage.Versioner { return s.versioner }

// Create implements storage.Interface.
func (s *Store) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return s.etcd.Create(ctx, key, obj, out, ttl)
}

// Delete implements storage.Interface. The object in memory is the suggestion
// that saves a read.
func (s *Store) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validateDeletion storage.ValidateObjectFunc, _ runtime.Object, opts storage.DeleteOptions) error {
	var suggestion runtime.Object
	if opts == (storage.DeleteOptions{}) { // else the deletion is about an object that cannot be decoded
		suggestion = s.suggestion(ctx, key)
	}
	return s.etcd.Delete(ctx, key, out, preconditions, validateDeletion, suggestion, opts)
}

// GuaranteedUpdate implements storage.Interface. The object in memory is the
// suggestion, so that an update without a conflict costs one etcd transaction.
func (s *Store) GuaranteedUpdate(ctx context.Context, key string, destination runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, _ runtime.Object) error {
	return s.etcd.GuaranteedUpdate(ctx, key, destination, ignoreNotFound, preconditions, tryUpdate, s.suggestion(ctx, key))
}

// suggestion returns the object in memory, decoded for the caller alone by the
// codec that will encode it again, or nil if there is none that can be decoded:
// then etcd is read, and reports what is wrong.
func (s *Store) suggestion(ctx context.Context, key string) runtime.Object {
	key, err := s.keys.prepare(key, false)
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
	obj, err := s.view.Now().Decode(ctx, e, e.ModRevision())
	if err != nil {
		klog.FromContext(ctx).V(4).Info("Object in memory cannot be decoded, reading etcd", "key", key, "err", err)
		return nil
	}
	return obj
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
	if n > 0 && utilfeature.DefaultFeatureGate.Enabled(features.SizeBasedListCostEstimate) {
		stats.EstimatedAverageObjectSizeBytes = bytes / int64(n)
	}
	return stats, nil
}

// EnableResourceSizeEstimation implements storage.Interface. Sizes are known here.
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
	rev, err := s.mirror.Current(ctx)
	return uint64(rev), err
}

// CompactRevision implements storage.Interface.
func (s *Store) CompactRevision() int64 { return s.etcd.CompactRevision() }

// notReady is the answer to a read that has to wait until the resource is loaded
// (KEP-4568): 429 with a pause.
func (s *Store) notReady() error {
	pause := s.unready.refuse(time.Now())
	return apierrors.NewTooManyRequests(storage.ErrStorageNotReady.Error(), int(pause/time.Second))
}

// ready returns when the resource can be read: what is being loaded, with its history or
// because a custom resource is asked for the first time, mostly is there within seconds, so
// whoever asks waits for it, for freshWait at most. When that has been too short for others,
// it takes long, and those who come are refused at once, as KEP-4568 has it. Error: 429.
func (s *Store) ready(ctx context.Context) error {
	if s.resource.Ready() {
		return nil
	}
	if s.unready.lasts(time.Now()) {
		return s.notReady()
	}
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	if err := s.resource.WaitReady(waitCtx); err != nil {
		return s.notReady()
	}
	return nil
}

// outage is a time in which reads are refused. The zero value has not begun.
type outage struct {
	mu            sync.Mutex // leaf
	began, recent time.Time  // of the first and the last refusal
}

// outageGap without a refusal ends an outage: twice the longest pause, so that those
// who keep to it belong to the same one.
const outageGap = time.Minute

// lasts reports whether readers have been refused lately.
func (o *outage) lasts(now time.Time) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return !o.recent.IsZero() && now.Sub(o.recent) <= outageGap
}

// refuse returns when the reader should come back: in 1 s at first, in 30 s when it
// takes long.
func (o *outage) refuse(now time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now.Sub(o.recent) > outageGap {
		o.began = now
	}
	o.recent = now
	// As upstream has it: 2 s after 12 s, 30 s after a minute.
	seconds := math.Min(30, math.Exp(0.06*now.Sub(o.began).Seconds()))
	return time.Duration(seconds) * time.Second
}

// Waits for the mirror to catch up.
const (
	// freshWait bounds the wait of a read for the revision it needs, as in upstream.
	freshWait = 3 * time.Second
	// getWait bounds it for a GET of one key, which may go to etcd instead:
	// deletions, updates and leader elections read before they write.
	getWait = 250 * time.Millisecond
	// getPatience is how long a GET waits for a member of etcd before it asks again; it
	// doubles.
	getPatience = time.Second
	// answerTime is what is left of a request's own deadline, if that comes first: whoever
	// waits until then is cut off instead of told when to try again.
	answerTime = 250 * time.Millisecond
	// tooHighRetrySeconds is the pause that a client is told with 504 and 429.
	tooHighRetrySeconds = 1
)

// waitContext bounds a wait on behalf of a request.
func waitContext(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		limit = min(limit, max(left-answerTime, left/2))
	}
	return context.WithTimeout(ctx, limit)
}

// waitFor returns when rev can be read, and 504 "Too large resource version" when
// it cannot be within freshWait.
func (s *Store) waitFor(ctx context.Context, rev mirror.Revision) error {
	if s.mirror.Clock() >= rev {
		if rev > 0 { // else nothing is asked for
			s.metrics.wait().Observe(0)
		}
		return nil
	}
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	err := s.await(waitCtx, rev)
	if err != nil && ctx.Err() == nil {
		return storage.NewTooLargeResourceVersionError(uint64(rev), uint64(s.mirror.Clock()), tooHighRetrySeconds)
	}
	return err
}

// await returns when rev can be read, or with ctx's error, and measures that.
func (s *Store) await(ctx context.Context, rev mirror.Revision) error {
	if s.mirror.Clock() >= rev {
		s.metrics.wait().Observe(0)
		return nil
	}
	began := time.Now()
	err := s.mirror.Wait(ctx, rev)
	s.metrics.wait().Observe(time.Since(began).Seconds())
	return err
}

// current returns etcd's revision (I6). Errors: mirror.ErrNotReady if etcd was
// restored, until everything is listed anew.
func (s *Store) current(ctx context.Context) (mirror.Revision, error) {
	rev, err := s.mirror.Current(ctx)
	if errors.Is(err, mirror.ErrRestored) {
		return 0, fmt.Errorf("%w: %w", mirror.ErrNotReady, err)
	}
	return rev, err
}

// consistent returns when the mirror has seen every write that was acknowledged
// before the call (I6), and 429 when it cannot tell within freshWait: that is not the
// client's doing, and not to be passed on to etcd, which would multiply an outage
// (KEP-2340, k/k#138494).
func (s *Store) consistent(ctx context.Context) error {
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	rev, err := s.current(waitCtx)
	if err == nil {
		err = s.await(waitCtx, rev)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.metrics.consistentRead(err == nil, false)
	if err != nil && waitCtx.Err() != nil {
		return errBehind()
	}
	return err
}

// errBehind is the answer to a read that memory has not caught up for.
func errBehind() error {
	return apierrors.NewTooManyRequests("the watch cache cannot keep up with etcd", tooHighRetrySeconds)
}

// getFromEtcd reads one key from etcd, unless too many do: then 429 (D7).
func (s *Store) getFromEtcd(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	select {
	case s.cluster.gets <- struct{}{}:
		defer func() { <-s.cluster.gets }()
		// A member that hangs would hold the request until its connection is given up. The
		// client takes members in turn, so that of two requests at once one goes elsewhere.
		requests := 1
		for patience := getPatience; ; patience *= 2 {
			late, err := s.getWithin(ctx, patience, requests, key, opts, out)
			if err == nil || !late || ctx.Err() != nil {
				return err
			}
			requests = 2
		}
	default:
		return apierrors.NewTooManyRequests("too many reads wait for etcd", tooHighRetrySeconds)
	}
}

// getWithin reads one key from etcd with so many requests at once, of which the first that
// succeeds counts, or else the last. late: there was no answer within the time.
func (s *Store) getWithin(ctx context.Context, patience time.Duration, requests int, key string, opts storage.GetOptions, out runtime.Object) (late bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if requests == 1 {
		err = s.etcd.Get(ctx, key, opts, out)
		return ctx.Err() != nil, err
	}
	type answer struct {
		obj runtime.Object
		err error
	}
	answers := make(chan answer, requests)
	for range requests {
		obj := out.DeepCopyObject()
		go func() {
			answers <- answer{obj, guard.Call(func() error { return s.etcd.Get(ctx, key, opts, obj) })}
		}()
	}
	for range requests {
		a := <-answers
		if err = a.err; err == nil || storage.IsNotFound(err) {
			reflect.ValueOf(out).Elem().Set(reflect.ValueOf(a.obj).Elem())
			return false, err
		}
	}
	return ctx.Err() != nil, err
}

// Get implements storage.Interface. Without a resource version the answer is
// linearizable.
func (s *Store) Get(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	endProbe(ctx, s, key, nil)
	if opts.ResourceVersion == "" && !s.present.gets {
		return s.etcd.Get(ctx, key, opts, out)
	}
	e, err := s.Entry(ctx, key, opts.ResourceVersion)
	switch {
	case errors.Is(err, ErrReadEtcd):
		err := s.getFromEtcd(ctx, key, opts, out)
		if opts.ResourceVersion == "" {
			s.metrics.consistentRead(err == nil || storage.IsNotFound(err), true)
		}
		return err
	case storage.IsNotFound(err) && opts.IgnoreNotFound:
		return runtime.SetZeroValue(out)
	case err != nil:
		return err
	}
	if err := s.view.Now().DecodeInto(ctx, e, out); err != nil {
		// Upstream's store words the error, and may have better luck.
		return s.getFromEtcd(ctx, key, opts, out)
	}
	return nil
}

type hasWaitedKey struct{}

// HasWaited returns a context for a request that was answered with ErrReadEtcd: a Get of the
// present does not wait for memory a second time.
func HasWaited(ctx context.Context) context.Context {
	return context.WithValue(ctx, hasWaitedKey{}, true)
}

// Entry resolves a GET: it returns what is stored at the key now, linearizably if
// there is no resource version, else at that revision or a later one. Errors:
// ErrReadEtcd if memory cannot answer soon, and those of storage.Interface's Get.
func (s *Store) Entry(ctx context.Context, key, resourceVersion string) (*mirror.Entry, error) {
	etcdKey, err := s.keys.prepare(key, false)
	if err != nil {
		return nil, err
	}
	rev, err := s.parseRevision(resourceVersion)
	if err != nil {
		return nil, err
	}
	if !s.resource.Ready() {
		return nil, ErrReadEtcd
	}
	if resourceVersion == "" {
		if !s.present.gets || ctx.Value(hasWaitedKey{}) != nil {
			return nil, ErrReadEtcd
		}
		if err := s.soonConsistent(ctx); err != nil {
			return nil, ErrReadEtcd
		}
	} else if s.outOfReach(rev) {
		return nil, ErrReadEtcd
	} else if err := s.waitFor(ctx, rev); err != nil {
		return nil, err
	}
	snap, err := s.resource.Latest()
	if err != nil {
		return nil, ErrReadEtcd
	}
	if resourceVersion == "" {
		s.metrics.consistentRead(true, false)
	}
	e, ok := snap.Get(etcdKey)
	if !ok {
		return nil, storage.NewKeyNotFoundError(etcdKey, snap.Rev)
	}
	return e, nil
}

// soonConsistent is consistent for those who do not wait longer than getWait.
func (s *Store) soonConsistent(ctx context.Context) error {
	ctx, cancel := waitContext(ctx, getWait)
	defer cancel()
	rev, err := s.mirror.Current(ctx)
	if err != nil {
		return err
	}
	return s.await(ctx, rev)
}

// errorWatch is a watch that reports an error and ends.
func errorWatch(err error) watch.Interface {
	w := &staticWatch{events: make(chan watch.Event, 1)}
	w.events <- errorEvent(err)
	close(w.events)
	return w
}

// endedWatch is a watch that has ended and has nothing to report.
func endedWatch() watch.Interface {
	w := &staticWatch{events: make(chan watch.Event)}
	close(w.events)
	return w
}

type staticWatch struct{ events chan watch.Event }

func (w *staticWatch) ResultChan() <-chan watch.Event { return w.events }
func (w *staticWatch) Stop()                          {}

func errorEvent(err error) watch.Event {
	return watch.Event{Type: watch.Error, Object: ErrorStatus(err)}
}
