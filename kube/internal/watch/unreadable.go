package watch

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// lost reports whether a past event cannot be decoded because of a superseded state, while the
// latest state can: if its decryption key was removed, the event stays unreadable, and a client
// that relists does not need it. If the latest state cannot be decoded either, decryption or
// conversion may be temporarily down. What is not decoded in time is not lost.
func (st *Stream) lost(ev *mirror.Event) bool {
	if ev.Rev > st.log.publishedAtStart {
		return false
	}
	snap, err := st.env.Lists.Memory.Latest()
	if err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(st.life.ctx, objects.DecodeTimeout)
	defer cancel()
	gen, lost := st.env.Lists.View.CurrentGeneration(), false
	for _, e := range []*mirror.Entry{ev.Prev, ev.Entry} {
		if e == nil {
			continue
		}
		_, err := gen.Decode(ctx, e, e.ModRevision())
		if err == nil {
			continue
		}
		if ctx.Err() != nil || apierrors.IsTimeout(err) {
			return false
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
		_, err := gen.Decode(ctx, e, e.ModRevision())
		if err == nil {
			return true
		}
		if tried++; tried == lostProbes || ctx.Err() != nil || apierrors.IsTimeout(err) {
			return false
		}
	}
	return tried == 0 // without any current object, a relist is right
}

// lostProbes bounds the current objects decoded to distinguish a removed key from a failing
// decryption.
const lostProbes = 16

// corruptDeletion returns the error for the deletion of an object whose last state is unreadable,
// in the words of upstream's store with AllowUnsafeMalformedObjectDeletion.
func corruptDeletion(err error) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusInternalServerError,
		Reason:  metav1.StatusReasonStoreReadError,
		Message: fmt.Sprintf("saw a DELETED event, but object data is corrupt - %v", objects.Cause(err)),
	}}
}

// ErrorStatus returns the object of the ERROR event for err.
func ErrorStatus(err error) *metav1.Status {
	err = objects.Cause(err)
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		status = apierrors.NewInternalError(err)
	}
	st := status.Status()
	return &st
}
