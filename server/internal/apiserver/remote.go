package apiserver

import (
	"fmt"
	"maps"
	"strconv"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// remoteVersions knows which versions of API groups an APIService has given to another server.
//
// It learns that a version has become remote before the aggregator can know it: when the informer receives the
// APIService, before it is in the cache that the aggregator reads. That a version has become local again it learns with
// the informer's other listeners. In between, what the byte path does not answer the aggregator sends where it belongs.
type remoteVersions struct {
	hasSynced func() bool
	synced    atomic.Bool // hasSynced has been true

	versions atomic.Pointer[map[schema.GroupVersion]bool] // the remote ones; replaced when it changes

	mu       sync.Mutex               // leaf; guards services, and the replacement of versions
	services map[string]*registration // by name of the APIService
}

// registration is what is known of one APIService. Word of it comes on two ways that may overtake each other, so that
// what counts is the highest resource version.
type registration struct {
	version  schema.GroupVersion
	remote   bool
	revision uint64 // of what is known
	told     uint64 // of what the listener was last told
}

func newRemoteVersions() *remoteVersions {
	r := &remoteVersions{services: map[string]*registration{}}
	r.versions.Store(&map[schema.GroupVersion]bool{})
	return r
}

// follow listens to an informer of APIServices that has not been started.
func (r *remoteVersions) follow(informer cache.SharedIndexInformer) error {
	if err := informer.SetTransform(r.received); err != nil {
		return fmt.Errorf("follow APIServices: %w", err)
	}
	r.hasSynced = informer.HasSynced
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { r.changed(obj.(*apiregistrationv1.APIService)) },
		UpdateFunc: func(_, obj any) { r.changed(obj.(*apiregistrationv1.APIService)) },
		DeleteFunc: r.deleted,
	})
	if err != nil {
		return fmt.Errorf("follow APIServices: %w", err)
	}
	return nil
}

// local reports whether this server serves the version. Until all APIServices are known it is false.
func (r *remoteVersions) local(gv schema.GroupVersion) bool {
	if !r.synced.Load() {
		if !r.hasSynced() {
			return false
		}
		r.synced.Store(true)
	}
	remote := *r.versions.Load()
	return len(remote) == 0 || !remote[gv]
}

// received is the informer's transformation of what it is about to store; it changes nothing.
func (r *remoteVersions) received(obj any) (any, error) {
	if s, ok := obj.(*apiregistrationv1.APIService); ok && s.Spec.Service != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.noteLocked(s, true, revisionOf(s))
	}
	return obj, nil
}

func (r *remoteVersions) changed(s *apiregistrationv1.APIService) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noteLocked(s, s.Spec.Service != nil, revisionOf(s)).told = revisionOf(s)
}

func (r *remoteVersions) deleted(obj any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := obj.(*apiregistrationv1.APIService)
	if ok {
		r.noteLocked(s, false, revisionOf(s))
		return
	}
	// The informer has missed the deletion, and knows some earlier state.
	if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		if s, ok := tombstone.Obj.(*apiregistrationv1.APIService); ok && r.services[s.Name] != nil {
			r.noteLocked(s, false, r.services[s.Name].told)
		}
	}
}

// noteLocked takes note of an APIService as of a revision, unless a later one is known.
func (r *remoteVersions) noteLocked(s *apiregistrationv1.APIService, remote bool, revision uint64) *registration {
	known := r.services[s.Name]
	if known == nil {
		known = &registration{version: schema.GroupVersion{Group: s.Spec.Group, Version: s.Spec.Version}}
		r.services[s.Name] = known
	}
	if revision < known.revision {
		return known
	}
	known.revision = revision
	if known.remote != remote {
		known.remote = remote
		versions := maps.Clone(*r.versions.Load())
		if remote {
			versions[known.version] = true
		} else {
			delete(versions, known.version)
		}
		r.versions.Store(&versions)
	}
	return known
}

// revisionOf returns the resource version as a number, 0 if it is none.
func revisionOf(s *apiregistrationv1.APIService) uint64 {
	revision, err := strconv.ParseUint(s.ResourceVersion, 10, 64)
	if err != nil {
		return 0
	}
	return revision
}
