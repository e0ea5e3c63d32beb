package kubestorage

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Get implements storage.Interface. Without a resource version the answer is
// linearizable.
func (s *Store) Get(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	endProbe(ctx, s, key, nil)
	if opts.ResourceVersion == "" && !s.latestReads.gets {
		return s.getFromEtcd(ctx, s.etcd.Get, key, opts, out)
	}
	e, err := s.Entry(ctx, key, opts.ResourceVersion)
	switch {
	case errors.Is(err, ErrReadEtcd):
		err := s.getFromEtcd(ctx, s.getInPlace, key, opts, out)
		if opts.ResourceVersion == "" {
			s.metrics.Consistent(err == nil || storage.IsNotFound(err), true)
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
	case s.conversions == nil || storage.IsInternalError(err): // of the decryption
		return fmt.Errorf("%w: %w", ErrReadEtcd, err)
	case s.unsafeDelete:
		return storage.NewCorruptObjError(key, objects.Cause(err)) // as upstream's
	}
	return err
}

// getInPlace reads one key with upstream's store, within the bound of such reads.
func (s *Store) getInPlace(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	return s.cluster.getPlaces.Get(ctx, s.etcd, key, opts, out)
}

// getFromEtcd calls get, which decodes the object with upstream's store: if conversions may block,
// detached from the request.
func (s *Store) getFromEtcd(ctx context.Context, get func(context.Context, string, storage.GetOptions, runtime.Object) error,
	key string, opts storage.GetOptions, out runtime.Object) error {
	into, custom := out.(*unstructured.Unstructured)
	if s.conversions == nil || !custom {
		return get(ctx, key, opts, out)
	}
	obj, err := s.conversions.Detach(ctx, func() (runtime.Object, error) {
		obj := s.newFunc()
		return obj, get(ctx, key, opts, obj)
	})
	if err == nil {
		*into = *obj.(*unstructured.Unstructured)
	}
	return err
}

// Entry resolves a GET: it returns the entry of the key, linearizably if there is no resource
// version, else at that revision or a later one. Errors: ErrReadEtcd if memory cannot answer soon,
// and those of storage.Interface's Get.
func (s *Store) Entry(ctx context.Context, key, resourceVersion string) (*mirror.Entry, error) {
	etcdKey, err := s.keys.Prepare(key, false)
	if err != nil {
		return nil, err
	}
	asked, err := s.parseRevision(resourceVersion)
	if err != nil {
		return nil, err
	}
	if !s.resource.Ready() {
		return nil, ErrReadEtcd
	}
	span := traceGet(ctx, key, resourceVersion)
	defer span.end()
	if resourceVersion == "" {
		if !s.latestReads.gets || ctx.Value(skipCacheWaitKey{}) != nil {
			return nil, ErrReadEtcd
		}
		if err := s.soonConsistent(ctx, span); err != nil {
			return nil, ErrReadEtcd
		}
	} else if s.outOfReach(revisionOf(asked)) {
		return nil, ErrReadEtcd
	} else {
		span.event(eventWaiting)
		if err := s.waitFor(ctx, asked); err != nil {
			return nil, err
		}
	}
	span.event(eventFresh)
	snap, err := s.resource.Latest()
	if err != nil {
		return nil, ErrReadEtcd
	}
	if resourceVersion == "" {
		s.metrics.Consistent(true, false)
	}
	e, ok := snap.Get(etcdKey)
	span.event(eventByKey)
	if !ok {
		return nil, storage.NewKeyNotFoundError(etcdKey, snap.Rev)
	}
	return e, nil
}
