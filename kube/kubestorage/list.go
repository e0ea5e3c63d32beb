package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/listadmission"
)

// GetList implements storage.Interface.
func (s *Store) GetList(ctx context.Context, key string, opts storage.ListOptions, listObj runtime.Object) error {
	endProbe(ctx, s, key, &opts.Predicate)
	q, err := newListRequest(ctx, s, key, opts)
	if err != nil {
		return s.listMetrics.Failed(err)
	}
	r, err := q.read(ctx, s)
	var etcd *readEtcd
	switch {
	case errors.As(err, &etcd):
		if err := admitEtcd(ctx, listadmission.DecodedOf(ctx), s, q); err != nil {
			return s.listMetrics.Failed(err)
		}
		s.listMetrics.Count(q.opts, metrics.SourceEtcd, etcd.reason)
		if err := s.pages.List(ctx, s.etcd, q.key, q.prefix, q.scope, q.opts, listObj); err != nil {
			return s.listMetrics.Failed(err)
		}
		return listadmission.DecodedOf(ctx).TakeTurn(ctx)
	case err != nil:
		return err
	}
	defer r.Close()
	decoded := listadmission.DecodedOf(ctx)
	if err := admit(ctx, decoded, r); err != nil {
		return s.listMetrics.Failed(err)
	}
	if err := r.fill(ctx, decoded, listObj); err != nil {
		return err
	}
	r.Close() // before the wait for the turn, which does not need the snapshot
	return decoded.TakeTurn(ctx)
}

// fill decodes the selected entries into listObj. decoded accounts for them.
func (r *ListRead) fill(ctx context.Context, decoded *listadmission.Decoded, listObj runtime.Object) error {
	s := r.store
	itemsPtr, err := meta.GetItemsPtr(listObj)
	if err != nil {
		return err
	}
	items, err := conversion.EnforcePtr(itemsPtr)
	if err != nil || items.Kind() != reflect.Slice {
		return fmt.Errorf("need a pointer to a slice of items, got %T: %w", itemsPtr, err)
	}
	most := math.MaxInt
	if !r.selector.All {
		most = 2048
	}
	if r.Limit > 0 {
		most = int(min(int64(most), r.Limit))
	}
	room := min(r.estimate(most), most)
	items.Set(reflect.MakeSlice(items.Type(), 0, room))

	var corrupt corruptObjects
	walked, last, more, now := 0, "", false, uint32(0)
	found := int64(0) // selected entries, decodable or not: as in Unreadable, all fill the page
	for e := range r.Selecting() {
		if r.Limit > 0 && found >= r.Limit {
			more = true
			break
		}
		if walked%64 == 0 {
			if ctx.Err() != nil {
				return storage.NewTimeoutError(r.Prefix, "request did not complete within requested timeout")
			}
			now = r.selector.Generation.Blocks().Now()
		}
		walked++
		ok, err := r.Matches(ctx, e)
		if err == nil && ok && r.Selective() {
			if err := decoded.Grow(e.Size()); err != nil {
				return s.listMetrics.Failed(err)
			}
		}
		var obj runtime.Object
		if err == nil && ok {
			found++
			obj, err = r.selector.Generation.Object(ctx, e, now)
		}
		if err != nil {
			if !s.unsafeDelete || !corrupt.add(e.Key(), err) {
				return corrupt.orElse(s.group, err)
			}
			continue
		}
		if ok {
			appendItem(items, obj)
			last = e.Key()
		}
	}
	if err := r.Err(); err != nil {
		return err
	}
	if err := corrupt.orElse(s.group, nil); err != nil {
		return err
	}
	if r.CountsMore() && r.Limit > 0 && int64(items.Len()) >= r.Limit {
		more = r.MoreAfter(ctx, last)
	}
	if r.FromEtcd() && !r.Selective() {
		more = walked < r.Count() // the walk ended at the end of the page
	}
	token, remaining, err := r.NextPage(ctx, last, r.Count(), more)
	if err != nil {
		return err
	}
	r.Served(walked, items.Len())
	if err := s.versioner.UpdateList(listObj, uint64(r.Rev), token, remaining); err != nil {
		return err
	}
	if s.shards {
		r.request.opts.Predicate.SetShardInfoOnList(listObj)
	}
	return nil
}

// appendItem appends the struct that obj points to. Unlike reflect.Append it allocates only to
// grow.
func appendItem(items reflect.Value, obj runtime.Object) {
	n := items.Len()
	if n == items.Cap() {
		items.Grow(1)
	}
	items.SetLen(n + 1)
	items.Index(n).Set(reflect.ValueOf(obj).Elem())
}
