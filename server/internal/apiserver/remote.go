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

// remoteVersions tracks the API group versions that an APIService assigns to another server.
//
// A version becomes remote here before it does in the aggregator: when the informer receives the
// APIService, before storing it in the cache that the aggregator reads. A version becomes local
// again when the informer notifies its handlers. In between, the byte path passes requests on, and
// the aggregator routes them to the right server.
//
// Until the informer has received an APIService, its version is local here as it is in the
// aggregator, which proxies to another server only after it has read the APIService from that
// cache. So the server's own informers, which begin before this one has synced, read through the
// byte path too: a watch that was passed on would stay with upstream's handlers for up to an hour.
type remoteVersions struct {
	// the remote versions; replaced on each change
	versions atomic.Pointer[map[schema.GroupVersion]bool]
	// of the informer's handlers; set before the server serves
	synced func() bool

	mu       sync.Mutex               // leaf; guards services, and the replacement of versions
	services map[string]*registration // by name of the APIService
}

// registration is the recorded state of one APIService. Updates arrive on two paths that may
// overtake each other, so the highest resource version wins.
type registration struct {
	version  schema.GroupVersion
	remote   bool
	revision uint64 // resource version of the recorded state
	notified uint64 // resource version of the last event handler notification
}

func newRemoteVersions() *remoteVersions {
	r := &remoteVersions{services: map[string]*registration{}}
	r.versions.Store(&map[schema.GroupVersion]bool{})
	return r
}

// follow registers with an informer of APIServices, which must not have been started.
func (r *remoteVersions) follow(informer cache.SharedIndexInformer) error {
	if err := informer.SetTransform(r.received); err != nil {
		return fmt.Errorf("watch APIServices: %w", err)
	}
	handlers, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { r.changed(obj.(*apiregistrationv1.APIService)) },
		UpdateFunc: func(_, obj any) { r.changed(obj.(*apiregistrationv1.APIService)) },
		DeleteFunc: r.deleted,
	})
	if err != nil {
		return fmt.Errorf("watch APIServices: %w", err)
	}
	r.synced = handlers.HasSynced
	return nil
}

// local reports whether this server serves the version.
func (r *remoteVersions) local(gv schema.GroupVersion) bool {
	remote := *r.versions.Load()
	return len(remote) == 0 || !remote[gv]
}

// known reports whether all APIServices that existed at the start have arrived.
func (r *remoteVersions) known() bool { return r.synced != nil && r.synced() }

// received is the informer's transform, called before an object is stored. It returns the object
// unchanged.
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
	r.noteLocked(s, s.Spec.Service != nil, revisionOf(s)).notified = revisionOf(s)
}

func (r *remoteVersions) deleted(obj any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := obj.(*apiregistrationv1.APIService)
	if ok {
		r.noteLocked(s, false, revisionOf(s))
		return
	}
	// The informer has missed the deletion and passes an earlier state.
	if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		if s, ok := tombstone.Obj.(*apiregistrationv1.APIService); ok && r.services[s.Name] != nil {
			r.noteLocked(s, false, r.services[s.Name].notified)
		}
	}
}

// noteLocked records the state of an APIService as of revision, unless a later state is recorded.
// The caller holds mu.
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

// revisionOf returns the resource version as a number, 0 if it is not a number.
func revisionOf(s *apiregistrationv1.APIService) uint64 {
	revision, err := strconv.ParseUint(s.ResourceVersion, 10, 64)
	if err != nil {
		return 0
	}
	return revision
}
