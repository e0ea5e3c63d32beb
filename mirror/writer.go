package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/freshness"
)

// writer changes the resources of one mirror: it loads them, follows the feed, applies batches,
// publishes versions, and bounds history. The writer and its tables belong to one goroutine, which
// calls run. Other goroutines send commands (registry).
type writer struct {
	*shared
	publisher freshness.Publisher // of the published revision
	loader    *loader
	tables    map[string]*table // by prefix

	updates   []*tableUpdate // of the current batch
	unclaimed int64          // bytes of the values in tables without a claim

	measuring  bool // versions are being weighed
	weighAgain time.Time

	divergedTable *table // the last one with a divergence, since the last list
	divergedAt    time.Time
	contradiction error // the whole feed contradicts the cached state

	// Of the invariant checks.
	checked publishedReading // the published revision at the last check
	pace    pace
}

// newWriter returns the writer of a mirror whose only resource is the root.
func newWriter(s *shared, p freshness.Publisher, root *Resource) *writer {
	w := &writer{shared: s, publisher: p, loader: newLoader(s), tables: map[string]*table{}}
	w.tables[root.prefix] = newTable(w, root)
	return w
}

// newLoader returns the loader of a mirror.
func newLoader(s *shared) *loader {
	return &loader{
		opts: &s.opts, count: &s.stats,
		mirroredState: s.mirroredState,
		excluded:      func() []string { return *s.excluded.Load() },
		oldestTrusted: s.trustedSince.Load,
		wait:          s.published.Wait,
		restoring:     make(chan struct{}, 1),
	}
}

// runCommands runs the pending commands.
func (w *writer) runCommands() {
	for _, c := range w.registry.take() {
		c(w)
	}
}

// loop loads the prefix and follows it, again and again, until ctx ends.
func (w *writer) loop(ctx context.Context) {
	defer func() {
		for _, t := range w.tables {
			if lin := t.lineage.Load(); lin != nil {
				lin.log.Abandon()
			}
			t.changed.wake()
		}
	}()
	why := errStart
	for backoff := retryFirst; ctx.Err() == nil; backoff = min(2*backoff, retryLast) {
		w.loading.Store(true)
		began, lists := time.Now(), w.installedLists.Load()
		err := w.session(ctx, why)
		if ctx.Err() != nil {
			return
		}
		if w.installedLists.Load() != lists {
			why = err // it was loaded, and err is the reason to load it again
		}
		w.stats.Relists.Add(1)
		w.opts.Logger.Warn("Relisting all resources", "prefix", w.opts.Prefix, "err", err)
		if time.Since(began) > retryLast {
			backoff = retryFirst
		}
		w.pause(ctx, backoff)
	}
}

// pause runs commands during the given time.
func (w *writer) pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.registry.due:
			w.runCommands()
		case <-timer.C:
			return
		}
	}
}

// session loads the whole prefix and follows it until it has to be loaded again, and returns the
// reason for that. why is the reason for this session.
func (w *writer) session(ctx context.Context, why error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	loads := make(chan *load, 1)
	w.wg.Go(func() { loads <- w.loader.loadAll(ctx, why) })
	var l *load
	for l == nil {
		select {
		case l = <-loads:
		case <-w.registry.due:
			w.runCommands()
		}
	}
	if l.err != nil {
		for _, t := range w.tables {
			if t.owned && !t.excluded {
				t.counts.loadFailures.Add(1)
			}
		}
		return l.err
	}
	history := newRestorer(w.shared, w.loader, l, w.opts.Prefix)
	w.installAll(l)
	w.verify()
	w.loading.Store(false)
	if history != nil {
		w.wg.Go(func() { history.run(ctx) })
	}
	l = nil
	for backoff := retryFirst; ; backoff = min(2*backoff, retryLast) {
		before := w.published.Revision()
		err := w.follow(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errDiverged):
			w.invalidateAll()
			return err
		case errors.Is(err, ErrCompacted), errors.Is(err, ErrRestored):
			return err
		}
		w.stats.Reconnects.Add(1)
		w.opts.Logger.Warn("Watch on etcd ended; resuming", "prefix", w.opts.Prefix, "revision", w.published.Revision(), "err", err)
		if w.published.Revision() > before {
			backoff = retryFirst
		}
		w.pause(ctx, backoff)
	}
}

