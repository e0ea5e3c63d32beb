package kubestorage

import (
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/stratakube/strata/kube/internal/running"
	"github.com/stratakube/strata/mirror"
)

// ErrStreamEnded: the watch is over, and there is nothing that its client would have
// to be told: the request, the storage or the mirror has ended.
var ErrStreamEnded = errors.New("watch ended")

// expired words the error of a position that has left the window.
func expired(err error) error {
	if errors.Is(err, mirror.ErrCompacted) {
		return apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %v", err))
	}
	return err
}

// Close lets go of what the stream holds.
func (st *Stream) Close() {
	if st.closed {
		return
	}
	st.closed = true
	st.store.watchMetrics.Ended(st.why().String())
	st.countReplayed()
	st.cancel()
	st.store.cluster.watches.Remove((*runningStream)(st))
	if st.cursor != nil {
		st.cursor.Close()
	}
	for _, end := range [...]func(){st.satisfied, st.sharded, st.unfollow} {
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

// EndSlow ends a stream whose client does not read its initial events, and gives back the seat of
// priority and fairness. It may be called concurrently with everything else. The owner tells the client
// SlowClient, if that begins to read.
func (st *Stream) EndSlow() {
	utilflowcontrol.WatchInitialized(st.ctx)
	st.cut(running.BySlowness)
}

// SlowClient is the status with which a watch ends after EndSlow.
func SlowClient() *metav1.Status {
	st := apierrors.NewTooManyRequests("the initial events were not read in time; the watch has ended", tooHighRetrySeconds).Status()
	return &st
}

// why returns why the stream ends, when its owner closes it.
func (st *Stream) why() running.Reason {
	if why := st.reason.Get(); why != running.NotEnded {
		return why
	}
	switch {
	case apierrors.IsResourceExpired(st.failed) || apierrors.IsGone(st.failed):
		return running.Expired
	case errors.Is(st.failed, ErrStreamEnded) && st.ctx.Err() == nil:
		return running.ByStorage
	case st.failed != nil && !errors.Is(st.failed, ErrStreamEnded):
		return running.ByError
	case !st.deadline.IsZero() && !time.Now().Before(st.deadline):
		return running.ByTimeout
	}
	return running.ByClient
}

// nudge has wait return, so that next looks what is due.
func (st *Stream) nudge() {
	select {
	case st.wake <- struct{}{}:
	default:
	}
}

// cut ends the stream now. Safe for concurrent use.
func (st *Stream) cut(why running.Reason) {
	st.reason.Set(why)
	st.cancel()
}

// leaving reports whether the watch is to end when it has handed out what is due now.
func (st *Stream) leaving() bool {
	if st.withoutDrain || !st.store.cluster.watches.Leaving() {
		return false
	}
	if st.lastRev == 0 {
		st.lastRev = max(1, st.store.mirror.Clock())
	}
	return true
}

// depart returns what the stream hands out last, when everything up to lastRev is delivered: a
// bookmark, and then its end.
func (st *Stream) depart() (batch, error) {
	// A watch at a future revision has nothing to tell before that.
	if at := st.cursor.Position(); !st.marked && st.bookmarkEvery > 0 && at <= st.store.mirror.Clock() {
		st.marked = true
		return st.bookmark(), nil
	}
	return batch{}, st.left()
}

// left takes note that the stream ends because the server does. Its context does not: that
// is for Drain to end, if the owner takes too long to deliver the rest.
func (st *Stream) left() error {
	st.reason.Set(running.ByShutdown)
	return ErrStreamEnded
}

// ending returns what the stream ends with when its position cannot be read any more.
func (st *Stream) ending(err error) error {
	select {
	case <-st.store.mirror.Done():
	case <-st.store.ctx.Done():
	default:
		if errors.Is(err, mirror.ErrNotReady) { // it was, and is being listed anew
			err = fmt.Errorf("%w: %w", mirror.ErrCompacted, err)
		}
		return expired(err)
	}
	// Nothing is wrong with the position; the client resumes elsewhere.
	return ErrStreamEnded
}

// runningStream is a Stream as running.Watches knows it.
type runningStream Stream

// Leave implements running.Watch: next looks whether it is to leave.
func (st *runningStream) Leave() { (*Stream)(st).nudge() }

// Cut implements running.Watch.
func (st *runningStream) Cut(why running.Reason) { (*Stream)(st).cut(why) }
