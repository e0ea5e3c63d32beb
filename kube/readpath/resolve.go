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

	"github.com/stratakube/strata/kube/kubestorage"
)

// ResolverConfig says what a Resolver is to find.
type ResolverConfig struct {
	// Engine has the storages.
	Engine *kubestorage.Engine
	// BuiltIn are the kinds that are Go types.
	BuiltIn []Kinds
	// Definition returns the definition of a custom resource by its name, which is
	// plural.group, and nil if there is none; a changed definition is another pointer.
	// It has to look into the very cache that the server's handler of custom resources
	// decides by, so that no change is noticed later here than there. It is called for
	// each read of a custom resource. nil: there are no custom resources.
	Definition func(name string) *apiextensionsv1.CustomResourceDefinition
	// Local reports whether this server itself, and not an aggregated one, serves the
	// version of an API group. It is called for each read, and must not say true any more
	// once the server has begun to ask the other one. nil: it serves all.
	Local func(schema.GroupVersion) bool
	// Decorators change objects when they are read, above the storage
	// (registry.Store.Decorator).
	Decorators map[schema.GroupResource]func(runtime.Object)
}

// Kinds are kinds of one scheme.
type Kinds struct {
	Scheme *runtime.Scheme
	// Serializer is what the handlers of these kinds negotiate and encode with: that of
	// genericapiserver.NewDefaultAPIGroupInfo, which feature gates have a say in.
	Serializer runtime.NegotiatedSerializer
}

// Resolver finds the Resource that a request reads.
//
// It knows no routes of its own. Where a path leads to is asked of the server's own
// handlers: a probe goes through them (kubestorage.WithProbe), and the storage that it
// reaches is the one that the byte path reads. Whatever those handlers decide before
// (versions that are not served, conditions of a custom resource, namespaces of
// something that has none) they decide for the byte path too, because then no
// storage is reached, and the request is passed on to be answered by them.
//
// What was found holds
//
//   - until the process ends, of built-in resources: their routes and storages are made at the start;
//   - as long as its definition is unchanged, of custom resources. The definition is compared
//     at each read; see settleTime for what a change brings with it;
//   - for retryAfter, if nothing was found.
//
// A read of what was found before takes a few map lookups; it waits for nobody and
// allocates nothing. Safe for concurrent use.
type Resolver struct {
	config ResolverConfig
	now    func() time.Time // the clock

	// routes is replaced when one is added. There are not more of them than storages
	// and definitions give reason for: a path that nothing is known of gets no place here.
	routes atomic.Pointer[map[route]*cell]

	mu        sync.Mutex // guards what follows, and the replacement of routes; taken inside of a cell's
	resources map[servedStore]*Resource
}

// route is all of a request that its storage depends on.
type route struct {
	group, version, resource string
	verb                     string // get, list or watch
	namespaced               bool   // the path names a namespace
}

// servedStore is a storage in one version of one group.
type servedStore struct {
	store *kubestorage.Store
	gvr   schema.GroupVersionResource
}

// cell is the place of one route.
type cell struct {
	mu    sync.Mutex // held while the route is probed
	bound atomic.Pointer[binding]
}

// binding is what a probe has found. It is immutable.
type binding struct {
	resource *Resource // nil: nothing to read from
	// definition is that of a custom resource, before the probe was sent; name is its.
	definition *apiextensionsv1.CustomResourceDefinition
	name       string
	// noticed is when the form of the definition was first seen here; settled, that the
	// probe was sent settleTime after that.
	noticed time.Time
	settled bool
	// retry is when to ask again, if there is nothing to read from.
	retry time.Time
}

const (
	// settleTime is how long after a definition was seen in a new form each request is
	// preceded by a probe. Upstream's handler looks at the same cache, but replaces the
	// storages of a changed definition only when the cache has told it, a little later,
	// and a storage that is being made at that moment may still be made from the old
	// form. Nothing tells when that is over. It takes milliseconds; this is a guess that a
	// server short of processors keeps too, and costs some microseconds for each read.
	settleTime = 10 * time.Second
	// retryAfter is how long a route without a storage is left alone.
	retryAfter = time.Second
)

const (
	// reasonRemote: another server serves this version of the group, or which one does is
	// not known yet.
	reasonRemote reason = "remote"
)

// NewResolver returns a resolver that knows nothing yet.
func NewResolver(c ResolverConfig) *Resolver {
	r := &Resolver{config: c, now: time.Now, resources: map[servedStore]*Resource{}}
	r.routes.Store(&map[route]*cell{})
	return r
}

// Resolve returns what a request reads, or why it has to be passed on. The request has
// the verb get, list or watch, no subresource, and a canonical path. next are the
// handlers that would answer it.
func (r *Resolver) Resolve(info *request.RequestInfo, next http.Handler) (*Resource, reason) {
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
	// A namespace counts as its own in the RequestInfo; its path names none.
	t.namespaced = info.Namespace != "" && (info.Resource != "namespaces" || info.APIGroup != "")
	return t
}

func (b *binding) read() (*Resource, reason) {
	if b.resource == nil {
		return nil, reasonResource
	}
	return b.resource, ""
}

// known returns what a request reads if it is known already, and nil otherwise. It
// looks nothing up and waits for nobody.
func (r *Resolver) known(info *request.RequestInfo) *Resource {
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

// holds reports whether what was found is still so.
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

// bind finds out where the route leads to. Requests for the same route wait for each
// other.
func (r *Resolver) bind(t route, next http.Handler) (*Resource, reason) {
	if r.definition(t) == nil && !r.builtIn(t) {
		return nil, reasonResource
	}
	c := r.cell(t)
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.bound.Load()
	if old == nil || !r.holds(old) {
		c.bound.Store(r.find(t, old, next))
	}
	return c.bound.Load().read()
}

// cell returns the place of a route, and makes one if there is none.
func (r *Resolver) cell(t route) *cell {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := *r.routes.Load()
	if c := old[t]; c != nil {
		return c
	}
	routes := maps.Clone(old)
	// Definitions that are gone will not be asked for again, or in another form.
	maps.DeleteFunc(routes, func(_ route, c *cell) bool {
		b := c.bound.Load()
		return b != nil && b.definition != nil && r.config.Definition(b.name) == nil
	})
	c := &cell{}
	routes[t] = c
	r.routes.Store(&routes)
	return c
}

// find sends a probe.
func (r *Resolver) find(t route, old *binding, next http.Handler) *binding {
	b := &binding{definition: r.definition(t)} // before the probe: what comes later is a change
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
		// The storage may be made from the new form, which the old one does not describe.
		b.retry = now
	case b.resource == nil:
		b.retry = now.Add(retryAfter)
	case !b.resource.Custom:
		// A built-in resource that a definition names as well.
		*b = binding{resource: b.resource}
	}
	return b
}

// resourceOf returns the Resource of a storage, the same one for all routes that lead
// to it: also for a storage that belongs to an earlier form of the definition. It
// returns nil if the storage is used in a way that the byte path does not know.
func (r *Resolver) resourceOf(t route, found kubestorage.Found, def *apiextensionsv1.CustomResourceDefinition, next http.Handler) *Resource {
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
	if _, custom := s.store.NewFunc().(runtime.Unstructured); custom {
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