// follow applies the feed until the feed ends.
func (w *writer) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	batches := make(chan driver.Batch)
	ended := make(chan error, 1)
	after := w.mirroredState()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	number := w.feedHealth.Begin()
	wg.Go(func() {
		ended <- w.opts.Source.Watch(ctx, w.opts.Prefix, after, freshness.Observed(w.feedHealth, func(b driver.Batch) error {
			select {
			case batches <- b:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}))
	})
	trim := time.NewTicker(markInterval)
	defer trim.Stop()
	for {
		select {
		case b := <-batches:
			if err := w.apply(b); err != nil {
				return err
			}
		case <-w.registry.due:
			w.runCommands()
		case <-trim.C:
			w.age(time.Now())
			w.stats.UnclaimedBytes.Store(w.unclaimed)
		case err := <-ended:
			return err
		case n := <-w.feedHealth.Silent():
			if n == number {
				w.stats.SilentFeeds.Add(1)
				cancel(ErrFeedSilent)
				return ErrFeedSilent
			}
		case r := <-w.restarts:
			if r.lists == w.installedLists.Load() {
				return r.err
			}
		}
		w.applyCompaction()
		w.verify()
	}
}

// apply commits a batch. It builds the next version of every touched resource privately, appends to
// the logs, publishes the versions and advances the published revision last. After an error the
// published revision is unchanged.
func (w *writer) apply(b driver.Batch) error {
	now := w.published.Revision()
	if w.opts.EventsOnly {
		if len(b.Changes) == 0 {
			return nil
		}
		b.Through = b.Changes[len(b.Changes)-1].ModRevision
	}
	if len(b.Changes) == 0 && b.Through < now {
		return fmt.Errorf("%w: revision is %d, was %d", ErrRestored, b.Through, now)
	}
	w.updates = w.updates[:0]
	last, arrived := now, driver.Now()
	for i := range b.Changes {
		c := &b.Changes[i]
		if c.ModRevision <= now || c.ModRevision < last || c.ModRevision > b.Through {
			// Progress has overtaken an event (etcd#15220), or an event was repeated.
			return fmt.Errorf("%w: event for key %q at revision %d received after revision %d", errDiverged, c.Key, c.ModRevision, max(last, now))
		}
		last = c.ModRevision
		t := w.route(string(c.Key))
		switch {
		case t.excluded:
			w.stats.Dropped.Add(1)
		case t.loading:
			t.postpone(c)
		default:
			x := w.update(t, arrived)
			if err := x.change(c); err != nil {
				// Only this resource diverged; the others continue.
				w.updates = slices.DeleteFunc(w.updates, func(o *tableUpdate) bool { return o == x })
				w.onDivergence(t, err)
				// The earlier changes of the batch to the resource are pending as well: its list
				// may be at the published revision, which the batch has not advanced yet.
				for j := range b.Changes[:i+1] {
					if w.route(string(b.Changes[j].Key)) == t {
						t.postpone(&b.Changes[j])
					}
				}
			}
		}
	}
	w.commit(b.Through, len(b.Changes) == 0)
	return w.contradiction
}

// update returns the transaction of the current batch on t.
func (w *writer) update(t *table, arrived int64) *tableUpdate {
	for _, x := range w.updates {
		if x.t == t {
			return x
		}
	}
	lin := t.lineage.Load()
	x := &tableUpdate{t: t, lin: lin, edit: lin.head.Load().tree.Edit(), arrived: arrived}
	w.updates = append(w.updates, x)
	return x
}

// commit publishes the transactions of the current batch, and advances the published revision to
// through.
func (w *writer) commit(through Revision, progress bool) {
	for _, x := range w.updates {
		x.commit()
		w.stats.Events.Add(int64(len(x.events))) // before a reader can know of them
	}
	if through > w.published.Revision() {
		w.publisher.Publish(through, progress)
		w.timeline.add(through, time.Now())
	}
	var took time.Duration
	if len(w.updates) > 0 {
		took = time.Duration(driver.Now() - w.updates[0].arrived)
	}
	for _, x := range w.updates {
		x.lin.head.Load().prev.Store(nil)
		x.t.notifyCursors(x.lin, x.events)
		x.t.countPublication(len(x.events), took)
		w.remember(x.t, through, x.events)
		x.supersede()
	}
	clear(w.updates)
	w.updates = w.updates[:0]
}
