package list

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

	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/listadmission"
	"github.com/stratakube/strata/mirror"
)

// GetList decodes the objects of a LIST into listObj, as storage.Interface does. A list that memory
// cannot answer is answered by Env.Etcd. Errors are for the client: those of Read without
// etcdread.ErrNeeded, 413 and 429 of its admission, and decoding errors.
func (env *Env) GetList(ctx context.Context, key string, opts storage.ListOptions, listObj runtime.Object) error {
	q, err := env.request(ctx, key, opts)
	if err != nil {
		return env.Metrics.Failed(err)
	}
	r, err := q.read(ctx, env)
	var etcd *etcdread.Needed
	switch {
	case errors.As(err, &etcd):
		if err := admitUpstream(ctx, listadmission.DecodedOf(ctx), env, q); err != nil {
			return env.Metrics.Failed(err)
		}
		env.Metrics.Count(q.opts, metrics.SourceEtcd, etcd.Reason)
		if err := env.Pages.List(ctx, env.Etcd, q.key, q.prefix, q.scope, q.opts, listObj); err != nil {
			return env.Metrics.Failed(etcdread.ForClient(ctx, err))
		}
		return listadmission.DecodedOf(ctx).TakeTurn(ctx)
	case err != nil:
		return err
	}
	defer r.Close()
	decoded := listadmission.DecodedOf(ctx)
	if err := admit(ctx, decoded, r); err != nil {
		return env.Metrics.Failed(err)
	}
	if err := r.fill(ctx, decoded, listObj); err != nil {
		return err
	}
	r.Close() // before the wait for the turn, which does not need the snapshot
	return decoded.TakeTurn(ctx)
}

// fill decodes the selected entries into listObj. decoded accounts for them.
func (r *Read) fill(ctx context.Context, decoded *listadmission.Decoded, listObj runtime.Object) error {
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
	p := page{list: r, items: items, decoded: decoded}
	if err := p.walk(ctx); err != nil {
		return err
	}
	token, remaining, err := r.NextPage(ctx, p.last, r.Count(), p.more(ctx))
	if err != nil {
		return err
	}
	r.Served(p.walked, items.Len())
	if err := versioner.UpdateList(listObj, uint64(r.Rev), token, remaining); err != nil {
		return err
	}
	if r.env.Gates.Shards {
		r.request.opts.Predicate.SetShardInfoOnList(listObj)
	}
	return nil
}

// page is the decoded page of a list.
type page struct {
	list    *Read
	items   reflect.Value // a slice of structs
	decoded *listadmission.Decoded
	corrupt corruptObjects
	walked  int    // candidates
	found   int64  // selected entries; those that cannot be decoded fill the page, too
	last    string // key of the last item
	full    bool   // the page reached its limit before the last candidate
	now     uint32 // see blockcache.Cache.Now
}

// walk decodes the selected candidates. Errors: of reading, and of entries that are unreadable.
func (p *page) walk(ctx context.Context) error {
	r := p.list
	for e := range r.Selecting() {
		if p.full = r.Limit > 0 && p.found >= r.Limit; p.full {
			break
		}
		if p.walked%64 == 0 {
			if ctx.Err() != nil {
				return storage.NewTimeoutError(r.request.scope, "request did not complete within requested timeout")
			}
			p.now = r.selector.Generation.Blocks().Now()
		}
		p.walked++
		if err := p.add(ctx, e); err != nil {
			return err
		}
	}
	if err := r.Err(); err != nil {
		return err
	}
	return p.corrupt.orElse(r.env.View.Kind().GroupResource, nil)
}

// add decodes a candidate if it is selected.
func (p *page) add(ctx context.Context, e *mirror.Entry) error {
	r := p.list
	ok, err := r.Matches(ctx, e)
	if err == nil && !ok {
		return nil
	}
	var obj runtime.Object
	if err == nil {
		if r.Selective() {
			if err := p.decoded.Grow(e.Size()); err != nil {
				return r.env.Metrics.Failed(err)
			}
		}
		p.found++
		obj, err = r.selector.Generation.Object(ctx, e, p.now)
	}
	if err != nil {
		if !r.env.Gates.UnsafeDelete || !p.corrupt.add(e.Key(), err) {
			return p.corrupt.orElse(r.env.View.Kind().GroupResource, err)
		}
		return nil
	}
	appendItem(p.items, obj)
	p.last = e.Key()
	return nil
}

// more reports whether another page follows.
func (p *page) more(ctx context.Context) bool {
	r := p.list
	switch {
	case r.FromEtcd() && !r.Selective():
		return p.walked < r.Count() // the walk ended at the end of the page
	case r.CountsMore() && r.Limit > 0 && int64(p.items.Len()) >= r.Limit:
		return r.MoreAfter(ctx, p.last)
	}
	return p.full
}

// appendItem appends the struct that obj points to. Unlike reflect.Append it allocates only to
// grow.
func appendItem(items reflect.Value, obj runtime.Object) {
	n := items.Len()
	items.Grow(1)
	items.SetLen(n + 1)
	items.Index(n).Set(reflect.ValueOf(obj).Elem())
}
