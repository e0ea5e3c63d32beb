// Package kubestorage implements storage.Interface of k8s.io/apiserver on the engine (package
// mirror): writes go to upstream's etcd3 store; reads and watches are answered from memory, except
// those that memory cannot answer (ErrReadEtcd), which go to etcd.
//
// An API server that is built on k8s.io/apiserver calls readpath.Attach, which makes an engine and
// puts the read path, which writes cached bytes, in front of the handlers too. The engine alone
// wraps the getter that gives registries their storage:
//
//	engine := kubestorage.New(kubestorage.Options{})
//	defer engine.Close()
//	config.RESTOptionsGetter = engine.RESTOptionsGetter(config.RESTOptionsGetter)
package kubestorage

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/kube/consistency"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/etcdclient"
	"github.com/stratakube/strata/kube/internal/upstream"
)

// newBlocks returns a block cache of at most so many bytes. A quarter of its size at rest may be
// decoded objects: they are several times as large as their bytes, and the collector has to follow
// their pointers.
func newBlocks(bytes int64) *blockcache.Cache {
	rest := min(bytes, DefaultRepresentationBytes)
	return blockcache.New(bytes, rest, rest/4)
}

// Engine owns the state shared by all storages of a process: one etcd client, one mirror and one
// compactor per etcd cluster. All methods may be called concurrently.
type Engine struct {
	opts   Options
	blocks *blockcache.Cache

	// held while a cluster is opened, which may take as long as a dial to etcd; taken before mu
	opening sync.Mutex

	mu       sync.Mutex // guards the fields below; held briefly
	closed   bool
	draining bool
	clusters map[string]*cluster
	stores   map[schema.GroupResource]*Store // of built-in resources
	opened   chan struct{}                   // closed and replaced when a store is added

	deferrals  map[string]*deferredCluster // by clusterKey; they remain when they are open
	connecting sync.WaitGroup              // the goroutines of deferrals
}

// New returns an engine. It does not connect before its first storage is made.
func New(opts Options) *Engine {
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	if opts.RepresentationBytes == 0 {
		opts.RepresentationBytes = DefaultRepresentationBytes
	}
	return &Engine{opts: opts, blocks: newBlocks(opts.RepresentationBytes), clusters: map[string]*cluster{},
		stores: map[schema.GroupResource]*Store{}, opened: make(chan struct{}), deferrals: map[string]*deferredCluster{}}
}

// Close stops every mirror and client and returns when all goroutines of the
// engine have ended. Storages of the engine must not be used afterwards.
func (e *Engine) Close() {
	e.mu.Lock()
	e.closed = true
	clusters := e.clusters
	e.clusters = map[string]*cluster{}
	deferrals := e.deferrals
	e.deferrals = map[string]*deferredCluster{}
	e.mu.Unlock()
	for _, d := range deferrals {
		d.cancel()
		d.patience.Stop()
	}
	e.connecting.Wait()
	for _, c := range clusters {
		c.close()
	}
	e.opening.Lock() // until a cluster that was being opened has closed itself
	defer e.opening.Unlock()
}

// WaitLoaded returns when the first list of each cluster is in place; history may follow. Errors:
// ctx's error when it ends, one that says so when etcd has sent no data for the time stall, or
// after a failed load. A server that calls it before it serves does not spend the
// time of its first requests on the load: admission in kube-apiserver gives its informers 10 s,
// and then rejects the writes of post-start hooks, which ends the process.
func (e *Engine) WaitLoaded(ctx context.Context, stall time.Duration) error {
	const interval = 10 * time.Millisecond // short compared to a start of seconds
	e.mu.Lock()
	clusters := slices.Collect(maps.Values(e.clusters))
	e.mu.Unlock()
	last, arrived := int64(-1), time.Now()
	return wait.PollUntilContextCancel(ctx, interval, true, func(context.Context) (bool, error) {
		var received int64
		loaded := true
		for _, c := range clusters {
			if c.mirror != nil {
				p := c.mirror.LoadState()
				received += p.Received
				if loaded = loaded && !p.Loading; p.Failed > 0 && !loaded {
					return false, errLoadFailed
				}
			}
		}
		if received != last {
			last, arrived = received, time.Now()
		}
		if !loaded && time.Since(arrived) > stall {
			return false, errLoadStalled
		}
		return loaded, nil
	})
}

var (
	errLoadStalled = errors.New("no data received from etcd")
	errLoadFailed  = errors.New("list from etcd failed")
)

// Checkers returns the consistency checkers of all clusters.
func (e *Engine) Checkers() (all consistency.Checkers) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.clusters {
		if c.checker != nil {
			all = append(all, c.checker)
		}
	}
	return all
}

// RESTOptionsGetter wraps inner: the storages of the returned getter are served by the engine.
func (e *Engine) RESTOptionsGetter(inner generic.RESTOptionsGetter) generic.RESTOptionsGetter {
	return restOptions{e, inner}
}

type restOptions struct {
	engine *Engine
	inner  generic.RESTOptionsGetter
}

func (r restOptions) GetRESTOptions(resource schema.GroupResource, example runtime.Object) (generic.RESTOptions, error) {
	opts, err := r.inner.GetRESTOptions(resource, example)
	if err != nil {
		return opts, err
	}
	opts.Decorator = r.engine.Decorator()
	return opts, nil
}

