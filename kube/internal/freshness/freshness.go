// Package freshness makes the reads of a resource wait until memory has reached their revision
// (KEP-2340, KEP-4568).
package freshness

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/trace"
	"github.com/stratakube/strata/mirror"
)

// Waiter makes the reads of a resource wait until memory has reached their revision. Safe for
// concurrent use.
type Waiter struct {
	Metrics metrics.Reads

	mirror     *mirror.Mirror
	resource   *mirror.Resource
	versioner  storage.APIObjectVersioner
	unready    outage
	eventsOnly bool // see New
}

// New returns the waiter of a resource of a mirror. With eventsOnly, only events move the published
// revision, and reads above it are not answered from memory; see mirror.Options.EventsOnly.
func New(m *mirror.Mirror, r *mirror.Resource, group schema.GroupResource, eventsOnly bool) *Waiter {
	return &Waiter{Metrics: metrics.NewReads(group), mirror: m, resource: r, eventsOnly: eventsOnly}
}

// NotReady returns the error of a read before the resource is loaded (KEP-4568): 429 with
// Retry-After.
func (w *Waiter) NotReady() error {
	pause := w.unready.refuse(time.Now())
	return apierrors.NewTooManyRequests(storage.ErrStorageNotReady.Error(), int(pause/time.Second))
}

// Ready returns when the resource can be read. A load, with its history or on the first request for
// a custom resource, mostly takes seconds, so a reader waits for it, for at most freshWait. Once
// a reader has waited for all of it, the load takes long: later readers are refused immediately
// (KEP-4568). The end of a request that has less time refuses that request only. Error: 429.
func (w *Waiter) Ready(ctx context.Context) error {
	if w.resource.Ready() {
		return nil
	}
	if w.unready.lasts(time.Now()) {
		return w.NotReady()
	}
	began := time.Now()
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	if w.resource.WaitReady(waitCtx) == nil {
		return nil
	}
	if time.Since(began) < freshWait {
		return apierrors.NewTooManyRequests(storage.ErrStorageNotReady.Error(), RetrySeconds)
	}
	return w.NotReady()
}

// WaitHistory returns when the history since rev is restored, for at most freshWait: a watch from
// before a restart then resumes (KEP-1904). Error: 429 with Retry-After; clients retry a watch
// after that without a relist.
func (w *Waiter) WaitHistory(ctx context.Context, rev mirror.Revision) error {
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	if w.resource.WaitHistory(waitCtx, rev) == nil {
		return nil
	}
	return apierrors.NewTooManyRequests(fmt.Sprintf("history since resource version %d is being restored", rev), RetrySeconds)
}

// outage is a period in which reads are refused. The zero value has not begun.
type outage struct {
	mu            sync.Mutex // leaf
	began, recent time.Time  // of the first and the last refusal
}

// outageGap without a refusal ends an outage. It is twice the longest pause, so that clients that
// honour Retry-After stay in the same outage.
const outageGap = time.Minute

// lasts reports whether readers have been refused recently.
func (o *outage) lasts(now time.Time) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return !o.recent.IsZero() && now.Sub(o.recent) <= outageGap
}

// refuse returns the Retry-After of a refusal: 1 s at first, 30 s after a minute.
func (o *outage) refuse(now time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now.Sub(o.recent) > outageGap {
		o.began = now
	}
	o.recent = now
	// Upstream's formula: 2 s after 12 s, 30 s after a minute.
	seconds := math.Min(30, math.Exp(0.06*now.Sub(o.began).Seconds()))
	return time.Duration(seconds) * time.Second
}

// Waits for the mirror to catch up.
const (
	// freshWait bounds the wait of a read for the revision it needs, as in upstream.
	freshWait = 3 * time.Second
	// getWait bounds it for a GET of one key, which may go to etcd instead: deletions, updates and
	// leader elections read before they write.
	getWait = 250 * time.Millisecond
	// answerTime is the part of a request's own deadline that is reserved for the answer: a request
	// that waits until its deadline is cut off and gets no Retry-After.
	answerTime = 250 * time.Millisecond
	// RetrySeconds is the Retry-After of 504 and 429 responses.
	RetrySeconds = 1
)

