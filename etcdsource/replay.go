package etcdsource

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// replayConfig configures the read of history. etcd (3.4 to 3.7) serves its unsynced watches every
// 100 ms: it loads all revisions since the oldest of them, iterates over them once for each watch,
// and sends each watch its next 1,000 revisions, while writers are blocked. So watches at staggered
// revisions read concurrently: more of them need fewer rounds, but each one makes the rounds
// longer.
//
// Measured: TestReplayFigures in test/engine.
type replayConfig struct {
	// segmentRevisions is the number of revisions of one watch. It is one less than a multiple of
	// 1,000, so that etcd's last response for a segment also contains the first revision of the
	// next one, which ends it.
	segmentRevisions int64
	// watches is the maximum number of concurrent watches.
	watches int
	// maxQueuedBytes bounds the bytes queued for delivery: beyond it, no more watches are created.
	maxQueuedBytes int64
	// patience bounds the wait for a silent member; it grows with each attempt.
	patience time.Duration
}

var defaultReplay = replayConfig{segmentRevisions: 4999, watches: 24, maxQueuedBytes: 128 << 20, patience: 5 * time.Second}

// Replay implements driver.Source. It reads from one member over a separate connection, and
// continues over another one when that connection fails or is silent.
func (s *Source) Replay(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	if after.Revision >= through {
		return nil
	}
	if s.hasNoProgress() {
		return fmt.Errorf("replay %s: %w", prefix, ErrProgressBug)
	}
	config := s.replay
	if after.ClusterID == unidentified {
		// kine reads its whole history for each watch.
		config.segmentRevisions, config.watches = through-after.Revision, 1
	}
	r := &historyReader{source: s, config: config, prefix: prefix, after: after, through: through, deliver: deliver}
	err := s.onMembers(ctx, func(ctx context.Context, conn *grpc.ClientConn) (bool, error) {
		before := r.after.Revision
		if err := s.verify(ctx, driver.Header{ClusterID: after.ClusterID, Revision: through}); err != nil {
			return false, err
		}
		err := r.from(ctx, conn)
		r.config.patience *= 2
		if r.after.Revision > before {
			r.config.patience = config.patience
		}
		return r.after.Revision > before, err
	})
	if err != nil {
		return fmt.Errorf("replay %s after %d: %w", prefix, r.after.Revision, err)
	}
	return nil
}

// historyReader is one Replay in progress.
type historyReader struct {
	source  *Source
	config  replayConfig
	prefix  string
	after   driver.Header // everything up to it was delivered
	through mirror.Revision
	deliver func(driver.Batch) error
}

// segment is a part of history that is read by one watch.
type segment struct {
	start, end mirror.Revision // end is the start of the next segment
	cancel     context.CancelFunc
	done       chan struct{} // closed when the fields below are complete
	batches    []driver.Batch
	through    mirror.Revision // the batches contain everything from start to here: end or more
	bytes      int64
	err        error
}

