package kubestorage

import (
	"context"

	"github.com/stratakube/strata/kube/listadmission"
)

// admitKey is the context's key of an AdmitFunc.
type admitKey struct{}

// WithAdmission returns the context of a list that is sent from memory, for Store.Read: where the revision
// has to be read from etcd, admit is called with about how many bytes that is before anything is read. Its
// error is that of Read.
func WithAdmission(ctx context.Context, admit func(bytes int64) error) context.Context {
	return context.WithValue(ctx, admitKey{}, admit)
}

// admit takes what the reading will hold, if that is known; see Decoded.Grow for one that is
// selective, and admitPast for one that is read from etcd.
func admit(ctx context.Context, d *listadmission.Decoded, r *Reading) error {
	if d == nil || r.Selective() || r.FromEtcd() {
		return nil
	}
	n, bytes := r.Objects().Count(r.Start, r.End)
	n, bytes = pageShare(n, bytes, r.Limit)
	return d.Take(ctx, n, bytes)
}

// pastKeep is etcdread.Source.Keep. A variable for tests.
var pastKeep int64 = 16 << 20

// admitPast admits a list that is read from etcd, by what its range is now, before anything of it is read.
func admitPast(ctx context.Context, s *Store, r *Reading) error {
	held, err := s.resource.Latest()
	if err != nil {
		return s.notReady()
	}
	n, bytes := held.Count(r.Start, r.End)
	if r.Selective() {
		bytes = min(bytes, 2*pastKeep) // what such a list holds at most
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

// admitEtcd is admit for a list that upstream's store answers.
func admitEtcd(ctx context.Context, d *listadmission.Decoded, s *Store, q listRequest) error {
	if d == nil || !q.opts.Predicate.Empty() {
		return nil
	}
	snap, err := s.resource.Latest()
	if err != nil {
		return nil // only small pages are read while a resource is not loaded
	}
	start, end := q.bounds()
	n, bytes := snap.Count(start, end)
	n, bytes = pageShare(n, bytes, q.limit())
	return d.Take(ctx, n, bytes)
}

// pageShare returns what a page of at most limit objects has of all of them.
func pageShare(objects int, bytes, limit int64) (int, int64) {
	if 0 < limit && limit < int64(objects) {
		return int(limit), int64(float64(bytes) / float64(objects) * float64(limit))
	}
	return objects, bytes
}