// waitContext bounds a wait on behalf of a request.
func waitContext(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		limit = min(limit, max(left-answerTime, left/2))
	}
	return context.WithTimeout(ctx, limit)
}

// WaitFor returns when memory has reached the client's revision asked. Errors: 504 "Too large
// resource version" with that number after freshWait, ctx's.
func (w *Waiter) WaitFor(ctx context.Context, asked uint64) error {
	rev := RevisionOf(asked)
	if w.mirror.PublishedRevision() >= rev {
		if rev > 0 { // otherwise the request has no revision
			w.Metrics.Waited(0)
		}
		return nil
	}
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	err := w.await(waitCtx, rev)
	if err != nil && ctx.Err() == nil {
		return storage.NewTooLargeResourceVersionError(asked, uint64(w.mirror.PublishedRevision()), RetrySeconds)
	}
	return err
}

// await returns when memory has reached rev, or with ctx's error, and records the wait in the
// metrics.
func (w *Waiter) await(ctx context.Context, rev mirror.Revision) error {
	if w.mirror.PublishedRevision() >= rev {
		w.Metrics.Waited(0)
		return nil
	}
	began := time.Now()
	err := w.mirror.Wait(ctx, rev)
	w.Metrics.Waited(time.Since(began))
	return err
}

// ReadRevision returns etcd's revision (I6). Errors: mirror.ErrNotReady after a restore of etcd,
// until everything is relisted.
func (w *Waiter) ReadRevision(ctx context.Context) (mirror.Revision, error) {
	rev, err := w.mirror.ReadRevision(ctx)
	if errors.Is(err, mirror.ErrRestored) {
		return 0, fmt.Errorf("%w: %w", mirror.ErrNotReady, err)
	}
	return rev, err
}

// Present returns etcd's revision (I6), read within freshWait. Errors: 429 if etcd cannot answer in
// time, ctx's, and those of ReadRevision.
func (w *Waiter) Present(ctx context.Context) (mirror.Revision, error) {
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	rev, err := w.ReadRevision(waitCtx)
	return rev, late(ctx, waitCtx, err)
}

// Consistent returns when the mirror has seen every write that was acknowledged before the call
// (I6). It returns 429 when it cannot verify that within freshWait. The client did not cause that,
// and passing such reads on to etcd would multiply an outage (KEP-2340, k/k#138494).
func (w *Waiter) Consistent(ctx context.Context, span *trace.Span) error {
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	rev, err := w.ReadRevision(waitCtx)
	if err == nil {
		span.Event(trace.Revision)
		span.Event(trace.Waiting)
		err = w.await(waitCtx, rev)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	w.Metrics.Consistent(err == nil, false)
	return late(ctx, waitCtx, err)
}

// late returns the error of a read that waited in waitCtx, which waitContext made for ctx.
func late(ctx, waitCtx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case waitCtx.Err() != nil:
		return errBehind()
	}
	return etcdread.ForClient(ctx, err)
}

// errBehind returns the 429 of a read for which memory has not caught up with etcd.
func errBehind() error {
	return apierrors.NewTooManyRequests("the watch cache cannot keep up with etcd", RetrySeconds)
}

// SoonConsistent is Consistent with a wait of at most getWait.
func (w *Waiter) SoonConsistent(ctx context.Context, span *trace.Span) error {
	ctx, cancel := waitContext(ctx, getWait)
	defer cancel()
	rev, err := w.mirror.ReadRevision(ctx)
	if err != nil {
		return err
	}
	span.Event(trace.Revision)
	span.Event(trace.Waiting)
	return w.await(ctx, rev)
}

