package selected

import (
	"testing"

	"github.com/stratakube/strata/kube/internal/objects"
)

// TestSelections_IdleShards_AreDropped with their timer.
func TestSelections_IdleShards_AreDropped(t *testing.T) {
	s := New(Config{})
	for _, name := range []string{"a", "b"} {
		s.Shard(&objects.ShardSet{Key: objects.ByUID, Name: name})
	}
	s.shards.mu.Lock()
	for _, x := range s.shards.byKey[objects.ByUID] {
		x.used = x.used.Add(-2 * ShardIdle)
	}
	s.shards.mu.Unlock()
	s.Shard(&objects.ShardSet{Key: objects.ByUID, Name: "b"})
	s.shards.dropIdle()
	if n := len(s.shards.byKey[objects.ByUID]); n != 1 || s.shards.timer == nil {
		t.Errorf("%d cached shards, want the one with a reader", n)
	}
	s.shards.byKey[objects.ByUID]["b"].used = s.shards.byKey[objects.ByUID]["b"].used.Add(-2 * ShardIdle)
	s.shards.dropIdle()
	if n := len(s.shards.byKey[objects.ByUID]); n != 0 || s.shards.timer != nil {
		t.Errorf("%d cached idle shards, want 0", n)
	}
}
