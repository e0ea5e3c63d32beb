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
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"github.com/stratakube/strata/mirror"
)

// GetList implements storage.Interface. What each combination of resource version,
// match, limit and continue means is KEP-2340's table and KEP-4988; see snapshot.
func (s *Store) GetList(ctx context.Context, key string, opts storage.ListOptions, listObj runtime.Object) error {
	prefix, err := s.prepareKey(key, opts.Recursive)
	if err != nil {
		return err
	}
	exact, start, err := storage.ValidateListOptions(prefix, s.versioner, opts)
	if err != nil {
		return err
	}
	if !s.resource.Ready() {
		if opts.Predicate.Limit > 0 && opts.Predicate.Empty() {
			return s.etcd.GetList(ctx, key, opts, listObj) // a small page is cheap for etcd
		}
		return s.notReady()
	}
	snap, err := s.snapshot(ctx, opts, exact)
	switch {
	case errors.Is(err, mirror.ErrCompacted):
		// Older than memory: etcd has it, or knows that it is gone (D7).
		return s.etcd.GetList(ctx, key, opts, listObj)
	case errors.Is(err, mirror.ErrNotReady):
		return s.notReady()
	case err != nil:
		return err
	}
	q := listQuery{prefix: prefix, start: prefix, end: after(prefix), limit: opts.Predicate.Limit, selector: s.view.selector(opts.Predicate)}
	if !opts.Recursive {
		q.end = prefix + "\x00"
	} else if start != "" {
		q.start = start
	}
	if opts.ResourceVersion == "0" && exact == 0 && opts.Predicate.Continue == "" {
		q.limit = 0 // KEP-2340: resource version 0 ignores the limit
	}
	return s.fill(ctx, q, snap, opts, listObj)
}

// after returns the smallest key above every key that begins with prefix, which
// ends with a slash or, for a single key, is a key.
func after(prefix string) string {
	return prefix[:len(prefix)-1] + string(prefix[len(prefix)-1]+1)
}

// snapshot returns the state that a list is about:
//
//	exact > 0 (Exact, a token's revision, or limit with a revision): that revision
//	no resource version, or a token that asks for the present:       the present, linearizably
//	0:                                                               what is here now
//	any other:                                                       that revision or later
func (s *Store) snapshot(ctx context.Context, opts storage.ListOptions, exact int64) (mirror.Snapshot, error) {
	if exact > 0 {
		if exact > s.mirror.Clock() {
			// Whether it exists is for etcd to say.
			current, err := s.mirror.Current(ctx)
			if err != nil {
				return mirror.Snapshot{}, err
			}
			if exact > current {
				return mirror.Snapshot{}, storage.NewTooLargeResourceVersionError(uint64(exact), uint64(current), tooHighRetrySeconds)
			}
			if err := s.waitFor(ctx, exact); err != nil {
				return mirror.Snapshot{}, err
			}
		}
		s.followCompaction()
		if rev := s.mirror.Compacted(); exact < rev {
			return mirror.Snapshot{}, fmt.Errorf("%w: asked %d, etcd is compacted to %d", mirror.ErrCompacted, exact, rev)
		}
		return s.resource.At(exact)
	}
	if opts.ResourceVersion == "" || opts.Predicate.Continue != "" {
		if err := s.consistent(ctx); err != nil {
			return mirror.Snapshot{}, err
		}
		return s.resource.Latest()
	}
	rev, err := s.versioner.ParseResourceVersion(opts.ResourceVersion)
	if err != nil {
		return mirror.Snapshot{}, err
	}
	if err := s.waitFor(ctx, int64(rev)); err != nil {
		return mirror.Snapshot{}, err
	}
	return s.resource.Latest()
}

// listQuery is the part of a resource that a list walks.
type listQuery struct {
	prefix     string // what continue tokens are relative to
	start, end string
	limit      int64 // 0: all
	selector   selector
}

// fill decodes what the query selects into listObj.
func (s *Store) fill(ctx context.Context, q listQuery, snap mirror.Snapshot, opts storage.ListOptions, listObj runtime.Object) error {
	itemsPtr, err := meta.GetItemsPtr(listObj)
	if err != nil {
		return err
	}
	items, err := conversion.EnforcePtr(itemsPtr)
	if err != nil || items.Kind() != reflect.Slice {
		return fmt.Errorf("need a pointer to a slice of items, got %T: %w", itemsPtr, err)
	}
	total, _ := snap.Count(q.start, q.end)
	room := total
	if !q.selector.all {
		room = min(room, 2048)
	}
	if q.limit > 0 {
		room = min(room, int(q.limit))
	}
	items.Set(reflect.MakeSlice(items.Type(), 0, room))

	var corrupt corruptObjects
	walked, last, more := 0, "", false
	for run := range snap.Runs(q.start, q.end) {
		if err := ctx.Err(); err != nil {
			return storage.NewTimeoutError(q.prefix, "request did not complete within requested timeout")
		}
		for _, e := range run.Items() {
			walked++
			ok, err := q.selector.matches(ctx, e)
			var obj runtime.Object
			if err == nil && ok {
				obj, err = s.view.decode(ctx, e, e.ModRevision())
			}
			if err != nil {
				if !s.view.unsafeDelete || !corrupt.add(e.Key(), err) {
					return corrupt.orElse(s.group, err)
				}
				continue
			}
			if !ok {
				continue
			}
			items.Set(reflect.Append(items, reflect.ValueOf(obj).Elem()))
			if q.limit > 0 && int64(items.Len()) >= q.limit {
				last, more = e.Key(), walked < total
				break
			}
		}
		if last != "" {
			break
		}
	}
	etcdmetrics.RecordStorageListMetrics(s.group, 0, walked, items.Len())
	if err := corrupt.orElse(s.group, nil); err != nil {
		return err
	}
	token, remaining, err := storage.PrepareContinueToken(last, q.prefix, snap.Rev, int64(total), more, opts)
	if err != nil {
		return err
	}
	if err := s.versioner.UpdateList(listObj, uint64(snap.Rev), token, remaining); err != nil {
		return err
	}
	if utilfeature.DefaultFeatureGate.Enabled(features.ShardedListAndWatch) {
		opts.Predicate.SetShardInfoOnList(listObj)
	}
	return nil
}

// maxCorrupt bounds the objects that one LIST reports.
const maxCorrupt = 100

// corruptObjects collects what a LIST cannot read, for AllowUnsafeMalformedObjectDeletion:
// the administrator learns of all of them at once.
type corruptObjects struct {
	causes []metav1.StatusCause
}

// add takes note of an object and reports whether the list goes on.
func (c *corruptObjects) add(key string, err error) bool {
	if len(c.causes) >= maxCorrupt {
		c.causes = append(c.causes, metav1.StatusCause{
			Type:    metav1.CauseTypeTooMany,
			Message: "too many errors, the list is truncated",
		})
		return false
	}
	c.causes = append(c.causes, metav1.StatusCause{
		Type:    metav1.CauseTypeUnexpectedServerResponse,
		Field:   key,
		Message: storage.NewCorruptObjError(key, err).Error(),
	})
	return true
}

// orElse returns the error for what was collected, err if nothing was.
func (c *corruptObjects) orElse(resource groupResource, err error) error {
	if len(c.causes) == 0 {
		return err
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
		Message: fmt.Sprintf("failed to read one or more %s from the storage", resource),
	}}
}
