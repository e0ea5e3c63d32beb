package mirror

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/mirror/driver"
)

// load is a prefix as listed at one revision, and the changes after it. Every lineage begins with a
// load (D5). The loader creates it; it has no effect before the writer installs it.
type load struct {
	header     driver.Header // of the list
	entries    []*Entry
	changes    []replayedChange // after the list and up to through, whole revisions in order
	through    Revision
	began      time.Time
	took       time.Duration // to read the changes
	omitted    []string      // excluded prefixes whose keys were left out
	hasGap     bool          // ended lineages get a successor, with a gap of events in between
	mayBeWrong bool          // the cached state, or events sent to clients, may be wrong
	err        error
}

// replayedChange is a change that was read from etcd's history: a write, or a deletion if it has no
// entry.
type replayedChange struct {
	key   string
	rev   Revision
	entry *Entry
}

// omits reports whether keys with the prefix may have been left out.
func (l *load) omits(prefix string) bool {
	return slices.ContainsFunc(l.omitted, func(p string) bool { return strings.HasPrefix(prefix, p) })
}

// errStart is the reason for the first list.
var errStart = errors.New("initial list")

// errOvertaken: etcd was compacted past the published revision, which does not advance without progress. The
// whole prefix has to be listed.
var errOvertaken = fmt.Errorf("%w: etcd was compacted past the published revision", ErrCompacted)

// omit reports whether key is under an excluded prefix, and records that prefix in left.
func omit(key []byte, excluded []string, omitted *[]string) bool {
	p := slices.IndexFunc(excluded, func(p string) bool { return bytes.HasPrefix(key, []byte(p)) })
	if p < 0 {
		return false
	}
	if !slices.Contains(*omitted, excluded[p]) {
		*omitted = append(*omitted, excluded[p])
	}
	return true
}

// loader reads resources and their history from the source. It changes nothing in the mirror except
// counters of its reads, and accesses the mirror only through the functions below. Its methods may
// be called concurrently.
type loader struct {
	opts  *Options
	count *counters

	mirroredState func() driver.Header                               // the mirrored cluster and the published revision
	excluded      func() []string                                    // prefixes whose keys can be left out
	oldestTrusted func() Revision                                    // history before it must not be restored
	wait          func(ctx context.Context, revision Revision) error // until the revision is published

	replaying chan struct{} // contains a value while the history of a resource is being read
}

// list reads a prefix, without excluded prefixes, at a revision, or at the newest one if that is 0.
// It builds the entries of a page while the next page is in flight. A list that cannot be of one
// revision returns ErrDiverged.
func (o *loader) list(ctx context.Context, prefix string, at Revision) *load {
	l := &load{}
	var last []byte
	var newest Revision
	l.header, l.err = o.opts.Source.List(ctx, prefix, at, func(page []driver.KV) error {
		excluded := o.excluded()
		for i := range page {
			kv := &page[i]
			if last != nil && bytes.Compare(last, kv.Key) >= 0 {
				return fmt.Errorf("%w: list out of order: key %q after key %q", ErrDiverged, kv.Key, last)
			}
			last, newest = kv.Key, max(newest, kv.ModRevision)
			if !omit(kv.Key, excluded, &l.omitted) {
				l.entries = append(l.entries, newEntry(kv, true))
			}
		}
		o.count.ListedKeys.Add(int64(len(page)))
		if len(page) > 0 && page[0].Version == 0 {
			o.count.uncounted.Store(true)
		}
		return ctx.Err()
	})
	if l.err == nil && newest > l.header.Revision {
		l.err = fmt.Errorf("%w: list at revision %d contains mod revision %d", ErrDiverged, l.header.Revision, newest)
	}
	l.through = l.header.Revision
	return l
}

