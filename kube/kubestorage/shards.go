package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/stratakube/strata/internal/btree"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Objects are entries in key order: those of a snapshot, or the part of them that a shard selector
// selects. They are immutable.
type Objects interface {
	// Runs yields the entries with start <= key < end, leaf by leaf.
	Runs(start, end string) iter.Seq[mirror.Run]
	// All yields the entries with start <= key < end.
	All(start, end string) iter.Seq[*mirror.Entry]
	// Count returns the number of entries with start <= key < end, and their stored bytes.
	Count(start, end string) (entries int, bytes int64)
	// Measure is mirror.Snapshot.Measure.
	Measure(start, end string, of any, measure func(mirror.Run) (int64, bool)) (int64, bool)
}

// shard is a shard selector and the entries that it selects, as a tree of their own, so that its
// lists cost what they have, not what the resource has: a leaf of the tree keeps where its items
// lie, and their compressed form, as a leaf of the resource's own tree does. A read brings the tree up
// to date from the log. Safe for concurrent use.
type shard struct {
	set      *objects.ShardSet
	resource *mirror.Resource
	view     *objects.View

	cur  atomic.Pointer[sharded]
	turn *semaphore.Weighted // of 1: taken by the reader that brings cur up to date, and to drop it

	// past is the last version that was made for a list of the past, for its next page.
	past atomic.Pointer[sharded]

	used time.Time // guarded by shards.mu
}

// sharded is a shard at one revision; immutable.
type sharded struct {
	gen    *objects.Generation // of the attributes from which it was made
	rev    mirror.Revision
	tree   btree.Tree[*mirror.Entry]
	cursor mirror.Cursor // after rev; only copies of it move
}

// Runs implements Objects.
func (s *sharded) Runs(start, end string) iter.Seq[mirror.Run] {
	return func(yield func(mirror.Run) bool) {
		for run := range s.tree.Runs(start, end) {
			run.Selected = true
			if !yield(run) {
				return
			}
		}
	}
}

// All implements Objects.
func (s *sharded) All(start, end string) iter.Seq[*mirror.Entry] { return s.tree.All(start, end) }

// Count implements Objects.
func (s *sharded) Count(start, end string) (entries int, bytes int64) {
	return s.tree.Count(start, end)
}

// Measure implements Objects.
func (s *sharded) Measure(start, end string, of any, measure func(mirror.Run) (int64, bool)) (int64, bool) {
	return s.tree.Measure(start, end, of, measure)
}

// serves reports whether the shard, which may be nil, answers at rev or later: not if the
// resource was relisted since, or the keys that decrypt values were replaced.
func (s *sharded) serves(gen *objects.Generation, rev mirror.Revision) bool {
	if s == nil || s.gen != gen || s.rev < rev {
		return false
	}
	cursor := s.cursor
	_, err := cursor.Next(nil, 0)
	return err == nil
}

// at returns the shard at rev or later. Errors: those of decoding an entry, mirror.ErrNotReady, and
// that of ctx. Cost: the events since it was read last; the first time, and when the log does not
// reach back to the last time, a look at every entry of the resource. It waits for a reader that is
// bringing the shard up to date.
func (x *shard) at(ctx context.Context, rev mirror.Revision) (*sharded, error) {
	if cur := x.cur.Load(); cur.serves(x.view.Now(), rev) {
		return cur, nil
	}
	if err := x.turn.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer x.turn.Release(1)
	cur, gen := x.cur.Load(), x.view.Now()
	if cur.serves(gen, rev) {
		return cur, nil
	}
	from := cur
	if cur != nil && cur.gen != gen {
		from = nil
	}
	next, replaced, err := x.follow(ctx, from)
	if errors.Is(err, mirror.ErrCompacted) {
		if next, err = x.build(ctx, gen); cur != nil {
			replaced = leavesOf(cur.tree)
		}
	}
	if err != nil {
		return nil, err
	}
	x.cur.Store(next)
	retire(replaced)
	if gen.Ended() {
		x.dropEndedInTurn() // dropEnded may have been here before
	}
	return next, nil
}

// build makes the shard from the present. The caller has the turn.
func (x *shard) build(ctx context.Context, gen *objects.Generation) (*sharded, error) {
	snap, err := x.resource.Latest()
	if err != nil {
		return nil, err
	}
	var selected []*mirror.Entry
	n := 0
	for e := range snap.All("", "") {
		if n++; n%1024 == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		ok, err := x.selects(ctx, gen, e)
		if err != nil {
			return nil, err
		}
		if ok {
			selected = append(selected, e)
		}
	}
	return &sharded{gen: gen, rev: snap.Rev, tree: btree.Build(selected), cursor: *snap.Cursor("", "")}, nil
}

