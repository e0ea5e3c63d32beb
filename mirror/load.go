package mirror

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/internal/btree"
	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// load is a prefix as listed at one revision, and what happened after it: how a lineage
// begins (D5). It is made beside the writer, and changes nothing before it is installed.
type load struct {
	header  Header // of the list
	entries []*Entry
	changes []replayed // after the list and up to through, whole revisions in order
	through Revision
	began   time.Time
	took    time.Duration // to read the changes
	left    []string      // excluded prefixes of which keys were left out
	gap     bool          // what is held may be continued, but for the events in between
	anew    bool          // what was held, or told, cannot be relied on
	err     error
}

// replayed is a change that was read from etcd's history: a write, or, without an entry,
// a deletion.
type replayed struct {
	key   string
	rev   Revision
	entry *Entry
}

// lacks reports whether keys with the prefix may have been left out.
func (l *load) lacks(prefix string) bool {
	return slices.ContainsFunc(l.left, func(p string) bool { return strings.HasPrefix(prefix, p) })
}

// omit reports whether the key is of a prefix that no load needs to keep, and takes a
// note of that.
func omit(key []byte, excluded []string, left *[]string) bool {
	p := slices.IndexFunc(excluded, func(p string) bool { return bytes.HasPrefix(key, []byte(p)) })
	if p < 0 {
		return false
	}
	if !slices.Contains(*left, excluded[p]) {
		*left = append(*left, excluded[p])
	}
	return true
}

// list reads a prefix, but for what is excluded, as it stands at a revision, the newest
// if that is 0. The entries are built while the next page is on its way. A list that cannot
// be one of that revision is ErrDiverged.
func (m *Mirror) list(ctx context.Context, prefix string, at Revision) *load {
	l := &load{}
	var last []byte
	var newest Revision
	l.header, l.err = m.opts.Source.List(ctx, prefix, at, func(page []KV) error {
		excluded := *m.excluded.Load()
		for i := range page {
			kv := &page[i]
			if last != nil && bytes.Compare(last, kv.Key) >= 0 {
				return fmt.Errorf("%w: %q is listed after %q", ErrDiverged, kv.Key, last)
			}
			last, newest = kv.Key, max(newest, kv.ModRevision)
			if !omit(kv.Key, excluded, &l.left) {
				l.entries = append(l.entries, newEntry(kv, true))
			}
		}
		m.stats.listedKeys.Add(int64(len(page)))
		if len(page) > 0 && page[0].Version == 0 {
			m.stats.uncounted.Store(true)
		}
		return ctx.Err()
	})
	if l.err == nil && newest > l.header.Revision {
		l.err = fmt.Errorf("%w: a list at %d has a key of %d", ErrDiverged, l.header.Revision, newest)
	}
	l.through = l.header.Revision
	return l
}

// replay reads what happened to a prefix, but for what is excluded, after the list. What is not
// in the order of revisions is ErrDiverged.
func (l *load) replay(ctx context.Context, m *Mirror, prefix string, after Header, through Revision) error {
	last := after.Revision
	return m.opts.Source.Replay(ctx, prefix, after, through, func(b Batch) error {
		excluded := *m.excluded.Load()
		begin := last
		defer func() { last = max(last, b.Through) }()
		for i := range b.Changes {
			c := &b.Changes[i]
			if c.ModRevision <= begin || c.ModRevision < last || c.ModRevision > min(b.Through, through) {
				return fmt.Errorf("%w: history has %d at %q after %d, up to %d", ErrDiverged, c.ModRevision, c.Key, last, through)
			}
			last = c.ModRevision
			if omit(c.Key, excluded, &l.left) {
				continue
			}
			r := replayed{rev: c.ModRevision}
			if c.Deleted {
				r.key = string(c.Key)
			} else {
				r.entry = newEntry(&c.KV, true)
				r.key = r.entry.Key()
			}
			l.changes = append(l.changes, r)
		}
		m.stats.replayedRecords.Add(int64(len(b.Changes)))
		return ctx.Err()
	})
}

const (
	// historyTimeout bounds a load with history: the oldest revision, a list and the events.
	// A guess: ten times what the most that is restored by default takes.
	historyTimeout = 30 * time.Second
	// replayTimeout bounds how long the events are read: twice what three servers that start at
	// once on two processors take for the most that is restored by default.
	replayTimeout = 15 * time.Second
	// replayQueue bounds what a resource waits for others to have their history read.
	replayQueue = time.Second
	// replayAttempts bounds how often compaction may overtake it.
	replayAttempts = 5
)

// restores reports whether history is restored at all: a source whose progress cannot be
// believed has no way to tell that a part of it is complete.
func (m *Mirror) restores() bool {
	return m.opts.Replay.Revisions > 0 && m.opts.Replay.Bytes > 0 && !m.opts.EventsOnly
}

