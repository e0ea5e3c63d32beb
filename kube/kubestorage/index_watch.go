package kubestorage

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/stratakube/strata/kube/internal/guard"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// follow has the stream's cursor woken by, and read, what its request is about: one object,
// the objects with one value of an index that the registry has declared, one shard, or one
// namespace. A watch of anything else reads every event of the resource.
func (st *Stream) follow() {
	if st.end != st.start+"\x00" {
		if x, value := st.store.indexFor(st.selector.Predicate); x != nil {
			st.cursor.FollowValue(x.watched, value)
			return
		}
		if st.followShard() {
			return
		}
	}
	st.cursor.Follow()
}

// values returns the values of an object before and after an event, for those who watch
// one value; false if one of them cannot be told because it cannot be decoded: each
// watch then meets the event, and tries again on its own (Stream.Retry).
func (x *index) values(ctx context.Context, ev *mirror.Event) (before, now string, known bool) {
	ctx, cancel := context.WithTimeout(ctx, objects.DecodeTimeout)
	defer cancel()
	gen := x.view.Now()
	err := guard.Call(func() error {
		if e := ev.Entry; e != nil {
			if gen.KnownAttributes(e) == nil {
				// Those who are going to be woken share the object.
				if _, err := gen.Added(ev); err != nil {
					return err
				}
			}
			a, err := gen.Attributes(ctx, e)
			if err != nil {
				return err
			}
			now = x.value(a)
		}
		if ev.Prev != nil {
			a, err := gen.Attributes(ctx, ev.Prev)
			if err != nil {
				return err
			}
			before = x.value(a)
		}
		return nil
	})
	if err != nil {
		klog.FromContext(ctx).V(4).Info("An object cannot be decoded, so its event goes to the watches of every value", "key", ev.Key(), "revision", ev.Rev, "err", err)
	}
	return before, now, err == nil
}