// follow applies the events since cur, and returns the leaves that the new tree does not have and
// on which something is kept. The caller has the turn.
func (x *shard) follow(ctx context.Context, cur *sharded) (*sharded, []*mirror.Leaf, error) {
	if cur == nil {
		return nil, nil, fmt.Errorf("%w: not built yet", mirror.ErrCompacted)
	}
	edit, cursor := cur.tree.Edit(), cur.cursor
	var events []*mirror.Event
	for {
		var err error
		if events, err = cursor.Next(events[:0], readAtOnce); err != nil {
			return nil, nil, err
		}
		for _, ev := range events {
			if ev.Entry == nil {
				edit.Delete(ev.Key()) // not there if it was not selected
				continue
			}
			ok, err := x.selects(ctx, cur.gen, ev.Entry)
			switch {
			case err != nil:
				return nil, nil, err
			case ok:
				edit.Set(ev.Entry)
			case ev.Prev != nil:
				edit.Delete(ev.Key())
			}
		}
		if len(events) < readAtOnce {
			replaced := edit.Replaced()
			return &sharded{gen: cur.gen, rev: cursor.Position(), tree: edit.Tree(), cursor: cursor}, replaced, nil
		}
	}
}

func (x *shard) selects(ctx context.Context, gen *objects.Generation, e *mirror.Entry) (bool, error) {
	a, err := gen.Attributes(ctx, e)
	return err == nil && x.set.Selects(a), err
}

// rolledTo returns the shard at the revision of the snapshot, which may be of the past, made of
// the shard at cur and of the keys that have changed since.
func (x *shard) rolledTo(ctx context.Context, snap mirror.Snapshot, cur *sharded, changed []string) (*sharded, error) {
	edit := cur.tree.Edit()
	for _, key := range changed {
		e, ok := snap.Get(key)
		if ok {
			var err error
			if ok, err = x.selects(ctx, cur.gen, e); err != nil {
				return nil, err
			}
		}
		if ok {
			edit.Set(e)
		} else {
			edit.Delete(key)
		}
	}
	past := &sharded{gen: cur.gen, rev: snap.Rev, tree: edit.Tree(), cursor: *snap.Cursor("", "")}
	if old := x.past.Swap(past); old != nil {
		retireOthers(old, past, cur)
	}
	return past, nil
}

// retireOthers retires the leaves of old that none of the others has.
func retireOthers(old *sharded, others ...*sharded) {
	kept := map[*mirror.Leaf]bool{}
	for _, o := range others {
		for run := range o.tree.Runs("", "") {
			kept[run.Leaf] = true
		}
	}
	retire(slices.DeleteFunc(leavesOf(old.tree), func(l *mirror.Leaf) bool { return kept[l] }))
}

// drop releases what is kept on the leaves of the shard.
func (x *shard) drop() {
	x.wait()
	defer x.turn.Release(1)
	for _, s := range []*sharded{x.cur.Swap(nil), x.past.Swap(nil)} {
		if s != nil {
			retire(leavesOf(s.tree))
		}
	}
}

// dropEnded is drop for versions whose generation has ended.
func (x *shard) dropEnded() {
	x.wait()
	defer x.turn.Release(1)
	x.dropEndedInTurn()
}

// wait takes the turn, however long that takes.
func (x *shard) wait() {
	_ = x.turn.Acquire(context.Background(), 1) // its only error is that of the context
}

func (x *shard) dropEndedInTurn() {
	for _, p := range []*atomic.Pointer[sharded]{&x.cur, &x.past} {
		if s := p.Load(); s != nil && s.gen.Ended() && p.CompareAndSwap(s, nil) {
			retire(leavesOf(s.tree))
		}
	}
}

func leavesOf(t btree.Tree[*mirror.Entry]) []*mirror.Leaf {
	var leaves []*mirror.Leaf
	for run := range t.Runs("", "") {
		leaves = append(leaves, run.Leaf)
	}
	return leaves
}

// retire does for leaves of shards what the writer does for those of the resource's own tree.
func retire(leaves []*mirror.Leaf) {
	for _, l := range leaves {
		if m := l.Memo.Load(); m != nil {
			if r, ok := (*m).(mirror.Retirer); ok {
				r.Retired()
			}
		}
	}
}

// shards are those of a store that are read, by what they select. The zero value has none. Safe for
// concurrent use.
type shards struct {
	mu    sync.Mutex // leaf
	byKey [objects.ShardKeys]map[string]*shard
	timer *time.Timer // drops idle shards; nil if there is no shard
	ended bool
}

