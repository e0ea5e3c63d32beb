package mirror

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/driver"
)

// table is the writer's half of a resource. It belongs to the writer's goroutine, which alone calls
// its methods.
type table struct {
	*Resource
	w *writer

	owned             bool // the resource is claimed or excluded
	excluded          bool
	loading           bool
	stopLoading       context.CancelFunc // set while loading
	pending           []driver.Change    // arrived while loading
	divergenceBackoff backoff            // between relists after divergences
	// since when the resource is unreadable, zero if it can be read
	unreadableSince time.Time
	// whether the lineage that is being loaded is inconsistent, see lineage.inconsistent
	inconsistent bool

	bytes           int64 // of entries with value
	missing         int   // entries and events whose value was not stored
	sinceCheckpoint int   // events
	history         history
	lastMeasured    measuredVersions
	// the log lacks events up to here of absorbed resources (writer.absorb)
	absorbed Revision
}

// measuredVersions is the state of a resource's versions at the last weighing. It keeps them alive
// until the next weighing or until the window drops some.
type measuredVersions struct {
	head                        *version
	checkpoints, cachedVersions *[]*version
}

// newTable returns the table of a resource that has not been loaded.
func newTable(w *writer, r *Resource) *table { return &table{Resource: r, w: w, loading: true} }

// own records whether the resource is claimed.
func (t *table) own(owned bool) {
	bytes := t.bytes
	t.addBytes(-bytes)
	t.owned = owned
	t.addBytes(bytes)
}

// addBytes counts values of the table, which are bounded while the resource is not claimed.
func (t *table) addBytes(n int64) {
	t.bytes += n
	if !t.owned {
		t.w.unclaimed += n
	}
}

// count adds an entry to the counts of the table, or subtracts it if sign is -1.
func (t *table) count(e *Entry, sign int) {
	if e.hasValue() {
		t.addBytes(int64(sign) * e.Size())
	} else {
		t.missing += sign
	}
}

// keeps reports whether the value of a new entry is stored: always if the resource is claimed,
// otherwise within Options.UnclaimedBytes.
func (t *table) keeps(bytes int64) bool {
	return t.owned || t.w.unclaimed+bytes <= t.w.opts.UnclaimedBytes
}

// postpone queues a change until the resource is loaded.
func (t *table) postpone(c *driver.Change) {
	t.pending = append(t.pending, *c)
	t.counts.received.Add(1)
}

// firstVersion returns the first version of a new lineage: the entries listed at rev.
func (t *table) firstVersion(entries []*Entry, rev Revision) *version {
	t.reset()
	for i, e := range entries {
		if e.hasValue() && !t.keeps(e.Size()) {
			e = e.withoutValue()
			entries[i] = e
		}
		t.count(e, 1)
	}
	return &version{rev: rev, tree: btree.Build(entries)}
}

// setLineage replaces the resource's lineage and history; cursors on the old lineage are woken. The
// caller has counted the entries of the new one.
func (t *table) setLineage(lin *lineage, h history) {
	t.sinceCheckpoint = 0
	old := t.lineage.Load()
	if old != nil {
		// first: a reader that loads the new lineage observes the end of the old one
		old.log.Abandon()
	}
	t.lineage.Store(lin)
	t.last.Store(nil)
	if old != nil {
		old.release()
		t.forget()
	}
	t.history = h
	t.w.stats.HistoryBytes.Add(h.bytes)
	// The load may be at a revision that etcd has been compacted past since.
	t.raise(lin, t.w.stats.Compacted.Load())
	t.changed.wake()
}

// publishUnclaimed makes the lineage of a resource that was not claimed readable.
func (t *table) publishUnclaimed() {
	lin := t.lineage.Load()
	if lin == nil || !lin.hasNoClaim {
		return
	}
	shown := newLineage(lin.versionAt(lin.oldest()), lin.head.Load(), lin.log, false)
	shown.addCheckpoints(t.w.opts.CheckpointEvents)
	shown.inconsistent.Store(lin.inconsistent.Load())
	shown.restore.Store(lin.restore.Load())
	t.lineage.Store(shown)
	t.loaded(time.Time{})
	t.changed.wake()
}

// drop empties the resource.
func (t *table) drop() {
	t.endLineage()
	t.reset()
}

// endLineage removes the resource's lineage, except for its last version (Resource.Last); cursors
// on it are woken.
func (t *table) endLineage() {
	if old := t.lineage.Load(); old != nil {
		if v := old.head.Load(); t.owned && !t.excluded && !old.hasNoClaim {
			t.last.Store(&Snapshot{Rev: v.rev, tree: v.tree, seq: v.seq, lin: old, res: t.Resource})
		}
		t.lineage.Store(nil)
		old.log.Abandon()
		old.release()
		t.forget()
	}
	t.changed.wake()
}

