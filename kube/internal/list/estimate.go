package list

import (
	"context"
	"math"

	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// Estimate is the expected extent of a list.
type Estimate struct {
	// Objects are those at the revision or at one near it; of a cached shard only its own.
	Objects    Objects
	Start, End string // keys
	Limit      int64  // of objects, 0 for all
}

// Estimate estimates the result of Read with the same options, before a request has waited. It
// does not wait or build an old version, and costs O(log n). ok is false if memory may not be able
// to answer: the resource is not loaded, or the revision is older than memory, not yet reached, or
// only available from etcd.
func (env *Env) Estimate(key string, opts storage.ListOptions) (x Estimate, ok bool) {
	q, err := env.request(noWait, key, opts)
	if err != nil || q.exact == math.MaxInt64 || !env.Memory.Ready() || !q.fromMemory(env) {
		return x, false
	}
	var snap mirror.Snapshot
	if q.exact > 0 {
		snap, err = env.Memory.NearestRetained(q.exact)
	} else {
		snap, err = env.Memory.Latest()
	}
	x.Objects = snap
	if sel := env.View.CurrentGeneration().Selector(q.opts.Predicate); sel.Plain && sel.Shard != nil {
		if known := env.Selections.KnownShard(sel.Shard); known != nil {
			x.Objects = known
		}
	}
	x.Start, x.End = q.bounds()
	x.Limit = q.limit()
	return x, err == nil
}

// EstimatedBytes returns the approximate number of stored bytes that a list reads: the bytes of its
// candidates, or for a page the share of its limit. Not for a list FromEtcd. Cost is O(log n), with
// indexes that of finding the candidates up to the limit, which are not searched again.
func (r *Read) EstimatedBytes() int64 {
	n, bytes := r.Objects().Count(r.Start, r.End)
	if r.narrowed.plan != nil {
		most := math.MaxInt
		if r.Limit > 0 {
			most = int(min(int64(most), r.Limit))
		}
		n, bytes = pageShare(n, bytes, int64(max(r.estimate(most), 1)))
	}
	_, bytes = pageShare(n, bytes, r.Limit)
	return bytes
}

// noWait is a canceled context, for calls that must not wait.
var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()
