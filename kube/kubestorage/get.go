package kubestorage

import (
	"context"
	"errors"
	"reflect"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/guard"
	"github.com/stratakube/strata/mirror"
)

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
			s.metrics.Consistent(err == nil || storage.IsNotFound(err), true)
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

// Entry resolves a GET: it returns what is stored at the key now, linearizably if
// there is no resource version, else at that revision or a later one. Errors:
// ErrReadEtcd if memory cannot answer soon, and those of storage.Interface's Get.
func (s *Store) Entry(ctx context.Context, key, resourceVersion string) (*mirror.Entry, error) {
	etcdKey, err := s.keys.Prepare(key, false)
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
		s.metrics.Consistent(true, false)
	}
	e, ok := snap.Get(etcdKey)
	if !ok {
		return nil, storage.NewKeyNotFoundError(etcdKey, snap.Rev)
	}
	return e, nil
}
