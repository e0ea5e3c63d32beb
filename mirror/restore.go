package mirror

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
	"unsafe"

	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// past is a part of a prefix's history, as read from etcd.
type past struct {
	after  Revision
	listed func(key string) (*Entry, bool) // the entries at the end of the history
	events []*Event
	last   map[string]*Event // the last event of each key
	first  map[string]*Event // the first event of each key that it has not created
	gaps   map[string]error  // keys of which a change is missing: their resources get no history
}

// add adds the next change.
func (p *past) add(c *driver.Change) {
	ev := &Event{Rev: c.ModRevision}
	last, known := p.last[string(c.Key)]
	if known {
		ev.Prev = last.Entry
	}
	if !c.Deleted {
		if e, exists := p.listed(unsafe.String(unsafe.SliceData(c.Key), len(c.Key))); exists && e.mod == c.ModRevision && e.writes == uint32(c.Version) {
			ev.Entry = e // the last change of the key
		} else {
			ev.Entry = newEntry(&c.KV, true)
		}
	}
	created := !c.Deleted && c.CreateRevision == c.ModRevision
	if known || created {
		p.verify(string(c.Key), ev)
	} else {
		p.first[string(c.Key)] = ev
	}
	p.events = append(p.events, ev)
	p.last[string(c.Key)] = ev
}

// verify records a gap before the event unless it follows the state of its key before.
func (p *past) verify(key string, ev *Event) {
	if !follows(ev.Prev, ev.Entry) {
		p.gaps[key] = fmt.Errorf("%w: history of key %q at revision %d does not follow the change before", errDiverged, key, ev.Rev)
	}
}

// complete reads the values that the first events have replaced.
func (p *past) complete(ctx context.Context, source driver.Source) error {
	err := source.GetAll(ctx, slices.Sorted(maps.Keys(p.first)), p.after, func(kv driver.KV) error {
		p.first[string(kv.Key)].Prev = newEntry(&kv, true)
		return nil
	})
	for key, ev := range p.first {
		p.verify(key, ev)
	}
	return err
}

// replay reads the history of a prefix, without excluded prefixes. Its last events share the
// entries that listed returns. Changes out of revision order return errDiverged.
func (o *loader) replay(ctx context.Context, prefix string, after driver.Header, through Revision, listed func(string) (*Entry, bool)) (*past, error) {
	p := &past{after: after.Revision, listed: listed, last: map[string]*Event{}, first: map[string]*Event{}, gaps: map[string]error{}}
	last := after.Revision
	var omitted []string
	err := o.opts.Source.Replay(ctx, prefix, after, through, func(b driver.Batch) error {
		excluded := o.excluded()
		begin := last
		defer func() { last = max(last, b.Through) }()
		for i := range b.Changes {
			c := &b.Changes[i]
			if c.ModRevision <= begin || c.ModRevision < last || c.ModRevision > min(b.Through, through) {
				return fmt.Errorf("%w: history out of order: revision %d of key %q after revision %d, last requested revision %d", errDiverged, c.ModRevision, c.Key, last, through)
			}
			last = c.ModRevision
			if omit(c.Key, excluded, &omitted) {
				continue
			}
			p.add(c)
		}
		o.count.replayedRecords.Add(int64(len(b.Changes)))
		return ctx.Err()
	})
	if err == nil {
		err = p.complete(ctx, o.opts.Source)
	}
	return p, err
}

const (
	// historyTimeout bounds a restore. A guess: ten times the duration of the largest one on an
	// idle machine with two processors.
	historyTimeout = time.Minute
	// restoreQueue bounds the wait for other restores: resources that are claimed during the first
	// one get their history, and many that are claimed at once do not read it one by one for
	// minutes.
	restoreQueue = 10 * time.Second
	// restoreAttempts bounds the retries after a compaction has overtaken the read, or resources
	// were divided while events were joined to them.
	restoreAttempts = 5
)

// readHistory reads the history of a prefix before the restore's list, within the bounds. If a
// compaction overtakes the read, it retries. It returns nil if there is no history.
func (o *loader) readHistory(ctx context.Context, prefix string, r *restore, listed func(string) (*Entry, bool)) (p *past, err error) {
	now := driver.Header{ClusterID: r.cluster, Revision: r.through}
	for range restoreAttempts {
		var oldest Revision
		if oldest, err = o.opts.Source.Oldest(ctx, prefix, now, o.opts.Replay); err == nil {
			oldest = max(oldest, min(o.oldestTrusted(), r.through))
			r.after.Store(oldest)
			if oldest == r.through {
				return nil, nil
			}
			p, err = o.replay(ctx, prefix, driver.Header{ClusterID: r.cluster, Revision: oldest}, r.through, listed)
		}
		if err == nil || !errors.Is(err, ErrCompacted) {
			break
		}
		o.opts.Logger.Info("Compaction overtook the history; restarting the read", "prefix", prefix, "revision", r.through)
	}
	return p, err
}

