package mirror

import "fmt"

// The invariants, the structures that show them, and their checks. Checks of I8 and I9 are partial:
// the arrival check of each event (tableUpdate.add) covers lost events, and a delay is not visible
// in the state.
//
//	I1      writer.checkPublished
//	I2, I3  lineage.checkEvents, lineage.checkVersions
//	I4      changes.check, topics.checkLocked, indexedEvents.check
//	I5      table.check: no version is newer than the published revision
//	I6      freshness.Published.Check
//	I7      writer.checkBudget, table.checkCounts, lineage.checkVersions
//	I8      table.checkCounts: each entry is in the resource that its key belongs to

// check returns an error if an invariant is broken. It runs between two batches, concurrently with
// readers. Cost is O(versions * (entries + events) + topics * events); for tests.
func (w *writer) check() error {
	if err := w.checkPublished(); err != nil {
		return err
	}
	for prefix, t := range w.tables {
		if err := t.check(w.published.Revision()); err != nil {
			return fmt.Errorf("%s: %w", prefix, err)
		}
	}
	return w.checkBudget()
}

// checkPublished checks I1 against the previous check, and the waits for the published revision.
func (w *writer) checkPublished() error {
	now := publishedReading{w.published.Revision(), w.stats.EtcdRestores.Load()}
	before := w.checked
	w.checked = now
	if now.rev < before.rev && now.restores == before.restores {
		return broken("I1", "published revision decreased from %d to %d without a restore", before.rev, now.rev)
	}
	if err := w.published.Check(); err != nil {
		return broken("I6", "%w", err)
	}
	return nil
}

// checkBudget checks I7: the counters equal the sums over the tables, and are within the bounds.
func (w *writer) checkBudget() error {
	unclaimed, history, versions := int64(0), int64(0), int64(0)
	for _, t := range w.tables {
		if !t.owned {
			unclaimed += t.bytes
		}
		history += t.history.bytes
		versions += t.versionBytes.Load()
	}
	if h, v := w.stats.HistoryBytes.Load(), w.stats.VersionBytes.Load(); h != history || v != versions || history+versions > w.opts.Window.MaxBytes {
		return broken("I7", "recorded %d bytes of history and %d of versions, actual %d and %d, limit %d",
			h, v, history, versions, w.opts.Window.MaxBytes)
	}
	if unclaimed != w.unclaimed || unclaimed > w.opts.UnclaimedBytes {
		return broken("I7", "recorded %d unclaimed bytes, actual %d, limit %d", w.unclaimed, unclaimed, w.opts.UnclaimedBytes)
	}
	return nil
}

// verify panics if an invariant is broken. The writer calls it after every batch and load, and
// after the commands that it runs between batches. Without the build tag strata_invariants it does
// nothing.
func (w *writer) verify() {
	if !checkInvariants || !w.pace.due(w.work()) {
		return
	}
	if err := w.check(); err != nil {
		panic("mirror: invariant " + err.Error())
	}
}

// work estimates how many entries and events check visits.
func (w *writer) work() (n int) {
	for _, t := range w.tables {
		if lin := t.lineage.Load(); lin != nil {
			topics, events := int(t.changed.subscribed.Load()), lin.log.Len()
			n += (lin.versions()+1)*2*(lin.head.Load().tree.Len()+events) + topics*events
		}
	}
	return n
}
