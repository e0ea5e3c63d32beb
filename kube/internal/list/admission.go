package list

import (
	"context"

	"github.com/stratakube/strata/kube/listadmission"
)

// admitKey is the context key of WithAdmission.
type admitKey struct{}

// WithAdmission returns the context of a list that is sent from memory, for Env.Read. If the
// revision has to be read from etcd, admit is called with the approximate bytes of the list before
// the first read. Read returns its error.
func WithAdmission(ctx context.Context, admit func(bytes int64) error) context.Context {
	return context.WithValue(ctx, admitKey{}, admit)
}

// admit reserves the memory that the list needs if its size is known. It leaves selective lists to
// Decoded.Grow and lists from etcd to admitFromEtcd.
func admit(ctx context.Context, d *listadmission.Decoded, r *Read) error {
	if d == nil || r.Selective() || r.FromEtcd() {
		return nil
	}
	n, bytes := r.Objects().Count(r.Start, r.End)
	n, bytes = pageShare(n, bytes, r.Limit)
	return d.Take(ctx, n, bytes)
}

// KeepBytes is etcdread.Reader.Keep of the past of lists.
const KeepBytes = 16 << 20

// admitFromEtcd admits a list that is read from etcd before the read starts, sized by the cached
// objects now in its range.
func admitFromEtcd(ctx context.Context, env *Env, r *Read) error {
	latest, err := env.Memory.Latest()
	if err != nil {
		return env.Fresh.NotReady()
	}
	n, bytes := latest.Count(r.Start, r.End)
	if r.Selective() {
		bytes = min(bytes, 2*KeepBytes) // upper bound of the memory that such a list holds
	} else {
		n, bytes = pageShare(n, bytes, r.Limit)
	}
	if d := listadmission.DecodedOf(ctx); d != nil && !r.Selective() {
		return d.Take(ctx, n, bytes)
	}
	if admit, ok := ctx.Value(admitKey{}).(func(int64) error); ok {
		return admit(bytes)
	}
	return nil
}

// admitEtcd is admit for a list that is answered by upstream's store.
func admitEtcd(ctx context.Context, d *listadmission.Decoded, env *Env, q request) error {
	if d == nil || !q.opts.Predicate.Empty() {
		return nil
	}
	snap, err := env.Memory.Latest()
	if err != nil {
		return nil // only small pages are read while a resource is not loaded
	}
	start, end := q.bounds()
	n, bytes := snap.Count(start, end)
	n, bytes = pageShare(n, bytes, q.limit())
	return d.Take(ctx, n, bytes)
}

// pageShare returns the objects and bytes of a page of at most limit objects.
func pageShare(objects int, bytes, limit int64) (int, int64) {
	if 0 < limit && limit < int64(objects) {
		return int(limit), int64(float64(bytes) / float64(objects) * float64(limit))
	}
	return objects, bytes
}
