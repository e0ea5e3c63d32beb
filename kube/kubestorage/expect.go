package kubestorage

import (
	"context"
	"math"

	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// Expect returns the range of keys, and the newest revision here to look at them in, that Read
// would read for the same options: for estimates, before a request has waited for
// anything. It waits for nothing itself, and costs O(log n). ok is false if memory may not
// be what answers: the resource is not loaded, the revision is older than memory, not
// yet here, or not to be had from memory.
func (s *Store) Expect(key string, opts storage.ListOptions) (snap mirror.Snapshot, start, end string, ok bool) {
	q, err := s.request(noWait, key, opts)
	if err != nil || q.exact == math.MaxInt64 || !s.resource.Ready() || !s.fromMemory(q.opts, q.exact) {
		return snap, "", "", false
	}
	if q.exact > 0 {
		snap, err = s.resource.At(q.exact)
	} else {
		snap, err = s.resource.Latest()
	}
	if err != nil {
		return snap, "", "", false
	}
	start, end = q.bounds()
	return snap, start, end, true
}

// noWait is the context of those who wait for nothing.
var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()
