package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/mirror"
)

// revisionWaiter makes reads wait until memory has reached their revision. Safe for concurrent use.
type revisionWaiter struct {
	mirror    *mirror.Mirror
	resource  *mirror.Resource
	versioner storage.Versioner
	metrics   metrics.Reads
	unready   outage
	// eventsOnly: see cluster.eventsOnly.
	eventsOnly bool
}

// notReady returns the error of a read before the resource is loaded (KEP-4568): 429 with
// Retry-After.
func (s *revisionWaiter) notReady() error {
	pause := s.unready.refuse(time.Now())
	return apierrors.NewTooManyRequests(storage.ErrStorageNotReady.Error(), int(pause/time.Second))
}

// ready returns when the resource can be read. A load, with its history or on the first request for
// a custom resource, mostly takes seconds, so a reader waits for it, for at most freshWait. Once
// such a wait has failed, the load takes long: later readers are refused immediately (KEP-4568).
// Error: 429.
func (s *revisionWaiter) ready(ctx context.Context) error {
	if s.resource.Ready() {
		return nil
	}
	if s.unready.lasts(time.Now()) {
		return s.notReady()
	}
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	if err := s.resource.WaitReady(waitCtx); err != nil {
		return s.notReady()
	}
	return nil
}

// waitHistory returns when the history since rev is restored, for at most freshWait: a watch from
// before a restart then resumes (KEP-1904). Error: 429 with Retry-After; clients retry a watch
// after that without a relist.
func (s *revisionWaiter) waitHistory(ctx context.Context, rev mirror.Revision) error {
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	if s.resource.WaitHistory(waitCtx, rev) == nil {
		return nil
	}
	return apierrors.NewTooManyRequests(fmt.Sprintf("history since resource version %d is being restored", rev), tooHighRetrySeconds)
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
	// tooHighRetrySeconds is the Retry-After of 504 and 429 responses.
	tooHighRetrySeconds = 1
)

// waitContext bounds a wait on behalf of a request.
func waitContext(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		limit = min(limit, max(left-answerTime, left/2))
	}
	return context.WithTimeout(ctx, limit)
}

// waitFor returns when the client's revision asked can be read. It returns 504 "Too large resource
// version" with that number after freshWait.
func (s *revisionWaiter) waitFor(ctx context.Context, asked uint64) error {
	rev := revisionOf(asked)
	if s.mirror.PublishedRevision() >= rev {
		if rev > 0 { // otherwise the request has no revision
			s.metrics.Waited(0)
		}
		return nil
	}
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	err := s.await(waitCtx, rev)
	if err != nil && ctx.Err() == nil {
		return storage.NewTooLargeResourceVersionError(asked, uint64(s.mirror.PublishedRevision()), tooHighRetrySeconds)
	}
	return err
}

// await returns when rev can be read, or with ctx's error, and records the wait in the metrics.
func (s *revisionWaiter) await(ctx context.Context, rev mirror.Revision) error {
	if s.mirror.PublishedRevision() >= rev {
		s.metrics.Waited(0)
		return nil
	}
	began := time.Now()
	err := s.mirror.Wait(ctx, rev)
	s.metrics.Waited(time.Since(began))
	return err
}

// readRevision returns etcd's revision (I6). Errors: mirror.ErrNotReady after a restore of etcd,
// until everything is relisted.
func (s *revisionWaiter) readRevision(ctx context.Context) (mirror.Revision, error) {
	rev, err := s.mirror.ReadRevision(ctx)
	if errors.Is(err, mirror.ErrRestored) {
		return 0, fmt.Errorf("%w: %w", mirror.ErrNotReady, err)
	}
	return rev, err
}

