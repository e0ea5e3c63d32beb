package flight

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"

	"k8s.io/klog/v2"
)

// Detached shares computations that take no context, such as a call of upstream's converters. Each
// runs on a goroutine of its own. A caller leaves when its context ends; the computation goes on,
// and later callers with its key wait for it too. The result of a failure is shared as well,
// because no caller's context has caused it.
//
// Callers bound the computations that are awaited, since each waits for one. Limit bounds the
// abandoned ones, which all callers have left: while there are so many, no other begins. So
// computations that hang cannot pile up, and a caller waits for its turn as long as its context
// lasts.
//
// The goroutines have no owner that waits for them: a computation that hangs would delay it too.
// They must use nothing that is closed. The zero value abandons nothing and must not be used; set
// Limit. Methods may be called concurrently.
type Detached[K comparable, V any] struct {
	// Limit is the number of abandoned computations from which no other begins, at least 1.
	Limit int
	// Changed, unless nil, is called with each change of the numbers of computations. It must not
	// block.
	Changed func(awaited, abandoned int)

	mu        sync.Mutex // leaf, but for Changed
	calls     map[K]*detachedCall[V]
	abandoned int
	room      chan struct{} // closed when there is room; nil: no caller waits
}

// detachedCall is a computation in progress.
type detachedCall[V any] struct {
	done    chan struct{} // closed at the end
	v       V
	err     error
	waiters int // 0: abandoned
}

// Do returns the result of compute for the key, of this call or of a concurrent one. compute must
// not panic, and must not use memory that the caller reuses. Errors: that of compute, and that of
// ctx, with which no computation begins.
func (d *Detached[K, V]) Do(ctx context.Context, key K, compute func() (V, error)) (v V, err error) {
	for {
		if err := ctx.Err(); err != nil {
			return v, err
		}
		c, room := d.join(key, compute)
		if c == nil {
			select {
			case <-room:
			case <-ctx.Done():
			}
			continue
		}
		select {
		case <-c.done:
			return c.v, c.err
		case <-ctx.Done():
			d.leave(c)
			return v, ctx.Err()
		}
	}
}

// join makes the caller wait for the computation of the key, which it begins if there is room for
// it. Without room, it returns a channel that is closed when there may be some.
func (d *Detached[K, V]) join(key K, compute func() (V, error)) (c *detachedCall[V], room <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.calls[key]; c != nil {
		if c.waiters++; c.waiters == 1 {
			d.changeLocked(1, -1)
		}
		return c, nil
	}
	if d.abandoned >= d.Limit {
		if d.room == nil {
			d.room = make(chan struct{})
		}
		return nil, d.room
	}
	if d.calls == nil {
		d.calls = map[K]*detachedCall[V]{}
	}
	c = &detachedCall[V]{done: make(chan struct{}), waiters: 1}
	d.calls[key] = c
	d.changeLocked(1, 0)
	go func() {
		c.v, c.err = compute()
		d.end(key, c)
	}()
	return c, nil
}

// end publishes the result of a computation.
func (d *Detached[K, V]) end(key K, c *detachedCall[V]) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.calls, key)
	close(c.done)
	if c.waiters > 0 {
		d.changeLocked(-1, 0)
	} else {
		d.changeLocked(0, -1)
	}
}

// leave ends the wait of a caller.
func (d *Detached[K, V]) leave(c *detachedCall[V]) {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-c.done:
		return // end has counted it
	default:
	}
	if c.waiters--; c.waiters == 0 {
		d.changeLocked(-1, 1)
	}
}

// changeLocked records a change of the numbers of computations, and wakes callers that wait for
// room.
func (d *Detached[K, V]) changeLocked(awaited, abandoned int) {
	d.abandoned += abandoned
	if d.Changed != nil {
		d.Changed(awaited, abandoned)
	}
	if d.room != nil && d.abandoned < d.Limit {
		close(d.room)
		d.room = nil
	}
}

// RecoverPanic calls f and returns its error, or one for its panic, which is logged. A panic of the
// request's own goroutine is recovered by a filter; that of another goroutine would end the
// process.
func RecoverPanic(f func() error) (err error) {
	defer func() {
		if x := recover(); x != nil {
			klog.ErrorS(nil, "Observed a panic", "panic", x, "stacktrace", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", x)
		}
	}()
	return f()
}
