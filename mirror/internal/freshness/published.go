// Package freshness tracks the published revision of a mirror and etcd's revision: waits for the
// published revision, progress requests, shared reads of etcd's revision, and the watchdog of the
// feed. It accesses etcd and the mirror through functions, so that tests run it alone.
package freshness

import (
	"container/heap"
	"context"
	"math"
	"sync"
	"sync/atomic"
)

// Published is the published revision, and the waits for it to advance. All methods may be called
// concurrently.
type Published struct {
	rev atomic.Int64
	// min is the lowest revision of all waits: Publish takes the lock only if it ends a wait.
	min atomic.Int64

	// byProgress: progress, not events, moves the published revision to the revisions of the waits.
	// Progress has ended the last wait, and since then no read has found the published revision at
	// etcd's revision.
	byProgress           atomic.Bool
	waitsEndedByProgress atomic.Int64 // times that progress has ended waits
	events               atomic.Int64 // times that events have moved the published revision

	closed    <-chan struct{}
	errClosed error

	mu      sync.Mutex // leaf; guards the fields below
	waiters waiterHeap

	reportedWaits bool          // there are waits; reported by the channels
	hasWaits      chan struct{} // closed while there are waits, replaced when there are none
	noWaits       chan struct{} // closed while there are no waits
	lowered       chan struct{} // a new wait is for a lower revision than all others
}

// NewPublished returns a published revision of 0 and its publisher. Waits end with err when closed
// is closed.
func NewPublished(closed <-chan struct{}, err error) (*Published, Publisher) {
	c := &Published{hasWaits: make(chan struct{}), noWaits: make(chan struct{}), lowered: make(chan struct{}, 1), closed: closed, errClosed: err}
	close(c.noWaits)
	c.min.Store(math.MaxInt64)
	return c, Publisher{c}
}

// Revision returns the published revision. Cost is one load.
func (c *Published) Revision() int64 { return c.rev.Load() }

type waiter struct {
	rev   int64
	done  chan struct{}
	index int
}

// Publisher advances a Published. It belongs to one goroutine, the only one that may publish;
// readers have access to the Published only.
type Publisher struct{ c *Published }

// Publish moves the published revision to rev and ends the waits for rev and lower revisions.
// byProgress reports that a progress response, not an event, has moved it. Cost is O(log n) for
// each wait that ends, and no lock if no wait ends.
func (p Publisher) Publish(rev int64, byProgress bool) {
	c := p.c
	if !byProgress {
		c.events.Add(1)
	}
	c.rev.Store(rev)
	if c.min.Load() > rev {
		return
	}
	c.byProgress.Store(byProgress)
	if byProgress {
		c.waitsEndedByProgress.Add(1)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.waiters) > 0 && c.waiters[0].rev <= rev {
		close(heap.Pop(&c.waiters).(*waiter).done)
	}
	c.setMinLocked()
}

func (c *Published) setMinLocked() {
	lowest := int64(math.MaxInt64)
	if len(c.waiters) > 0 {
		lowest = c.waiters[0].rev
	}
	c.min.Store(lowest)
	switch occupied := len(c.waiters) > 0; {
	case occupied == c.reportedWaits:
	case occupied:
		close(c.hasWaits)
		c.reportedWaits, c.noWaits = true, make(chan struct{})
	default:
		close(c.noWaits)
		c.reportedWaits, c.hasWaits = false, make(chan struct{})
	}
}

// Wait returns when the published revision has reached rev, with ctx's error, or with the error
// given to NewPublished when the mirror is closed.
func (c *Published) Wait(ctx context.Context, rev int64) error {
	if c.rev.Load() >= rev {
		return nil
	}
	w := &waiter{rev: rev, done: make(chan struct{})}
	c.mu.Lock()
	heap.Push(&c.waiters, w)
	if w.index == 0 && c.reportedWaits {
		select {
		case c.lowered <- struct{}{}:
		default:
		}
	}
	c.setMinLocked()
	// The writer stores rev before it loads min, and Wait stores min before it loads rev: at least
	// one of them observes the other.
	if now := c.rev.Load(); now >= rev {
		heap.Remove(&c.waiters, w.index)
		c.setMinLocked()
		c.mu.Unlock()
		return nil
	}
	c.mu.Unlock()
	var err error
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-c.closed:
		err = c.errClosed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.index < 0 { // woken at the same time
		return nil
	}
	heap.Remove(&c.waiters, w.index)
	c.setMinLocked()
	return err
}

// whileWaits returns a channel that is closed while there are waits.
func (c *Published) whileWaits() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hasWaits
}

// whileNoWaits returns a channel that is closed while there are no waits.
func (c *Published) whileNoWaits() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.noWaits
}

type waiterHeap []*waiter

func (h waiterHeap) Len() int           { return len(h) }
func (h waiterHeap) Less(i, j int) bool { return h[i].rev < h[j].rev }
func (h waiterHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *waiterHeap) Push(x any) {
	w := x.(*waiter)
	w.index = len(*h)
	*h = append(*h, w)
}
func (h *waiterHeap) Pop() any {
	old := *h
	w := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	w.index = -1
	return w
}