// part is the part of a restored history that belongs to one table.
type part struct {
	t      *table
	lin    *lineage
	base   tree // at the list's revision
	events []*Event

	history  history
	versions []*version // ascending, below the list's revision
	err      error      // the events do not lead to the base
}

// divide adds to each part the events of its table. parts has an element for every table, nil for
// those that do not await the history; their events are left out.
func (p *past) divide(parts map[string]*part, root string) {
	for key, err := range p.gaps {
		if x := longestPrefix(parts, root, key); x != nil {
			x.err = err
		}
	}
	for _, ev := range p.events {
		if ev.Entry == nil && ev.Prev == nil {
			continue // its key has a gap
		}
		if x := longestPrefix(parts, root, ev.Key()); x != nil {
			x.events = append(x.events, ev)
		}
	}
	for key, ev := range p.last {
		x := longestPrefix(parts, root, key)
		if x == nil {
			continue
		}
		// The last event shares its entry with the list, also if that was divided meanwhile.
		e, exists := x.base.Get(key)
		if exists != (ev.Entry != nil) || exists && e.mod != ev.Entry.mod {
			x.err = fmt.Errorf("%w: history of key %q ends at revision %d, which is not the listed one", errDiverged, key, ev.Rev)
		} else if exists {
			ev.Entry = e
		}
	}
}

// build builds the table's versions and accounts; checkpointEvents is the distance of the newest
// versions. It sets err, unless it is set, if the events do not lead to the base. A deletion that
// was lost without another event of its key is not found.
func (x *part) build(after Revision, checkpointEvents int) {
	if x.err != nil {
		return
	}
	x.history = historyOf(x.events)
	edit, n := x.base.Edit(), len(x.events)
	for i, newer := n-1, n; i >= 0; i-- {
		// newer is the number of events before the next newer version
		ev := x.events[i]
		replace(edit, ev.Entry, ev.Prev)
		rev := after
		if i > 0 {
			if rev = x.events[i-1].Rev; rev == ev.Rev || newer-i < distance(uint64(n-newer), checkpointEvents) {
				continue
			}
		}
		v := &version{rev: rev, tree: edit.Tree(), seq: eventlog.Start - uint64(n-i)}
		x.versions = append(x.versions, v)
		edit, newer = v.tree.Edit(), i
	}
	slices.Reverse(x.versions)
	oldest := x.base
	if n > 0 {
		oldest = x.versions[0].tree
	}
	for e := range oldest.All("", "") {
		if e.mod > after { // the event that wrote it was lost
			x.err = fmt.Errorf("%w: history after revision %d does not contain the write of key %q at revision %d", errDiverged, after, e.Key(), e.mod)
			return
		}
	}
}

// parts returns a part without events for each table. The part is nil if the table does not await
// the restore, is left out, or has absorbed another table since the list: its listed state then
// lacks keys of the history, which would look like lost events.
func (w *writer) parts(r *restore, leftOut map[*table]bool) (parts map[string]*part, awaited bool) {
	parts = make(map[string]*part, len(w.tables))
	for prefix, t := range w.tables {
		parts[prefix] = nil
		if lin := t.lineage.Load(); lin != nil && lin.awaitsHistory(r) && t.absorbed <= r.through && !leftOut[t] {
			parts[prefix], awaited = &part{t: t, lin: lin, base: lin.versionAt(r.through).tree}, true
		}
	}
	return parts, awaited
}

// join adds a part of history to its table, unless the table has another lineage by now, for which
// it returns false.
func (w *writer) join(x *part, r *restore, after Revision) bool {
	t, lin := x.t, x.lin
	if x.err != nil || t.lineage.Load() != lin || !lin.awaitsHistory(r) {
		return false
	}
	lin.log.Prepend(after, x.events)
	// Versions first: a reader that finds the lower oldest revision also finds them.
	oldest := max(after, w.stats.Compacted.Load())
	seq := lin.log.After(oldest)
	versions := slices.DeleteFunc(x.versions, func(v *version) bool { return v.seq < seq })
	versions = append(versions, *lin.checkpoints.Load()...)
	lin.checkpoints.Store(&versions)
	lin.oldestReadable.Store(oldest)
	lin.restore.Store(nil) // last: a reader that finds no restore also finds all of its history

	h := &t.history
	h.marks = append(x.history.marks, h.marks...)
	h.bytes += x.history.bytes
	h.fresh += x.history.fresh
	w.stats.HistoryBytes.Add(x.history.bytes)
	t.countVersionBytes(lin)
	t.changed.wake()
	return true
}

