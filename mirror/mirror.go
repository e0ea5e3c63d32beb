package mirror

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/stratakube/strata/mirror/internal/freshness"
)

// Mirror is a copy of one key range of one etcd cluster. All methods may be called
// concurrently. The writer, which changes the copy, runs on its own goroutine: callers reach it
// by commands only (registry).
type Mirror struct {
	*shared
	reads    *freshness.Reads
	progress *freshness.Progress
}

// New returns a mirror and starts it: it lists the prefix, follows it, and relists it when
// necessary, until Close.
func New(opts Options) (*Mirror, error) {
	if !strings.HasSuffix(opts.Prefix, "/") {
		return nil, fmt.Errorf("mirror: prefix %q does not end with a slash", opts.Prefix)
	}
	if opts.Source == nil {
		return nil, errors.New("mirror: no source")
	}
	opts.setDefaults()
	s := &shared{opts: opts, feed: freshness.NewFeed(), restarts: make(chan restart, 1)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	clock, publisher := freshness.NewClock(s.ctx.Done(), ErrClosed)
	s.clock = clock
	s.excluded.Store(&[]string{})
	s.loading.Store(true)
	// The root holds every key of which no prefix was claimed.
	root := &Resource{m: s, prefix: opts.Prefix}
	s.registry = newRegistry(root)
	w := newWriter(s, publisher, root)
	s.wg.Go(func() { w.run(s.ctx) })
	m := &Mirror{shared: s}
	m.startFreshness()
	return m, nil
}

// Close ends the mirror and returns when its goroutines are gone. Snapshots stay
// readable; waits end with an error.
func (m *Mirror) Close() {
	m.cancel()
	m.reads.Close()
	m.wg.Wait()
}

// Cluster returns the ID of the etcd cluster that is mirrored, 0 before the first list.
func (m *Mirror) Cluster() uint64 { return m.cluster.Load() }

// ChecksArrival reports whether each write is checked on arrival to follow what is held. It is
// false once the source has delivered a key whose Version is 0: the store does not count writes
// (kine), so that only Resource.Check finds a lost one.
func (m *Mirror) ChecksArrival() bool { return !m.stats.uncounted.Load() }

// Done returns a channel that is closed when the mirror is closed.
func (m *Mirror) Done() <-chan struct{} { return m.ctx.Done() }

// Claim returns the resource with the prefix, which must end with a slash and lie
// inside the mirror's. Claims are counted: each needs its Release. A resource that
// is claimed while the mirror runs takes what is already held for it, history
// included, and asks etcd only for values that were not kept.
func (m *Mirror) Claim(prefix string) (*Resource, error) { return m.claim(prefix, false) }

// Exclude marks the prefix as uncached: its keys are not kept and its events are dropped unread,
// until it is claimed after the last Release. The resource never becomes ready.
func (m *Mirror) Exclude(prefix string) (*Resource, error) { return m.claim(prefix, true) }

// Restoring reports whether the whole prefix is being listed, and its history restored:
// a read that fails now can probably be served soon.
func (m *Mirror) Restoring() bool { return m.loading.Load() }

// LoadProgress returns how many keys and changes were read so far, of all lists and of all history, and how often the whole
// prefix had to be relisted or could not be listed. Cost is a few loads.
func (m *Mirror) LoadProgress() (received, failed int64) {
	return m.stats.listedKeys.Load() + m.stats.replayedRecords.Load(), m.stats.relists.Load()
}

// Compact makes rev the oldest revision that can be read with At, as etcd does
// when it is compacted to rev: rev itself stays readable. Logs, and with them
// watchers, keep their own window (KEP-4988). It returns at once; the writer drops the versions
// later. A revision above the clock waits for the clock.
func (m *Mirror) Compact(rev Revision) {
	for {
		old := m.compacted.Load()
		if rev <= old {
			return
		}
		if m.compacted.CompareAndSwap(old, rev) {
			break
		}
	}
	m.registry.enqueue((*writer).applyCompaction)
}

// Compacted returns the highest revision given to Compact.
func (m *Mirror) Compacted() Revision { return m.compacted.Load() }

// Resources returns the resources that are claimed or excluded now, in no order.
func (m *Mirror) Resources() []*Resource { return m.registry.claimed() }

// Clock returns the published revision: every resource that is ready can be read
// at it. It is 0 before the first list.
func (m *Mirror) Clock() Revision { return m.clock.Revision() }

// Wait returns when the clock has reached rev, requesting progress from etcd meanwhile,
// or with ctx's error. With Options.EventsOnly the clock may never get there, though
// etcd has. Errors: ErrClosed.
func (m *Mirror) Wait(ctx context.Context, rev Revision) error { return m.clock.Wait(ctx, rev) }

// Current returns etcd's revision, read linearizably after the call began: at
// least that of every write acknowledged before (I6). A call that arrives while a
// read is in flight joins the next one, never the current; a lone call starts its
// own at once. Cost: one etcd read shared by all callers that wait for it.
func (m *Mirror) Current(ctx context.Context) (Revision, error) { return m.reads.Current(ctx) }

// WantProgress makes the mirror request progress every Options.IdleProgress while no
// events come, for a caller that waits for no revision and yet needs the clock to follow etcd,
// such as a watch with bookmarks. It ends with release, which is to be called once.
func (m *Mirror) WantProgress() (release func()) { return m.progress.Want() }

// startFreshness starts the goroutines that request progress and watch over the feed.
func (m *Mirror) startFreshness() {
	m.progress = freshness.NewProgress(m.clock, m.opts.IdleProgress, m.requestProgress)
	m.reads = freshness.NewReads(m.ctx, m.clock, freshness.Env{
		Read: m.readRevision, Known: m.stats.etcdRevision.Load, Progress: m.progress,
	})
	if m.opts.EventsOnly {
		return
	}
	if !m.opts.EveryRevision {
		m.wg.Go(func() { m.progress.Run(m.ctx) })
	}
	if m.opts.FeedPatience > 0 {
		watchdog := freshness.Watchdog{Feed: m.feed, Clock: m.clock, Reads: m.reads,
			Patience: m.opts.FeedPatience, Request: m.requestProgress}
		m.wg.Go(func() { watchdog.Run(m.ctx) })
	}
}