// replay adds to a load the changes of a prefix after the list, without excluded prefixes. Changes
// out of revision order return ErrDiverged.
func (o *loader) replay(ctx context.Context, l *load, prefix string, after driver.Header, through Revision) error {
	last := after.Revision
	return o.opts.Source.Replay(ctx, prefix, after, through, func(b driver.Batch) error {
		excluded := o.excluded()
		begin := last
		defer func() { last = max(last, b.Through) }()
		for i := range b.Changes {
			c := &b.Changes[i]
			if c.ModRevision <= begin || c.ModRevision < last || c.ModRevision > min(b.Through, through) {
				return fmt.Errorf("%w: history out of order: revision %d of key %q after revision %d, last requested revision %d", ErrDiverged, c.ModRevision, c.Key, last, through)
			}
			last = c.ModRevision
			if omit(c.Key, excluded, &l.omitted) {
				continue
			}
			r := replayedChange{rev: c.ModRevision}
			if c.Deleted {
				r.key = string(c.Key)
			} else {
				r.entry = newEntry(&c.KV, true)
				r.key = r.entry.Key()
			}
			l.changes = append(l.changes, r)
		}
		o.count.replayedRecords.Add(int64(len(b.Changes)))
		return ctx.Err()
	})
}

const (
	// historyTimeout bounds a load with history: the oldest revision, a list and the events. A
	// guess: ten times the duration of the largest default restore.
	historyTimeout = 30 * time.Second
	// replayTimeout bounds the read of the events: twice the duration of the largest default
	// restore on three servers that start at once on two processors.
	replayTimeout = 15 * time.Second
	// replayQueue bounds the wait of a resource while the history of others is read.
	replayQueue = time.Second
	// replayAttempts bounds the retries after a compaction has overtaken the read.
	replayAttempts = 5
)

// replaysHistory reports whether history is restored at all: a source without reliable progress cannot
// report that a part of it is complete.
func (o *loader) replaysHistory() bool {
	return o.opts.Replay.Revisions > 0 && o.opts.Replay.Bytes > 0 && !o.opts.EventsOnly
}

// loadAll loads the whole prefix: at the oldest revision within the bounds, with the later changes,
// or at the newest revision without history. It restores no history if etcd was restored or the
// feed has contradicted itself: etcd's history may then differ from the events that clients have
// received, so they have to start over. why is the reason for the load.
func (o *loader) loadAll(ctx context.Context, why error) *load {
	began := time.Now()
	var l *load
	if o.replaysHistory() && (errors.Is(why, errStart) || errors.Is(why, ErrCompacted)) {
		now, err := o.now(ctx)
		if err != nil {
			return &load{err: fmt.Errorf("read current revision: %w", err)}
		}
		if !o.mirroredState().ReplacedBy(now) {
			l = o.loadHistory(ctx, o.opts.Prefix, now, o.now)
		}
	}
	if l == nil {
		l = o.list(ctx, o.opts.Prefix, 0)
	}
	l.began = began
	l.hasGap = errors.Is(why, ErrCompacted)
	l.mayBeWrong = !l.hasGap && !errors.Is(why, errStart)
	if l.err == nil {
		o.opts.Logger.Info("Listed the prefix", "prefix", o.opts.Prefix, "keys", len(l.entries), "revision", l.header.Revision,
			"through", l.through, "took", time.Since(began).Round(time.Millisecond))
	}
	return l
}

// now reads etcd's revision; it retries, possibly on another member, if there is no answer in time.
func (o *loader) now(ctx context.Context) (now driver.Header, err error) {
	const longest = 8 * time.Second
	for timeout := 500 * time.Millisecond; timeout <= longest && ctx.Err() == nil; timeout *= 2 {
		attempt, cancel := context.WithTimeout(ctx, timeout)
		now, err = o.opts.Source.ReadRevision(attempt)
		late := attempt.Err() != nil
		cancel()
		if err == nil || !late {
			break
		}
	}
	return now, err
}

