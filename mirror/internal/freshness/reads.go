package freshness

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Env is the access of Reads to etcd and to other sources of its revision.
type Env struct {
	// Read reads etcd's revision linearizably. It returns an error if the answer is not from the
	// mirrored cluster.
	Read func(context.Context) (int64, error)
	// Known returns the highest revision that etcd is known to have.
	Known func() int64
	// Progress sends requests along with reads.
	Progress *Progress
}

// Reads lets concurrent consistent reads share one read of etcd's revision. All methods may be
// called concurrently.
type Reads struct {
	ctx       context.Context
	published *Published
	env       Env
	wg        sync.WaitGroup

	reads, waiters atomic.Int64 // see Counts

	mu      sync.Mutex  // leaf
	next    *sharedRead // the read that callers join; nil if none is due
	pending []*attempt  // in the order in which they began
	began   time.Time   // when the newest attempt began, also if it has failed since
	late    *time.Timer // fires when the newest attempt is overdue
	closed  bool
}

// NewReads returns the Reads for a published revision. They end with ctx; Close waits for their
// end.
func NewReads(ctx context.Context, c *Published, env Env) *Reads {
	return &Reads{ctx: ctx, published: c, env: env}
}

// sharedRead is the result for a group of callers.
type sharedRead struct {
	done chan struct{}
	rev  int64
	err  error
}

// attempt is one request to etcd, for the reads that were waiting when it began.
type attempt struct {
	reads            []*sharedRead
	began            time.Time
	ctx              context.Context
	cancel           context.CancelFunc
	publishedAtStart int64 // the published revision when it began
}

const (
	// revisionReadTimeout bounds an attempt, whose callers may have left.
	revisionReadTimeout = 10 * time.Second
	// revisionReadLate is the delay after which the next attempt begins although the previous one
	// is unanswered. It may use another member, and also answers the callers of earlier attempts.
	revisionReadLate = 100 * time.Millisecond
	// maxRevisionReads bounds the concurrent attempts.
	maxRevisionReads = 8
)

// ReadRevision returns etcd's revision, read linearizably after the call began: at least the
// revision of every write acknowledged before (I6). A call that arrives while a read is in flight
// joins the next read, never the one in flight. A call without concurrent calls starts its own read
// at once. Cost: one etcd read shared by all waiting callers.
func (r *Reads) ReadRevision(ctx context.Context) (int64, error) {
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
		return 0, r.published.errClosed
	}
}

// nextAttemptLocked begins an attempt if one is due: it has callers, and the previous attempt is
// answered or overdue. One for the callers of earlier attempts only also waits after a failed one,
// which may have failed at once. Otherwise it returns nil.
func (r *Reads) nextAttemptLocked() *attempt {
	n := len(r.pending)
	if n > 0 && time.Since(r.pending[n-1].began) < revisionReadLate {
		return nil
	}
	waiting := r.next != nil || time.Since(r.began) >= revisionReadLate && slices.ContainsFunc(r.pending, func(a *attempt) bool { return len(a.reads) > 0 })
	if r.closed || n == maxRevisionReads || !waiting {
		return nil
	}
	a := &attempt{began: time.Now(), publishedAtStart: r.published.Revision()}
	a.ctx, a.cancel = context.WithTimeout(r.ctx, revisionReadTimeout)
	if r.next != nil {
		a.reads, r.next = append(a.reads, r.next), nil
	}
	r.pending, r.began = append(r.pending, a), a.began
	if r.late == nil {
		r.late = time.AfterFunc(revisionReadLate, r.overdue)
	} else {
		r.late.Reset(revisionReadLate)
	}
	return a
}

// overdue begins the next attempt although the previous one is unanswered.
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

// Close prevents new attempts and returns when the running ones have ended. They end with the
// context given to NewReads.
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

// run makes attempts while there are callers.
func (r *Reads) run(a *attempt) {
	for a != nil {
		r.reads.Add(1)
		if r.published.byProgress.Load() && r.published.min.Load() > r.env.Known() {
			// no wait is for a revision known to exist
			r.env.Progress.withRead()
		}
		rev, err := r.env.Read(a.ctx)
		if err == nil && rev == a.publishedAtStart {
			// its callers do not wait for the published revision
			r.published.byProgress.Store(false)
		}
		r.mu.Lock()
		r.answerLocked(a, rev, err)
		a = r.nextAttemptLocked()
		r.mu.Unlock()
	}
}

// answerLocked answers the callers of the attempt and of earlier attempts, which it cancels: the
// answer is recent enough for them. If an attempt fails before its timeout, its callers move to the
// next attempt, if there is one.
func (r *Reads) answerLocked(a *attempt, rev int64, err error) {
	i := slices.Index(r.pending, a)
	if i < 0 {
		return // a later attempt was faster
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
		first = i // earlier attempts may still succeed
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