// loadAll loads the whole prefix: as it was at the oldest revision within the bounds and
// what happened since, or as it is now. The second if etcd was restored or the feed has
// contradicted itself: then what clients have seen may not be what etcd tells of the same
// revisions, so they have to start over.
func (m *Mirror) loadAll(ctx context.Context, why error) *load {
	began := time.Now()
	var l *load
	if m.restores() && (errors.Is(why, errStart) || errors.Is(why, ErrCompacted)) {
		now, err := m.now(ctx)
		if err != nil {
			return &load{err: fmt.Errorf("read current revision: %w", err)}
		}
		if !m.replaces(now.ClusterID, now.Revision) {
			l = m.loadHistory(ctx, m.opts.Prefix, now, m.now)
		}
	}
	if l == nil {
		l = m.list(ctx, m.opts.Prefix, 0)
	}
	l.began = began
	l.gap = errors.Is(why, ErrCompacted)
	l.anew = !l.gap && !errors.Is(why, errStart)
	if l.err == nil {
		m.opts.Logger.Info("mirror listed", "prefix", m.opts.Prefix, "keys", len(l.entries), "revision", l.header.Revision,
			"through", l.through, "took", time.Since(began).Round(time.Millisecond))
	}
	return l
}

// now reads etcd's revision, of which other members are asked if one does not answer.
func (m *Mirror) now(ctx context.Context) (now Header, err error) {
	const longest = 8 * time.Second
	for timeout := 500 * time.Millisecond; timeout <= longest && ctx.Err() == nil; timeout *= 2 {
		attempt, cancel := context.WithTimeout(ctx, timeout)
		now, err = m.opts.Source.Current(attempt)
		late := attempt.Err() != nil
		cancel()
		if err == nil || !late {
			break
		}
	}
	return now, err
}

// replaces reports whether an etcd is not the one that is mirrored, or an older state of it.
func (m *Mirror) replaces(cluster uint64, rev Revision) bool {
	c := m.cluster.Load()
	return c != 0 && (cluster != c || rev < m.clock.rev.Load())
}

// loadHistory loads a prefix as it was at the oldest revision within the bounds, and what
// happened to it up to now, or up to a later revision that again tells, if it is given, when
// compaction has overtaken that. It returns nil if history cannot be had: the caller lists the
// present.
func (m *Mirror) loadHistory(ctx context.Context, prefix string, now Header, again func(context.Context) (Header, error)) *load {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, historyTimeout)
	defer cancel()
	var err error
	for range replayAttempts {
		var (
			oldest Revision
			l      *load
		)
		if oldest, err = m.opts.Source.Oldest(ctx, prefix, now, m.opts.Replay); err == nil {
			oldest = max(oldest, min(m.since.Load(), now.Revision))
			l, err = m.loadSince(ctx, prefix, Header{ClusterID: now.ClusterID, Revision: oldest}, now.Revision)
		}
		if err == nil {
			if oldest < now.Revision {
				m.stats.replayed(l)
				m.opts.Logger.Info("history restored", "prefix", prefix, "after", oldest, "through", l.through,
					"events", len(l.changes), "took", time.Since(began).Round(time.Millisecond), "replay", l.took.Round(time.Millisecond))
			}
			return l
		}
		if !errors.Is(err, ErrCompacted) {
			break
		}
		m.opts.Logger.Info("compaction has overtaken the history that was being read; once more", "prefix", prefix, "revision", now.Revision)
		if again == nil {
			continue
		}
		if now, err = again(ctx); err == nil && m.replaces(now.ClusterID, now.Revision) {
			err = ErrRestored
		}
		if err != nil {
			break
		}
	}
	m.opts.Logger.Warn("history could not be restored; watches of revisions before this one are refused",
		"prefix", prefix, "revision", now.Revision, "error", err)
	return nil
}

// loadSince lists the prefix at a revision, and then reads what happened after it. One after the
// other: etcd holds writers up for longer if it does both at once.
func (m *Mirror) loadSince(ctx context.Context, prefix string, after Header, through Revision) (*load, error) {
	l := m.list(ctx, prefix, after.Revision)
	if l.err != nil {
		return nil, l.err
	}
	if l.header.ClusterID != after.ClusterID {
		return nil, fmt.Errorf("%w: cluster %x, was %x", ErrRestored, l.header.ClusterID, after.ClusterID)
	}
	listed := time.Now()
	ctx, cancel := context.WithTimeout(ctx, replayTimeout)
	defer cancel()
	if err := l.replay(ctx, m, prefix, after, through); err != nil {
		return nil, err
	}
	l.through, l.took = through, time.Since(listed)
	return l, nil
}

