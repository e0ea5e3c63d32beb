package kubestorage

import (
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// ErrStreamEnded: the watch is over without an error for the client, because the request, the
// storage or the mirror has ended.
var ErrStreamEnded = errors.New("watch ended")

// expired returns the error for a position that has left the window.
func expired(err error) error {
	if errors.Is(err, mirror.ErrCompacted) {
		return apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %v", err))
	}
	return err
}

// Close releases the resources of the stream.
func (st *Stream) Close() {
	if st.closed {
		return
	}
	st.closed = true
	st.store.watchMetrics.Ended(st.endReason().String())
	st.countReplayed()
	st.endInitial()
	st.cancel()
	st.store.cluster.watches.Remove((*runningStream)(st))
	if st.cursor != nil {
		st.cursor.Unfollow()
	}
	for _, end := range [...]func(){st.releaseProgress, st.countShardEnd, st.unfollow} {
		if end != nil {
			end()
		}
	}
	st.stopTimers()
}

func (st *Stream) stopTimers() {
	for _, timer := range [...]*time.Timer{st.timer, st.seat} {
		if timer != nil {
			timer.Stop()
		}
	}
}

// EndSlow ends a stream whose client does not read its initial events, and releases the seat of
// priority and fairness. It may be called concurrently with all other methods. The owner sends
// SlowClient if the client starts to read.
func (st *Stream) EndSlow() {
	utilflowcontrol.WatchInitialized(st.ctx)
	st.abort(watchset.BySlowness)
}

// SlowClient is the status with which a watch ends after EndSlow.
func SlowClient() *metav1.Status {
	st := apierrors.NewTooManyRequests("client did not read the initial events in time; watch closed", tooHighRetrySeconds).Status()
	return &st
}

// endReason returns the reason of the stream's end, when its owner closes it.
func (st *Stream) endReason() watchset.Reason {
	if why := st.reason.Get(); why != watchset.NotEnded {
		return why
	}
	switch {
	case apierrors.IsResourceExpired(st.failed) || apierrors.IsGone(st.failed):
		return watchset.Expired
	case errors.Is(st.failed, ErrStreamEnded) && st.ctx.Err() == nil:
		return watchset.ByStorage
	case st.failed != nil && !errors.Is(st.failed, ErrStreamEnded):
		return watchset.ByError
	case !st.deadline.IsZero() && !time.Now().Before(st.deadline):
		return watchset.ByTimeout
	}
	return watchset.ByClient
}

// nudge wakes wait, so that next checks for pending work.
func (st *Stream) nudge() {
	select {
	case st.wake <- struct{}{}:
	default:
	}
}

// abort ends the stream now. Safe for concurrent use.
func (st *Stream) abort(reason watchset.Reason) {
	st.reason.Set(reason)
	st.cancel()
}

// draining reports whether the watch ends after the pending events.
func (st *Stream) draining() bool {
	if st.withoutDrain || !st.store.cluster.watches.Draining() {
		return false
	}
	if st.lastRev == 0 {
		st.lastRev = max(1, st.store.mirror.PublishedRevision())
	}
	return true
}

// drain returns the last batches of the stream, when everything up to lastRev is delivered: a
// bookmark, and then the end.
func (st *Stream) drain() (delivery, error) {
	// A watch at a future revision gets no bookmark below that revision.
	if at := st.cursor.Position(); !st.finalBookmarkSent && st.bookmarkEvery > 0 && at <= st.store.mirror.PublishedRevision() {
		st.finalBookmarkSent = true
		return st.bookmark(), nil
	}
	return delivery{}, st.drained()
}

// drained records that the stream ends because the server does. Its context stays open: Drain
// cancels it if the owner takes too long to deliver the rest.
func (st *Stream) drained() error {
	st.reason.Set(watchset.ByShutdown)
	return ErrStreamEnded
}

// ending returns the error that ends the stream when its position cannot be read any more.
func (st *Stream) ending(err error) error {
	select {
	case <-st.store.mirror.Done():
	case <-st.store.ctx.Done():
	case <-st.ctx.Done():
	default:
		if errors.Is(err, mirror.ErrNotReady) { // it was ready, and is being relisted
			err = fmt.Errorf("%w: %w", mirror.ErrCompacted, err)
		}
		return expired(err)
	}
	// The position is valid; the client resumes on another server.
	return ErrStreamEnded
}

// runningStream is a Stream as a watchset.Watch.
type runningStream Stream

// Drain implements watchset.Watch: it wakes the stream, which then checks draining.
func (st *runningStream) Drain() { (*Stream)(st).nudge() }

// Abort implements watchset.Watch.
func (st *runningStream) Abort(reason watchset.Reason) { (*Stream)(st).abort(reason) }
