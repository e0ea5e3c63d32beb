package mirror

import (
	"container/heap"
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// clock is the published revision and those who wait for it to move.
type clock struct {
	rev atomic.Int64
	// min is the lowest revision anybody waits for, so that the writer takes the
	// lock only when there is somebody to wake.
	min atomic.Int64

	// byProgress: what waits are for is told by progress, not by events: it ended the last
	// one, and since then no read has found that there was nothing to wait for.
	byProgress atomic.Bool
	served     atomic.Int64 // waits that progress has ended
	events     atomic.Int64 // times that events have moved the clock

	mu      sync.Mutex // leaf; guards what follows
	waiters waiterHeap

	occupied bool          // somebody waits; what follows tells
	waiting  chan struct{} // closed while somebody waits, replaced when nobody does
	resting  chan struct{} // the other way round
	lowered  chan struct{} // somebody waits for less than all others
}

type waiter struct {
	rev   Revision
	done  chan struct{}
	index int
}

func newClock() *clock {
	c := &clock{waiting: make(chan struct{}), resting: make(chan struct{}), lowered: make(chan struct{}, 1)}
	close(c.resting)
	c.min.Store(math.MaxInt64)
	return c
}

// publish moves the clock and wakes whoever waited for rev or less. Writer only.
func (c *clock) publish(rev Revision, byProgress bool) {
	if !byProgress {
		c.events.Add(1)
	}
	c.rev.Store(rev)
	if c.min.Load() > rev {
		return
	}
	c.byProgress.Store(byProgress)
	if byProgress {
		c.served.Add(1)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.waiters) > 0 && c.waiters[0].rev <= rev {
		close(heap.Pop(&c.waiters).(*waiter).done)
	}
	c.setMinLocked()
}

func (c *clock) setMinLocked() {
	lowest := Revision(math.MaxInt64)
	if len(c.waiters) > 0 {
		lowest = c.waiters[0].rev
	}
	c.min.Store(lowest)
	switch occupied := len(c.waiters) > 0; {
	case occupied == c.occupied:
	case occupied:
		close(c.waiting)
		c.occupied, c.resting = true, make(chan struct{})
	default:
		close(c.resting)
		c.occupied, c.waiting = false, make(chan struct{})
	}
}

// wait returns when the clock has reached rev, with ctx's error, or with
// ErrClosed when closed is.
func (c *clock) wait(ctx context.Context, closed <-chan struct{}, rev Revision) error {
	if c.rev.Load() >= rev {
		return nil
	}
	w := &waiter{rev: rev, done: make(chan struct{})}
	c.mu.Lock()
	heap.Push(&c.waiters, w)
	if w.index == 0 && c.occupied {
		select {
		case c.lowered <- struct{}{}:
		default:
		}
	}
	c.setMinLocked()
	// The writer stores rev before it loads min, we store min before we load rev:
	// one of the two sees the other.
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
	case <-closed:
		err = ErrClosed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.index < 0 { // woken in the same moment
		return nil
	}
	heap.Remove(&c.waiters, w.index)
	c.setMinLocked()
	return err
}

// someoneWaits returns a channel that is closed while anybody waits.
func (c *clock) someoneWaits() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waiting
}

// nobodyWaits returns a channel that is closed while nobody waits.
func (c *clock) nobodyWaits() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resting
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

// While somebody waits for the clock, progress is asked for at growing intervals:
// quickly at first, because etcd answers only when the feed is in step, which usually
// is a matter of a millisecond; 100 ms is KEP-2340's interval.
const (
	progressFirst = 2 * time.Millisecond
	progressLast  = 100 * time.Millisecond
)

// progressTimeout bounds one request, which a feed that does not move may hold up.
const progressTimeout = time.Second

// asker asks etcd how far the feed has come:
//
//   - while somebody waits for the clock: at once if progress is what waits are for
//     (clock.byProgress), else after progressFirst, because a write inside the prefix moves the
//     clock by its own event and needs no answer. Then at intervals that double up to
//     progressLast. They begin anew when progress has ended a wait, or when somebody waits
//     for less than all others: nobody waits for the interval of others, and who waits
//     for a revision that is far away does not make it short.
//   - at the moment a revision read begins, if progress is what waits are for
//     (readRevisions), so that the two answers arrive together;
//   - every Options.IdleProgress, if no event has come for so long and somebody wants the
//     clock to move (WantProgress).
type asker struct {
	m     *Mirror
	along time.Time // of the last question with a revision read
}

// run asks until ctx ends.
func (a *asker) run(ctx context.Context) {
	m := a.m
	var idle <-chan time.Time
	if m.opts.IdleProgress > 0 {
		ticker := time.NewTicker(m.opts.IdleProgress)
		defer ticker.Stop()
		idle = ticker.C
	}
	events := int64(-1)
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.clock.someoneWaits():
			a.forWaiters(ctx)
		case <-m.progressDue:
			a.along = time.Now()
			a.ask(ctx)
		case <-idle:
			now := m.clock.events.Load()
			if now == events && m.wantProgress.Load() > 0 {
				a.ask(ctx)
			}
			events = now
		}
	}
}

