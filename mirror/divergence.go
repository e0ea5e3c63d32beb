package mirror

import (
	"fmt"
	"time"
)

// diverged drops a resource whose feed contradicts the cached state, and relists it: at once,
// but with growing delays if the contradictions continue.
func (w *writer) diverged(t *table, err error) {
	delay := t.distrust.next(time.Now())
	w.opts.Logger.Error("memory contradicts etcd: an event was lost or came twice; the resource is listed anew", "prefix", t.prefix, "in", delay, "error", err)
	w.stats.divergences.Add(1)
	// A restored history must not reach back to events that clients have seen differently.
	w.since.Store(max(w.clock.Revision(), w.since.Load()))
	w.reload(t, delay, false)
	w.doubt(t)
}

// doubt records that a resource was found to differ from etcd.
func (w *writer) doubt(t *table) {
	if now := time.Now(); w.doubted != nil && w.doubted != t && now.Sub(w.doubtedAt) < doubtFor {
		// One lost event concerns one resource. Two resources at odds with the feed
		// mean that it is not the continuation of the cached state, for example because
		// etcd was restored and written to since; then nothing is certain.
		w.contradiction = fmt.Errorf("%w: of %s and of %s", ErrDiverged, w.doubted.prefix, t.prefix)
	} else {
		w.doubted, w.doubtedAt = t, now
	}
}

// doubtFor is how long a contradiction is taken for the sign of a wider one: a
// guess, long enough for quiet resources to show theirs.
const doubtFor = 10 * time.Minute

// distrust makes every resource unreadable until the whole prefix is relisted: the feed has
// contradicted its own order, so state that was served as complete may not have been.
func (w *writer) distrust() {
	w.stats.divergences.Add(1)
	for _, t := range w.tables {
		if !t.excluded {
			t.drop()
			t.await()
			t.loading = true
		}
	}
}

// mend is the writer's half of comparison.repair: a new lineage that begins at the clock, with the
// keys as etcd has them. With an error, or where a key has changed since it was
// compared, it has the resource relisted instead: ErrDiverged. Error: ErrSuperseded.
func (w *writer) mend(r *Resource, snap Snapshot, keys []mended, err error) error {
	t := w.tables[r.prefix]
	if t == nil || t.Resource != r || r.cur.Load() != snap.lin || !t.owned {
		return ErrSuperseded
	}
	head := snap.lin.head.Load()
	edit := head.tree.Edit()
	x := &txn{t: t} // only to retire
	for _, k := range keys {
		if err != nil {
			break
		}
		was, held := snap.Get(k.key)
		now, _ := head.tree.Get(k.key)
		if was != now {
			err = fmt.Errorf("%q has changed since", k.key)
			break
		}
		if held {
			x.events = append(x.events, &Event{Prev: was})
		}
		replace(edit, was, k.entry)
	}
	if err != nil {
		err = fmt.Errorf("%w: a check has found it different from etcd: %w", ErrDiverged, err)
		w.diverged(t, err)
		t.suspect = true // when it is loaded
		return err
	}
	for _, k := range keys {
		if was, held := snap.Get(k.key); held {
			t.count(was, -1)
		}
		if k.entry != nil {
			t.count(k.entry, 1)
		}
	}
	rev := w.clock.Revision()
	lin := newLineage(&version{rev: rev, tree: edit.Tree()}, nil, nil, false)
	lin.suspect.Store(true)
	t.begin(lin, history{})
	// A restored history must not reach back to events that clients have seen differently.
	w.since.Store(max(rev, w.since.Load()))
	w.stats.repairs.Add(1)
	x.old = edit.Replaced()
	x.retire()
	w.doubt(t)
	return nil
}

// backoff spaces repetitions of an operation. The zero value is ready.
type backoff struct {
	last  time.Time
	delay time.Duration
}

// next returns how long to wait this time: nothing if the last time is long ago.
func (b *backoff) next(now time.Time) time.Duration {
	if now.Sub(b.last) > 10*retryLast {
		b.delay = 0
	} else {
		b.delay = min(max(2*b.delay, retryFirst), retryLast)
	}
	b.last = now
	return b.delay
}