// joinAll joins the parts of a history, and returns the number of tables that they were joined to.
func (w *writer) joinAll(parts map[string]*part, r *restore, after Revision) (joined int) {
	for _, x := range parts {
		if x != nil && w.join(x, r, after) {
			joined++
		}
	}
	w.bound()
	w.verify()
	return joined
}

// restorer runs one restore on its own goroutine.
type restorer struct {
	*restore
	*shared
	loader *loader
	prefix string
}

// newRestorer returns the restorer for a load of the prefix, nil if history is not restored. It
// must be called before the load is installed; the caller must call run.
func newRestorer(s *shared, o *loader, l *load, prefix string) *restorer {
	if l.restore == nil {
		return nil
	}
	s.stats.Restoring.Add(1)
	return &restorer{restore: l.restore, shared: s, loader: o, prefix: prefix}
}

// run reads the history and joins it to the lineages that await it. It ends with ctx.
func (r *restorer) run(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, historyTimeout)
	defer cancel()
	defer r.end()
	select { // one at a time, because each makes etcd read the history of all keys
	case r.loader.restoring <- struct{}{}:
		defer func() { <-r.loader.restoring }()
	case <-time.After(restoreQueue):
		r.opts.Logger.Warn("History is not restored because earlier restores take too long; rejecting watches from earlier revisions",
			"prefix", r.prefix, "revision", r.through, "waited", restoreQueue)
		return
	case <-ctx.Done():
		return
	}
	began := time.Now()
	var (
		parts   map[string]*part
		awaited bool
	)
	if r.command(ctx, func(w *writer) { parts, awaited = w.parts(r.restore, nil) }) != nil || !awaited {
		return
	}
	p, err := r.loader.readHistory(ctx, r.prefix, r.restore, func(key string) (*Entry, bool) {
		if x := longestPrefix(parts, r.opts.Prefix, key); x != nil {
			return x.base.Get(key)
		}
		return nil, false
	})
	read := time.Since(began)
	joined := 0
	if err == nil && p != nil {
		joined, err = r.joinTo(ctx, p)
	}
	switch {
	case err != nil && context.Cause(ctx) != context.Canceled:
		r.opts.Logger.Warn("History could not be restored; rejecting watches from earlier revisions",
			"prefix", r.prefix, "revision", r.through, "err", err)
	case joined > 0:
		r.stats.Replays.Add(1)
		r.stats.ReplayedEvents.Add(int64(len(p.events)))
		r.stats.ReplayFloor.Store(p.after)
		r.stats.ReplayTime.Store(int64(read))
		r.opts.Logger.Info("Restored history", "prefix", r.prefix, "after", p.after, "through", r.through,
			"events", len(p.events), "took", time.Since(began).Round(time.Millisecond), "replay", read.Round(time.Millisecond))
	}
}

// end ends the restore. Cursors and callers that have waited for it are woken.
func (r *restorer) end() {
	r.ended.Store(true)
	r.stats.Restoring.Add(-1)
	r.registry.enqueue(func(w *writer) {
		for _, t := range w.tables {
			t.changed.wake()
		}
	})
}

// joinTo joins a history to the lineages that await it. The writer only appends and publishes:
// events are divided, and versions built, here. A lineage that another one has replaced meanwhile,
// because a claim has divided its keys, is joined in the next round. A resource whose events do not
// lead to its listed state gets none. It returns the number of tables that have got history.
func (r *restorer) joinTo(ctx context.Context, p *past) (joined int, err error) {
	diverged := map[*table]bool{}
	for range restoreAttempts {
		var (
			parts   map[string]*part
			awaited bool
		)
		if err := r.command(ctx, func(w *writer) { parts, awaited = w.parts(r.restore, diverged) }); err != nil || !awaited {
			return joined, err
		}
		p.divide(parts, r.opts.Prefix)
		for prefix, x := range parts {
			if x == nil {
				continue
			}
			if x.build(p.after, r.opts.CheckpointEvents); x.err != nil {
				diverged[x.t] = true
				r.opts.Logger.Error("History does not lead to the listed state (lost event); rejecting watches from earlier revisions",
					"prefix", prefix, "revision", r.through, "err", x.err)
			}
		}
		var n int
		if err := r.command(ctx, func(w *writer) { n = w.joinAll(parts, r.restore, p.after) }); err != nil {
			return joined, err
		}
		joined += n
	}
	return joined, nil
}
