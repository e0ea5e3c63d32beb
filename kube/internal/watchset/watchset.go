// Package watchset holds the running watches of an etcd cluster, and ends them when the server
// shuts down.
package watchset

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
