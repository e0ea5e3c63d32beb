package kubestorage

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
)

const (
	// deferAfter is the time for which the first storage of a deferrable cluster waits for its
	// etcd. An etcd that runs answers within milliseconds.
	deferAfter = 2 * time.Second
	// deferredDial bounds one attempt to connect; short, because gRPC waits longer after each
	// failure of one attempt.
	deferredDial = 3 * time.Second
	// deferredPause is the pause between two attempts; a guess.
	deferredPause = time.Second
	// logEvery is the number of failed attempts for which one is logged: about one in a minute.
	logEvery = 15
)

// deferredCluster is a cluster whose etcd may be down when its storages are made. A goroutine
// connects until it succeeds or the engine closes.
type deferredCluster struct {
	engine    *Engine
	key       string
	endpoints string
	prefix    string
	cancel    context.CancelFunc
	opened    chan struct{} // closed when the cluster is open
	patience  *time.Timer   // fires once, deferAfter after the first storage
	late      chan struct{} // closed when patience has fired

	mu       sync.Mutex // taken before Engine.mu; guards the fields below
	cluster  *cluster   // nil before it is open
	awaiting []func(*cluster)
}

// deferred returns the deferred cluster of a config, and starts to connect if the call is the first
// one for it. Errors: errClosed.
func (e *Engine) deferred(config *storagebackend.ConfigForResource) (*deferredCluster, error) {
	key := clusterKey(config)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, errClosed
	}
	if d := e.deferrals[key]; d != nil {
		return d, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	late := make(chan struct{})
	d := &deferredCluster{engine: e, key: key, endpoints: strings.Join(config.Transport.ServerList, ","), prefix: keyPrefix(config.Prefix),
		cancel: cancel, opened: make(chan struct{}), late: late, patience: time.AfterFunc(deferAfter, func() { close(late) })}
	e.deferrals[key] = d
	e.connecting.Go(func() { d.connect(ctx, *config) })
	return d, nil
}

// connect opens the cluster, and then the storages that wait for it.
func (d *deferredCluster) connect(ctx context.Context, config storagebackend.ConfigForResource) {
	log := d.engine.opts.Logger
	for failures := 0; ; failures++ {
		c, err := newCluster(ctx, deferredDial, &config, d.engine.opts, d.engine.blocks)
		if err == nil {
			d.open(c)
			if failures > 0 {
				log.Info("Etcd answers; serving its resources", "endpoints", d.endpoints)
			}
			return
		}
		if ctx.Err() != nil {
			return
		}
		if failures%logEvery == 0 {
			log.Error("Etcd does not answer; its resources are unavailable until it does", "endpoints", d.endpoints, "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(deferredPause):
		}
	}
}

func (d *deferredCluster) open(c *cluster) {
	if !d.engine.adopt(d.key, c) {
		c.close()
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cluster = c
	for _, f := range d.awaiting {
		f(c)
	}
	d.awaiting = nil
	close(d.opened)
}

// wait returns the cluster when it is open, or nil after deferAfter since the first call for this
// cluster.
func (d *deferredCluster) wait() *cluster {
	select {
	case <-d.opened:
	case <-d.late:
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cluster
}

// whenOpen calls f with the cluster, at once if it is open, and otherwise when it opens, before the
// cluster counts as open.
func (d *deferredCluster) whenOpen(f func(*cluster)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cluster != nil {
		f(d.cluster)
		return
	}
	d.awaiting = append(d.awaiting, f)
}

// unavailable returns the error of requests before the cluster is open: 503.
func (d *deferredCluster) unavailable(resource schema.GroupResource) error {
	return apierrors.NewServiceUnavailable(fmt.Sprintf("etcd at %s, which stores %s, has not answered since this server started; the request can be retried", d.endpoints, resource))
}

// deferredStore is the storage of a resource whose etcd was down when the storage was made. Until
// the cluster opens, each request fails with 503; then the requests go to the storage of the
// cluster.
type deferredStore struct {
	guarded
	cluster  *deferredCluster
	resource schema.GroupResource
	opened   atomic.Pointer[openedStore] // nil before the cluster is open

	mu        sync.Mutex // guards the fields below
	destroyed bool
	estimate  storage.KeysFunc // see EnableResourceSizeEstimation
}

type openedStore struct {
	storage.Interface
	destroy factory.DestroyFunc
	err     error // of the creation of the storage; the other fields are nil
}

// newDeferredStore returns a storage that open creates when the cluster is open.
func newDeferredStore(d *deferredCluster, resource schema.GroupResource,
	open func(*cluster) (storage.Interface, factory.DestroyFunc, error)) (*deferredStore, factory.DestroyFunc) {
	s := &deferredStore{cluster: d, resource: resource}
	s.allow = s.inner
	d.whenOpen(func(c *cluster) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.destroyed {
			return
		}
		inner, destroy, err := open(c)
		if err != nil {
			d.engine.opts.Logger.Error("Cannot serve a resource", "resource", resource.String(), "err", err)
		} else if s.estimate != nil {
			err = inner.EnableResourceSizeEstimation(s.estimate)
		}
		s.opened.Store(&openedStore{inner, destroy, err})
	})
	return s, s.close
}

func (s *deferredStore) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.opened.Load(); o != nil && o.destroy != nil && !s.destroyed {
		o.destroy()
	}
	s.destroyed = true
}

// inner returns the storage of the cluster. Error: 503, for every verb.
func (s *deferredStore) inner(string) (storage.Interface, error) {
	o := s.opened.Load()
	if o == nil {
		return nil, s.cluster.unavailable(s.resource)
	}
	return o.Interface, o.err
}

// EnableResourceSizeEstimation implements storage.Interface. Before the cluster opens, it keeps the
// function for the storage of the cluster.
func (s *deferredStore) EnableResourceSizeEstimation(keys storage.KeysFunc) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.opened.Load(); o != nil && o.err == nil {
		return o.EnableResourceSizeEstimation(keys)
	}
	s.estimate = keys
	return nil
}
