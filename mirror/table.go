package mirror

import (
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/btree"
)

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

// count adds an entry to the counts of the table, or with a sign of -1 takes it from them.
func (t *table) count(e *Entry, sign int) {
	if e.hasValue() {
		t.addBytes(int64(sign) * e.Size())
	} else {
		t.missing += sign
	}
}

// keeps reports whether the value of a new entry is kept: always if the resource is claimed,
// else within Options.UnclaimedBytes.
func (t *table) keeps(bytes int64) bool {
	return t.owned || t.w.unclaimed+bytes <= t.w.opts.UnclaimedBytes
}

// postpone has a change wait until the resource is loaded.
func (t *table) postpone(c *Change) {
	t.pending = append(t.pending, *c)
	t.counts.received.Add(1)
}

// found returns the first version of a new lineage: the entries listed at rev.
func (t *table) found(entries []*Entry, rev Revision) *version {
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

// begin replaces the resource's lineage, and its history with that of the new log; cursors on
// the one before are woken. The caller has counted the entries of the new one.
func (t *table) begin(lin *lineage, h history) {
	t.sinceCheckpoint = 0
	old := t.cur.Load()
	if old != nil {
		old.log.Abandon() // first: a reader that finds the new one finds this one ended
	}
	t.cur.Store(lin)
	if old != nil {
		old.retire()
		t.forget()
	}
	t.history = h
	t.w.stats.historyBytes.Add(h.bytes)
	// It may have been loaded at a revision that etcd has been compacted past since.
	t.raise(lin, t.w.stats.compacted.Load())
	t.changed.wake()
}

// show makes a lineage readable that was kept for a resource without a claim.
func (t *table) show() {
	lin := t.cur.Load()
	if lin == nil || !lin.private {
		return
	}
	shown := newLineage(lin.since(lin.oldest()), lin.head.Load(), lin.log, false)
	shown.addCheckpoints(t.w.opts.CheckpointEvents)
	shown.suspect.Store(lin.suspect.Load())
	t.cur.Store(shown)
	t.loaded(time.Time{})
	t.changed.wake()
}

// drop empties the resource.
func (t *table) drop() {
	t.end()
	t.reset()
}

// end takes the resource's lineage away; cursors on it are woken.
func (t *table) end() {
	if old := t.cur.Swap(nil); old != nil {
		old.log.Abandon()
		old.retire()
		t.forget()
	}
	t.changed.wake()
}

// reset clears the counts of entries and the pending changes, and cancels the load that is under
// way: its result comes too late.
func (t *table) reset() {
	if t.stopLoading != nil {
		t.stopLoading()
		t.stopLoading = nil
	}
	t.addBytes(-t.bytes)
	t.loading, t.pending, t.missing = false, nil, 0
}

// forget drops the counts of history of a resource whose log has been abandoned.
func (t *table) forget() {
	t.w.stats.historyBytes.Add(-t.history.bytes)
	t.history, t.weighed = history{}, weighed{}
	t.countVersionBytes(nil)
}

// await begins the time that the next load takes, if the resource is claimed.
func (t *table) await() {
	if t.owned && !t.excluded && t.awaited.IsZero() {
		t.awaited = time.Now()
	}
}

// loaded counts that the resource can be read, because of a list that began at that
// time, zero if there was none.
func (t *table) loaded(listed time.Time) {
	if !t.owned || t.excluded {
		return
	}
	began := t.awaited
	if began.IsZero() {
		began = listed
	}
	t.awaited = time.Time{}
	t.counts.loads.Add(1)
	if !began.IsZero() {
		t.counts.loadTime.Add(int64(time.Since(began)))
	}
}

// countPublication counts the events of a batch that took so long.
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

// publish wakes the cursors for the newest events of the log, which the clock has reached.
func (t *table) publish(lin *lineage, events []*Event) {
	c := &t.changed
	c.notifier.wake()
	if c.subscribed.Load() == 0 {
		return
	}
	if ts := c.topicsOf(lin); ts != nil {
		ts.postKeys(len(t.prefix), events)
	}
}

// checkpoint keeps the newest version for reads of the past if enough events lie between it and
// the one before. events is the number of new ones.
func (t *table) checkpoint(lin *lineage, v *version, events int) {
	every := t.w.opts.CheckpointEvents
	if t.sinceCheckpoint += events; t.sinceCheckpoint >= every {
		t.sinceCheckpoint = 0
		next := thin(append(slices.Clone(*lin.checkpoints.Load()), v), every)
		lin.checkpoints.Store(&next)
	}
}

// raise makes rev the oldest revision that can be read. It needs the events
// after rev still in the log.
func (t *table) raise(lin *lineage, rev Revision) {
	if rev <= lin.oldest() {
		return
	}
	lin.readable.Store(rev) // before the versions go, see lineage.at
	seq := lin.log.After(rev)
	cps := *lin.checkpoints.Load()
	if i, _ := slices.BinarySearchFunc(cps, seq, bySeq); i > 0 {
		left := slices.Clone(cps[i:])
		lin.checkpoints.Store(&left)
	}
	lin.forget(func(v *version) bool { return v.seq < seq })
	t.weighed = weighed{}
	t.countVersionBytes(lin)
}

// countVersionBytes adds up the weights of the past versions that are kept.
func (t *table) countVersionBytes(lin *lineage) {
	var bytes int64
	if lin != nil {
		head := lin.head.Load().seq
		for _, v := range lin.past() {
			if v.seq != head { // or it is the present
				bytes += v.bytes
			}
		}
	}
	before := t.versionBytes.Swap(bytes)
	t.w.stats.versionBytes.Add(bytes - before)
}

// route returns the table with the longest prefix of key. The root's prefix
// is a prefix of every key of the feed.
func (w *writer) route(key string) *table {
	for end := len(key); end > len(w.opts.Prefix); {
		end = strings.LastIndexByte(key[:end], '/')
		if t := w.tables[key[:end+1]]; t != nil {
			return t
		}
	}
	return w.tables[w.opts.Prefix]
}
