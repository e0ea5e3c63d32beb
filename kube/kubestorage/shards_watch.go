package kubestorage

import (
	"context"
	"sync"

	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/kube/internal/guard"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// shardWatches are the watches of all keys of a resource that select by one shard key. An event is
// sorted once for all of them, by its hash. Safe for concurrent use.
type shardWatches struct {
	store  *Store
	key    objects.ShardKey
	sorted *mirror.Partition

	mu    sync.Mutex // leaf
	bySet map[string]int
	all   int
}

func newShardWatches(s *Store, key objects.ShardKey) *shardWatches {
	w := &shardWatches{store: s, key: key, bySet: map[string]int{}}
	w.sorted = mirror.NewSetPartition(s.ctx, s.resource, s.watches.start, w.values, objects.CoversHash)
	return w
}

// shardWatchesOf returns the store's watches by the key.
func (s *Store) shardWatchesOf(key objects.ShardKey) *shardWatches {
	s.indexMu.Lock()
	defer s.indexMu.Unlock()
	if s.shardWatches[key] == nil {
		s.shardWatches[key] = newShardWatches(s, key)
	}
	return s.shardWatches[key]
}

// join has the cursor follow the events of a set.
func (w *shardWatches) join(c *mirror.Cursor, set *objects.ShardSet) {
	w.mu.Lock()
	w.bySet[set.Name]++
	w.all++
	w.mu.Unlock()
	c.FollowValue(w.sorted, set.Name)
}

// leave is the end of join.
func (w *shardWatches) leave(set *objects.ShardSet) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.bySet[set.Name]--; w.bySet[set.Name] == 0 {
		delete(w.bySet, set.Name)
	}
	w.all--
}

// values returns the hashes of an object before and after an event; false if one of them cannot be
// told because the object cannot be decoded: each watch then meets the event, and retries on its own.
func (w *shardWatches) values(ev *mirror.Event) (before, now string, known bool) {
	gen := w.store.view.Now()
	ctx, cancel := context.WithTimeout(w.store.ctx, objects.DecodeTimeout)
	defer cancel()
	err := guard.Call(func() error {
		if e := ev.Entry; e != nil {
			if gen.KnownAttributes(e) == nil {
				// The watches that are about to be woken share the object.
				if _, err := gen.Added(ev); err != nil {
					return err
				}
			}
			a, err := gen.Attributes(ctx, e)
			if err != nil {
				return err
			}
			now = objects.HashValue(a.Hash(w.key))
		}
		if ev.Prev != nil {
			a, err := gen.Attributes(ctx, ev.Prev)
			if err != nil {
				return err
			}
			before = objects.HashValue(a.Hash(w.key))
		}
		return nil
	})
	if err != nil {
		klog.FromContext(ctx).V(4).Info("An object cannot be decoded, so its event goes to the watches of every shard", "key", ev.Key(), "revision", ev.Rev, "err", err)
		return before, now, false
	}
	w.count(ev, before, now)
	return before, now, true
}

// count counts the states of the object that the watches which are not woken do not select, as
// upstream counts them for each watch.
func (w *shardWatches) count(ev *mirror.Event, before, now string) {
	filtered := 0
	w.mu.Lock()
	for set, watches := range w.bySet {
		was, is := ev.Prev != nil && objects.CoversHash(set, before), ev.Entry != nil && objects.CoversHash(set, now)
		if was || is {
			continue // it is woken, and counts the rest itself
		}
		if ev.Prev != nil {
			filtered += watches
		}
		if ev.Entry != nil {
			filtered += watches
		}
	}
	w.mu.Unlock()
	w.store.streams.filtered(filtered)
}

// followShard has the stream's cursor follow its shard, if it is one of the whole resource.
func (st *Stream) followShard() bool {
	set := st.selector.Shard
	if set == nil || st.start != st.store.resource.Prefix() {
		return false
	}
	w := st.store.shardWatchesOf(set.Key)
	w.join(st.cursor, set)
	st.unfollow = func() { w.leave(set) }
	return true
}

// countFiltered counts those of the entries, which may be nil, that are of other shards than the
// watch's.
func (st *Stream) countFiltered(entries ...*mirror.Entry) {
	n := 0
	for _, e := range entries {
		if e == nil {
			continue
		}
		if a := st.selector.Generation.KnownAttributes(e); a != nil && !st.selector.Shard.Selects(a) {
			n++
		}
	}
	st.store.streams.filtered(n)
}

// sharded counts a watch with a shard selector, and returns what counts its end.
func (m *watchMetrics) sharded() (ended func()) {
	cachermetrics.RecordShardedWatchStarted(m.resource)
	return func() { cachermetrics.RecordShardedWatchStopped(m.resource) }
}

// filtered counts objects that a shard selector keeps from a watch.
func (m *watchMetrics) filtered(n int) {
	if n > 0 {
		cachermetrics.WatchFilteredEventsTotal.WithLabelValues(m.resource.Group, m.resource.Resource).Add(float64(n))
	}
}
