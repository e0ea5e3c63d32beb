package list

import (
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/objects"
)

// maxCorrupt bounds the objects that one LIST reports: the last of them ends it.
const maxCorrupt = 100

// corruptObjects collects the unreadable objects of a LIST for AllowUnsafeMalformedObjectDeletion,
// so that one error names all of them to the administrator.
type corruptObjects struct {
	causes []metav1.StatusCause
}

// add records an object and reports whether the list continues.
func (c *corruptObjects) add(key string, err error) bool {
	c.causes = append(c.causes, metav1.StatusCause{
		Type:    metav1.CauseTypeUnexpectedServerResponse,
		Field:   key,
		Message: storage.NewCorruptObjError(key, objects.Cause(err)).Error(),
	})
	if len(c.causes) < maxCorrupt {
		return true
	}
	c.causes = append(c.causes, metav1.StatusCause{
		Type:    metav1.CauseTypeTooMany,
		Message: "too many errors, the list is truncated",
	})
	return false
}

// orElse returns the error for the collected objects, or err if there are none.
func (c *corruptObjects) orElse(resource schema.GroupResource, err error) error {
	if len(c.causes) == 0 {
		return err
	}
	objects := min(len(c.causes), maxCorrupt)
	message := fmt.Sprintf("failed to read one or more %s from the storage: %s", resource, c.causes[0].Message)
	if objects > 1 {
		message = fmt.Sprintf("%s (and %d more)", message, objects-1)
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure,
		Code:   http.StatusInternalServerError,
		Reason: metav1.StatusReasonStoreReadError,
		Details: &metav1.StatusDetails{
			Group:  resource.Group,
			Kind:   resource.Resource,
			Name:   "list",
			Causes: c.causes,
		},
		Message: message,
	}}
}
