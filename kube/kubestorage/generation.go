package kubestorage

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/mirror"
)

// generation holds what readers of a view have derived from values while those were decrypted
// with the same keys: attributes, decoded and converted objects, objects of events, and the
// representations with their items. When the keys change (see keysOf) the view gets another
// generation, and no later reader finds anything of the ended one.
//
// A reader takes the view's generation first and decrypts afterwards, so derived data is never of
// older keys than its generation, however long the decryption takes. A LIST uses one generation
// from its beginning to its end, a watch takes the present one for each batch. All methods may be
// called concurrently.
type generation struct {
	view *view
	keys any // see view.keys

	slot *mirror.Slot // of attributes, and of the objects of events
	// objects and converted are the slots of decoded objects, and of custom resources as a
	// webhook has converted them.
	objects, converted *mirror.Slot
	events             eventCache
	representations    sync.Map // of *Representation, by name

	ended atomic.Bool
}

func (v *view) newGeneration() *generation {
	g := &generation{view: v, slot: &mirror.Slot{}, objects: &mirror.Slot{}, converted: &mirror.Slot{}}
	if v.keys != nil {
		g.keys = v.keys()
	}
	return g
}

// now returns the generation of the keys in use. Cost is a few loads, unless the keys have
// changed since the last call.
func (v *view) now() *generation {
	g := v.cur.Load()
	if v.keys == nil || g.keys == v.keys() {
		return g
	}
	return v.replace()
}

// replace ends the generation of keys that are not in use any more and returns the next one.
func (v *view) replace() *generation {
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.cur.Load()
	next := v.newGeneration()
	if v.closed || old.keys == next.keys { // another reader was faster
		return old
	}
	v.cur.Store(next)
	old.end()
	if v.ended != nil {
		v.ended(old)
	}
	return next
}

// end closes the slots of the generation and releases its blocks. Readers that still use it
// finish with what they have loaded and cache nothing.
func (g *generation) end() {
	g.ended.Store(true)
	g.slot.Close()
	g.objects.Close()
	g.converted.Close()
	g.events.end()
	g.representations.Range(func(_, p any) bool {
		p.(*Representation).Close()
		return true
	})
	g.view.budget.releaseClosed()
}

// generationEnded drops, beside the readers, what refers to a generation that has ended. The
// view's mutex is held.
func (s *Store) generationEnded(*generation) {
	s.indexMu.Lock()
	for _, x := range s.indexes {
		x.drop()
	}
	s.indexMu.Unlock()
	s.watches.start(func() {
		s.shards.dropEnded()
		s.dropClosed(s.ctx)
	})
}

// dropClosed drops what entries, leaves and events of the resource hold under closed slots, so
// that nothing that was decrypted with removed keys stays in memory until its entry is replaced.
// Versions of the past may hold the positions of items, but no items. Cost is O(entries + events
// of the log), without a lock that readers take. It ends early with ctx.
func (s *Store) dropClosed(ctx context.Context) {
	snap, err := s.resource.Latest()
	if err != nil {
		return // being relisted
	}
	for run := range snap.Runs("", "") {
		if ctx.Err() != nil {
			return
		}
		dropClosedRuns(run.Leaf)
		for _, e := range run.Items() {
			e.DropClosed()
		}
	}
	_, floor, err := s.resource.Oldest()
	if err != nil {
		return
	}
	cursor, err := s.resource.CursorAfter(floor, "", "")
	if err != nil {
		return
	}
	defer cursor.Close()
	for events := make([]*mirror.Event, 0, readAtOnce); ctx.Err() == nil; {
		if events, err = cursor.Next(events[:0], readAtOnce); err != nil || len(events) == 0 {
			return // the rest has left the window
		}
		for _, ev := range events {
			ev.DropClosed()
			if ev.Prev != nil {
				ev.Prev.DropClosed()
			}
			if ev.Entry != nil {
				ev.Entry.DropClosed()
			}
		}
	}
}

// dropClosedRuns drops the leaf's runs of closed slots.
func dropClosedRuns(l *mirror.Leaf) {
	for {
		cur := l.Memo.Load()
		if cur == nil {
			return
		}
		all := (*cur).(runs)
		var open runs
		for _, r := range all {
			if !r.slot.Closed() {
				open = append(open, r)
			}
		}
		if len(open) == len(all) {
			return
		}
		var next *any
		if len(open) > 0 {
			m := any(open)
			next = &m
		}
		if l.Memo.CompareAndSwap(cur, next) {
			return
		}
	}
}
