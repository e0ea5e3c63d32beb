package kubestorage

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/trace"
	"github.com/stratakube/strata/mirror"
)

type skipCacheWaitKey struct{}

// SkipCacheWait returns a context for a request that was answered with ErrReadEtcd: a Get of the
// latest revision does not wait for memory again.
func SkipCacheWait(ctx context.Context) context.Context {
	return context.WithValue(ctx, skipCacheWaitKey{}, true)
}

// ErrReadEtcd: this read is served by etcd through upstream's store, not from memory. For a list: a
// gate is off, the resource is not loaded and the page is small, or etcd's progress is unreliable.
// For a single key: the resource is not loaded, or the mirror does not catch up soon.
var ErrReadEtcd = etcdread.ErrNeeded

// Get implements storage.Interface. Without a resource version the answer is
// linearizable.
func (s *Store) Get(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	endProbe(ctx, s, key, nil)
	if opts.ResourceVersion == "" && !s.cluster.detected.latestReads.gets {
		return s.getFromEtcd(ctx, s.etcd.Get, key, opts, out)
	}
	e, err := s.Entry(ctx, key, opts.ResourceVersion)
	switch {
	case errors.Is(err, ErrReadEtcd):
		err := s.getFromEtcd(ctx, s.getInPlace, key, opts, out)
		if opts.ResourceVersion == "" {
			s.fresh.Metrics.Consistent(err == nil || storage.IsNotFound(err), true)
		}
		return err
	case storage.IsNotFound(err) && opts.IgnoreNotFound:
		return runtime.SetZeroValue(out)
	case err != nil:
		return err
	}
	err = s.view.CurrentGeneration().DecodeInto(ctx, e, out)
	if err != nil {
		err = s.DecodeError(ctx, key, err)
	}
	if errors.Is(err, ErrReadEtcd) {
		return s.getFromEtcd(ctx, s.getInPlace, key, opts, out)
	}
	return err
}

// DecodeError returns the error of a GET whose entry could not be decoded: ErrReadEtcd if
// upstream's store words it. Its read may succeed, but would call a conversion webhook again.
func (s *Store) DecodeError(ctx context.Context, key string, err error) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case apierrors.IsTimeout(err):
		return err
	case s.watches.Conversions == nil || storage.IsInternalError(err): // of the decryption
		return fmt.Errorf("%w: %w", ErrReadEtcd, err)
	case s.lists.Gates.UnsafeDelete:
		return storage.NewCorruptObjError(key, objects.Cause(err)) // as upstream's
	}
	return err
}

// getInPlace reads one key with upstream's store, within the bound of such reads.
func (s *Store) getInPlace(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	return s.cluster.getPlaces.Get(ctx, s.etcd, key, opts, out)
}

// getFromEtcd calls get, which decodes the object with upstream's store: if conversions may block,
// detached from the request. Errors are those of etcdread.ForClient.
func (s *Store) getFromEtcd(ctx context.Context, get func(context.Context, string, storage.GetOptions, runtime.Object) error,
	key string, opts storage.GetOptions, out runtime.Object) error {
	into, custom := out.(*unstructured.Unstructured)
	if s.watches.Conversions == nil || !custom {
		return etcdread.ForClient(ctx, get(ctx, key, opts, out))
	}
	obj, err := s.watches.Conversions.Detach(ctx, func() (runtime.Object, error) {
		obj := s.Kind().NewFunc()
		return obj, get(ctx, key, opts, obj)
	})
	if err == nil {
		*into = *obj.(*unstructured.Unstructured)
	}
	return etcdread.ForClient(ctx, err)
}

// Entry resolves a GET: it returns the entry of the key, linearizably if there is no resource
// version, else at that revision or a later one. Errors: ErrReadEtcd if memory cannot answer soon,
// and those of storage.Interface's Get.
func (s *Store) Entry(ctx context.Context, key, resourceVersion string) (*mirror.Entry, error) {
	etcdKey, err := s.keys.Prepare(key, false)
	if err != nil {
		return nil, err
	}
	asked, err := s.fresh.ParseRevision(resourceVersion)
	if err != nil {
		return nil, err
	}
	if !s.resource.Ready() {
		return nil, ErrReadEtcd
	}
	span := trace.StartGet(ctx, key, resourceVersion)
	defer span.End()
	if resourceVersion == "" {
		if !s.cluster.detected.latestReads.gets || ctx.Value(skipCacheWaitKey{}) != nil {
			return nil, ErrReadEtcd
		}
		if err := s.fresh.SoonConsistent(ctx, span); err != nil {
			return nil, ErrReadEtcd
		}
	} else if s.fresh.OutOfReach(freshness.RevisionOf(asked)) {
		return nil, ErrReadEtcd
	} else {
		span.Event(trace.Waiting)
		if err := s.fresh.WaitFor(ctx, asked); err != nil {
			return nil, err
		}
	}
	span.Event(trace.Fresh)
	snap, err := s.resource.Latest()
	if err != nil {
		return nil, ErrReadEtcd
	}
	if resourceVersion == "" {
		s.fresh.Metrics.Consistent(true, false)
	}
	e, ok := snap.Get(etcdKey)
	span.Event(trace.ByKey)
	if !ok {
		return nil, storage.NewKeyNotFoundError(etcdKey, snap.Rev)
	}
	return e, nil
}