// installAll gives every resource its part of what was loaded, as a new lineage, and sets
// the clock.
func (m *Mirror) installAll(l *load) {
	m.doubted, m.contradiction = nil, nil
	for _, r := range m.byPrefix {
		r.suspect = false
	}
	restored := m.replaces(l.header.ClusterID, l.through)
	if restored {
		m.opts.Logger.Warn("etcd was restored or replaced; everything starts anew", "prefix", m.opts.Prefix,
			"revision", l.through, "was", m.clock.rev.Load())
		m.stats.restores.Add(1)
		m.compacted.Store(0)
		m.stats.compacted.Store(0)
	}
	parts := map[*Resource]*load{}
	for _, r := range m.byPrefix {
		parts[r] = &load{header: l.header, through: l.through}
	}
	for _, e := range l.entries {
		p := parts[m.route(e.Key())]
		p.entries = append(p.entries, e)
	}
	for i := range l.changes {
		p := parts[m.route(l.changes[i].key)]
		p.changes = append(p.changes, l.changes[i])
	}
	// Build everything, then swap everything, then move the clock: readers wait
	// for the last two steps only.
	lineages := make(map[*Resource]*lineage, len(parts))
	var again []*Resource
	for r, p := range parts {
		switch {
		case r.excluded:
			m.drop(r)
		case l.lacks(r.prefix): // it was excluded, or lies in what was, meanwhile
			m.drop(r)
			again = append(again, r)
		default:
			lin, err := r.grow(p)
			if err != nil {
				p.err = err
				m.drop(r)
				continue
			}
			lineages[r] = lin
		}
	}
	m.cluster.Store(l.header.ClusterID)
	if l.through < m.clock.rev.Load() {
		// Only a restored etcd goes back. Its revisions say nothing about what was
		// held, so nothing is readable while the clock is set back.
		for r := range lineages {
			r.end()
		}
		m.clock.publish(l.through, false)
	}
	for r, lin := range lineages {
		if old := r.cur.Load(); old != nil && l.gap && !restored {
			old.successor.Store(lin)
		}
		r.begin(lin)
	}
	m.clock.publish(l.through, false)
	m.stats.etcdRevision.Store(l.through)
	m.stats.historyFloor.Store(l.header.Revision)
	if restored || l.anew {
		m.since.Store(l.through)
	}
	m.lists.Add(1)
	for r := range lineages {
		r.loaded(l.began)
		r.recount()
		r.changed.wake()
	}
	m.bound()
	m.age(time.Now())
	for r, p := range parts {
		if p.err != nil {
			m.diverged(r, p.err)
		}
	}
	for _, r := range again {
		m.reload(r, 0, false)
	}
	m.stats.ready.Store(true)
}

// grow returns a new lineage of the resource: what was listed, and what happened after it. The
// error is that of a change which does not follow what was listed.
func (r *Resource) grow(l *load) (*lineage, error) {
	v := r.found(l.entries, l.header.Revision)
	lin := newLineage(v, eventlog.New[Event](v.rev), !r.owned)
	r.sinceCheckpoint, r.absorbed = 0, 0
	t := &txn{r: r, lin: lin, edit: v.tree.Edit()}
	for i := range l.changes {
		c := &l.changes[i]
		if n := len(t.events); n >= distance(uint64(len(l.changes)-i), r.m.opts.CheckpointEvents) && c.rev != t.events[n-1].Rev {
			t.commitUnpublished()
			t = &txn{r: r, lin: lin, edit: lin.head.Load().tree.Edit()}
		}
		e := c.entry
		if e != nil && !r.keeps(int64(len(e.data))) {
			e = e.withoutValue()
		}
		if err := t.add(c.key, c.rev, e); err != nil {
			return lin, err
		}
	}
	if len(t.events) > 0 {
		t.commitUnpublished()
	}
	return lin, nil
}

// found returns the first version of a new lineage: the entries listed at rev.
func (r *Resource) found(entries []*Entry, rev Revision) *version {
	r.reset()
	for i, e := range entries {
		if !e.hasValue() {
			r.missing++
		} else if !r.keeps(e.Size()) {
			entries[i] = e.withoutValue()
			r.missing++
		} else {
			r.bytes += e.Size()
		}
	}
	return &version{rev: rev, tree: btree.Build(entries)}
}

func newLineage(v *version, log *eventLog, private bool) *lineage {
	lin := &lineage{log: log, private: private}
	lin.head.Store(v)
	lin.readable.Store(v.rev)
	lin.checkpoints.Store(&[]*version{v})
	lin.made.Store(&[]*version{})
	return lin
}

