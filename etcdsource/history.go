package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// eventOverhead is the estimated memory of an event in addition to its key and value. A guess.
const eventOverhead = 100

func eventBytes(events []*mvccpb.Event) (n int64) {
	for _, e := range events {
		n += int64(len(e.Kv.Key)+len(e.Kv.Value)) + eventOverhead
	}
	return n
}

// Oldest implements driver.Source. If etcd's whole database fits the bound and there are few
// revisions, it costs three small requests and, if etcd was ever compacted, one round of its
// synchronization, which is 100 ms; otherwise up to maxProbes such rounds (see sampler).
//
// No history is available from a client inside the server's process, which has no connection to
// read it from, or from a server with unreliable progress, which cannot report that the history of
// a prefix is complete. A server other than etcd keeps the whole result of a watch from an old
// revision in memory, so the bounds are lower for it.
func (s *Source) Oldest(ctx context.Context, prefix string, now driver.Header, bounds driver.ReplayBounds) (mirror.Revision, error) {
	if s.hasNoProgress() || len(s.client.Endpoints()) == 0 || bounds.Revisions <= 0 || bounds.Bytes <= 0 {
		return now.Revision, nil
	}
	if err := s.verify(ctx, now); err != nil {
		return 0, err
	}
	if now.ClusterID == unidentified {
		bounds.Revisions, bounds.Bytes, bounds.Pause = min(bounds.Revisions, othersRevisions), min(bounds.Bytes, othersBytes), 0
	}
	oldest := now.Revision
	err := s.onMembers(ctx, func(ctx context.Context, conn *grpc.ClientConn) (bool, error) {
		p := &sampler{source: s, conn: conn, prefix: prefix, now: now}
		for {
			floor, err := p.oldestRevision(ctx)
			if err != nil {
				return false, err
			}
			if floor > now.Revision {
				return false, fmt.Errorf("%w: requested %d, oldest available %d", mirror.ErrCompacted, now.Revision, floor)
			}
			oldest = max(floor, now.Revision-bounds.Revisions)
			if oldest == now.Revision {
				return false, nil
			}
			bytes := bounds.Bytes
			if p.everythingFits(ctx, bytes) {
				if bounds.Pause <= 0 || now.Revision-oldest <= fewRevisions || p.ofFeedServer(ctx) {
					return false, nil
				}
				bytes = math.MaxInt64
			}
			oldest, err = p.sample(ctx, oldest, bytes, bounds.Pause)
			if !errors.Is(err, mirror.ErrCompacted) { // otherwise the floor has risen
				return false, err
			}
		}
	})
	if err != nil {
		return 0, fmt.Errorf("find oldest revision of %s: %w", prefix, err)
	}
	return oldest, nil
}

// Bounds of one read from a server other than etcd: kine also loads the previous value of each
// event, and sends everything in one message. Guesses, for hosts of 1 GiB.
const (
	othersRevisions = 20_000
	othersBytes     = 32 << 20
)

const (
	// probeWait bounds each request to one member. etcd may be slow, and load a lot.
	probeWait = 3 * time.Second
	// firstProbe is the distance of the first probe, for which the amount that etcd has to load is
	// unknown. A guess: an eighth of a gigabyte if all values are of 256 KB.
	firstProbe = 500
	// probeGrowth bounds the distance of a probe to this multiple of the previous one.
	probeGrowth = 8
	maxProbes   = 8
	// fewRevisions are restored however busy etcd is: they block a writer for about 30 ms with
	// values of 1 KB.
	fewRevisions = 10_000
	// syncInterval is the time from the end of a round of etcd's synchronization to the next one
	// (watchResyncPeriod).
	syncInterval = 100 * time.Millisecond
	// staggeredCost is the time of a round that serves the watches of a replay, as a multiple of
	// that of a probe (measured: TestReplayFigures).
	staggeredCost = 2
	// probeBytes bounds the part of a probe's response that is read.
	probeBytes = 8 << 20
)

// sampler determines how far back the history of a prefix can be read from one member. It sends all
// its requests to that member, because another one may not have applied a compaction yet.
type sampler struct {
	source *Source
	conn   *grpc.ClientConn
	prefix string
	now    driver.Header

	answered time.Time // when the last probe was answered; zero before the first
}

// oldestRevision returns the oldest revision that the member can list.
//
// etcd cancels a watch below its compact revision at once, and reports that revision (E6 of
// docs/etcd-contract.md). On an etcd that was never compacted, such a watch would load its whole
// history, so a range at revision 1 checks for that first.
func (p *sampler) oldestRevision(ctx context.Context) (mirror.Revision, error) {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	_, err := pb.NewKVClient(p.conn).Range(ctx, &pb.RangeRequest{Key: []byte(p.source.probe), Revision: 1, CountOnly: true, Limit: 1})
	if err = rpctypes.Error(err); err == nil {
		return 1, nil
	}
	if !errors.Is(err, rpctypes.ErrCompacted) {
		return 0, translate(err)
	}
	l, err := p.source.openWatchStream(ctx, p.conn, p.source.probe, "", 1, p.now.ClusterID, new(atomic.Int64))
	if err != nil {
		return 0, err
	}
	defer l.close()
	_, err = l.receive(0)
	if c := (*compactedError)(nil); errors.As(err, &c) {
		return c.oldestRevision, nil
	}
	if err == nil {
		err = errors.New("etcd accepted a watch from a revision that it reported as compacted")
	}
	return 0, err
}

