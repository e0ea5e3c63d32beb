package mirror

import (
	"container/heap"
	"context"
	"fmt"
	"math"
	"slices"
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
	served     atomic.Int64 // times that progress has ended waits
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
	if a.m.opts.EveryRevision {
		return // there is nothing to be told
	}
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
	mu      sync.Mutex    // leaf
	next    *revisionRead // the one that readers join; nil if none is due
	pending []*attempt    // in the order in which they began
	late    *time.Timer   // fires when the last of them is overdue
	closed  bool
}

// revisionRead is what a group of readers waits for.
type revisionRead struct {
	done chan struct{}
	rev  Revision
	err  error
}

// attempt is one request to etcd, on behalf of reads that began before it did.
type attempt struct {
	reads  []*revisionRead
	began  time.Time
	ctx    context.Context
	cancel context.CancelFunc
	// As they were when it began.
	lists   int64
	cluster uint64
	clock   Revision
}

const (
	// revisionReadTimeout bounds an attempt that nobody may be waiting for any more.
	revisionReadTimeout = 10 * time.Second
	// revisionReadLate is when an attempt is not waited for any longer: the next one begins,
	// maybe on another member, and answers for those before as well.
	revisionReadLate = 100 * time.Millisecond
	// maxRevisionReads bounds the attempts at once.
	maxRevisionReads = 8
)

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
	}
	read := r.next
	if a := m.nextAttemptLocked(); a != nil {
		m.wg.Go(func() { m.readRevisions(a) })
	}
	r.mu.Unlock()
	select {
	case <-read.done:
		return read.rev, read.err
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-m.ctx.Done():
		return 0, ErrClosed
	}
}

// nextAttemptLocked begins an attempt if one is due: somebody waits for the next, and the
// last is answered or overdue. nil: none is.
func (m *Mirror) nextAttemptLocked() *attempt {
	r := &m.reads
	n := len(r.pending)
	if n > 0 && time.Since(r.pending[n-1].began) < revisionReadLate {
		return nil
	}
	waiting := r.next != nil || slices.ContainsFunc(r.pending, func(a *attempt) bool { return len(a.reads) > 0 })
	if r.closed || n == maxRevisionReads || !waiting {
		return nil
	}
	a := &attempt{began: time.Now(), lists: m.lists.Load(), cluster: m.cluster.Load(), clock: m.clock.rev.Load()}
	a.ctx, a.cancel = context.WithTimeout(m.ctx, revisionReadTimeout)
	if r.next != nil {
		a.reads, r.next = append(a.reads, r.next), nil
	}
	r.pending = append(r.pending, a)
	if r.late == nil {
		r.late = time.AfterFunc(revisionReadLate, m.revisionReadIsLate)
	} else {
		r.late.Reset(revisionReadLate)
	}
	return a
}

// revisionReadIsLate begins the next attempt though the last one is not answered.
func (m *Mirror) revisionReadIsLate() {
	r := &m.reads
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pending) == 0 {
		return
	}
	if a := m.nextAttemptLocked(); a != nil {
		m.wg.Go(func() { m.readRevisions(a) })
	} else {
		r.late.Reset(revisionReadLate)
	}
}

// closeReads lets no attempt begin any more.
func (m *Mirror) closeReads() {
	r := &m.reads
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.late != nil {
		r.late.Stop()
	}
}

// readRevisions makes one attempt after the other for as long as readers want one.
func (m *Mirror) readRevisions(a *attempt) {
	for a != nil {
		m.stats.revisionReads.Add(1)
		if m.clock.byProgress.Load() && m.clock.min.Load() > m.stats.etcdRevision.Load() { // nobody waits for what exists
			select {
			case m.progressDue <- struct{}{}:
			default:
			}
		}
		header, err := m.opts.Source.Current(a.ctx)
		if err = m.checkRead(a, header, err); err != nil {
			err = fmt.Errorf("read current revision: %w", err)
		}
		m.reads.mu.Lock()
		m.answerLocked(a, header.Revision, err)
		a = m.nextAttemptLocked()
		m.reads.mu.Unlock()
	}
}

// checkRead returns err, or what is wrong with the answer: that it is of another etcd.
func (m *Mirror) checkRead(a *attempt, header Header, err error) error {
	if err != nil {
		return err
	}
	switch {
	case a.cluster == 0:
	case header.ClusterID == a.cluster && header.Revision >= a.clock:
	case m.lists.Load() != a.lists && header.ClusterID == m.cluster.Load():
		// The writer has found out in the meantime.
	default:
		err = fmt.Errorf("%w: it is at %d, was at %d", ErrRestored, header.Revision, a.clock)
		m.restart(a.lists, err)
		return err
	}
	if header.Revision == a.clock {
		m.clock.byProgress.Store(false) // nothing to wait for
	}
	if header.Revision > m.stats.etcdRevision.Load() {
		m.stats.etcdRevision.Store(header.Revision)
	}
	return nil
}

// answerLocked tells those who wait for the attempt, and for those that began before it,
// which are given up: the answer is as fresh as they need. An attempt that fails before its time is
// over leaves its readers to the next, if there is one.
func (m *Mirror) answerLocked(a *attempt, rev Revision, err error) {
	r := &m.reads
	i := slices.Index(r.pending, a)
	if i < 0 {
		return // a later one was faster
	}
	defer a.cancel()
	if err != nil && a.ctx.Err() == nil && i+1 < len(r.pending) {
		after := r.pending[i+1]
		after.reads = append(after.reads, a.reads...)
		r.pending = slices.Delete(r.pending, i, i+1)
		return
	}
	first := 0
	if err != nil {
		first = i // those before may still succeed
	}
	for _, done := range r.pending[first : i+1] {
		done.cancel()
		for _, read := range done.reads {
			read.rev, read.err = rev, err
			close(read.done)
		}
	}
	r.pending = slices.Delete(r.pending, first, i+1)
	if len(r.pending) == 0 {
		r.late.Stop()
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
