// Package kubestorage implements storage.Interface of k8s.io/apiserver on the
// engine (package mirror): writes go to upstream's etcd3 store, every read and
// watch is answered from memory.
//
// An API server uses it by wrapping the getter that gives its registries their
// storage:
//
//	engine := kubestorage.New(kubestorage.Options{})
//	defer engine.Close()
//	config.RESTOptionsGetter = engine.RESTOptionsGetter(config.RESTOptionsGetter)
package kubestorage

import (
	"errors"
	"log/slog"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/mirror"
)

// Options configures an Engine. The zero value serves every resource from memory.
type Options struct {
	// Uncached says which resources are served from etcd and kept out of memory;
	// nil means none.
	Uncached func(schema.GroupResource) bool
	// Window bounds the history kept in memory, per etcd cluster. The zero value
	// means mirror.DefaultWindow.
	Window mirror.Window
	// UnclaimedBytes bounds the values kept for resources that nobody has asked for
	// yet, per etcd cluster; 0 means mirror.DefaultUnclaimedBytes.
	UnclaimedBytes int64
	// Gates turns behaviour off; it has to know Gates(). It is read when a storage is
	// made. nil means the defaults.
	Gates featuregate.FeatureGate
	// Logger receives what an operator should know. Default: slog.Default().
	Logger *slog.Logger
}

// Engine owns what all storages of a process share: one etcd client, one mirror and
// one compactor per etcd cluster. All methods may be called concurrently.
type Engine struct {
	opts Options

	mu       sync.Mutex
	closed   bool
	clusters map[string]*cluster
}

// New returns an engine. It connects to nothing before its first storage is made.
func New(opts Options) *Engine {
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	return &Engine{opts: opts, clusters: map[string]*cluster{}}
}

// Close stops every mirror and client and returns when all goroutines of the
// engine have ended. Storages of the engine must not be used afterwards.
func (e *Engine) Close() {
	e.mu.Lock()
	e.closed = true
	clusters := e.clusters
	e.clusters = map[string]*cluster{}
	e.mu.Unlock()
	for _, c := range clusters {
		c.close()
	}
}

// RESTOptionsGetter returns a getter like inner whose storages are served by the engine.
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
	return func(
		config *storagebackend.ConfigForResource,
		resourcePrefix string,
		_ func(obj runtime.Object) (string, error),
		newFunc, newListFunc func() runtime.Object,
		getAttrs storage.AttrFunc,
		_ storage.IndexerFuncs,
		_ *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		c, err := e.cluster(config)
		if err != nil {
			return nil, nil, err
		}
		uncached := e.opts.Uncached != nil && e.opts.Uncached(config.GroupResource)
		return c.newStore(config, resourcePrefix, newFunc, newListFunc, getAttrs, uncached)
	}
}

// cluster returns the shared parts for the etcd cluster and prefix of a config.
func (e *Engine) cluster(config *storagebackend.ConfigForResource) (*cluster, error) {
	key := clusterKey(config)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, errors.New("storage engine is closed")
	}
	if c := e.clusters[key]; c != nil {
		return c, nil
	}
	c, err := newCluster(config, e.opts)
	if err != nil {
		return nil, err
	}
	e.clusters[key] = c
	return c, nil
}
