package index

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// shards are the shards of a resource by their sets. The zero value is empty. Safe for concurrent
// use.
type shards struct {
	mu    sync.Mutex // leaf
	byKey [objects.ShardKeys]map[string]*Shard
	timer *time.Timer // drops idle shards; nil if there is no shard
	ended bool
}

const (
	// shardIdle is how long a shard without readers is kept, with the entries of its last read.
	// Clients of a fleet list when they start, and after a lost watch.
	shardIdle = time.Minute
	// maxShardCopies bounds how often all shards together have the entries of the resource. A fleet
	// has them once, two while it is resized. An entry takes about 12 bytes in a tree, and 16 more
	// for each representation.
	maxShardCopies = 4
	// maxEmptyShards bounds the number of shards of a resource with few entries.
	maxEmptyShards = 256
)

// Shard returns the shard of the set, which the first call makes.
func (s *Selections) Shard(set *objects.ShardSet) *Shard {
	t := &s.shards
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.byKey[set.Key][set.Name]
	if x == nil {
		x = &Shard{set: set}
		x.selection = selection[*mirror.Entry]{resource: s.cfg.Resource, view: s.cfg.View, kind: x, buildLock: semaphore.NewWeighted(1)}
		if t.ended {
			return x
		}
		if t.byKey[set.Key] == nil {
			t.byKey[set.Key] = map[string]*Shard{}
		}
		t.byKey[set.Key][set.Name] = x
		if t.timer == nil {
			t.timer = time.AfterFunc(shardIdle, t.dropIdle)
		}
	}
	x.used = time.Now()
	return x
}

// KnownShard returns the shard of the set as of its last read, nil if it is not cached.
func (s *Selections) KnownShard(set *objects.ShardSet) *ShardVersion {
	t := &s.shards
	t.mu.Lock()
	defer t.mu.Unlock()
	if x := t.byKey[set.Key][set.Name]; x != nil {
		return x.cur.Load()
	}
	return nil
}

func (t *shards) all() []*Shard {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.allLocked()
}

// allLocked returns all shards. The caller holds mu.
func (t *shards) allLocked() []*Shard {
	var all []*Shard
	for _, shards := range t.byKey {
		for _, s := range shards {
			all = append(all, s)
		}
	}
	return all
}

// TrimShards drops the least recently read shards, except x, until the others have at most
// maxShardCopies times n entries.
func (s *Selections) TrimShards(x *Shard, n int) {
	for _, dropped := range s.shards.leastRecent(x, maxShardCopies*n+maxEmptyShards) {
		dropped.drop()
	}
}

// leastRecent removes and returns the least recently read shards, except x, beyond the limit of
// entries. Each shard counts as one entry more.
func (t *shards) leastRecent(x *Shard, limit int) (removed []*Shard) {
	t.mu.Lock()
	defer t.mu.Unlock()
	all, total := t.allLocked(), 0
	size := func(s *Shard) int {
		if cur := s.cur.Load(); cur != nil {
			return cur.tree.Len() + 1
		}
		return 0
	}
	for _, s := range all {
		total += size(s)
	}
	if total <= limit {
		return nil
	}
	slices.SortFunc(all, func(a, b *Shard) int { return a.used.Compare(b.used) })
	for _, s := range all {
		if s == x || total <= limit {
			continue
		}
		total -= size(s)
		delete(t.byKey[s.set.Key], s.set.Name)
		removed = append(removed, s)
	}
	return removed
}

// dropIdle drops the shards that have no readers any more.
func (t *shards) dropIdle() {
	var idle []*Shard
	t.mu.Lock()
	left := 0
	for _, shards := range t.byKey {
		for name, s := range shards {
			if time.Since(s.used) >= shardIdle {
				delete(shards, name)
				idle = append(idle, s)
			} else {
				left++
			}
		}
	}
	switch {
	case t.timer == nil: // EndShards ran before
	case left == 0:
		t.timer = nil
	default:
		t.timer.Reset(shardIdle / 2)
	}
	t.mu.Unlock()
	for _, s := range idle {
		s.drop()
	}
}

// DropEnded drops the versions of shards whose generation has ended. It waits for readers that
// bring one up to date.
func (s *Selections) DropEnded() {
	for _, x := range s.shards.all() {
		x.lockBuild()
		x.dropEnded()
		x.buildLock.Release(1)
	}
}

// EndShards drops all shards and caches none from then on.
func (s *Selections) EndShards() {
	t := &s.shards
	t.mu.Lock()
	t.ended = true
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	all := t.allLocked()
	t.byKey = [objects.ShardKeys]map[string]*Shard{}
	t.mu.Unlock()
	for _, x := range all {
		x.drop()
	}
}
