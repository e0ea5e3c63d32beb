package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// Drain ends the watches of all storages of the engine, in order, for a server that
// shuts down (KEP-1904). From the call on new watches are refused with 429.
//
//  1. The clock catches up with etcd, for at most progress; 0 does not wait.
//  2. Each watch hands out what is due up to the clock, then, if its client asked for
//     bookmarks, one at the revision that it has come to, and ends without an error (I4).
//     One in the middle of its initial events ends without a bookmark. A client so
//     resumes wherever it likes, at a revision as new as any that this server knows.
//  3. Watches that have not ended when ctx does, because their clients do not read,
//     are ended as they are.
//
// Watches of WithoutDrain go on, and may begin, until their storages end.
//
// It returns when the last has ended, or says how many were not in time. Reads go on as
// before. Package readpath calls it at the right moment (DrainOnShutdown).
func (e *Engine) Drain(ctx context.Context, progress time.Duration) error {
	e.mu.Lock()
	e.draining = true
	clusters := make([]*cluster, 0, len(e.clusters))
	for _, c := range e.clusters {
		clusters = append(clusters, c)
	}
	e.mu.Unlock()
	for _, c := range clusters {
		c.watches.refuse()
	}
	errs := make([]error, len(clusters))
	var wg sync.WaitGroup
	for i, c := range clusters {
		wg.Go(func() {
			c.catchUp(ctx, progress)
			errs[i] = c.watches.drain(ctx)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// catchUp returns when memory has what etcd has, or when that takes too long.
func (c *cluster) catchUp(ctx context.Context, atMost time.Duration) {
	if c.mirror == nil || c.eventsOnly || atMost <= 0 || c.watches.len() == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	rev, err := c.mirror.Current(ctx)
	if err == nil {
		err = c.mirror.Wait(ctx, rev)
	}
	if err != nil {
		c.opts.Logger.Warn("watches end at a revision that may be behind etcd's", "prefix", c.prefix,
			"revision", c.mirror.Clock(), "error", err)
	}
}

// running are the watches of a cluster that run. The zero value has none. Safe for
// concurrent use.
type running struct {
	refused atomic.Bool // no more are let in
	last    atomic.Bool // those that run hand out what is due, and end

	mu        sync.Mutex // leaf, but for what ender's methods take
	all       map[ender]struct{}
	undrained map[ender]struct{} // see WithoutDrain
	none      chan struct{}      // closed when the last of all is gone; nil if nobody waits for that
}

type withoutDrainKey struct{}

// WithoutDrain returns a context for a watch that Engine.Drain is to leave alone: one of a client
// that stops with the server, such as an informer in its process. If it ended before its client
// stops, the client would start it again, in vain.
func WithoutDrain(ctx context.Context) context.Context {
	return context.WithValue(ctx, withoutDrainKey{}, true)
}

func isWithoutDrain(ctx context.Context) bool { return ctx.Value(withoutDrainKey{}) != nil }

// ender is a watch that can be told to end. Its methods do not wait.
type ender interface {
	leave()               // running.last was set: hand out what is due, and end
	cut(reason endReason) // end now
}

// refuse lets no more watches in.
func (r *running) refuse() { r.refused.Store(true) }

// errShuttingDown is the answer to a watch that comes when they are being ended: clients
// try again elsewhere, without listing anew.
func errShuttingDown() error {
	return apierrors.NewTooManyRequests("the server is shutting down", tooHighRetrySeconds)
}

// add lets a watch in, or reports that no more are.
func (r *running) add(w ender, withoutDrain bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if withoutDrain {
		if r.undrained == nil {
			r.undrained = map[ender]struct{}{}
		}
		r.undrained[w] = struct{}{}
		return true
	}
	if r.refused.Load() {
		return false
	}
	if r.all == nil {
		r.all = map[ender]struct{}{}
	}
	r.all[w] = struct{}{}
	return true
}

// remove forgets a watch that has ended.
func (r *running) remove(w ender) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.all, w)
	delete(r.undrained, w)
	if len(r.all) == 0 && r.none != nil {
		close(r.none)
		r.none = nil
	}
}

func (r *running) len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.all)
}

// each calls f for every watch that drain ends.
func (r *running) each(f func(ender)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.all {
		f(w)
	}
}

// every calls f for every watch that runs.
func (r *running) every(f func(ender)) {
	r.each(f)
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.undrained {
		f(w)
	}
}

// drain has every watch hand out what is due and end, and waits for that until ctx ends.
func (r *running) drain(ctx context.Context) error {
	r.refuse()
	r.last.Store(true)
	r.each(ender.leave)
	r.mu.Lock()
	if len(r.all) == 0 {
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
	r.each(func(w ender) {
		w.cut(endedByShutdown)
		left++
	})
	return fmt.Errorf("%d watches were broken off: %w", left, ctx.Err())
}

// endReason says why a watch has ended.
type endReason int32

const (
	notEnded endReason = iota
	endedByTimeout
	endedByClient
	endedByShutdown
	endedByStorage
	endedExpired
	endedByError
	endedBySlowness // of the client
)

// String is a label of a metric.
func (e endReason) String() string {
	return [...]string{"", "timeout", "client", "shutdown", "storage", "expired", "error", "slow_client"}[e]
}

// directWatch is a watch that etcd serves. It has no bookmarks but those that etcd's
// progress makes, so it just ends.
type directWatch struct {
	watch.Interface
	running *running
	cancel  context.CancelFunc
}

func (w *directWatch) leave()        { w.cancel() }
func (w *directWatch) cut(endReason) { w.cancel() }

// Stop implements watch.Interface.
func (w *directWatch) Stop() {
	w.running.remove(w)
	w.cancel()
	w.Interface.Stop()
}

// watchDirectly starts a watch that etcd serves and that ends when all of r do.
func (r *running) watchDirectly(ctx context.Context, etcd storage.Interface, key string, opts storage.ListOptions) (watch.Interface, error) {
	w := &directWatch{running: r}
	ctx, w.cancel = context.WithCancel(ctx)
	if !r.add(w, isWithoutDrain(ctx)) {
		w.cancel()
		return nil, errShuttingDown()
	}
	var err error
	if w.Interface, err = etcd.Watch(ctx, key, opts); err != nil {
		r.remove(w)
		w.cancel()
		return nil, err
	}
	return w, nil
}
