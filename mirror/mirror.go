package mirror

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/stratakube/strata/mirror/internal/freshness"
)

// Mirror is a copy of one key range of one etcd cluster. All methods may be called concurrently.
// The writer, which changes the copy, runs on its own goroutine and is reached by commands only
// (registry).
type Mirror struct {
	*shared
	reads    *freshness.Reads
	progress *freshness.Progress
}

// New returns a running mirror. It lists the prefix, follows it, and relists it when necessary,
// until Close.
func New(opts Options) (*Mirror, error) {
	if !strings.HasSuffix(opts.Prefix, "/") {
		return nil, fmt.Errorf("mirror: prefix %q does not end with a slash", opts.Prefix)
	}
	if opts.Source == nil {
		return nil, errors.New("mirror: no source")
	}
	opts.setDefaults()
	s := &shared{opts: opts, feedHealth: freshness.NewFeedHealth(), restarts: make(chan restart, 1)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	published, publisher := freshness.NewPublished(s.ctx.Done(), ErrClosed)
	s.published = published
	s.excluded.Store(&[]string{})
	s.loading.Store(true)
	// The root resource contains every key whose prefix is not claimed.
	root := &Resource{m: s, prefix: opts.Prefix}
	s.registry = newRegistry(root)
	w := newWriter(s, publisher, root)
	s.wg.Go(func() { w.loop(s.ctx) })
	s.wg.Go(func() { newCompressor(s, defaultCompression).run(s.ctx) })
	m := &Mirror{shared: s}
	m.startFreshness()
	return m, nil
}

// Close stops the mirror and returns when its goroutines have ended. Snapshots stay readable; waits
// return ErrClosed.
func (m *Mirror) Close() {
	m.cancel()
	m.reads.Close()
	m.wg.Wait()
}

// Cluster returns the ID of the etcd cluster that is mirrored, 0 before the first list.
func (m *Mirror) Cluster() uint64 { return m.cluster.Load() }

// VerifiesVersions reports whether each write is checked on arrival against the cached entry. It is
// false once the source has delivered a key whose Version is 0: that store does not count writes
// (kine), so only Resource.Check finds a lost write.
func (m *Mirror) VerifiesVersions() bool { return !m.stats.uncounted.Load() }

// Done returns a channel that is closed when the mirror is closed.
func (m *Mirror) Done() <-chan struct{} { return m.ctx.Done() }

// Claim returns the resource with the prefix, which must end with a slash and lie inside the
// mirror's. Claims are counted: each needs its Release. A resource claimed on a running mirror
// starts with the cached keys and history of its prefix, and reads from etcd only the values that
// were not kept. Errors: a prefix that is none of the mirror or is excluded, ErrClosed.
func (m *Mirror) Claim(prefix string) (*Resource, error) { return m.claim(prefix, false) }

// Exclude marks the prefix as uncached: its keys are not stored and its events are discarded
// without decoding, until the last Release and a later claim. The resource never becomes ready.
// Errors: a prefix that is none of the mirror or is claimed, ErrClosed.
func (m *Mirror) Exclude(prefix string) (*Resource, error) { return m.claim(prefix, true) }

// Loading reports whether the whole prefix is being listed. A read that fails during this time can
// probably be served soon.
func (m *Mirror) Loading() bool { return m.loading.Load() }

// LoadState is the state of a mirror's lists and restores.
type LoadState struct {
	Loading  bool   // the whole prefix is being listed; see Mirror.Loading
	Listed   int64  // keys that its current or last list has read
	Position string // the last one of them
	// Restoring reports whether history is being read, and Restored is the number of changes read,
	// over all restores.
	Restoring bool
	Restored  int64
	Received  int64 // keys and changes read, over all lists and restores
	Failed    int64 // times the whole prefix had to be relisted, or could not be listed
}

// LoadState returns the state of lists and restores. Cost is a few atomic loads.
func (m *Mirror) LoadState() LoadState {
	p := LoadState{
		Loading:   m.Loading(),
		Listed:    m.stats.listing.Load(),
		Restoring: m.stats.Restoring.Load() > 0,
		Restored:  m.stats.replayedRecords.Load(),
		Failed:    m.stats.Relists.Load(),
	}
	p.Received = m.stats.ListedKeys.Load() + p.Restored
	if key := m.stats.position.Load(); key != nil {
		p.Position = *key
	}
	return p
}

// Compact makes rev the oldest revision that At can read, like a compaction of etcd to rev: rev
// itself stays readable. Logs, and therefore watchers, keep their own window (KEP-4988). Compact
// returns at once; the writer drops the versions later. A revision above the published revision
// takes effect when the published revision reaches it.
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

// CompactRevision returns the highest revision given to Compact.
func (m *Mirror) CompactRevision() Revision { return m.compacted.Load() }

// Resources returns the resources that are currently claimed or excluded, in no order.
func (m *Mirror) Resources() []*Resource { return m.registry.claimed() }

// PublishedRevision returns the published revision. Every ready resource can be read at it. It is 0
// before the first list.
func (m *Mirror) PublishedRevision() Revision { return m.published.Revision() }

// EtcdRevision returns the newest revision that etcd is known to have, at least the published
// revision. It advances with events, progress and ReadRevision. Cost is two loads.
func (m *Mirror) EtcdRevision() Revision {
	return max(m.stats.EtcdRevision.Load(), m.PublishedRevision())
}

// Wait returns when the published revision has reached rev, or with ctx's error. It requests
// progress from etcd while it waits. With Options.EventsOnly the published revision may never reach
// a revision that etcd has. Errors: ErrClosed.
func (m *Mirror) Wait(ctx context.Context, rev Revision) error { return m.published.Wait(ctx, rev) }

// ReadRevision returns etcd's revision, read linearizably after the call began: at least the
// revision of every write acknowledged before (I6). A call that arrives while a read is in flight
// joins the next read, never the one in flight. A call without concurrent calls starts its own read
// at once. Cost: one etcd read shared by all waiting callers. Errors: ErrRestored, after which the
// prefix is relisted, ErrClosed, those of Source.ReadRevision, ctx's.
func (m *Mirror) ReadRevision(ctx context.Context) (Revision, error) {
	return m.reads.ReadRevision(ctx)
}

// WantProgress makes the mirror request progress every Options.IdleProgress while no events arrive.
// It is for callers that wait for no revision but need the published revision to follow etcd, such
// as a watch with bookmarks. The caller must call release exactly once.
func (m *Mirror) WantProgress() (release func()) { return m.progress.Want() }

// startFreshness starts the goroutines that request progress and monitor the feed.
func (m *Mirror) startFreshness() {
	m.progress = freshness.NewProgress(m.published, m.opts.IdleProgress, m.requestProgress)
	m.reads = freshness.NewReads(m.ctx, m.published, freshness.Env{
		Read: m.readRevision, Known: m.stats.EtcdRevision.Load, Progress: m.progress,
	})
	if m.opts.EventsOnly {
		return
	}
	if !m.opts.EveryRevision {
		m.wg.Go(func() { m.progress.Run(m.ctx) })
	}
	if m.opts.FeedPatience > 0 {
		watchdog := freshness.Watchdog{Feed: m.feedHealth, Published: m.published, Reads: m.reads,
			Patience: m.opts.FeedPatience, Request: m.requestProgress}
		m.wg.Go(func() { watchdog.Run(m.ctx) })
	}
}
