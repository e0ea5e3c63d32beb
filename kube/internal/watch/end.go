package watch

import (
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// ErrEnded: the watch is over without an error for the client, because the request, the
// storage or the mirror has ended.
var ErrEnded = errors.New("watch ended")

// expired returns the error for a position that has left the window.
func expired(err error) error {
	if errors.Is(err, mirror.ErrCompacted) {
		return apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %v", err))
	}
	return err
}

// Close releases the resources of the stream.
func (st *Stream) Close() {
	if st.phase == ended {
		return
	}
	st.phase = ended
	st.env.Metrics.Ended(st.endReason().String())
	st.countReplayed()
	st.endInitial()
	st.life.cancel()
	st.env.Running.Remove(st)
	if st.log.cursor != nil {
		st.log.cursor.Unfollow()
	}
	for _, release := range st.life.releases {
		release()
	}
	st.stopTimers()
}

func (st *Stream) stopTimers() {
	for _, timer := range [...]*time.Timer{st.bookmarks.timer, st.life.seat} {
		if timer != nil {
			timer.Stop()
		}
	}
}

// EndSlow ends a stream whose client does not read its initial events, and releases the seat of
// priority and fairness. It may be called concurrently with all other methods. The owner sends
// SlowClient if the client starts to read.
func (st *Stream) EndSlow() {
	utilflowcontrol.WatchInitialized(st.life.ctx)
	st.Abort(watchset.BySlowness)
}

// SlowClient is the status with which a watch ends after EndSlow.
func SlowClient() *metav1.Status {
	st := apierrors.NewTooManyRequests("client did not read the initial events in time; watch closed", freshness.RetrySeconds).Status()
	return &st
}

// endReason returns the reason of the stream's end, when its owner closes it.
func (st *Stream) endReason() watchset.Reason {
	if why := st.life.reason.Get(); why != watchset.NotEnded {
		return why
	}
	switch {
	case apierrors.IsResourceExpired(st.failed) || apierrors.IsGone(st.failed):
		return watchset.Expired
	case errors.Is(st.failed, ErrEnded) && st.life.ctx.Err() == nil:
		return watchset.ByStorage
	case st.failed != nil && !errors.Is(st.failed, ErrEnded):
		return watchset.ByError
	case !st.life.deadline.IsZero() && !time.Now().Before(st.life.deadline):
		return watchset.ByTimeout
	}
	return watchset.ByClient
}

// Drain implements watchset.Watch: it wakes wait, so that next checks for pending work.
func (st *Stream) Drain() {
	select {
	case st.life.wake <- struct{}{}:
	default:
	}
}

// Abort implements watchset.Watch: it ends the stream now. Safe for concurrent use.
func (st *Stream) Abort(reason watchset.Reason) {
	st.life.reason.Set(reason)
	st.life.cancel()
}

// leaving reports whether the watch ends after the pending events.
func (st *Stream) leaving() bool {
	if st.life.undrained || !st.env.Running.Draining() {
		return false
	}
	if st.life.until == 0 {
		st.life.until = max(1, st.env.Lists.Mirror.PublishedRevision())
	}
	return true
}

// drained records that the stream ends because the server does. Its context stays open: Drain
// cancels it if the owner takes too long to deliver the rest.
func (st *Stream) drained() error {
	st.life.reason.Set(watchset.ByShutdown)
	return ErrEnded
}

// fail ends the stream because its position cannot be read any more, and returns the error.
func (st *Stream) fail(err error) error {
	st.failed = st.ending(err)
	return st.failed
}

// ending returns the error that ends the stream when its position cannot be read any more.
func (st *Stream) ending(err error) error {
	select {
	case <-st.env.Lists.Mirror.Done():
	case <-st.env.Context.Done():
	case <-st.life.ctx.Done():
	default:
		if errors.Is(err, mirror.ErrNotReady) { // it was ready, and is being relisted
			err = fmt.Errorf("%w: %w", mirror.ErrCompacted, err)
		}
		return expired(err)
	}
	// The position is valid; the client resumes on another server.
	return ErrEnded
}
