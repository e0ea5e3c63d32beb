package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/mirror/driver"
)

// installAll divides a load of the whole prefix among the resources, gives each a new lineage, and
// sets the published revision.
func (w *writer) installAll(l *load) {
	w.divergedTable, w.contradiction = nil, nil
	restored := w.mirroredState().ReplacedBy(l.header)
	if restored {
		w.opts.Logger.Warn("Etcd was restored or replaced; discarding all cached state", "prefix", w.opts.Prefix,
			"revision", l.header.Revision, "previousRevision", w.published.Revision())
		w.stats.EtcdRestores.Add(1)
		w.compacted.Store(0)
		w.stats.Compacted.Store(0)
		w.timeline.reset()
	}
	// Build all lineages, then publish them, then move the published revision: readers wait for the
	// last two steps only.
	parts := w.divide(l)
	drafts, again := w.buildLineages(l, parts)
	w.cluster.Store(l.header.ClusterID)
	if l.header.Revision < w.published.Revision() {
		// The revision decreases only if etcd was restored. Its revisions are unrelated to the
		// cached ones, so nothing is readable while the published revision is set back.
		for t := range drafts {
			t.endLineage()
		}
		w.publisher.Publish(l.header.Revision, false)
	}
	for t, lin := range drafts {
		if old := t.lineage.Load(); old != nil && l.hasGap && !restored {
			old.successor.Store(lin)
		}
		t.setLineage(lin, history{})
	}
	w.publisher.Publish(l.header.Revision, false)
	w.stats.EtcdRevision.Store(l.header.Revision)
	if restored || l.mayBeWrong {
		w.trustedSince.Store(l.header.Revision)
	}
	w.installedLists.Add(1)
	for t := range drafts {
		t.loaded(l.began)
		t.changed.wake()
	}
	w.bound()
	w.age(time.Now())
	for _, t := range again {
		w.reload(t, 0, false)
	}
	w.stats.Ready.Store(true)
}

// divide returns the part of a load for each table.
func (w *writer) divide(l *load) map[*table]*load {
	parts := make(map[*table]*load, len(w.tables))
	for _, t := range w.tables {
		parts[t] = &load{header: l.header, restore: l.restore}
	}
	for _, e := range l.entries {
		p := parts[w.route(e.Key())]
		p.entries = append(p.entries, e)
	}
	return parts
}

// buildLineages builds the lineages of all tables from their parts of the load. A table without one
// is emptied: it is excluded, or the load lacks its keys and the table is returned in again.
func (w *writer) buildLineages(l *load, parts map[*table]*load) (drafts map[*table]*lineage, again []*table) {
	drafts = make(map[*table]*lineage, len(parts))
	for t, p := range parts {
		t.inconsistent = false
		switch {
		case t.excluded:
			t.drop()
		case l.omits(t.prefix): // it, or a prefix around it, was excluded during the load
			t.drop()
			again = append(again, t)
		default:
			drafts[t] = t.buildLineage(p)
		}
	}
	return drafts, again
}

// buildLineage returns a new lineage of the resource that begins with the listed entries.
func (t *table) buildLineage(l *load) *lineage {
	lin := newLineage(t.firstVersion(l.entries, l.header.Revision), nil, nil, !t.owned)
	lin.restore.Store(l.restore)
	t.sinceCheckpoint, t.absorbed = 0, 0
	return lin
}

// onDivergence drops a resource whose feed contradicts the cached state, and relists it: at once
// the first time, with growing delays if the contradictions continue.
func (w *writer) onDivergence(t *table, err error) {
	delay := t.divergenceBackoff.next(time.Now())
	w.opts.Logger.Error("Event does not match the cached state (lost or duplicated event); relisting resource", "prefix", t.prefix, "delay", delay, "err", err)
	w.stats.Divergences.Add(1)
	// A restored history must not reach back to events that clients have received differently.
	w.trustedSince.Store(max(w.published.Revision(), w.trustedSince.Load()))
	w.reload(t, delay, false)
	w.noteDivergence(t)
}

// noteDivergence records that a resource was found to differ from etcd.
func (w *writer) noteDivergence(t *table) {
	if now := time.Now(); w.divergedTable != nil && w.divergedTable != t && now.Sub(w.divergedAt) < divergenceWindow {
		// One lost event concerns one resource. If two resources contradict the feed, the feed does
		// not continue the cached state, for example because etcd was restored and written to
		// since; then the whole cached state is in doubt.
		w.contradiction = fmt.Errorf("%w: %s and %s", errDiverged, w.divergedTable.prefix, t.prefix)
	} else {
		w.divergedTable, w.divergedAt = t, now
	}
}

