package mirror

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrFeedSilent is the cancellation cause of a Watch that delivered nothing while etcd's revision
// advanced: its member hangs, or is cut off. A source may begin the next one on another member.
var ErrFeedSilent = errors.New("feed is silent")

// progressTimeout bounds one request for progress, which may block on a feed that does not move.
const progressTimeout = time.Second

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
