package kubestorage

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdclient"
)

// guarded is a storage that asks allow before each request. allow returns the storage that serves a
// request with the verb, or the error that answers it. A storage without refusals is not guarded.
type guarded struct {
	allow func(verb string) (storage.Interface, error)
}

// ErrReadOnly is wrapped by the errors of requests to change etcd with Options.ReadOnly. The
// requests were not sent.
var ErrReadOnly = etcdclient.ErrReadOnly

// readOnly returns a storage whose writes fail with a 405 that wraps ErrReadOnly, and are not sent.
func readOnly(inner storage.Interface, resource schema.GroupResource) guarded {
	return guarded{func(verb string) (storage.Interface, error) {
		if verb == "create" || verb == "delete" || verb == "update" {
			return nil, &readOnlyError{apierrors.NewMethodNotSupported(resource, verb)}
		}
		return inner, nil
	}}
}

// readOnlyError is an API status that wraps ErrReadOnly.
type readOnlyError struct{ *apierrors.StatusError }

func (e *readOnlyError) Error() string {
	return fmt.Sprintf("%s: %s; send the request to a server that writes", e.ErrStatus.Message, ErrReadOnly)
}

func (e *readOnlyError) Unwrap() []error { return []error{ErrReadOnly, e.StatusError} }

func (g guarded) Versioner() storage.Versioner { return storage.APIObjectVersioner{} }

// do runs a request on the storage that allow returns.
func (g guarded) do(verb string, request func(storage.Interface) error) error {
	inner, err := g.allow(verb)
	if err == nil {
		err = request(inner)
	}
	return err
}

func (g guarded) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return g.do("create", func(s storage.Interface) error { return s.Create(ctx, key, obj, out, ttl) })
}

func (g guarded) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validate storage.ValidateObjectFunc, cached runtime.Object, opts storage.DeleteOptions) error {
	return g.do("delete", func(s storage.Interface) error {
		return s.Delete(ctx, key, out, preconditions, validate, cached, opts)
	})
}

func (g guarded) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object) error {
	return g.do("update", func(s storage.Interface) error {
		return s.GuaranteedUpdate(ctx, key, out, ignoreNotFound, preconditions, update, cached)
	})
}

func (g guarded) Get(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	return g.do("get", func(s storage.Interface) error { return s.Get(ctx, key, opts, out) })
}

func (g guarded) GetList(ctx context.Context, key string, opts storage.ListOptions, out runtime.Object) error {
	return g.do("list", func(s storage.Interface) error { return s.GetList(ctx, key, opts, out) })
}

func (g guarded) Watch(ctx context.Context, key string, opts storage.ListOptions) (w apiwatch.Interface, err error) {
	err = g.do("watch", func(s storage.Interface) (err error) { w, err = s.Watch(ctx, key, opts); return err })
	return w, err
}

func (g guarded) Stats(ctx context.Context) (stats storage.Stats, err error) {
	err = g.do("stats", func(s storage.Interface) (err error) { stats, err = s.Stats(ctx); return err })
	return stats, err
}

func (g guarded) RequestWatchProgress(ctx context.Context) error {
	return g.do("watch", func(s storage.Interface) error { return s.RequestWatchProgress(ctx) })
}

func (g guarded) GetCurrentResourceVersion(ctx context.Context) (rv uint64, err error) {
	err = g.do("get", func(s storage.Interface) (err error) { rv, err = s.GetCurrentResourceVersion(ctx); return err })
	return rv, err
}

func (g guarded) EnableResourceSizeEstimation(keys storage.KeysFunc) error {
	return g.do("stats", func(s storage.Interface) error { return s.EnableResourceSizeEstimation(keys) })
}

// ReadinessCheck returns nil while requests are refused: the server must not wait for the storage.
func (g guarded) ReadinessCheck() error {
	if inner, err := g.allow("get"); err == nil {
		return inner.ReadinessCheck()
	}
	return nil
}

// CompactRevision returns 0, an unknown revision, while requests are refused.
func (g guarded) CompactRevision() int64 {
	if inner, err := g.allow("get"); err == nil {
		return inner.CompactRevision()
	}
	return 0
}
