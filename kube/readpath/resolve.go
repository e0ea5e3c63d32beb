package readpath

import (
	"context"
	"maps"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/stratakube/strata/kube/kubestorage"
)

// ResolverOptions configures a Resolver.
type ResolverOptions struct {
	// Engine owns the storages.
	Engine *kubestorage.Engine
	// BuiltIn are the built-in kinds, which are Go types.
	BuiltIn []Kinds
	// Definition returns the definition of a custom resource by its name, plural.group, or nil if
	// there is none; a changed definition has another pointer. It must read the cache that the
	// server's custom resource handler uses, so that a change is not seen later here than there. It
	// is called for each read of a custom resource. A nil Definition means that there are no custom
	// resources.
	Definition func(name string) *apiextensionsv1.CustomResourceDefinition
	// Local reports whether this server itself, and not an aggregated server, serves the version of
	// an API group. It is called for each read, and must return false from the moment at which the
	// server proxies to the aggregated one. A nil Local means that this server serves all.
	Local func(schema.GroupVersion) bool
	// Tables makes tables of built-in kinds, as their registries do; it returns an error for a kind
	// that it does not know. nil: upstream's handlers make them.
	Tables rest.TableConvertor
}

// Kinds are the kinds of one scheme and their serializer.
type Kinds struct {
	Scheme *runtime.Scheme
	// Serializer is the one that the handlers of these kinds negotiate and encode with: that of
	// genericapiserver.NewDefaultAPIGroupInfo, which depends on feature gates.
	Serializer runtime.NegotiatedSerializer
}

// Resolver finds the resource that a request reads.
//
// It does not duplicate the server's routing. To resolve a path, it sends a probe request through
// the server's own handlers (kubestorage.WithProbe); the storage that the probe reaches is the one
// that the byte path reads. Earlier decisions of those handlers (versions that are not served,
// conditions of a custom resource, a namespace of a cluster-scoped resource) therefore apply to the
// byte path too: the probe reaches no storage, and the request is passed on to those handlers.
//
// A result is valid
//
//   - until the process ends, for built-in resources: their routes and storages are created at
//     startup;
//   - as long as the definition is unchanged, for custom resources. The definition is compared at
//     each read; see settleTime for the effects of a change;
//   - for retryAfter, if no storage was found.
//
// A lookup of a valid result takes a few map lookups, without blocking or allocating. Safe for
// concurrent use.
type Resolver struct {
	config ResolverOptions
	now    func() time.Time // time.Now; replaced in tests

	// routes is replaced when a route is added. Its size is bounded by the storages and
	// definitions: a path without either gets no entry.
	routes atomic.Pointer[map[route]*routeEntry]

	// guards the fields below and the replacement of routes; acquired after routeEntry.mu
	mu        sync.Mutex
	resources map[servedStore]*boundResource
}

// route is the part of a request that determines its storage.
type route struct {
	group, version, resource string
	verb                     string // get, list or watch
	namespaced               bool   // the path names a namespace
}

// servedStore is a storage, served in one group version.
type servedStore struct {
	store *kubestorage.Store
	gvr   schema.GroupVersionResource
}

// routeEntry holds the binding of one route.
type routeEntry struct {
	mu    sync.Mutex // held while the route is probed
	bound atomic.Pointer[binding]
}

// binding is the result of a probe. It is immutable.
type binding struct {
	resource *boundResource // nil: no readable storage
	// definition is the definition of a custom resource as of before the probe, and name its name.
	definition *apiextensionsv1.CustomResourceDefinition
	name       string
	// noticed is the time at which this form of the definition was first seen; settled means that
	// the probe was sent at least settleTime later.
	noticed time.Time
	settled bool
	// retry is the time of the next probe, if resource is nil.
	retry time.Time
}

const (
	// settleTime is the period after a new form of a definition was first seen, in which each
	// request is preceded by a probe. Upstream's handler reads the same cache, but replaces the
	// storages of a changed definition only after the cache's event handler has run, a little
	// later, and a storage under construction at that moment may still use the old form. There is
	// no signal for the end of this window. It lasts milliseconds; settleTime is a guess that is
	// long enough for a server short of processors, and costs some microseconds for each read.
	settleTime = 10 * time.Second
	// retryAfter is the time before a route without a storage is probed again.
	retryAfter = time.Second
)

const (
	// reasonRemote: another server serves this version of the group.
	reasonRemote reason = "remote"
)

// NewResolver returns a Resolver without any routes.
func NewResolver(c ResolverOptions) *Resolver {
	r := &Resolver{config: c, now: time.Now, resources: map[servedStore]*boundResource{}}
	r.routes.Store(&map[route]*routeEntry{})
	return r
}