// ofFeedServer reports whether the member is a feed server, which reads history from memory and
// blocks no writer. Samples of history that it is restoring itself would take longer than
// probeWait.
func (p *sampler) ofFeedServer(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	resp, err := pb.NewClusterClient(p.conn).MemberList(ctx, &pb.MemberListRequest{})
	return err == nil && isFeedServer(resp.Members)
}

// everythingFits reports whether the member's whole database, including the history of all keys, is
// within the bound. false: it is not, or the size is unknown.
func (p *sampler) everythingFits(ctx context.Context, bytes int64) bool {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	status, err := pb.NewMaintenanceClient(p.conn).Status(ctx, &pb.StatusRequest{})
	if err != nil {
		return false
	}
	size := status.DbSizeInUse
	if size == 0 { // kine reports DbSize only
		size = status.DbSize
	}
	return size > 0 && size <= bytes
}

// sample returns the lowest revision, at or above oldest, for which the events after it are
// estimated to be within the bounds on bytes and on the time for which etcd blocks writers; a pause
// of 0 is no bound.
//
// It samples the history at growing distances from now. For the next sample etcd has to load
// everything from there to now, which must fit according to the previous samples. Between two
// samples, the bytes per revision are estimated by the mean of both.
func (p *sampler) sample(ctx context.Context, oldest mirror.Revision, bytes int64, pause time.Duration) (mirror.Revision, error) {
	var (
		at    = p.now.Revision // everything after it fits
		room  = float64(bytes)
		rate  = -1.0 // bytes per revision before at; -1: unknown
		reach = mirror.Revision(firstProbe)
	)
	for range maxProbes {
		from := max(oldest, p.now.Revision-reach)
		older, took, err := p.look(ctx, from+1)
		if err != nil {
			return 0, err
		}
		mean := older
		if rate >= 0 {
			mean = (older + rate) / 2
		}
		need := mean * float64(at-from)
		lowest := from
		if need > room {
			lowest = at - mirror.Revision(room/mean)
		}
		within := revisionsWithin(pause, took, p.now.Revision-from)
		lowest = max(lowest, p.now.Revision-within)
		if lowest > from {
			return lowest, nil
		}
		room -= need
		at, rate = from, older
		if at == oldest {
			return oldest, nil
		}
		distance := p.now.Revision - at
		reach = min(probeGrowth*distance, within)
		if rate*float64(reach-distance) > room {
			reach = distance + mirror.Revision(room/rate)
		}
		if reach < distance+distance/8 {
			return at, nil // another sample would gain little
		}
	}
	return at, nil
}

// revisionsWithin returns how many revisions etcd reads for a replay within pause, at least
// fewRevisions. took is the time between the answers of two probes, the second of which had
// distance revisions; 0 if unknown. etcd blocks writers for the time of a round, and begins the
// next one syncInterval later, so the rest of took is the time of the second round. Rounds for
// other watches may be between the two: then the result is too low, or the interval is not in took,
// and all of took counts.
func revisionsWithin(pause, took time.Duration, distance mirror.Revision) mirror.Revision {
	if pause <= 0 || took <= 0 {
		return math.MaxInt64
	}
	if took > syncInterval {
		took -= syncInterval
	}
	within := float64(pause) / staggeredCost * float64(distance) / float64(took)
	return max(fewRevisions, mirror.Revision(min(within, math.MaxInt32)))
}

// look returns the bytes per revision of the history from the revision start on, estimated from
// etcd's first response, which has at most 1,000 revisions. Revisions that do not touch the prefix
// count. took is the time since the last probe was answered; 0 for the first one.
func (p *sampler) look(ctx context.Context, start mirror.Revision) (rate float64, took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	key, end := p.source.watched(p.prefix)
	l, err := p.source.openWatchStream(ctx, p.conn, key, end, start, p.now.ClusterID, new(atomic.Int64))
	if err != nil {
		return 0, 0, err
	}
	defer l.close()
	defer func() {
		now := time.Now()
		if !p.answered.IsZero() {
			took = now.Sub(p.answered)
		}
		p.answered = now
	}()
	for {
		r, err := l.receive(probeBytes)
		if err != nil {
			return 0, 0, err
		}
		if n := len(r.Events); n > 0 {
			last := r.Events[n-1].Kv.ModRevision
			return float64(eventBytes(r.Events)) / float64(last-start+1), 0, nil
		}
		if !p.source.eventsOnly && r.Header.Revision >= p.now.Revision {
			return 0, 0, nil // the prefix has no events
		}
	}
}
