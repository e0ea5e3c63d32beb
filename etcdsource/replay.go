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
)

// replayPlan is how history is read. etcd (3.4 to 3.7) serves the watches that are behind
// every 100 ms: it loads everything since the oldest of them, walks over it once for each, and gives
// each the next 1,000 revisions that concern it, while writers wait. So watches at
// staggered revisions add up, fewer rounds are faster, and each watch makes rounds longer.
//
// Measured: TestReplayFigures in kube/enginetest.
type replayPlan struct {
	// segment is the revisions of one watch. One less than a multiple of 1,000: with the last
	// of so many responses etcd shows the first revision of the next segment, which ends this
	// one.
	segment int64
	// watches is how many there are at once.
	watches int
	// held bounds the bytes that wait for their turn: no more watches are begun beyond it.
	held int64
	// patience bounds the wait for a member that says nothing; the next attempt has more.
	patience time.Duration
}

var defaultPlan = replayPlan{segment: 4999, watches: 24, held: 128 << 20, patience: 5 * time.Second}

// Replay implements mirror.Source. It reads from one member over a connection of its own, and
// goes on over another one when that breaks or is silent.
func (s *Source) Replay(ctx context.Context, prefix string, after mirror.Header, through mirror.Revision, deliver func(mirror.Batch) error) error {
	if after.Revision >= through {
		return nil
	}
	if s.unproven() {
		return fmt.Errorf("replay %s: %w", prefix, ErrProgressBug)
	}
	plan := s.plan
	if after.ClusterID == unidentified {
		// kine reads everything since its start for each watch.
		plan.segment, plan.watches = through-after.Revision, 1
	}
	r := &replay{source: s, plan: plan, prefix: prefix, after: after, through: through, deliver: deliver}
	err := s.onMembers(ctx, func(ctx context.Context, conn *grpc.ClientConn) (bool, error) {
		before := r.after.Revision
		if err := s.verify(ctx, mirror.Header{ClusterID: after.ClusterID, Revision: through}); err != nil {
			return false, err
		}
		err := r.from(ctx, conn)
		r.plan.patience *= 2
		if r.after.Revision > before {
			r.plan.patience = plan.patience
		}
		return r.after.Revision > before, err
	})
	if err != nil {
		return fmt.Errorf("replay %s after %d: %w", prefix, r.after.Revision, err)
	}
	return nil
}

// replay is one Replay in progress.
type replay struct {
	source  *Source
	plan    replayPlan
	prefix  string
	after   mirror.Header // everything up to it was delivered
	through mirror.Revision
	deliver func(mirror.Batch) error
}

// segment is a part of history that one watch reads.
type segment struct {
	start, end mirror.Revision // end is the next one's start
	cancel     context.CancelFunc
	done       chan struct{} // closed when what follows is complete
	batches    []mirror.Batch
	through    mirror.Revision // everything from start to here is in the batches: end or more
	bytes      int64
	err        error
}

// from reads history over the connection until all is delivered.
func (r *replay) from(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var (
		heard    atomic.Int64 // see watchStream
		running  atomic.Int64 // segments
		held     atomic.Int64 // bytes of all that are in the queue
		finished = make(chan struct{}, 1)
		queue    []*segment // in order; the first is the next to be delivered
		next     = r.after.Revision + 1
	)
	begin := func() {
		s := &segment{start: next, end: min(next+r.plan.segment, r.through+1), done: make(chan struct{})}
		next = s.end
		queue = append(queue, s)
		var ctxOfSegment context.Context
		ctxOfSegment, s.cancel = context.WithCancel(ctx)
		running.Add(1)
		wg.Go(func() {
			defer s.cancel()
			s.err = r.read(ctxOfSegment, conn, s, &heard, &held)
			running.Add(-1)
			close(s.done)
			select {
			case finished <- struct{}{}:
			default:
			}
		})
	}
	silence := time.NewTicker(r.plan.patience / 8)
	defer silence.Stop()
	waiting := time.Now()
	for r.after.Revision < r.through {
		for next <= r.through && (len(queue) == 0 || running.Load() < int64(r.plan.watches) && held.Load() < r.plan.held) {
			begin()
		}
		first := queue[0]
		select {
		case <-first.done:
		case <-finished: // another one may begin
			continue
		case <-ctx.Done():
			return context.Cause(ctx)
		case now := <-silence.C:
			if now.Sub(waiting) > r.plan.patience && time.Duration(mirror.Now()-heard.Load()) > r.plan.patience {
				return fmt.Errorf("etcd says nothing for %s", r.plan.patience)
			}
			continue
		}
		if first.err != nil {
			return first.err
		}
		if err := r.pass(ctx, first); err != nil {
			return err
		}
		// What follows may have come along: etcd delivers by revisions that concern the prefix.
		for len(queue) > 0 && queue[0].end-1 <= r.after.Revision {
			queue[0].cancel()
			<-queue[0].done
			held.Add(-queue[0].bytes)
			queue[0] = nil // its batches are the caller's now
			queue = queue[1:]
		}
		next = max(next, r.after.Revision+1)
		waiting = time.Now()
	}
	return nil
}

// pass delivers what a segment has read and was not delivered yet.
func (r *replay) pass(ctx context.Context, s *segment) error {
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

// read fills the segment. Each response of etcd is a batch of complete revisions. That the
// segment is complete is shown by what comes after it, an event at the next one's start or later, or
// progress; where all keys are watched, by the event of its last revision.
func (r *replay) read(ctx context.Context, conn *grpc.ClientConn, s *segment, heard, held *atomic.Int64) error {
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
			held.Add(size)
		}
		last := resp.Events[len(resp.Events)-1].Kv.ModRevision
		if s.through = last - 1; last >= s.end || r.source.allKeys && last == s.end-1 {
			s.through = last
			return nil
		}
		if last == s.end-1 {
			l.askNow() // this may be the last event there is
		}
	}
}

// batch returns the response's changes of the prefix up to the last revision that is read.
func (r *replay) batch(resp *pb.WatchResponse) mirror.Batch {
	b := mirror.Batch{Changes: make([]mirror.Change, 0, len(resp.Events))}
	for _, e := range resp.Events {
		if e.Kv.ModRevision > r.through {
			break
		}
		if !r.source.outside(r.prefix, e.Kv.Key) {
			b.Changes = append(b.Changes, mirror.Change{KV: fromKV(e.Kv), Deleted: e.Type == mvccpb.DELETE})
			b.Through = e.Kv.ModRevision
		}
	}
	return b
}
