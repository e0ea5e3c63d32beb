package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"strings"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// errPastMemory is the ErrReadEtcd of a revision older than memory; few such lists are read
// from etcd at once (D7).
var errPastMemory = fmt.Errorf("%w: older than memory", ErrReadEtcd)

// ErrReadEtcd: memory does not answer this read, etcd does. Of a list: the revision is
// older than memory, a gate is off, or the resource is not loaded and the page is small. Of
// a single key: the resource is not loaded, or memory does not catch up soon.
var ErrReadEtcd = errors.New("to be read from etcd")

// Reading is what a LIST is about: a revision of the resource and the part of it
// that was asked for. It is how bytes are served without making objects first:
//
//	r, err := store.Read(ctx, key, opts)
//	for run := range r.Runs() {
//		spans.Reset()
//		err = representation.AppendRun(ctx, &spans, run) // made once
//		...
//	}
//
// It may be read concurrently and keeps its revision alive for as long as it is held.
type Reading struct {
	Snapshot mirror.Snapshot
	// Prefix is the etcd key prefix of the request, to which continue tokens are
	// relative; Start <= key < End are the keys still to be walked.
	Prefix, Start, End string
	// Limit is the number of selected objects asked for, 0 for all.
	Limit int64

	opts     storage.ListOptions
	selector selector
	index    *indexed // nil: none helps
	value    string   // to look up in it
}

// Runs yields the entries to be walked in key order, leaf by leaf, before
// selection. See Candidates for a request that an index helps with.
func (r *Reading) Runs() iter.Seq[mirror.Run] { return r.Snapshot.Runs(r.Start, r.End) }

// Candidates yields, in key order, entries among which are all that the request
// selects: those of the index if there is one for the selector, else all of Runs.
func (r *Reading) Candidates() iter.Seq[*mirror.Entry] {
	if r.index != nil {
		return r.index.entries(r.value, r.Start, r.End)
	}
	return r.Snapshot.All(r.Start, r.End)
}

// Count returns the number of Candidates. Cost is O(log n).
func (r *Reading) Count() int {
	if r.index != nil {
		return r.index.count(r.value, r.Start, r.End)
	}
	n, _ := r.Snapshot.Count(r.Start, r.End)
	return n
}

// Selective reports whether Matches has to be asked at all.
func (r *Reading) Selective() bool { return !r.selector.all }

// Matches reports whether the request selects the entry's object. The object is
// decoded if no reader has needed its labels and fields before; the error is that
// of decoding it.
func (r *Reading) Matches(ctx context.Context, e *mirror.Entry) (bool, error) {
	return r.selector.matches(ctx, e)
}

// NextPage returns the continue token for what follows the key last, which is the
// last object of the page, and the number of objects that remain if it is known. It is
// "" and nil if there is nothing more. more says whether there are candidates after
// last; count is Count.
func (r *Reading) NextPage(last string, count int, more bool) (token string, remaining *int64, err error) {
	return storage.PrepareContinueToken(last, r.Prefix, r.Snapshot.Rev, int64(count), more, r.opts)
}

// Read resolves a LIST: it waits for the revision that the options ask for and
// returns it. What each combination of resource version, match, limit and continue
// means is KEP-2340's table and KEP-4988; see Store.snapshot. Errors: ErrReadEtcd,
// and API errors for the client (400, 410, 429, 504).
func (s *Store) Read(ctx context.Context, key string, opts storage.ListOptions) (*Reading, error) {
	prefix, err := s.prepareKey(key, opts.Recursive)
	if err != nil {
		return nil, err
	}
	exact, start, err := storage.ValidateListOptions(prefix, s.versioner, opts)
	if err != nil {
		return nil, err
	}
	if exact < 0 { // beyond what a revision can reach
		exact = math.MaxInt64
	}
	if !s.resource.Ready() && opts.Predicate.Limit > 0 && opts.Predicate.Empty() && (exact == 0 || !s.mirror.Restoring()) {
		return nil, ErrReadEtcd // a small page is cheap for etcd (KEP-4568)
	}
	if err := s.ready(ctx); err != nil {
		return nil, err
	}
	if !s.fromMemory(opts, exact) {
		return nil, ErrReadEtcd
	}
	snap, err := s.snapshot(ctx, opts, exact)
	switch {
	case errors.Is(err, mirror.ErrCompacted):
		return nil, errPastMemory // etcd has it, or knows that it is gone
	case errors.Is(err, mirror.ErrNotReady):
		return nil, s.notReady()
	case err != nil:
		return nil, err
	}
	r := &Reading{Snapshot: snap, Prefix: prefix, Start: prefix, End: after(prefix), Limit: opts.Predicate.Limit,
		opts: opts, selector: s.view.selector(opts.Predicate)}
	if !opts.Recursive {
		r.End = prefix + "\x00"
	} else if start != "" {
		r.Start = start
	} else if info, ok := request.RequestInfoFrom(ctx); ok && info.Namespace == "" {
		// A field selector for one namespace narrows the first page, but not the
		// following ones, to the keys of the namespace: their tokens are relative
		// to what the client asked for.
		r.Prefix = s.resource.Prefix()
	}
	if !strings.HasSuffix(key, "/") {
		// Upstream's cacher cuts tokens from the key that it was given, its etcd3 store
		// from one that ends with a slash. Both read either; ours are the cacher's.
		r.Prefix = strings.TrimSuffix(r.Prefix, "/")
	}
	if opts.ResourceVersion == "0" && exact == 0 && opts.Predicate.Continue == "" {
		r.Limit = 0 // KEP-2340: resource version 0 ignores the limit
	}
	if exact == 0 {
		s.useIndex(ctx, r)
	}
	return r, nil
}

// useIndex narrows a reading of the present to what an index finds. The index may
// be a little newer than the snapshot, which then follows it: the request asked for
// a revision or later.
func (s *Store) useIndex(ctx context.Context, r *Reading) {
	x, value := s.indexFor(r.selector.pred)
	if x == nil {
		return
	}
	cur, err := x.at(ctx, r.Snapshot.Rev)
	if err != nil {
		return // the walk over everything meets the same error and words it
	}
	if snap, err := s.resource.At(cur.rev); err == nil {
		r.Snapshot, r.index, r.value = snap, cur, value
	}
}
