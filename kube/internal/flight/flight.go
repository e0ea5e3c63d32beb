// Package flight lets concurrent readers share one computation.
package flight

import (
	"context"
	"sync"
)

// Group shares computations by key: the first caller computes, callers that come meanwhile wait for
// the result. The zero value is ready to use. Methods may be called concurrently.
//
// It differs from golang.org/x/sync/singleflight in that a waiter ends with its own context, and
// that a failure is not shared: it may be due to the request of the caller that computed, so the
// next waiter computes again.
//
// Detached shares computations that take no context.
//
// Three shared computations are not of this kind: a read of etcd's revision and one of the keys of
// continue tokens must begin after the request that waits for it (freshness.Reads,
// continuetoken.Keeper), and the turns of selected bound work without sharing a result.
type Group[K comparable, V any] struct {
	mu    sync.Mutex // leaf
	calls map[K]*call[V]
}

// call is a computation in progress.
type call[V any] struct {
	done chan struct{} // closed at the end
	v    V
	ok   bool // v is valid; otherwise the computation failed or panicked
}

// Do returns the result of compute, by this caller (mine) or by a concurrent one for the same key.
// Errors: that of compute if mine, otherwise that of ctx. The result is not cached.
func (g *Group[K, V]) Do(ctx context.Context, key K, compute func() (V, error)) (v V, mine bool, err error) {
	for {
		c, mine := g.join(key)
		if mine {
			v, err := g.lead(key, c, compute)
			return v, true, err
		}
		select {
		case <-c.done:
			if c.ok {
				return c.v, false, nil
			}
		case <-ctx.Done():
			return v, false, ctx.Err()
		}
	}
}

// join returns the computation of a key, and whether the caller has to do it.
func (g *Group[K, V]) join(key K) (c *call[V], mine bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c, ok := g.calls[key]; ok {
		return c, false
	}
	if g.calls == nil {
		g.calls = map[K]*call[V]{}
	}
	c = &call[V]{done: make(chan struct{})}
	g.calls[key] = c
	return c, true
}

func (g *Group[K, V]) lead(key K, c *call[V], compute func() (V, error)) (V, error) {
	defer func() { // after a panic as well
		g.mu.Lock()
		delete(g.calls, key)
		g.mu.Unlock()
		close(c.done)
	}()
	v, err := compute()
	c.v, c.ok = v, err == nil
	return v, err
}