const (
	// shardIdle is for how long a shard is kept that has no reader: its entries, of when it was read
	// last, are kept with it. Clients of a fleet list when they start, and after a lost watch.
	shardIdle = time.Minute
	// maxShardCopies bounds how often all shards together have the entries of the resource. A fleet
	// has them once, two while it is resized. An entry takes about 12 bytes in a tree, and 16 more for
	// each representation.
	maxShardCopies = 4
)

// shard returns the shard of the set, which it makes when it is first asked for.
func (s *Store) shard(set *objects.ShardSet) *shard {
	t := &s.shards
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.byKey[set.Key][set.Name]
	if x == nil {
		x = &shard{set: set, resource: s.resource, view: s.view, turn: semaphore.NewWeighted(1)}
		if t.ended {
			return x
		}
		if t.byKey[set.Key] == nil {
			t.byKey[set.Key] = map[string]*shard{}
		}
		t.byKey[set.Key][set.Name] = x
		if t.timer == nil {
			t.timer = time.AfterFunc(shardIdle, t.dropIdle)
		}
	}
	x.used = time.Now()
	return x
}

// known returns the shard of the set as it was read last, nil if it is not kept.
func (t *shards) known(set *objects.ShardSet) *sharded {
	t.mu.Lock()
	defer t.mu.Unlock()
	if x := t.byKey[set.Key][set.Name]; x != nil {
		return x.cur.Load()
	}
	return nil
}

// trim drops the shards that were not read for the longest time, other than x, until those that are
// left have at most maxShardCopies times n entries.
func (t *shards) trim(x *shard, n int) {
	t.mu.Lock()
	var all []*shard
	total := 0
	for _, shards := range t.byKey {
		for _, s := range shards {
			if cur := s.cur.Load(); cur != nil {
				total += cur.tree.Len() + 1
			}
			all = append(all, s)
		}
	}
	var dropped []*shard
	if total > maxShardCopies*n+maxEmptyShards {
		slices.SortFunc(all, func(a, b *shard) int { return a.used.Compare(b.used) })
		for _, s := range all {
			if s == x || total <= maxShardCopies*n+maxEmptyShards {
				continue
			}
			if cur := s.cur.Load(); cur != nil {
				total -= cur.tree.Len() + 1
			}
			delete(t.byKey[s.set.Key], s.set.Name)
			dropped = append(dropped, s)
		}
	}
	t.mu.Unlock()
	for _, s := range dropped {
		s.drop()
	}
}

// maxEmptyShards is how many shards there may be whatever the resource has.
const maxEmptyShards = 256

// dropIdle drops the shards that have no readers any more.
func (t *shards) dropIdle() {
	var idle []*shard
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
	case t.timer == nil: // end was faster
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

// dropEnded drops the versions of shards whose generation has ended.
func (t *shards) dropEnded() {
	var all []*shard
	t.mu.Lock()
	for _, shards := range t.byKey {
		for _, s := range shards {
			all = append(all, s)
		}
	}
	t.mu.Unlock()
	for _, s := range all {
		s.dropEnded()
	}
}

// end drops all shards, for good.
func (t *shards) end() {
	t.mu.Lock()
	t.ended = true
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	all := t.byKey
	t.byKey = [objects.ShardKeys]map[string]*shard{}
	t.mu.Unlock()
	for _, shards := range all {
		for _, s := range shards {
			s.drop()
		}
	}
}

// useShard narrows a reading of memory to the entries of its shard. As with an index, that of the
// present may be a little newer than the snapshot, which then follows it.
func (s *Store) useShard(ctx context.Context, r *Reading) {
	x := s.shard(r.selector.Shard)
	if r.request.exact > 0 {
		if past := x.past.Load(); past != nil && past.rev == r.Rev && past.serves(s.view.Now(), r.Rev) {
			r.shard = past
			return
		}
	}
	built := x.cur.Load() == nil
	cur, err := x.at(ctx, r.Rev)
	if err != nil {
		return // the walk over everything meets the same error and words it
	}
	if built {
		n, _ := r.Snapshot.Count("", "")
		s.shards.trim(x, n)
	}
	if r.request.exact == 0 {
		if snap, err := s.resource.At(cur.rev); err == nil && cur.serves(cur.gen, cur.rev) {
			r.Snapshot, r.Rev, r.shard = snap, cur.rev, cur
		}
		return
	}
	changed, ok := s.changedSince(r.Snapshot.Cursor("", ""))
	if !ok {
		return
	}
	if len(changed) == 0 {
		r.shard = cur
		return
	}
	if past, err := x.rolledTo(ctx, r.Snapshot, cur, changed); err == nil {
		r.shard = past
	}
}
