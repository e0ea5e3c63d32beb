package kubestorage

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/kube/informer"
	"github.com/stratakube/strata/mirror"
)

// Objects returns the opener of informers on the objects of a built-in resource, whose storage may
// be opened later:
//
//	pods := informer.New(&v1.Pod{}, engine.Objects(resource, toV1, false), 0, indexers)
//
// convert makes an object for readers of one in the registry's version, decorated as its registry
// does (kind.Form.Decorate), which it owns; nil: they are the same. keep is informer.Source.Keep.
//
// The opener waits until its context ends if the resource is not served from memory, or is a custom
// resource. Those have informers of client-go, because a Source cannot follow their storages:
//   - There is one for each served version, all with one resource, and none before the first
//     request for the resource.
//   - A change of the definition closes them, and the next request opens others. Meanwhile the
//     resource has no claim: the mirror drops the history that handlers follow, and the store of
//     an informer would be empty.
//   - Decoding may wait for a conversion webhook, and reads of a cache.Store have no context.
func (e *Engine) Objects(resource schema.GroupResource, convert func(runtime.Object) (runtime.Object, error), keep bool) informer.Opener {
	return func(ctx context.Context, transform cache.TransformFunc) (informer.Source, error) {
		s, err := e.waitStore(ctx, resource)
		if err != nil {
			return informer.Source{}, err
		}
		source := s.informerSource(convert, transform)
		source.Keep = keep
		return source, nil
	}
}

// waitStore returns the store of a built-in resource, or ctx's error.
func (e *Engine) waitStore(ctx context.Context, resource schema.GroupResource) (*Store, error) {
	for {
		e.mu.Lock()
		s, opened := e.stores[resource], e.opened
		e.mu.Unlock()
		if s != nil {
			return s, nil
		}
		select {
		case <-opened:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// informerSource returns the source of one informer.
func (s *Store) informerSource(convert func(runtime.Object) (runtime.Object, error), transform cache.TransformFunc) informer.Source {
	finish := func(obj runtime.Object) (_ any, err error) {
		if decorate := s.Kind().Decorate; decorate != nil {
			decorate(obj)
		}
		if convert != nil {
			if obj, err = convert(obj); err != nil {
				return nil, err
			}
		}
		if transform != nil {
			transformed, err := transform(obj)
			if err != nil {
				return nil, &informer.TransformError{Err: err}
			}
			return transformed, nil
		}
		return obj, nil
	}
	type name struct{ _ int }
	cacheName := &name{}
	return informer.Source{
		Resource: s.resource,
		Decode: func(ctx context.Context, e *mirror.Entry, rev mirror.Revision) (any, error) {
			obj, err := s.view.CurrentGeneration().Decode(ctx, e, rev)
			if err != nil {
				return nil, err
			}
			return finish(obj)
		},
		Shared: func(ctx context.Context, e *mirror.Entry) (any, error) {
			return s.view.CurrentGeneration().Converted(cacheName, finish).Object(ctx, e)
		},
		Loop: func() func(context.Context, *mirror.Entry) (any, error) {
			return s.view.CurrentGeneration().Converted(cacheName, finish).Loop()
		},
	}
}
