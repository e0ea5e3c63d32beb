package objects

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"github.com/stratakube/strata/mirror"
)

// Selector decides which objects match a request.
type Selector struct {
	Generation *Generation
	Predicate  storage.SelectionPredicate
	All        bool      // every object matches
	Plain      bool      // every object of the shard matches
	Shard      *ShardSet // nil: objects of all shards
	// NeedsObject: attributes do not suffice to decide. No request of the API has such a selector.
	NeedsObject bool
}

// Selector returns the selector of a predicate.
func (g *Generation) Selector(pred storage.SelectionPredicate) Selector {
	s := Selector{Generation: g, Predicate: pred}
	if pred.ShardSelector != nil && !pred.ShardSelector.Empty() && utilfeature.DefaultFeatureGate.Enabled(features.ShardedListAndWatch) {
		if set, ok := parseShardSet(pred.ShardSelector); ok {
			s.Shard = set
		} else {
			s.NeedsObject = true
		}
	}
	s.Plain = !s.NeedsObject && (pred.Label == nil || pred.Label.Empty()) && (pred.Field == nil || pred.Field.Empty())
	s.All = s.Plain && s.Shard == nil
	return s
}

// Matches reports whether the entry's object matches. Errors are those of Decode; without a
// selector the entry is not decoded.
func (s *Selector) Matches(ctx context.Context, e *mirror.Entry) (bool, error) {
	return s.matches(ctx, e, func() (runtime.Object, error) { return s.Generation.Decode(ctx, e, e.ModRevision()) })
}

// MatchesEvent is Matches for the objects before and after an event, each decoded once for all
// watchers, within DecodeTimeout.
func (s *Selector) MatchesEvent(ctx context.Context, ev *mirror.Event) (before, now bool, err error) {
	if ev.Prev != nil {
		before, err = s.matches(ctx, ev.Prev, func() (runtime.Object, error) { return s.Generation.ObjectBefore(ctx, ev) })
	}
	if ev.Entry != nil && err == nil {
		now, err = s.matches(ctx, ev.Entry, func() (runtime.Object, error) { return s.Generation.ObjectAfter(ctx, ev) })
	}
	return before, now, err
}

func (s *Selector) matches(ctx context.Context, e *mirror.Entry, decode func() (runtime.Object, error)) (bool, error) {
	if s.All {
		return true, nil
	}
	a := s.Generation.KnownAttributes(e)
	if a == nil && !s.NeedsObject {
		a = s.Generation.abridgedAttributes(ctx, e)
	}
	if a == nil || s.NeedsObject {
		obj, err := decode()
		if err != nil {
			return false, err
		}
		if shared, ok := obj.(*CachingObject); ok {
			obj = shared.obj
		}
		if a, err = s.Generation.keepAttributes(e, obj); err != nil {
			return false, err
		}
		if s.NeedsObject {
			if ok, err := s.Predicate.MatchesSharding(obj); err != nil || !ok {
				return false, err
			}
		}
	}
	if s.Shard != nil && !s.Shard.Selects(a) {
		return false, nil
	}
	pred := &s.Predicate
	return (pred.Label == nil || pred.Label.Matches(&a.Labels)) && (pred.Field == nil || pred.Field.Matches(&a.Fields)), nil
}