// begin replaces the resource's lineage; cursors on the one before learn of it.
func (r *Resource) begin(lin *lineage) {
	r.sinceCheckpoint = 0
	old := r.cur.Load()
	if old != nil {
		old.log.Abandon() // first: whoever finds the new one finds this one ended
	}
	r.cur.Store(lin)
	if old != nil {
		old.retire()
		r.forget()
	}
	// It may have been loaded at a revision that etcd has been compacted past since.
	r.raise(lin, r.m.stats.compacted.Load())
	r.changed.wake()
}

// reload lists one resource anew, after a delay, while the others go on: at the
// revision of the clock, so that what arrives meanwhile is all that has to be applied
// on top of the list; or, with its history, as loadHistory does. Cursors on the resource
// learn of it. Writer only.
func (m *Mirror) reload(r *Resource, delay time.Duration, history bool) {
	m.drop(r)
	r.await()
	r.loading = true
	ctx, cancel := context.WithCancel(m.ctx)
	r.stopLoading = cancel
	m.wg.Go(func() {
		for next := retryFirst; ; next = min(2*next, retryLast) {
			select {
			case <-time.After(delay):
			case <-ctx.Done():
				return
			}
			// The list needs nothing of what has been waiting for it (I7).
			seen := m.clock.rev.Load()
			m.do(func() {
				if ctx.Err() == nil {
					r.pending = slices.DeleteFunc(r.pending, func(c Change) bool { return c.ModRevision <= seen })
				}
			})
			l := m.loadOne(ctx, r.prefix, seen, history)
			switch {
			case ctx.Err() != nil:
				return
			case l.err == nil:
				m.do(func() {
					if ctx.Err() == nil {
						m.install(r, l)
					}
				})
				return
			}
			r.counts.loadFailures.Add(1)
			m.opts.Logger.Warn("listing a resource failed", "prefix", r.prefix, "error", l.err)
			delay = next
		}
	})
}

// loadOne loads a prefix as it stood at the clock.
func (m *Mirror) loadOne(ctx context.Context, prefix string, clock Revision, history bool) (l *load) {
	cluster := m.cluster.Load()
	if history && m.restores() && clock > 0 {
		// One at a time: etcd reads the history of all keys for each. Who would have to wait
		// for long does without.
		select {
		case m.replaying <- struct{}{}:
			l = m.loadHistory(ctx, prefix, Header{ClusterID: cluster, Revision: clock}, nil)
			<-m.replaying
		case <-time.After(replayQueue):
		case <-ctx.Done():
		}
	}
	if l == nil {
		l = m.list(ctx, prefix, clock)
	}
	if errors.Is(l.err, ErrCompacted) {
		l = m.listAhead(ctx, prefix)
	}
	if l.err == nil && l.header.ClusterID != m.cluster.Load() {
		l.err = fmt.Errorf("%w: cluster %x", ErrRestored, l.header.ClusterID)
	}
	return l
}

// listAhead lists a prefix as it stands now: the clock has stood still for so long that etcd
// was compacted past it. A snapshot at the list's revision may exist only once the clock
// is there; waiting for it makes etcd tell. If it would not, everything is listed anew.
func (m *Mirror) listAhead(ctx context.Context, prefix string) *load {
	if m.opts.EventsOnly {
		err := fmt.Errorf("%w: the clock, at %d", ErrCompacted, m.clock.rev.Load())
		select {
		case m.restart <- restart{m.lists.Load(), err}:
		default:
		}
		return &load{err: err}
	}
	l := m.list(ctx, prefix, 0)
	if l.err == nil {
		l.err = m.Wait(ctx, l.through)
	}
	return l
}

// install begins a lineage with what was loaded and applies what has arrived since.
func (m *Mirror) install(r *Resource, l *load) {
	l.entries = slices.DeleteFunc(l.entries, func(e *Entry) bool { return m.route(e.Key()) != r })
	l.changes = slices.DeleteFunc(l.changes, func(c replayed) bool { return m.route(c.key) != r })
	// What was claimed meanwhile lists for itself.
	pending := slices.DeleteFunc(r.pending, func(c Change) bool { return m.route(string(c.Key)) != r })
	lin, err := r.grow(l)
	t := &txn{r: r, lin: lin, edit: lin.head.Load().tree.Edit()}
	for i := range pending {
		if c := &pending[i]; err == nil && c.ModRevision > l.through {
			err = t.change(c)
		}
	}
	if err != nil {
		m.diverged(r, err)
		return
	}
	if len(t.events) > 0 {
		t.commitUnpublished()
		m.stats.events.Add(int64(len(t.events)))
	}
	lin.suspect.Store(r.suspect)
	r.suspect = false
	// Only now: a reader takes the lineage for complete up to the clock (I8).
	r.begin(lin)
	r.loaded(time.Time{})
	r.recount()
	m.bound()
	m.age(time.Now())
}