// Decorator returns the function that makes storages on the engine, for
// RESTOptions.Decorator. Each storage holds a claim on its resource until its
// destroy function is called, which may be called more than once.
func (e *Engine) Decorator() generic.StorageDecorator {
	return upstream.Decorator(func(
		config *storagebackend.ConfigForResource,
		resourcePrefix string,
		reverse upstream.ReverseKeyFunc,
		newFunc, newListFunc func() runtime.Object,
		getAttrs storage.AttrFunc,
		indexers *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		open := func(c *cluster) (storage.Interface, factory.DestroyFunc, error) {
			uncached := e.opts.Uncached != nil && e.opts.Uncached(config.GroupResource)
			s, destroy, err := c.newStore(config, resourcePrefix, reverse, newFunc, newListFunc, getAttrs, indexers, uncached)
			if _, custom := newFunc().(runtime.Unstructured); !custom && err == nil {
				e.noteBuiltIn(config.GroupResource, s)
			}
			return s, destroy, err
		}
		if e.opts.Deferrable != nil && e.opts.Deferrable(config.Transport) {
			d, err := e.deferred(config)
			if err != nil {
				return nil, nil, err
			}
			if c := d.wait(); c != nil {
				return open(c)
			}
			s, destroy := newDeferredStore(d, config.GroupResource, open)
			return s, destroy, nil
		}
		c, err := e.cluster(config)
		if err != nil {
			return nil, nil, err
		}
		return open(c)
	})
}

func (e *Engine) noteBuiltIn(resource schema.GroupResource, s storage.Interface) {
	if store, ok := s.(*Store); ok {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.stores[resource] = store
		close(e.opened)
		e.opened = make(chan struct{})
	}
}

// HoldsBuiltIn reports whether there is a storage, other than of custom resources, that
// answers reads of a resource with this name from memory. Which API groups serve
// it does not show here: several may share one storage.
func (e *Engine) HoldsBuiltIn(resource string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for r := range e.stores {
		if r.Resource == resource {
			return true
		}
	}
	return false
}

// cluster returns the shared parts for the etcd cluster and prefix of a config.
func (e *Engine) cluster(config *storagebackend.ConfigForResource) (*cluster, error) {
	key := clusterKey(config)
	if c, err := e.openCluster(key); c != nil || err != nil {
		return c, err
	}
	e.opening.Lock()
	defer e.opening.Unlock()
	if c, err := e.openCluster(key); c != nil || err != nil {
		return c, err
	}
	c, err := newCluster(context.Background(), etcdclient.DialTimeout, config, e.opts, e.blocks)
	if err != nil {
		return nil, err
	}
	if !e.adopt(key, c) {
		c.close()
		return nil, errClosed
	}
	return c, nil
}

// adopt adds an open cluster. It reports false if the engine is closed.
func (e *Engine) adopt(key string, c *cluster) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	if e.draining {
		c.watches.Refuse()
	}
	e.clusters[key] = c
	return true
}

// openCluster returns an open cluster, nil if it has to be opened. Errors: errClosed.
func (e *Engine) openCluster(key string) (*cluster, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, errClosed
	}
	return e.clusters[key], nil
}

var errClosed = errors.New("storage engine is closed")

// Drain ends the watches of all storages of the engine, in order, for a server that shuts down
// (KEP-1904). New watches are refused with 429 from the start of the call.
//
//  1. The published revision catches up with etcd, for at most progress; 0 does not wait.
//  2. Each watch delivers its pending events up to the published revision, then a bookmark at its
//     position if its client requested bookmarks, and ends without an error (I4). A watch
//     in the middle of its initial events ends without a bookmark. So its client can resume
//     on any server, at a revision as new as any that this server has.
//  3. Watches that have not ended when ctx does, because their clients do not read,
//     are canceled.
//
// Watches of WithoutDrain continue, and may start, until their storages end.
//
// Drain returns when the last watch has ended, or an error with the number of canceled ones. Reads
// are not affected. Package readpath calls it at the right moment (DrainOnShutdown).
func (e *Engine) Drain(ctx context.Context, progress time.Duration) error {
	e.mu.Lock()
	e.draining = true
	clusters := make([]*cluster, 0, len(e.clusters))
	for _, c := range e.clusters {
		clusters = append(clusters, c)
	}
	e.mu.Unlock()
	for _, c := range clusters {
		c.watches.Refuse()
	}
	errs := make([]error, len(clusters))
	var wg sync.WaitGroup
	for i, c := range clusters {
		wg.Go(func() {
			c.catchUp(ctx, progress)
			errs[i] = c.watches.Drain(ctx)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// catchUp returns when the mirror has caught up with etcd, or after atMost.
func (c *cluster) catchUp(ctx context.Context, atMost time.Duration) {
	if c.mirror == nil || c.detected.eventsOnly || atMost <= 0 || c.watches.Len() == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	rev, err := c.mirror.ReadRevision(ctx)
	if err == nil {
		err = c.mirror.Wait(ctx, rev)
	}
	if err != nil {
		c.opts.Logger.Warn("Etcd did not answer at shutdown; watches end at the published revision", "prefix", c.prefix,
			"revision", c.mirror.PublishedRevision(), "err", err)
	}
}
