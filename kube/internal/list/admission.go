package list

import (
	"context"

	"github.com/stratakube/strata/kube/listadmission"
)

// admitKey is the context key of WithAdmission.
type admitKey struct{}

// WithAdmission returns the context of a list for Env.Read. If the revision is older than memory,
// Read calls admit with the approximate bytes of the list before it reads etcd, and returns its
// error. A list from memory is admitted by the caller of Read, which knows the form of its bytes.
func WithAdmission(ctx context.Context, admit func(bytes int64) error) context.Context {
	return context.WithValue(ctx, admitKey{}, admit)
}

// admit reserves the memory of a list from memory if its size is known. With a selector it is not,
// and Decoded.Grow reserves the memory of each selected object. Errors: those of Decoded.Take.
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

// admitPast admits a list that is older than memory before etcd is read. Its size is that of the
// cached objects now in its range. Errors: 429, and those of Decoded.Take and WithAdmission.
func admitPast(ctx context.Context, env *Env, r *Read) error {
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

// admitUpstream is admit for a list that upstream's store answers.
func admitUpstream(ctx context.Context, d *listadmission.Decoded, env *Env, q request) error {
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
