package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/listadmission"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GetList implements storage.Interface.
func (s *Store) GetList(ctx context.Context, key string, opts storage.ListOptions, listObj runtime.Object) error {
	endProbe(ctx, s, key, &opts.Predicate)
	q, err := newListRequest(ctx, s, key, opts)
	if err != nil {
		return s.lists.Failed(err)
	}
	r, err := q.read(ctx, s)
	var etcd *readEtcd
	switch {
	case errors.As(err, &etcd):
		if err := admitEtcd(ctx, listadmission.DecodedOf(ctx), s, q); err != nil {
			return s.lists.Failed(err)
		}
		s.lists.Count(q.opts, metrics.SourceEtcd, etcd.reason)
		if err := s.pages.List(ctx, s.etcd, q.key, q.prefix, q.scope, q.opts, listObj); err != nil {
			return s.lists.Failed(err)
		}
		return listadmission.DecodedOf(ctx).TakeTurn(ctx)
	case err != nil:
		return err
	}
	defer r.Close()
	held := listadmission.DecodedOf(ctx)
	if err := admit(ctx, held, r); err != nil {
		return s.lists.Failed(err)
	}
	if err := r.fill(ctx, held, listObj); err != nil {
		return err
	}
	r.Close() // not while others are encoded
	return held.TakeTurn(ctx)
}

// after returns the smallest key above every key that begins with prefix, which
// ends with a slash or, for a single key, is a key.
func after(prefix string) string {
	return prefix[:len(prefix)-1] + string(prefix[len(prefix)-1]+1)
}

// fill decodes the selected entries into listObj, which count as held.
func (r *Reading) fill(ctx context.Context, held *listadmission.Decoded, listObj runtime.Object) error {
	s := r.store
	itemsPtr, err := meta.GetItemsPtr(listObj)
	if err != nil {
		return err
	}
	items, err := conversion.EnforcePtr(itemsPtr)
	if err != nil || items.Kind() != reflect.Slice {
		return fmt.Errorf("need a pointer to a slice of items, got %T: %w", itemsPtr, err)
	}
	room := r.estimate()
	if !r.selector.All {
		room = min(room, 2048)
	}
	if r.Limit > 0 {
		room = min(room, int(r.Limit))
	}
	items.Set(reflect.MakeSlice(items.Type(), 0, room))

	var corrupt corruptObjects
	walked, last, more := 0, "", false
	for e := range r.Selecting() {
		if r.Limit > 0 && int64(items.Len()) >= r.Limit {
			more = true
			break
		}
		if walked%64 == 0 && ctx.Err() != nil {
			return storage.NewTimeoutError(r.Prefix, "request did not complete within requested timeout")
		}
		walked++
		ok, err := r.Matches(ctx, e)
		if err == nil && ok && r.Selective() {
			if err := held.Grow(e.Size()); err != nil {
				return s.lists.Failed(err)
			}
		}
		var obj runtime.Object
		if err == nil && ok {
			obj, err = r.selector.Generation.Object(ctx, e)
		}
		if err != nil {
			if !s.unsafeDelete || !corrupt.add(e.Key(), err) {
				return corrupt.orElse(s.group, err)
			}
			continue
		}
		if ok {
			items.Set(reflect.Append(items, reflect.ValueOf(obj).Elem()))
			last = e.Key()
		}
	}
	if err := r.Err(); err != nil {
		return err
	}
	if err := corrupt.orElse(s.group, nil); err != nil {
		return err
	}
	if r.shard != nil && r.Limit > 0 && int64(items.Len()) >= r.Limit {
		more = r.MoreAfter(last)
	}
	if r.FromEtcd() && !r.Selective() {
		more = walked < r.Count() // the walk ended where the page does
	}
	token, remaining, err := r.NextPage(ctx, last, r.Count(), more)
	if err != nil {
		return err
	}
	r.Served(walked, items.Len())
	if err := s.versioner.UpdateList(listObj, uint64(r.Rev), token, remaining); err != nil {
		return err
	}
	if utilfeature.DefaultFeatureGate.Enabled(features.ShardedListAndWatch) {
		r.request.opts.Predicate.SetShardInfoOnList(listObj)
	}
	return nil
}

// maxCorrupt bounds the objects that one LIST reports: the last of them ends it.
const maxCorrupt = 100

// corruptObjects collects what a LIST cannot read, for AllowUnsafeMalformedObjectDeletion:
// the administrator learns of all of them at once.
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

// orElse returns the error for what was collected, err if nothing was.
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
