package index

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Shard is a shard selector and its selected entries, in a separate tree, so that the cost of its
// lists depends on its entries and not on those of the resource. The leaves of the tree have memos
// for items and compressed runs, as the leaves of the resource's own tree do. Safe for concurrent
// use.
type Shard struct {
	selection[*mirror.Entry]
	set *objects.ShardSet

	// lastOldVersion is the last version made for a list at an old revision, for its next page.
	lastOldVersion atomic.Pointer[ShardVersion]

	used time.Time // guarded by shards.mu
}

// ShardVersion is a shard at one revision: the part of a snapshot that its selector selects.
type ShardVersion = Version[*mirror.Entry]

// items implements kind.
func (x *Shard) items(ctx context.Context, gen *objects.Generation, snap mirror.Snapshot) ([]*mirror.Entry, error) {
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
	return selected, nil
}

// apply implements kind.
func (x *Shard) apply(ctx context.Context, gen *objects.Generation, edit *btree.Edit[*mirror.Entry], ev *mirror.Event) error {
	if ev.Entry == nil {
		edit.Delete(ev.Key()) // not present if it was not selected
		return nil
	}
	ok, err := x.selects(ctx, gen, ev.Entry)
	switch {
	case err != nil:
		return err
	case ok:
		edit.Set(ev.Entry)
	case ev.Prev != nil:
		edit.Delete(ev.Key())
	}
	return nil
}

func (x *Shard) selects(ctx context.Context, gen *objects.Generation, e *mirror.Entry) (bool, error) {
	a, err := gen.Attributes(ctx, e)
	return err == nil && x.set.Selects(a), err
}

// install implements kind. It supersedes the leaves of old that are not in next.
func (x *Shard) install(old, next *ShardVersion, edit *btree.Edit[*mirror.Entry]) {
	x.cur.Store(next)
	switch {
	case edit != nil:
		supersede(edit.Replaced())
	case old != nil:
		supersede(old.leaves())
	}
}

// OldVersion returns the last version made of old revisions, if it is of rev and serves gen.
func (x *Shard) OldVersion(gen *objects.Generation, rev mirror.Revision) (*ShardVersion, bool) {
	past := x.lastOldVersion.Load()
	return past, past != nil && past.rev == rev && past.Serves(gen, rev)
}

// RolledTo returns the shard at the revision of the snapshot, which may be of old revisions, made
// from the shard at cur and the keys that have changed since.
func (x *Shard) RolledTo(ctx context.Context, snap mirror.Snapshot, cur *ShardVersion, changed []string) (*ShardVersion, error) {
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
	past := &ShardVersion{gen: cur.gen, rev: snap.Rev, tree: edit.Tree(), cursor: *snap.Cursor("", "")}
	if old := x.lastOldVersion.Swap(past); old != nil {
		supersedeOthers(old, past, cur)
	}
	return past, nil
}

// supersedeOthers supersedes the leaves of old that are in none of the others.
func supersedeOthers(old *ShardVersion, others ...*ShardVersion) {
	kept := map[*btree.Leaf[*mirror.Entry]]bool{}
	for _, o := range others {
		for run := range o.tree.Runs("", "") {
			kept[run.Leaf] = true
		}
	}
	supersede(slices.DeleteFunc(old.leaves(), func(l *btree.Leaf[*mirror.Entry]) bool { return kept[l] }))
}

// drop releases the cached data of the leaves of the shard. It waits for buildLock.
func (x *Shard) drop() {
	x.lockBuild()
	defer x.buildLock.Release(1)
	for _, v := range []*ShardVersion{x.cur.Swap(nil), x.lastOldVersion.Swap(nil)} {
		if v != nil {
			supersede(v.leaves())
		}
	}
}

// lockBuild acquires buildLock, without a time limit.
func (x *Shard) lockBuild() {
	_ = x.buildLock.Acquire(context.Background(), 1) // its only error is that of the context
}

// dropEnded implements kind.
func (x *Shard) dropEnded() {
	for _, p := range []*atomic.Pointer[ShardVersion]{&x.cur, &x.lastOldVersion} {
		if v := p.Load(); v != nil && v.gen.Ended() && p.CompareAndSwap(v, nil) {
			supersede(v.leaves())
		}
	}
}

// supersede retires leaves of shards, as the writer does with those of the resource's own tree.
func supersede(leaves []*btree.Leaf[*mirror.Entry]) {
	for _, l := range leaves {
		l.Memos().Supersede(false)
	}
}
