// Package watchset holds the running watches of an etcd cluster, and ends them when the server
// shuts down.
package watchset

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// Watches are the running watches of an etcd cluster. The zero value is empty. Safe for concurrent
// use.
type Watches struct {
	refused  atomic.Bool // Add rejects watches
	draining atomic.Bool // running watches deliver their pending events, and end

	mu        sync.Mutex // leaf, but for the locks that the methods of Watch take
	drainable map[Watch]struct{}
	undrained map[Watch]struct{} // Drain does not end them
	none      chan struct{}      // closed when drainable is empty; nil if Drain does not wait
}

// Watch is a running watch. Its methods do not wait.
type Watch interface {
	Drain()           // Watches.Draining has become true: deliver pending events, and end
	Abort(why Reason) // end now
}

// Refuse makes Add reject watches from now on.
func (r *Watches) Refuse() { r.refused.Store(true) }

// Refused reports whether Add rejects watches.
func (r *Watches) Refused() bool { return r.refused.Load() }

// Draining reports whether watches must deliver their pending events, and end.
func (r *Watches) Draining() bool { return r.draining.Load() }

// ErrShuttingDown returns the error of a rejected watch, 429: its client retries on another server,
// without a relist.
func ErrShuttingDown() error {
	return apierrors.NewTooManyRequests("the server is shutting down", 1)
}

// Add adds a watch; false if it is rejected. Drain does not end an undrained watch, which is never
// rejected.
func (r *Watches) Add(w Watch, undrained bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	set := &r.drainable
	switch {
	case undrained:
		set = &r.undrained
	case r.refused.Load():
		return false
	}
	if *set == nil {
		*set = map[Watch]struct{}{}
	}
	(*set)[w] = struct{}{}
	return true
}

// Remove removes a watch that has ended.
func (r *Watches) Remove(w Watch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.drainable, w)
	delete(r.undrained, w)
	if len(r.drainable) == 0 && r.none != nil {
		close(r.none)
		r.none = nil
	}
}

// Len returns the number of watches that Drain ends.
func (r *Watches) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.drainable)
}

// All returns the number of open watches, including those that Drain does not end.
func (r *Watches) All() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.drainable) + len(r.undrained)
}

// EachDrainable calls f for every watch that Drain ends. f must not call methods of r.
func (r *Watches) EachDrainable(f func(Watch)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.drainable {
		f(w)
	}
}

// Every calls f for every running watch. f must not call methods of r.
func (r *Watches) Every(f func(Watch)) {
	r.EachDrainable(f)
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.undrained {
		f(w)
	}
}

// Drain rejects new watches, makes the others deliver their pending events and end, and waits for
// them until ctx ends. It then cuts the remaining watches, and returns an error with their number.
func (r *Watches) Drain(ctx context.Context) error {
	r.Refuse()
	r.draining.Store(true)
	r.EachDrainable(Watch.Drain)
	r.mu.Lock()
	if len(r.drainable) == 0 {
		r.mu.Unlock()
		return nil
	}
	if r.none == nil {
		r.none = make(chan struct{})
	}
	none := r.none
	r.mu.Unlock()
	select {
	case <-none:
		return nil
	case <-ctx.Done():
	}
	left := 0
	r.EachDrainable(func(w Watch) {
		w.Abort(ByShutdown)
		left++
	})
	return fmt.Errorf("%d watches were aborted: %w", left, ctx.Err())
}

// direct is a watch that etcd serves. Its only bookmarks are those of etcd's progress, so it just
// ends.
type direct struct {
	watch.Interface
	watches *Watches
	cancel  context.CancelFunc
}

// Drain implements Watch.
func (w *direct) Drain() { w.cancel() }

// Abort implements Watch.
func (w *direct) Abort(Reason) { w.cancel() }

// Stop implements watch.Interface.
func (w *direct) Stop() {
	w.watches.Remove(w)
	w.cancel()
	w.Interface.Stop()
}

// Direct starts a watch that etcd serves and adds it to r. Errors: that of etcd, and
// ErrShuttingDown if it is rejected.
func (r *Watches) Direct(ctx context.Context, etcd storage.Interface, key string, opts storage.ListOptions, undrained bool) (watch.Interface, error) {
	w := &direct{watches: r}
	ctx, w.cancel = context.WithCancel(ctx)
	if !r.Add(w, undrained) {
		w.cancel()
		return nil, ErrShuttingDown()
	}
	var err error
	if w.Interface, err = etcd.Watch(ctx, key, opts); err != nil {
		r.Remove(w)
		w.cancel()
		return nil, err
	}
	return w, nil
}

// Group is the goroutines of a storage. The zero value is empty. Safe for concurrent use.
type Group struct {
	mu    sync.Mutex // leaf
	ended bool
	wg    sync.WaitGroup
}

// Start runs f on a goroutine, or reports that the storage has ended.
func (g *Group) Start(f func()) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.ended {
		g.wg.Go(f)
	}
	return !g.ended
}

// End makes Start refuse from now on, and returns when all goroutines have ended.
func (g *Group) End() {
	g.mu.Lock()
	g.ended = true
	g.mu.Unlock()
	g.wg.Wait()
}

// Reason is the reason why a watch has ended.
type Reason int32

// Reasons. NotEnded is the zero value.
const (
	NotEnded Reason = iota
	ByTimeout
	ByClient
	ByShutdown
	ByStorage
	Expired
	ByError
	BySlowness // of the client
)

// String is a label of a metric.
func (e Reason) String() string {
	return [...]string{"", "timeout", "client", "shutdown", "storage", "expired", "error", "slow_client"}[e]
}

// Ended is the first reason that was set. The zero value is NotEnded. Safe for concurrent use.
type Ended struct{ reason atomic.Int32 }

// Set sets the reason if none was set before.
func (e *Ended) Set(reason Reason) { e.reason.CompareAndSwap(int32(NotEnded), int32(reason)) }

// Get returns the reason.
func (e *Ended) Get() Reason { return Reason(e.reason.Load()) }
