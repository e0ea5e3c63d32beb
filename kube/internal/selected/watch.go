package selected

import (
	"context"
	"sync"

	"k8s.io/klog/v2"

	"github.com/stratakube/strata/kube/internal/guard"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Follow subscribes a cursor to the events of its selector: the objects with one value of an index, one shard if the cursor reads
// the whole resource, else all events of its keys. The caller calls end, unless it is nil, when the watch ends.
func (s *Selections) Follow(c *mirror.Cursor, sel *objects.Selector, whole bool) (end func()) {
	if x, value := s.IndexFor(sel.Predicate); x != nil {
		c.FollowIndex(x.watched, value)
		return nil
	}
	if set := sel.Shard; set != nil && whole {
		w := s.watchesBy(set.Key)
		w.join(c, set)
		return func() { w.leave(set) }
	}
	c.Follow()
	return nil
}

// values returns the values of an object before and after an event, for watches of one value; false
// if the object cannot be decoded: each watch then reads the event, and retries separately. readers
// completes the log message.
func (s *Selections) values(ev *mirror.Event, value func(*objects.Attributes) string, readers string) (before, now string, known bool) {
	ctx, cancel := context.WithTimeout(s.cfg.Context, objects.DecodeTimeout)
	defer cancel()
	gen := s.cfg.View.CurrentGeneration()
	err := guard.RecoverPanic(func() error {
		if e := ev.Entry; e != nil {
			if gen.KnownAttributes(e) == nil {
				// The woken watches share the object.
				if _, err := gen.ObjectAfter(ev); err != nil {
					return err
				}
			}
			a, err := gen.Attributes(ctx, e)
			if err != nil {
				return err
			}
			now = value(a)
		}
		if ev.Prev != nil {
			a, err := gen.Attributes(ctx, ev.Prev)
			if err != nil {
				return err
			}
			before = value(a)
		}
		return nil
	})
	if err != nil {
		klog.FromContext(ctx).V(4).Info("Failed to decode object; sending its event to the watches of every "+readers, "key", ev.Key(), "revision", ev.Rev, "err", err)
	}
	return before, now, err == nil
}

// watches are the watches of shards, by key. The zero value is empty. Safe for concurrent use.
type watches struct {
	mu    sync.Mutex // leaf
	byKey [objects.ShardKeys]*shardWatches
}

// watchesBy returns the watches by the key.
func (s *Selections) watchesBy(key objects.ShardKey) *shardWatches {
	s.watches.mu.Lock()
	defer s.watches.mu.Unlock()
	if s.watches.byKey[key] == nil {
		s.watches.byKey[key] = newShardWatches(s, key)
	}
	return s.watches.byKey[key]
}

// shardWatches are the watches of all keys of a resource that select by one shard key. An event is
// assigned by its hash once for all of them. Safe for concurrent use.
type shardWatches struct {
	of     *Selections
	sorted *mirror.WatchIndex

	mu    sync.Mutex // leaf
	bySet map[string]int
	all   int
}

func newShardWatches(s *Selections, key objects.ShardKey) *shardWatches {
	w := &shardWatches{of: s, bySet: map[string]int{}}
	hash := func(a *objects.Attributes) string { return objects.HashValue(a.Hash(key)) }
	w.sorted = mirror.NewWatchIndex(s.cfg.Context, s.cfg.Resource, s.cfg.Start, func(ev *mirror.Event) (before, now string, known bool) {
		if before, now, known = s.values(ev, hash, "shard"); known {
			w.count(ev, before, now)
		}
		return before, now, known
	}, objects.CoversHash)
	return w
}

// join subscribes the cursor to the events of a set.
func (w *shardWatches) join(c *mirror.Cursor, set *objects.ShardSet) {
	w.mu.Lock()
	w.bySet[set.Name]++
	w.all++
	w.mu.Unlock()
	c.FollowIndex(w.sorted, set.Name)
}

// leave undoes join.
func (w *shardWatches) leave(set *objects.ShardSet) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.bySet[set.Name]--; w.bySet[set.Name] == 0 {
		delete(w.bySet, set.Name)
	}
	w.all--
}

// ShardFollowers returns the number of watches that follow a shard by the key, and of the different sets that they follow.
func (s *Selections) ShardFollowers(key objects.ShardKey) (watches, sets int) {
	w := s.watchesBy(key)
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.all, len(w.bySet)
}

// count counts the states of the object that the watches that are not woken do not select, as
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
	w.of.cfg.Filtered(filtered)
}