// consistent returns when the mirror has seen every write that was acknowledged before the call
// (I6). It returns 429 when it cannot verify that within freshWait. The client did not cause that,
// and passing such reads on to etcd would multiply an outage (KEP-2340, k/k#138494).
func (s *revisionWaiter) consistent(ctx context.Context, span *readSpan) error {
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	rev, err := s.readRevision(waitCtx)
	if err == nil {
		span.event(eventRevision)
		span.event(eventWaiting)
		err = s.await(waitCtx, rev)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.metrics.Consistent(err == nil, false)
	if err != nil && waitCtx.Err() != nil {
		return errBehind()
	}
	return err
}

// errBehind returns the error of a read that memory has not caught up for.
func errBehind() error {
	return apierrors.NewTooManyRequests("the watch cache cannot keep up with etcd", tooHighRetrySeconds)
}

type skipCacheWaitKey struct{}

// SkipCacheWait returns a context for a request that was answered with ErrReadEtcd: a Get of the
// latest revision does not wait for memory again.
func SkipCacheWait(ctx context.Context) context.Context {
	return context.WithValue(ctx, skipCacheWaitKey{}, true)
}

// soonConsistent is consistent with a wait of at most getWait.
func (s *revisionWaiter) soonConsistent(ctx context.Context, span *readSpan) error {
	ctx, cancel := waitContext(ctx, getWait)
	defer cancel()
	rev, err := s.mirror.ReadRevision(ctx)
	if err != nil {
		return err
	}
	span.event(eventRevision)
	span.event(eventWaiting)
	return s.await(ctx, rev)
}

// parseRevision returns the number of a client's resourceVersion, 0 for "" and "0"; revisionOf
// returns its revision. Error: 400.
func (s *revisionWaiter) parseRevision(resourceVersion string) (asked uint64, err error) {
	asked, err = s.versioner.ParseResourceVersion(resourceVersion)
	if err != nil {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("invalid resource version: %v", err))
	}
	return asked, nil
}

// revisionOf returns the revision of a client's number. One above the int64 range becomes the
// highest revision, which is always in the future.
func revisionOf(asked uint64) mirror.Revision { return mirror.Revision(min(asked, math.MaxInt64)) }

// snapshot returns the state of the cache that a list reads:
//
//	exact > 0 (Exact, a token's revision, or limit with a revision): that revision
//	no resource version, or a token with revision -1:                the latest revision, linearizably
//	0:                                                               the latest cached revision
//	any other:                                                       that revision or later
func (s *revisionWaiter) snapshot(ctx context.Context, opts storage.ListOptions, exact int64, span *readSpan) (mirror.Snapshot, error) {
	if exact > 0 {
		span.event(eventWaiting)
		if exact > s.mirror.PublishedRevision() {
			// Only etcd can say whether the revision exists.
			current, err := s.readRevision(ctx)
			if err != nil {
				return mirror.Snapshot{}, err
			}
			if exact > current {
				asked, err := s.parseRevision(opts.ResourceVersion) // 0 with a token
				if err != nil {
					return mirror.Snapshot{}, err
				}
				return mirror.Snapshot{}, storage.NewTooLargeResourceVersionError(max(asked, uint64(exact)), uint64(current), tooHighRetrySeconds)
			}
			if err := s.waitFor(ctx, uint64(exact)); err != nil {
				if storage.IsTooLargeResourceVersion(err) { // it exists: see consistent
					err = errBehind()
				}
				return mirror.Snapshot{}, err
			}
		}
		if rev := s.mirror.CompactRevision(); exact < rev {
			return mirror.Snapshot{}, fmt.Errorf("%w: requested %d, etcd is compacted to %d", mirror.ErrCompacted, exact, rev)
		}
		span.event(eventFresh)
		return s.resource.At(exact)
	}
	if opts.ResourceVersion == "" || opts.Predicate.Continue != "" {
		if err := s.consistent(ctx, span); err != nil {
			return mirror.Snapshot{}, err
		}
		span.event(eventFresh)
		return s.resource.Latest()
	}
	asked, err := s.parseRevision(opts.ResourceVersion)
	if err != nil {
		return mirror.Snapshot{}, err
	}
	if s.outOfReach(revisionOf(asked)) {
		return mirror.Snapshot{}, errNoProgress
	}
	span.event(eventWaiting)
	if err := s.waitFor(ctx, asked); err != nil {
		return mirror.Snapshot{}, err
	}
	span.event(eventFresh)
	return s.resource.Latest()
}

// outOfReach reports whether only etcd can answer for a revision, see cluster.eventsOnly.
func (s *revisionWaiter) outOfReach(rev mirror.Revision) bool {
	return s.eventsOnly && rev > s.mirror.PublishedRevision()
}