// resolve returns the resource that a request reads, or the reason to pass it on. The request must
// have the verb get, list or watch, no subresource, and a canonical path. next is the handler that
// would otherwise answer it.
func (r *Resolver) resolve(info *request.RequestInfo, next http.Handler) (*boundResource, reason) {
	t := routeOf(info)
	if r.config.Local != nil && !r.config.Local(schema.GroupVersion{Group: t.group, Version: t.version}) {
		return nil, reasonRemote
	}
	if c := (*r.routes.Load())[t]; c != nil {
		if b := c.bound.Load(); b != nil && r.holds(b) {
			return b.read()
		}
	}
	return r.bind(t, next)
}

func routeOf(info *request.RequestInfo) route {
	t := route{group: info.APIGroup, version: info.APIVersion, resource: info.Resource, verb: info.Verb}
	// The RequestInfo of a namespace object names the object as its namespace; the path does not.
	t.namespaced = info.Namespace != "" && (info.Resource != "namespaces" || info.APIGroup != "")
	return t
}

func (b *binding) read() (*boundResource, reason) {
	if b.resource == nil {
		return nil, reasonResource
	}
	return b.resource, ""
}

// known returns the resource that a request reads if it has a valid binding, and nil otherwise. It
// sends no probe and does not block.
func (r *Resolver) known(info *request.RequestInfo) *boundResource {
	c := (*r.routes.Load())[routeOf(info)]
	if c == nil {
		return nil
	}
	b := c.bound.Load()
	if b == nil || !r.holds(b) {
		return nil
	}
	return b.resource
}

// holds reports whether the binding is still valid.
func (r *Resolver) holds(b *binding) bool {
	if b.definition != nil && r.config.Definition(b.name) != b.definition {
		return false
	}
	switch {
	case b.resource == nil:
		return r.now().Before(b.retry)
	case b.definition == nil:
		return true
	}
	return b.settled && b.resource.Store.Lifetime().Err() == nil
}

// bind resolves the route with a probe. Concurrent requests for the same route wait for one probe.
func (r *Resolver) bind(t route, next http.Handler) (*boundResource, reason) {
	if r.definition(t) == nil && !r.builtIn(t) {
		return nil, reasonResource
	}
	c := r.entry(t)
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.bound.Load()
	if old == nil || !r.holds(old) {
		c.bound.Store(r.find(t, old, next))
	}
	return c.bound.Load().read()
}

// entry returns the entry of a route, and creates it if there is none.
func (r *Resolver) entry(t route) *routeEntry {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := *r.routes.Load()
	if c := old[t]; c != nil {
		return c
	}
	routes := maps.Clone(old)
	// Remove the entries of deleted definitions.
	maps.DeleteFunc(routes, func(_ route, c *routeEntry) bool {
		b := c.bound.Load()
		return b != nil && b.definition != nil && r.config.Definition(b.name) == nil
	})
	c := &routeEntry{}
	routes[t] = c
	r.routes.Store(&routes)
	return c
}

// find probes the route and returns the new binding.
func (r *Resolver) find(t route, old *binding, next http.Handler) *binding {
	// before the probe, so that a later update counts as a change
	b := &binding{definition: r.definition(t)}
	now := r.now()
	if b.definition != nil {
		b.name, b.noticed = b.definition.Name, now
		if old != nil && old.definition != nil && sameForm(old.definition, b.definition) {
			b.noticed = old.noticed
		}
		b.settled = now.Sub(b.noticed) >= settleTime
	}
	found := probe(t, next)
	changed := r.definition(t) != b.definition
	if found.Store != nil && !changed {
		b.resource = r.resourceOf(t, found, b.definition, next)
	}
	switch {
	case changed:
		// The storage may have been built from the new definition, which b.definition does not
		// describe.
		b.retry = now
	case b.resource == nil:
		b.retry = now.Add(retryAfter)
	case !b.resource.Custom:
		// A built-in resource that is also named by a definition.
		*b = binding{resource: b.resource}
	}
	return b
}

// resourceOf returns the resource of a storage: the same one for all routes to that storage, also
// for a storage of an earlier form of the definition. It returns nil if the storage is used in a
// way that the byte path does not support.
func (r *Resolver) resourceOf(t route, found kubestorage.Found, def *apiextensionsv1.CustomResourceDefinition, next http.Handler) *boundResource {
	if found.Key != t.key(found.Store.ResourcePrefix()) {
		return nil
	}
	s := servedStore{found.Store, t.gvr()}
	r.mu.Lock()
	res := r.resources[s]
	r.mu.Unlock()
	if res != nil {
		return res
	}
	if _, custom := s.store.Kind().NewFunc().(runtime.Unstructured); custom {
		if def == nil {
			return nil
		}
		res = customResource(t.gvr(), s.store, def)
	} else {
		res = r.builtInResource(t, s.store, next)
	}
	if res == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if first := r.resources[s]; first != nil {
		return first
	}
	r.resources[s] = res
	context.AfterFunc(s.store.Lifetime(), func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.resources, s)
	})
	return res
}
