package kubestorage

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Selects reports whether the watch selects an initial entry. The error is that of
// decoding it; without a selector nothing is decoded.
func (st *Stream) Selects(e *mirror.Entry) (bool, error) {
	ok, err := st.selector.Matches(st.ctx, e)
	if st.selector.Shard != nil && err == nil && !ok && !st.counted {
		st.countFiltered(e)
	}
	return ok, err
}

// Translate returns what an event is to the watch: ADDED or MODIFIED with the object
// after it, DELETED with the object before it and the event's revision, or "" if the
// watch selects it neither before nor after. Errors are those of decoding; see Retry.
func (st *Stream) Translate(ev *mirror.Event) (watch.EventType, error) {
	before, now, err := st.selector.MatchesEvent(ev)
	if st.selector.Shard != nil && err == nil {
		st.countFiltered(ev.Prev, ev.Entry)
	}
	switch {
	case err != nil:
		return "", err
	case now && before:
		return watch.Modified, nil
	case now:
		return watch.Added, nil
	case before:
		return watch.Deleted, nil
	}
	return "", nil
}

// Retry tries again, with growing pauses, what has failed with err for an event that
// cannot be decoded, converted or encoded: sending later events first would break the
// order that a watch promises. Other watches, and watches of other objects, go on. It
// returns nil on success, ErrStreamEnded, or what the client is to be told: 410 at once if only
// history lacks what is needed (lost).
func (st *Stream) Retry(ev *mirror.Event, err error, try func() error) error {
	corrupt := ev.Entry == nil && st.store.unsafeDelete
	if st.lost(ev) {
		return apierrors.NewResourceExpired(fmt.Sprintf("the event of revision %d cannot be decoded any more: %v", ev.Rev, objects.Cause(err)))
	}
	giveUp := time.Now().Add(st.store.retryFor)
	for backoff := 100 * time.Millisecond; err != nil; backoff = min(2*backoff, 5*time.Second) {
		if corrupt || time.Now().Add(backoff).After(giveUp) {
			if corrupt {
				err = corruptDeletion(err)
			}
			klog.FromContext(st.ctx).Error(err, "Watch ends at an object that cannot be decoded", "key", ev.Key(), "revision", ev.Rev)
			return err
		}
		select {
		case <-time.After(backoff):
		case <-st.wake:
		case <-st.ctx.Done():
			return ErrStreamEnded
		}
		if st.leaving() { // nothing after this event may be sent, a bookmark neither
			return st.left()
		}
		err = try()
	}
	return nil
}

// lost reports whether an event of history cannot be decoded because of a state that was superseded,
// while the present can: nothing will bring it back if the key that decrypts it was removed, and a client
// that lists anew does not need it. If the present cannot be decoded either, what decrypts or converts
// may be down for a while.
func (st *Stream) lost(ev *mirror.Event) bool {
	if ev.Rev > st.began {
		return false
	}
	snap, err := st.store.resource.Latest()
	if err != nil {
		return false
	}
	gen, lost := st.store.view.Now(), false
	for _, e := range []*mirror.Entry{ev.Prev, ev.Entry} {
		if e == nil {
			continue
		}
		if _, err := gen.Attributes(st.ctx, e); err == nil {
			continue
		}
		if present, ok := snap.Get(e.Key()); ok && present == e {
			return false
		}
		lost = true
	}
	if !lost {
		return false
	}
	tried := 0
	for e := range snap.All("", "") {
		if _, err := gen.Decode(st.ctx, e, e.ModRevision()); err == nil {
			return true
		}
		if tried++; tried == lostProbes {
			return false
		}
	}
	return tried == 0 // with nothing left, a list is right
}

// lostProbes is how many objects of the present are decoded at most to tell a key that was removed from a decryption that fails.
const lostProbes = 16

// corruptDeletion words the error for the deletion of an object whose last state
// cannot be read, as upstream's store does with AllowUnsafeMalformedObjectDeletion.
func corruptDeletion(err error) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusInternalServerError,
		Reason:  metav1.StatusReasonStoreReadError,
		Message: fmt.Sprintf("saw a DELETED event, but object data is corrupt - %v", objects.Cause(err)),
	}}
}

// ErrorStatus returns the object of the ERROR event by which a watch reports err.
func ErrorStatus(err error) *metav1.Status {
	err = objects.Cause(err)
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		status = apierrors.NewInternalError(err)
	}
	st := status.Status()
	return &st
}

// Delivered records in the metrics that events have been written to the client now, of which the
// oldest arrived (mirror.Event.Arrived) and was ready to be written at those times, as mirror.Now
// counts.
func (st *Stream) Delivered(arrived, ready int64) {
	now := mirror.Now()
	st.store.streams.delivery().Observe(time.Duration(now - arrived).Seconds())
	st.store.streams.dispatch.observe(arrived, ready, now)
}