// loadHistory loads a prefix at the oldest revision within the bounds, and its changes up to now.
// If a compaction overtakes the read, it retries, with the revision that again returns if again is
// given. It returns nil if history is not available: the caller lists the newest revision.
func (o *loader) loadHistory(ctx context.Context, prefix string, now driver.Header, again func(context.Context) (driver.Header, error)) *load {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, historyTimeout)
	defer cancel()
	var err error
	for range replayAttempts {
		var (
			oldest Revision
			l      *load
		)
		if oldest, err = o.opts.Source.Oldest(ctx, prefix, now, o.opts.Replay); err == nil {
			oldest = max(oldest, min(o.oldestTrusted(), now.Revision))
			l, err = o.loadSince(ctx, prefix, driver.Header{ClusterID: now.ClusterID, Revision: oldest}, now.Revision)
		}
		if err == nil {
			if oldest < now.Revision {
				o.count.countReplay(l)
				o.opts.Logger.Info("Restored history", "prefix", prefix, "after", oldest, "through", l.through,
					"events", len(l.changes), "took", time.Since(began).Round(time.Millisecond), "replay", l.took.Round(time.Millisecond))
			}
			return l
		}
		if !errors.Is(err, ErrCompacted) {
			break
		}
		o.opts.Logger.Info("Compaction overtook the history; restarting the read", "prefix", prefix, "revision", now.Revision)
		if again == nil {
			continue
		}
		if now, err = again(ctx); err == nil && o.mirroredState().ReplacedBy(now) {
			err = ErrRestored
		}
		if err != nil {
			break
		}
	}
	o.opts.Logger.Warn("History could not be restored; rejecting watches from earlier revisions",
		"prefix", prefix, "revision", now.Revision, "err", err)
	return nil
}

// loadSince lists the prefix at a revision, and then reads the changes after it. The two reads are
// not concurrent because etcd would block writers for longer.
func (o *loader) loadSince(ctx context.Context, prefix string, after driver.Header, through Revision) (*load, error) {
	l := o.list(ctx, prefix, after.Revision)
	if l.err != nil {
		return nil, l.err
	}
	if l.header.ClusterID != after.ClusterID {
		return nil, fmt.Errorf("%w: cluster ID %x, was %x", ErrRestored, l.header.ClusterID, after.ClusterID)
	}
	listed := time.Now()
	ctx, cancel := context.WithTimeout(ctx, replayTimeout)
	defer cancel()
	if err := o.replay(ctx, l, prefix, after, through); err != nil {
		return nil, err
	}
	l.through, l.took = through, time.Since(listed)
	return l, nil
}

// loadOne loads a prefix at the published revision.
func (o *loader) loadOne(ctx context.Context, prefix string, published Revision, history bool) (l *load) {
	cluster := o.mirroredState().ClusterID
	if history && o.replaysHistory() && published > 0 {
		// One at a time, because each replay makes etcd read the history of all keys. After
		// replayQueue a resource is loaded without history.
		select {
		case o.replaying <- struct{}{}:
			l = o.loadHistory(ctx, prefix, driver.Header{ClusterID: cluster, Revision: published}, nil)
			<-o.replaying
		case <-time.After(replayQueue):
		case <-ctx.Done():
		}
	}
	if l == nil {
		l = o.list(ctx, prefix, published)
	}
	if errors.Is(l.err, ErrCompacted) {
		l = o.listAhead(ctx, prefix)
	}
	if l.err == nil && l.header.ClusterID != o.mirroredState().ClusterID {
		l.err = fmt.Errorf("%w: cluster ID %x", ErrRestored, l.header.ClusterID)
	}
	return l
}

// listAhead lists a prefix at the newest revision: the published revision has not advanced for so long that etcd
// was compacted past it. A snapshot at the list's revision must not exist before the published revision has
// reached it; the wait requests progress. Error, if there is no progress: errOvertaken.
func (o *loader) listAhead(ctx context.Context, prefix string) *load {
	if o.opts.EventsOnly {
		return &load{err: fmt.Errorf("%w %d", errOvertaken, o.mirroredState().Revision)}
	}
	l := o.list(ctx, prefix, 0)
	if l.err == nil {
		l.err = o.wait(ctx, l.through)
	}
	return l
}

// countReplay counts a history that was read from etcd.
func (c *counters) countReplay(l *load) {
	c.Replays.Add(1)
	c.ReplayedEvents.Add(int64(len(l.changes)))
	c.ReplayFloor.Store(l.header.Revision)
	c.ReplayTime.Store(int64(l.took))
}
