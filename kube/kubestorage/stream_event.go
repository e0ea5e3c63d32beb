package kubestorage

import (
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

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
func (st *Stream) Delivered(arrived, ready int64) { st.store.watchMetrics.Delivered(arrived, ready) }
