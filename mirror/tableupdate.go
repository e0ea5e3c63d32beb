package mirror

import (
	"fmt"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/driver"
)

// tableUpdate is the effect of one batch, or of a part of a restored history, on one table.
type tableUpdate struct {
	t      *table
	lin    *lineage
	edit   *btree.Edit[*Entry]
	events []*Event
	old    []*leaf // replaced leaves that have a memo

	arrived int64 // see Event
}

// change adds a change of the feed; see add.
func (x *tableUpdate) change(c *driver.Change) error {
	key := string(c.Key)
	if c.Deleted {
		return x.add(key, c.ModRevision, nil)
	}
	return x.add(key, c.ModRevision, newEntry(&c.KV, x.t.keeps(int64(len(c.Key)+len(c.Value)))))
}

// add checks a change against the cached entry and adds it. By D1 of the design, etcd's Version is
// the cached one plus 1, and is 1 exactly when the key is not cached; a store that does not count
// leaves it 0. The entry is nil for a deletion.
func (x *tableUpdate) add(key string, rev Revision, e *Entry) error {
	prev, exists := x.edit.Get(key)
	switch {
	case e == nil && !exists:
		return fmt.Errorf("%w: delete event for key %q at revision %d, but the key is not cached", errDiverged, key, rev)
	case e == nil:
		x.edit.Delete(key)
	case !follows(prev, e):
		return fmt.Errorf("%w: put event for key %q at revision %d has version %d, which does not follow the cached version", errDiverged, key, rev, e.writes)
	default:
		if e.writes == 0 {
			x.t.w.stats.uncounted.Store(true)
		}
		x.edit.Set(e)
		x.t.count(e, 1)
	}
	if exists {
		x.t.count(prev, -1)
		if !prev.hasValue() {
			x.t.missing++ // the event still references it
		}
	}
	x.events = append(x.events, &Event{Rev: rev, Entry: e, Prev: prev, Arrived: x.arrived})
	return nil
}

// follows reports whether etcd can have replaced the entry prev by e; nil means no key. See
// tableUpdate.add.
func follows(prev, e *Entry) bool {
	switch {
	case e == nil:
		return prev != nil
	case e.writes == 0:
		return true
	case prev == nil:
		return e.writes == 1
	}
	return e.writes == prev.writes+1 && e.create == prev.create
}

// commit publishes the log and the version; the caller advances the published revision afterwards.
func (x *tableUpdate) commit() {
	prev := x.lin.head.Load()
	x.old = x.edit.Replaced()
	x.lin.log.Append(x.events...)
	v := &version{rev: x.events[len(x.events)-1].Rev, tree: x.edit.Tree(), seq: x.lin.log.End()}
	v.prev.Store(prev)
	x.lin.head.Store(v)
	if x.lin.hasNoClaim {
		return // table.publishUnclaimed adds checkpoints when the resource is claimed
	}
	x.t.checkpoint(x.lin, v, len(x.events))
}

// commitUnpublished is commit for a lineage that readers have not seen. It does not link the
// versions (version.prev), so that versions dropped later can be collected.
func (x *tableUpdate) commitUnpublished() {
	x.commit()
	x.lin.head.Load().prev.Store(nil)
}

// supersede drops the memos of replaced entries and leaves that are valid in the newest version
// only: history is large and has few readers.
func (x *tableUpdate) supersede() {
	for _, ev := range x.events {
		if ev.Prev != nil {
			ev.Prev.memos.Supersede(ev.Entry == nil)
		}
	}
	for _, leaf := range x.old {
		leaf.Memos().Supersede(false)
	}
}
