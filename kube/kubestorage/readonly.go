package kubestorage

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdclient"
)

// ErrReadOnly is wrapped by the errors of requests to change etcd with Options.ReadOnly. The requests were not sent.
var ErrReadOnly = etcdclient.ErrReadOnly

// readOnly is a storage whose writes fail before they reach etcd. The error is a 405 that wraps ErrReadOnly.
type readOnly struct {
	storage.Interface
	resource schema.GroupResource
}

func (r readOnly) refuse(verb string) error {
	return &readOnlyError{apierrors.NewMethodNotSupported(r.resource, verb)}
}

// readOnlyError is an API status that wraps ErrReadOnly.
type readOnlyError struct{ *apierrors.StatusError }

func (e *readOnlyError) Error() string {
	return fmt.Sprintf("%s: %s; send the request to a server that writes", e.ErrStatus.Message, ErrReadOnly)
}

func (e *readOnlyError) Unwrap() []error { return []error{ErrReadOnly, e.StatusError} }

// Create implements storage.Interface.
func (r readOnly) Create(context.Context, string, runtime.Object, runtime.Object, uint64) error {
	return r.refuse("create")
}

// Delete implements storage.Interface.
func (r readOnly) Delete(context.Context, string, runtime.Object, *storage.Preconditions, storage.ValidateObjectFunc, runtime.Object, storage.DeleteOptions) error {
	return r.refuse("delete")
}

// GuaranteedUpdate implements storage.Interface.
func (r readOnly) GuaranteedUpdate(context.Context, string, runtime.Object, bool, *storage.Preconditions, storage.UpdateFunc, runtime.Object) error {
	return r.refuse("update")
}