// from reads history over the connection until everything was delivered.
func (r *historyReader) from(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var (
		heard       atomic.Int64 // see watchStream
		running     atomic.Int64 // segments
		queuedBytes atomic.Int64 // bytes of all segments in the queue
		finished    = make(chan struct{}, 1)
		queue       []*segment // ascending; the first is the next to deliver
		next        = r.after.Revision + 1
	)
	begin := func() {
		s := &segment{start: next, end: min(next+r.config.segmentRevisions, r.through+1), done: make(chan struct{})}
		next = s.end
		queue = append(queue, s)
		var ctxOfSegment context.Context
		ctxOfSegment, s.cancel = context.WithCancel(ctx)
		running.Add(1)
		wg.Go(func() {
			defer s.cancel()
			s.err = r.read(ctxOfSegment, conn, s, &heard, &queuedBytes)
			running.Add(-1)
			close(s.done)
			select {
			case finished <- struct{}{}:
			default:
			}
		})
	}
	silence := time.NewTicker(r.config.patience / 8)
	defer silence.Stop()
	waiting := time.Now()
	for r.after.Revision < r.through {
		for next <= r.through && (len(queue) == 0 || running.Load() < int64(r.config.watches) && queuedBytes.Load() < r.config.maxQueuedBytes) {
			begin()
		}
		first := queue[0]
		select {
		case <-first.done:
		case <-finished: // another segment may begin
			continue
		case <-ctx.Done():
			return context.Cause(ctx)
		case now := <-silence.C:
			if now.Sub(waiting) > r.config.patience && time.Duration(driver.Now()-heard.Load()) > r.config.patience {
				return fmt.Errorf("no response from etcd for %s", r.config.patience)
			}
			continue
		}
		if first.err != nil {
			return first.err
		}
		if err := r.pass(ctx, first); err != nil {
			return err
		}
		// A response may extend into later segments: etcd counts revisions of the prefix only.
		for len(queue) > 0 && queue[0].end-1 <= r.after.Revision {
			queue[0].cancel()
			<-queue[0].done
			queuedBytes.Add(-queue[0].bytes)
			queue[0] = nil // the caller of Replay owns its batches now
			queue = queue[1:]
		}
		next = max(next, r.after.Revision+1)
		waiting = time.Now()
	}
	return nil
}

// pass delivers the events of a segment that were not delivered yet.
func (r *historyReader) pass(ctx context.Context, s *segment) error {
	for _, b := range s.batches {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		for len(b.Changes) > 0 && b.Changes[0].ModRevision <= r.after.Revision {
			b.Changes = b.Changes[1:]
		}
		if len(b.Changes) == 0 {
			continue
		}
		if err := r.deliver(b); err != nil {
			return permanent{err}
		}
		r.after.Revision = b.Through
	}
	r.after.Revision = max(r.after.Revision, min(s.through, r.through))
	return nil
}

// read fills the segment. Each response of etcd is a batch of complete revisions. The segment is
// complete when a later event or progress has arrived: an event at the next segment's start or
// above, or progress; with a watch on all keys, the event of its last revision.
func (r *historyReader) read(ctx context.Context, conn *grpc.ClientConn, s *segment, heard, queuedBytes *atomic.Int64) error {
	key, end := r.source.watched(r.prefix)
	l, err := r.source.openWatchStream(ctx, conn, key, end, s.start, r.after.ClusterID, heard)
	if err != nil {
		return err
	}
	defer l.close()
	for {
		resp, err := l.receive(0)
		if err != nil {
			return err
		}
		if len(resp.Events) == 0 {
			if !r.source.eventsOnly && resp.Header.Revision >= s.end-1 {
				s.through = max(s.through, resp.Header.Revision)
				return nil
			}
			continue
		}
		b := r.batch(resp)
		if n := len(b.Changes); n > 0 {
			s.batches = append(s.batches, b)
			size := eventBytes(resp.Events)
			s.bytes += size
			queuedBytes.Add(size)
		}
		last := resp.Events[len(resp.Events)-1].Kv.ModRevision
		if s.through = last - 1; last >= s.end || r.source.allKeys && last == s.end-1 {
			s.through = last
			return nil
		}
		if last == s.end-1 {
			l.requestProgress() // there may be no later event
		}
	}
}

// batch returns the response's changes of the prefix up to the last requested revision.
func (r *historyReader) batch(resp *pb.WatchResponse) driver.Batch {
	b := driver.Batch{Changes: make([]driver.Change, 0, len(resp.Events))}
	for _, e := range resp.Events {
		if e.Kv.ModRevision > r.through {
			break
		}
		if !r.source.outside(r.prefix, e.Kv.Key) {
			b.Changes = append(b.Changes, driver.Change{KV: fromKV(e.Kv), Deleted: e.Type == mvccpb.DELETE})
			b.Through = e.Kv.ModRevision
		}
	}
	return b
}
