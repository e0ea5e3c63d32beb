package mirror

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stratakube/strata/mirror/internal/freshness"
)

// ErrFeedSilent is the cancellation cause of a Watch that delivered nothing while etcd's revision
// advanced: its member hangs, or is cut off. A source may begin the next one on another member.
var ErrFeedSilent = errors.New("feed is silent")

// progressTimeout bounds one request for progress, which may block on a feed that does not move.
const progressTimeout = time.Second

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

// requestProgress requests progress of the feed, unless every revision has its batch.
func (s *shared) requestProgress(ctx context.Context) {
	if s.opts.EveryRevision {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, progressTimeout)
	defer cancel()
	s.stats.progressRequests.Add(1)
	if err := s.opts.Source.RequestProgress(ctx); err != nil && s.ctx.Err() == nil {
		s.opts.Logger.Debug("progress request failed", "error", err)
	}
}

// readRevision reads etcd's revision. If the answer is of another etcd, it asks for a list of the
// whole prefix. Errors: ErrRestored, those of Source.Current.
func (s *shared) readRevision(ctx context.Context) (Revision, error) {
	lists, known := s.lists.Load(), s.known()
	answer, err := s.opts.Source.Current(ctx)
	if err == nil && known.replacedBy(answer) && (s.lists.Load() == lists || answer.ClusterID != s.cluster.Load()) {
		// The writer has not found out in the meantime.
		err = fmt.Errorf("%w: it is at %d, was at %d", ErrRestored, answer.Revision, known.Revision)
		s.restart(lists, err)
	}
	if err != nil {
		return 0, fmt.Errorf("read current revision: %w", err)
	}
	if answer.Revision > s.stats.etcdRevision.Load() {
		s.stats.etcdRevision.Store(answer.Revision)
	}
	return answer.Revision, nil
}
