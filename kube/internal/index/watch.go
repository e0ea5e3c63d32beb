package index

import (
	"context"
	"sync"

	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/flight"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Follow subscribes a cursor to the events of its selector: the objects with one value of a field
// or label, one shard if the cursor reads the whole resource, else all events of its keys. The
// caller calls end, unless it is nil, when the watch ends.
func (s *Selections) Follow(c *mirror.Cursor, sel *objects.Selector, whole bool) (end func()) {
	if name, lookup, value, declared := watchedValue(&sel.Predicate); lookup != nil {
		if v := s.watches.byValue(s, name, lookup, declared); v != nil {
			c.FollowIndex(v.index, value)
			if declared {
				return nil
			}
			return func() { s.watches.leaveValue(name, v) }
		}
		s.cfg.Unindexed()
	}
	if set := sel.Shard; set != nil && whole {
		w := s.watchesBy(set.Key)
		w.join(c, set)
		return func() { w.leave(set) }
	}
	c.Follow()
	return nil
}

// knownValues is values for an event whose objects have cached attributes.
func knownValues(gen *objects.Generation, ev *mirror.Event, value func(*objects.Attributes) string) (before, now string, known bool) {
	for _, side := range []struct {
		e    *mirror.Entry
		into *string
	}{{ev.Prev, &before}, {ev.Entry, &now}} {
		if side.e == nil {
			continue
		}
		a := gen.KnownAttributes(side.e)
		if a == nil {
			return "", "", false
		}
		*side.into = value(a)
	}
	return before, now, true
}

// values returns the values of an object before and after an event, for watches of one value; false
// if the object cannot be decoded: each watch then reads the event, and retries separately. readers
// completes the log message.
func (s *Selections) values(ev *mirror.Event, value func(*objects.Attributes) string, readers string) (before, now string, known bool) {
	gen := s.cfg.View.CurrentGeneration()
	if before, now, known = knownValues(gen, ev, value); known {
		return before, now, true
	}
	ctx, cancel := context.WithTimeout(s.cfg.Context, objects.DecodeTimeout)
	defer cancel()
	err := flight.RecoverPanic(func() error {
		if ev.Entry != nil {
			a, err := gen.AttributesAfter(ctx, ev)
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
		s.cfg.Logger.Debug("Failed to decode object; sending its event to the watches of every "+readers, "key", ev.Key(), "revision", ev.Rev, "err", err)
	}
	return before, now, err == nil
}

// watchedValue returns a field or label of which the selector demands one value, and the value; nil
// if there is none. It prefers those that a registry has declared, which are never dropped, then
// fields, then labels.
func watchedValue(pred *storage.SelectionPredicate) (name string, lookup lookup, value string, declared bool) {
	for _, t := range termsOf(pred) {
		switch {
		case t.test != oneOf || len(t.values) != 1 || t.index.label && t.values[0] == "":
		case t.index.name == namespaceField || declared:
		case lookup == nil || t.index.declared(pred):
			name, lookup, value, declared = t.index.name, t.index.lookup, t.values[0], t.index.declared(pred)
		}
	}
	return name, lookup, value, declared
}

// namespaceField is the index of the namespace: a watch of one namespace follows a range of keys,
// one of everything that selects a namespace is rare.
var namespaceField = storage.FieldIndex("metadata.namespace")

// maxWatchedLabels bounds the fields and labels of a resource, beside the declared ones, by which
// watches are woken. Each of them costs about a microsecond for each event, and up to 3 MB for
// values that have no watch, which the log still has. Watches beyond the bound read every event.
const maxWatchedLabels = 8

// watches are the watches of values and shards, by name and key. The zero value is empty. Safe for
// concurrent use.
type watches struct {
	mu      sync.Mutex // leaf
	byKey   [objects.ShardKeys]*shardWatches
	byName  map[string]*valueWatches
	clients int // elements of byName that are not declared
}

// valueWatches are the watches of the values of one field or label.
type valueWatches struct {
	index    *mirror.WatchIndex
	declared bool // stays without watches
	watches  int  // that call leaveValue
}

// byValue returns the watch index of the name, nil if there are too many. The caller calls
// leaveValue once, unless it is declared.
func (w *watches) byValue(s *Selections, name string, lookup lookup, declared bool) *valueWatches {
	w.mu.Lock()
	defer w.mu.Unlock()
	v := w.byName[name]
	if v == nil {
		if !declared && w.clients == maxWatchedLabels {
			return nil
		}
		value := func(a *objects.Attributes) string {
			v, _ := lookup(a)
			return v
		}
		v = &valueWatches{index: mirror.NewWatchIndex(s.cfg.Context, s.cfg.Resource, s.cfg.Start, func(ev *mirror.Event) (before, now string, known bool) {
			return s.values(ev, value, "value")
		}, nil)}
		if w.byName == nil {
			w.byName = map[string]*valueWatches{}
		}
		w.byName[name] = v
		w.clients++
	}
	if declared {
		if !v.declared {
			v.declared = true
			w.clients--
		}
		return v
	}
	v.watches++
	return v
}

// leaveValue undoes byValue.
func (w *watches) leaveValue(name string, v *valueWatches) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if v.watches--; v.watches == 0 && !v.declared {
		delete(w.byName, name)
		w.clients--
	}
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
