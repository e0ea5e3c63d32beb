package mirror

import (
	"context"
	"fmt"
	"time"
)

// progressTimeout bounds one progress request, which may block on a stalled feed.
const progressTimeout = time.Second

// requestProgress requests progress on the feed, unless the source delivers every revision.
func (s *shared) requestProgress(ctx context.Context) {
	if s.opts.EveryRevision {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, progressTimeout)
	defer cancel()
	s.stats.ProgressRequests.Add(1)
	if err := s.opts.Source.RequestProgress(ctx); err != nil && s.ctx.Err() == nil {
		s.opts.Logger.Debug("Progress request failed", "err", err)
	}
}

// readRevision reads etcd's revision. If the answer is from another cluster or an older state, it
// requests a list of the whole prefix. Errors: ErrRestored, those of Source.ReadRevision.
func (s *shared) readRevision(ctx context.Context) (Revision, error) {
	lists, known := s.installedLists.Load(), s.mirroredState()
	answer, err := s.opts.Source.ReadRevision(ctx)
	if err == nil && known.ReplacedBy(answer) && (s.installedLists.Load() == lists || answer.ClusterID != s.cluster.Load()) {
		// The writer has not detected it meanwhile.
		err = fmt.Errorf("%w: revision is %d, was %d", ErrRestored, answer.Revision, known.Revision)
		s.restart(lists, err)
	}
	if err != nil {
		return 0, fmt.Errorf("read current revision: %w", err)
	}
	if answer.Revision > s.stats.EtcdRevision.Load() {
		s.stats.EtcdRevision.Store(answer.Revision)
	}
	return answer.Revision, nil
}