// reset clears the counts of entries and the pending changes, and cancels a running load, whose
// result would be stale.
func (t *table) reset() {
	if t.stopLoading != nil {
		t.stopLoading()
		t.stopLoading = nil
	}
	t.addBytes(-t.bytes)
	t.loading, t.pending, t.missing = false, nil, 0
}

// forget drops the history counts of a resource whose log has been abandoned.
func (t *table) forget() {
	t.w.stats.HistoryBytes.Add(-t.history.bytes)
	t.history, t.lastMeasured = history{}, measuredVersions{}
	t.countVersionBytes(nil)
}

// startLoadTimer starts the timing of the next load, if the resource is claimed.
func (t *table) startLoadTimer() {
	if t.owned && !t.excluded && t.unreadableSince.IsZero() {
		t.unreadableSince = time.Now()
	}
}

// loaded counts a load: the resource can be read. listed is when its list began, zero if there was
// none.
func (t *table) loaded(listed time.Time) {
	if !t.owned || t.excluded {
		return
	}
	began := t.unreadableSince
	if began.IsZero() {
		began = listed
	}
	t.unreadableSince = time.Time{}
	t.counts.loads.Add(1)
	if !began.IsZero() {
		t.counts.loadTime.Add(int64(time.Since(began)))
	}
}

// countPublication counts the events of a batch and their delay.
func (t *table) countPublication(events int, took time.Duration) {
	c := &t.counts
	c.received.Add(int64(events))
	c.published.Add(int64(events))
	i := 0
	for i < len(publicationBounds) && took > publicationBounds[i] {
		i++
	}
	c.publications[i].n.Add(1)
	c.publications[i].time.Add(int64(took))
}

// notifyCursors wakes the cursors of the newest events of the log, which the published revision has
// reached.
func (t *table) notifyCursors(lin *lineage, events []*Event) {
	c := &t.changed
	c.notifier.wake()
	if c.subscribed.Load() == 0 {
		return
	}
	if ts := c.topicsOf(lin); ts != nil {
		ts.postKeys(len(t.prefix), events)
	}
}

// checkpoint retains the newest version as a checkpoint if enough events lie between it and the
// previous one. events is the number of new events.
func (t *table) checkpoint(lin *lineage, v *version, events int) {
	every := t.w.opts.CheckpointEvents
	if t.sinceCheckpoint += events; t.sinceCheckpoint >= every {
		t.sinceCheckpoint = 0
		next := thinCheckpoints(append(slices.Clone(*lin.checkpoints.Load()), v), every)
		lin.checkpoints.Store(&next)
	}
}

// raise makes rev the oldest readable revision. The log still has the events after rev.
func (t *table) raise(lin *lineage, rev Revision) {
	if rev <= lin.oldest() {
		return
	}
	lin.oldestReadable.Store(rev) // before the versions are dropped, see lineage.at
	seq := lin.log.After(rev)
	cps := *lin.checkpoints.Load()
	if i, _ := slices.BinarySearchFunc(cps, seq, bySeq); i > 0 {
		left := slices.Clone(cps[i:])
		lin.checkpoints.Store(&left)
	}
	lin.dropCached(func(v *version) bool { return v.seq < seq })
	t.lastMeasured = measuredVersions{}
	t.countVersionBytes(lin)
}

// countVersionBytes adds up the weights of the retained past versions.
func (t *table) countVersionBytes(lin *lineage) {
	var bytes int64
	if lin != nil {
		head := lin.head.Load().seq
		for _, v := range lin.pastVersions() {
			if v.seq != head { // otherwise it is the latest version
				bytes += v.bytes
			}
		}
	}
	before := t.versionBytes.Swap(bytes)
	t.w.stats.VersionBytes.Add(bytes - before)
}

// route returns the table with the longest prefix of key. The root's prefix
// is a prefix of every key of the feed.
func (w *writer) route(key string) *table { return longestPrefix(w.tables, w.opts.Prefix, key) }

// longestPrefix returns the element of byPrefix with the longest prefix of key; root is the
// shortest.
func longestPrefix[T any](byPrefix map[string]T, root, key string) T {
	for end := len(key); end > len(root); {
		end = strings.LastIndexByte(key[:end], '/')
		if t, ok := byPrefix[key[:end+1]]; ok {
			return t
		}
	}
	return byPrefix[root]
}