// divergenceWindow is how long after a divergence another one is taken as a sign of a wider
// contradiction: a guess, long enough for quiet resources to diverge too.
const divergenceWindow = 10 * time.Minute

// invalidateAll makes every resource unreadable until the whole prefix is relisted: the feed has
// contradicted its own order, so state that was served as complete may have been incomplete.
func (w *writer) invalidateAll() {
	w.stats.Divergences.Add(1)
	for _, t := range w.tables {
		if !t.excluded {
			t.drop()
			t.startLoadTimer()
			t.loading = true
		}
	}
}

// reload relists one resource, after a delay, without blocking the others. The list is at the
// published revision, so that only changes that arrive meanwhile have to be applied on top of it.
// With history, the history before the list is restored. Cursors on the resource are woken.
func (w *writer) reload(t *table, delay time.Duration, history bool) {
	t.drop()
	t.startLoadTimer()
	t.loading = true
	ctx, cancel := context.WithCancel(w.ctx)
	t.stopLoading = cancel
	l := &reload{shared: w.shared, loader: w.loader, resource: t.Resource, inner: w.inside(t.prefix), history: history}
	l.discard = func(w *writer, seen Revision) { w.discardPending(t, seen) }
	l.install = func(w *writer, loaded *load) { w.install(t, loaded) }
	w.wg.Go(func() { l.loop(ctx, delay) })
}

// inside returns the prefixes of the tables inside a prefix.
func (w *writer) inside(prefix string) innerPrefixes {
	inner := innerPrefixes{}
	for p := range w.tables {
		if p != prefix && strings.HasPrefix(p, prefix) {
			inner[p] = p
		}
	}
	return inner
}

// reload loads one resource on its own goroutine. It accesses the table by commands only.
type reload struct {
	*shared
	loader   *loader
	resource *Resource
	inner    innerPrefixes // none of them is removed while the resource is loading
	history  bool
	// Commands for the resource's table.
	discard func(w *writer, seen Revision)
	install func(*writer, *load)
}

// loop loads the resource and enqueues its installation; it retries until ctx ends.
func (r *reload) loop(ctx context.Context, delay time.Duration) {
	command := func(f func(*writer)) {
		r.registry.enqueue(func(w *writer) {
			if ctx.Err() == nil {
				f(w)
			}
		})
	}
	for next := retryFirst; ; next = min(2*next, retryLast) {
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return
		}
		// The list contains every change up to this revision; pending changes up to it are
		// discarded, which bounds them (I7).
		seen := r.published.Revision()
		command(func(w *writer) { r.discard(w, seen) })
		l := r.loader.loadOne(ctx, r.resource.prefix, r.inner, seen, r.history)
		if errors.Is(l.err, errOvertaken) {
			r.restart(r.installedLists.Load(), l.err)
		}
		switch {
		case ctx.Err() != nil:
			return
		case l.err == nil:
			history := newRestorer(r.shared, r.loader, l, r.resource.prefix)
			command(func(w *writer) { r.install(w, l) })
			if history != nil {
				history.run(r.shared.ctx)
			}
			return
		}
		r.resource.counts.loadFailures.Add(1)
		r.opts.Logger.Warn("Failed to list resource; retrying", "prefix", r.resource.prefix, "err", l.err)
		delay = next
	}
}

// install begins a lineage with a load and applies the changes that arrived since.
func (w *writer) install(t *table, l *load) {
	l.entries = slices.DeleteFunc(l.entries, func(e *Entry) bool { return w.route(e.Key()) != t })
	// Resources that were claimed during the load load their own keys.
	pending := slices.DeleteFunc(t.pending, func(c driver.Change) bool { return w.route(string(c.Key)) != t })
	lin := t.buildLineage(l)
	x := &tableUpdate{t: t, lin: lin, edit: lin.head.Load().tree.Edit()}
	for i := range pending {
		if c := &pending[i]; c.ModRevision > l.header.Revision {
			if err := x.change(c); err != nil {
				w.onDivergence(t, err)
				return
			}
		}
	}
	if len(x.events) > 0 {
		x.commitUnpublished()
		w.stats.Events.Add(int64(len(x.events)))
	}
	lin.inconsistent.Store(t.inconsistent)
	t.inconsistent = false
	// Publish after the pending changes: a reader assumes that a lineage is complete up to the
	// published revision (I8).
	t.setLineage(lin, historyOf(x.events))
	t.loaded(time.Time{})
	w.bound()
	w.age(time.Now())
}

// discardPending drops the pending changes up to a revision.
func (w *writer) discardPending(t *table, upTo Revision) {
	t.pending = slices.DeleteFunc(t.pending, func(c driver.Change) bool { return c.ModRevision <= upTo })
}
