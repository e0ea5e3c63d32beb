package freshness

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Env is the access of Reads to etcd and to what else is known of it.
type Env struct {
	// Read reads etcd's revision linearizably. It is an error if the answer is not of the mirrored
	// etcd.
	Read func(context.Context) (int64, error)
	// Known returns the newest revision that etcd is known to have.
	Known func() int64
	// Progress sends requests along with reads.
	Progress *Progress
}

// Reads lets concurrent consistent reads share one read of etcd's revision. All methods may be
// called concurrently.
type Reads struct {
	ctx   context.Context
	clock *Clock
	env   Env
	wg    sync.WaitGroup

	reads, waiters atomic.Int64 // see Counts

	mu      sync.Mutex  // leaf
	next    *sharedRead // the one that callers join; nil if none is due
	pending []*attempt  // in the order in which they began
	late    *time.Timer // fires when the last of them is overdue
	closed  bool
}

// NewReads returns the reads for a clock. They end with ctx; Close waits for that.
func NewReads(ctx context.Context, c *Clock, env Env) *Reads {
	return &Reads{ctx: ctx, clock: c, env: env}
}

// sharedRead is the result for a group of callers.
type sharedRead struct {
	done chan struct{}
	rev  int64
	err  error
}

// attempt is one request to etcd, on behalf of reads that began before it did.
type attempt struct {
	reads  []*sharedRead
	began  time.Time
	ctx    context.Context
	cancel context.CancelFunc
	clock  int64 // when it began
}

const (
	// revisionReadTimeout bounds an attempt, which may have lost its callers.
	revisionReadTimeout = 10 * time.Second
	// revisionReadLate is when the next attempt begins though the last one has no answer. It may use
	// another member, and answers for those before as well.
	revisionReadLate = 100 * time.Millisecond
	// maxRevisionReads bounds the attempts at once.
	maxRevisionReads = 8
)

// Current returns etcd's revision, read linearizably after the call began: at
// least that of every write acknowledged before (I6). A call that arrives while a
// read is in flight joins the next one, never the current; a lone call starts its
// own at once. Cost: one etcd read shared by all callers that wait for it.
func (r *Reads) Current(ctx context.Context) (int64, error) {
	r.waiters.Add(1)
	r.mu.Lock()
	if r.next == nil {
		r.next = &sharedRead{done: make(chan struct{})}
	}
	read := r.next
	if a := r.nextAttemptLocked(); a != nil {
		r.wg.Go(func() { r.run(a) })
	}
	r.mu.Unlock()
	select {
	case <-read.done:
		return read.rev, read.err
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-r.ctx.Done():
		return 0, r.clock.errClosed
	}
}

// nextAttemptLocked begins an attempt if one is due: it has callers, and the
// last is answered or overdue. nil: none is.
func (r *Reads) nextAttemptLocked() *attempt {
	n := len(r.pending)
	if n > 0 && time.Since(r.pending[n-1].began) < revisionReadLate {
		return nil
	}
	waiting := r.next != nil || slices.ContainsFunc(r.pending, func(a *attempt) bool { return len(a.reads) > 0 })
	if r.closed || n == maxRevisionReads || !waiting {
		return nil
	}
	a := &attempt{began: time.Now(), clock: r.clock.Revision()}
	a.ctx, a.cancel = context.WithTimeout(r.ctx, revisionReadTimeout)
	if r.next != nil {
		a.reads, r.next = append(a.reads, r.next), nil
	}
	r.pending = append(r.pending, a)
	if r.late == nil {
		r.late = time.AfterFunc(revisionReadLate, r.overdue)
	} else {
		r.late.Reset(revisionReadLate)
	}
	return a
}

// overdue begins the next attempt though the last one is not answered.
func (r *Reads) overdue() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pending) == 0 {
		return
	}
	if a := r.nextAttemptLocked(); a != nil {
		r.wg.Go(func() { r.run(a) })
	} else {
		r.late.Reset(revisionReadLate)
	}
}

// Close prevents new attempts and returns when the running ones have ended, which takes the end of
// the context given to NewReads.
func (r *Reads) Close() {
	r.mu.Lock()
	r.closed = true
	if r.late != nil {
		r.late.Stop()
	}
	r.mu.Unlock()
	r.wg.Wait()
}

// Counts returns the number of reads and of the calls that shared them.
func (r *Reads) Counts() (reads, calls int64) { return r.reads.Load(), r.waiters.Load() }

// run makes one attempt after the other while there are callers.
func (r *Reads) run(a *attempt) {
	for a != nil {
		r.reads.Add(1)
		if r.clock.byProgress.Load() && r.clock.min.Load() > r.env.Known() { // no wait is for a revision known to exist
			r.env.Progress.withRead()
		}
		rev, err := r.env.Read(a.ctx)
		if err == nil && rev == a.clock {
			r.clock.byProgress.Store(false) // there was nothing to wait for
		}
		r.mu.Lock()
		r.answerLocked(a, rev, err)
		a = r.nextAttemptLocked()
		r.mu.Unlock()
	}
}

// answerLocked answers the callers of the attempt, and of those that began before it,
// which it cancels: the answer is as fresh as they need. An attempt that fails before its time is
// over leaves its callers to the next, if there is one.
func (r *Reads) answerLocked(a *attempt, rev int64, err error) {
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
