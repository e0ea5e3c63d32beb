package kubestorage

import (
	"context"
	"math"

	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// Expectation is what a list will be about, as far as can be told at once.
type Expectation struct {
	Objects    Objects // of the revision, or one near it; those of the shard if it has been read before
	Start, End string  // keys
	Limit      int64   // of objects, 0 for all
}

// Expect returns what Read would read for the same options: for estimates, before a request has
// waited for anything. It waits for nothing itself, makes no version of the past, and costs
// O(log n). ok is false if memory may not be what answers: the resource is not loaded,
// the revision is older than memory, not yet here, or not to be had from memory.
func (s *Store) Expect(key string, opts storage.ListOptions) (x Expectation, ok bool) {
	q, err := newListRequest(noWait, s, key, opts)
	if err != nil || q.exact == math.MaxInt64 || !s.resource.Ready() || !q.fromMemory(s) {
		return x, false
	}
	var snap mirror.Snapshot
	if q.exact > 0 {
		snap, err = s.resource.Near(q.exact)
	} else {
		snap, err = s.resource.Latest()
	}
	x.Objects = snap
	if sel := s.view.Now().Selector(q.opts.Predicate); sel.Plain && sel.Shard != nil {
		if known := s.selections.KnownShard(sel.Shard); known != nil {
			x.Objects = known
		}
	}
	x.Start, x.End = q.bounds()
	x.Limit = q.limit()
	return x, err == nil
}

// Expected returns about how many stored bytes a list has to look at: those of its candidates, and
// of a page the share that its limit has. Not for a reading FromEtcd. Cost is O(log n).
func (r *Reading) Expected() int64 {
	n, bytes := r.Objects().Count(r.Start, r.End)
	if r.index != nil {
		_, bytes = pageShare(n, bytes, int64(max(r.estimate(), 1)))
	}
	_, bytes = pageShare(n, bytes, r.Limit)
	return bytes
}

// noWait is the context of those who wait for nothing.
var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()