// forWaiters returns when nobody waits for the clock any more.
func (a *asker) forWaiters(ctx context.Context) {
	c := a.m.clock
	// atOnce: not if the question has gone out with the revision read.
	atOnce := func() bool { return c.byProgress.Load() && time.Since(a.along) >= progressFirst }
	timer := time.NewTimer(0)
	defer timer.Stop()
	for interval, due := progressFirst, atOnce(); ; {
		served, nobody := c.served.Load(), c.nobodyWaits()
		if due {
			a.ask(ctx)
		}
		timer.Reset(interval)
		select {
		case <-ctx.Done():
			return
		case <-nobody:
			return
		case <-c.lowered:
			interval, due = progressFirst, atOnce()
			continue
		case <-timer.C:
		}
		due = true
		if c.served.Load() == served {
			interval = min(2*interval, progressLast)
		} else {
			interval = progressFirst
		}
	}
}

func (a *asker) ask(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, progressTimeout)
	defer cancel()
	a.m.stats.progressRequests.Add(1)
	if err := a.m.opts.Source.RequestProgress(ctx); err != nil && a.m.ctx.Err() == nil {
		a.m.opts.Logger.Debug("progress request failed", "error", err)
	}
}

// WantProgress makes the mirror ask for progress every Options.IdleProgress while no
// events come, for somebody who waits for nothing and yet wants to know how far
// things have come, such as a watch with bookmarks. It ends with release, which is to
// be called once.
func (m *Mirror) WantProgress() (release func()) {
	m.wantProgress.Add(1)
	return func() { m.wantProgress.Add(-1) }
}

// revisionReads lets concurrent consistent reads share one read of etcd's revision.
type revisionReads struct {
	mu   sync.Mutex    // leaf
	next *revisionRead // the one that readers join; nil if none is due
	kick chan struct{} // one is due
}

type revisionRead struct {
	done   chan struct{}
	header Header
	err    error
}

// Current returns etcd's revision, read linearizably after the call began: at
// least that of every write acknowledged before (I6). A call that arrives while a
// read is in flight joins the next one, never the current; a lone call starts its
// own at once. Cost: one etcd read shared by all callers that wait for it.
func (m *Mirror) Current(ctx context.Context) (Revision, error) {
	m.stats.revisionReadWaiters.Add(1)
	r := &m.reads
	r.mu.Lock()
	if r.next == nil {
		r.next = &revisionRead{done: make(chan struct{})}
		select {
		case r.kick <- struct{}{}:
		default:
		}
	}
	read := r.next
	r.mu.Unlock()
	select {
	case <-read.done:
		return read.header.Revision, read.err
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-m.ctx.Done():
		return 0, ErrClosed
	}
}

// revisionReadTimeout bounds a read that nobody may be waiting for any more.
const revisionReadTimeout = 10 * time.Second

// readRevisions makes one read after the other for as long as readers want one,
// until ctx ends.
func (m *Mirror) readRevisions(ctx context.Context) {
	r := &m.reads
	for {
		select {
		case <-r.kick:
		case <-ctx.Done():
			return
		}
		r.mu.Lock()
		read := r.next
		r.next = nil
		r.mu.Unlock()
		if read == nil {
			continue
		}
		readCtx, cancel := context.WithTimeout(ctx, revisionReadTimeout)
		m.stats.revisionReads.Add(1)
		lists, cluster, before := m.lists.Load(), m.cluster.Load(), m.clock.rev.Load()
		if m.clock.byProgress.Load() && m.clock.min.Load() > m.stats.etcdRevision.Load() { // nobody waits for what exists
			select {
			case m.progressDue <- struct{}{}:
			default:
			}
		}
		read.header, read.err = m.opts.Source.Current(readCtx)
		cancel()
		if read.err == nil {
			if read.header.Revision == before {
				m.clock.byProgress.Store(false) // nothing to wait for
			}
			m.stats.etcdRevision.Store(read.header.Revision)
		}
		switch {
		case read.err != nil, cluster == 0:
		case read.header.ClusterID == cluster && read.header.Revision >= before:
		case m.lists.Load() != lists && read.header.ClusterID == m.cluster.Load():
			// The writer has found out in the meantime.
		default:
			read.err = fmt.Errorf("%w: it is at %d, was at %d", ErrRestored, read.header.Revision, before)
			select {
			case m.restart <- restart{lists, read.err}:
			default:
			}
		}
		if read.err != nil {
			read.err = fmt.Errorf("read current revision: %w", read.err)
		}
		close(read.done)
	}
}

// Clock returns the published revision: every resource that is ready can be read
// at it. It is 0 before the first list.
func (m *Mirror) Clock() Revision { return m.clock.rev.Load() }

// Wait returns when the clock has reached rev, asking etcd for progress meanwhile,
// or with ctx's error. With Options.EventsOnly the clock may never get there, though
// etcd has. Errors: ErrClosed.
func (m *Mirror) Wait(ctx context.Context, rev Revision) error {
	return m.clock.wait(ctx, m.ctx.Done(), rev)
}