// ParseRevision returns the number of a client's resourceVersion, 0 for "" and "0"; RevisionOf
// returns its revision. Error: 400.
func (w *Waiter) ParseRevision(resourceVersion string) (asked uint64, err error) {
	asked, err = w.versioner.ParseResourceVersion(resourceVersion)
	if err != nil {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("invalid resource version: %v", err))
	}
	return asked, nil
}

// RevisionOf returns the revision of a client's number. One above the int64 range becomes the
// highest revision, which is always in the future.
func RevisionOf(asked uint64) mirror.Revision { return mirror.Revision(min(asked, math.MaxInt64)) }

// Snapshot waits for the state of memory that a list reads, and returns it:
//
//	exact > 0 (Exact, a token's revision, limit and a revision): that revision
//	no resource version, or a token with revision -1:            the latest one, linearizably
//	0:                                                           the latest one in memory
//	any other:                                                   that revision or later
//
// The wait is at most freshWait. Errors: API errors for the client (400, 429, 504),
// etcdread.NoProgress, mirror.ErrCompacted, mirror.ErrNotReady, ctx's.
func (w *Waiter) Snapshot(ctx context.Context, opts storage.ListOptions, exact int64, span *trace.Span) (mirror.Snapshot, error) {
	if exact > 0 {
		return w.snapshotAt(ctx, opts.ResourceVersion, exact, span)
	}
	if opts.ResourceVersion == "" || opts.Predicate.Continue != "" {
		if err := w.Consistent(ctx, span); err != nil {
			return mirror.Snapshot{}, err
		}
		span.Event(trace.Fresh)
		return w.resource.Latest()
	}
	asked, err := w.ParseRevision(opts.ResourceVersion)
	if err != nil {
		return mirror.Snapshot{}, err
	}
	if w.OutOfReach(RevisionOf(asked)) {
		return mirror.Snapshot{}, etcdread.NoProgress
	}
	span.Event(trace.Waiting)
	if err := w.WaitFor(ctx, asked); err != nil {
		return mirror.Snapshot{}, err
	}
	span.Event(trace.Fresh)
	return w.resource.Latest()
}

// snapshotAt is Snapshot at exactly a revision; the client's resourceVersion is "" with a token.
func (w *Waiter) snapshotAt(ctx context.Context, resourceVersion string, exact mirror.Revision, span *trace.Span) (mirror.Snapshot, error) {
	span.Event(trace.Waiting)
	if exact > w.mirror.PublishedRevision() {
		if err := w.reach(ctx, resourceVersion, exact); err != nil {
			return mirror.Snapshot{}, err
		}
	}
	if rev := w.mirror.CompactRevision(); exact < rev {
		return mirror.Snapshot{}, fmt.Errorf("%w: requested %d, etcd is compacted to %d", mirror.ErrCompacted, exact, rev)
	}
	span.Event(trace.Fresh)
	return w.resource.At(exact)
}

// reach returns when a revision above the published one is published. Only etcd can report whether
// it exists: 504 if it does not, 429 if memory does not reach it in time.
func (w *Waiter) reach(ctx context.Context, resourceVersion string, exact mirror.Revision) error {
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	current, err := w.ReadRevision(waitCtx)
	if err != nil {
		return late(ctx, waitCtx, err)
	}
	if exact > current {
		asked, err := w.ParseRevision(resourceVersion) // 0 with a token
		if err != nil {
			return err
		}
		return storage.NewTooLargeResourceVersionError(max(asked, uint64(exact)), uint64(current), RetrySeconds)
	}
	return late(ctx, waitCtx, w.await(waitCtx, exact)) // it exists: see Consistent
}

// OutOfReach reports whether only etcd can answer for a revision.
func (w *Waiter) OutOfReach(rev mirror.Revision) bool {
	return w.eventsOnly && rev > w.mirror.PublishedRevision()
}
