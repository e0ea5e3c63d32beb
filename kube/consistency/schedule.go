package consistency

import (
	"container/heap"
	"math/rand/v2"
	"time"
)

// schedule compares each resource at every interval, one after the other, until the checker is
// closed. One goroutine and one timer serve all resources: a server may have thousands.
func (k *Checker) schedule() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		x, wait := k.due(time.Now())
		if x != nil {
			if x.resource.Ready() {
				k.check(x.ctx, x)
			}
			k.enqueue(x)
			continue
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-k.earlier:
		case <-k.ctx.Done():
			return
		}
	}
}

// due removes and returns the resource whose time has come, and otherwise returns the time until
// the first one.
func (k *Checker) due(now time.Time) (x *checked, wait time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ctx.Err() != nil || len(k.queue) == 0 {
		return nil, k.opts.Interval
	}
	if first := k.queue[0]; first.at.After(now) {
		return nil, first.at.Sub(now)
	}
	return heap.Pop(&k.queue).(*checked), 0
}

// enqueue sets the time of the next comparison of a resource, which is no later than one that is
// scheduled already. A resource that was not ready is scheduled again too.
func (k *Checker) enqueue(x *checked) {
	wait := checkWait(k.opts.Interval, k.opts.VerifiesVersions(), x.resource.Inconsistent())
	k.mu.Lock()
	defer k.mu.Unlock()
	k.enqueueLocked(x, time.Now().Add(wait))
}

func (k *Checker) enqueueLocked(x *checked, at time.Time) {
	switch {
	case !k.periodic() || x.stores == 0:
		return
	case x.place < 0:
		x.at = at
		heap.Push(&k.queue, x)
	case at.Before(x.at):
		x.at = at
		heap.Fix(&k.queue, x.place)
	}
	if x.place == 0 {
		select {
		case k.earlier <- struct{}{}:
		default:
		}
	}
}

// periodic reports whether resources are compared at intervals.
func (k *Checker) periodic() bool { return !k.opts.Off && k.opts.Interval > 0 }

// checkWait returns the time until the next comparison of a resource: the interval and up to a half
// of it, so that not all resources are compared at once. Where events are not checked when they
// arrive it is no longer than uncheckedInterval, and for a resource that may have lost an event a
// tenth: a successful check lets memory serve lists at old revisions again.
func checkWait(interval time.Duration, verifiesVersions, inconsistent bool) time.Duration {
	wait := interval + rand.N(interval/2+1)
	if !verifiesVersions && wait > uncheckedInterval {
		wait = uncheckedInterval/2 + rand.N(uncheckedInterval/2+1)
	}
	if inconsistent {
		wait /= 10
	}
	return wait
}

// queue is a heap of resources by the time of their next comparison (container/heap).
type queue []*checked

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].at.Before(q[j].at) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	c := x.(*checked)
	c.place = len(*q)
	*q = append(*q, c)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	last := len(*q) - 1
	x := (*q)[last]
	(*q)[last] = nil
	*q, x.place = (*q)[:last], -1
	return x
}
