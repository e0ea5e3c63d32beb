package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"

	"github.com/stratakube/strata/mirror"
)

// eventOverhead is added to each event's key and value: what it costs to hold it. A guess.
const eventOverhead = 100

func eventBytes(events []*mvccpb.Event) (n int64) {
	for _, e := range events {
		n += int64(len(e.Kv.Key)+len(e.Kv.Value)) + eventOverhead
	}
	return n
}

// Oldest implements mirror.Source. Where everything that etcd has stored fits the bound, it
// costs three small requests and, if etcd was ever compacted, one round of its
// synchronization, which is 100 ms; else up to maxProbes such rounds (see sampler).
//
// A client inside the server's process has no connection of its own to read history from,
// and a server whose progress cannot be believed cannot tell where the history of a prefix ends:
// none is to be had of either. One that is no etcd holds all that a watch from the past delivers in
// memory at once, so the bounds are lower for it.
func (s *Source) Oldest(ctx context.Context, prefix string, now mirror.Header, bounds mirror.ReplayBounds) (mirror.Revision, error) {
	if s.unproven() || len(s.client.Endpoints()) == 0 || bounds.Revisions <= 0 || bounds.Bytes <= 0 {
		return now.Revision, nil
	}
	if err := s.verify(ctx, now); err != nil {
		return 0, err
	}
	if now.ClusterID == unidentified {
		bounds.Revisions, bounds.Bytes = min(bounds.Revisions, othersRevisions), min(bounds.Bytes, othersBytes)
	}
	oldest := now.Revision
	err := s.onMembers(ctx, func(ctx context.Context, conn *grpc.ClientConn) (bool, error) {
		p := &sampler{source: s, conn: conn, prefix: prefix, now: now}
		for {
			floor, err := p.floor(ctx)
			if err != nil {
				return false, err
			}
			if floor > now.Revision {
				return false, fmt.Errorf("%w: %d, oldest is %d", mirror.ErrCompacted, now.Revision, floor)
			}
			oldest = max(floor, now.Revision-bounds.Revisions)
			if oldest == now.Revision || p.everythingFits(ctx, bounds.Bytes) {
				return false, nil
			}
			oldest, err = p.sample(ctx, oldest, bounds.Bytes)
			if !errors.Is(err, mirror.ErrCompacted) { // else the floor is higher now
				return false, err
			}
		}
	})
	if err != nil {
		return 0, fmt.Errorf("oldest revision of %s: %w", prefix, err)
	}
	return oldest, nil
}

// Bounds of what is read at once from a server that is no etcd: kine loads the previous
// value of each event as well, and sends everything in one message. Guesses, for hosts of 1 GiB.
const (
	othersRevisions = 20_000
	othersBytes     = 32 << 20
)

const (
	// probeWait bounds each question to one member. etcd may be slow, and load a lot.
	probeWait = 3 * time.Second
	// firstProbe is the distance of the first probe; nothing is known yet of what etcd has
	// to load for it. A guess: an eighth of a gigabyte if all values are of 256 KB.
	firstProbe = 500
	// probeGrowth is how much farther than the one before a probe is at most.
	probeGrowth = 8
	maxProbes   = 8
	// probeBytes is what is read of a probe's response at most.
	probeBytes = 8 << 20
)

// sampler finds out how far back the history of a prefix may be read from one member. All
// its questions go to that one, because another may not have applied a compaction yet.
type sampler struct {
	source *Source
	conn   *grpc.ClientConn
	prefix string
	now    mirror.Header
}

// floor returns the oldest revision that the member can list.
//
// A watch from before it is told at once, but on an etcd that was never compacted the
// same watch would make it load everything it has. A range at revision 1 tells which it is.
func (p *sampler) floor(ctx context.Context) (mirror.Revision, error) {
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
		return c.floor, nil
	}
	if err == nil {
		err = errors.New("etcd delivers what it has said is compacted")
	}
	return 0, err
}

// everythingFits reports whether all that the member has stored, history of all keys
// and everything else, is within the bound. false: it is not, or does not tell.
func (p *sampler) everythingFits(ctx context.Context, bytes int64) bool {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	status, err := pb.NewMaintenanceClient(p.conn).Status(ctx, &pb.StatusRequest{})
	if err != nil {
		return false
	}
	size := status.DbSizeInUse
	if size == 0 { // kine reports the size alone, without what is free
		size = status.DbSize
	}
	return size > 0 && size <= bytes
}

// sample returns the oldest revision, oldest or later, such that the events after it are
// believed to be within the bound.
//
// It looks at the history at growing distances from now: what etcd has to load for the next
// look, everything from there to now, is believed to fit, judging by those before. Between
// two looks, the bytes per revision are taken to be the mean of both.
func (p *sampler) sample(ctx context.Context, oldest mirror.Revision, bytes int64) (mirror.Revision, error) {
	var (
		at    = p.now.Revision // everything after it fits
		room  = float64(bytes)
		rate  = -1.0 // bytes per revision before at; not known yet
		reach = mirror.Revision(firstProbe)
	)
	for range maxProbes {
		from := max(oldest, p.now.Revision-reach)
		older, err := p.look(ctx, from+1)
		if err != nil {
			return 0, err
		}
		mean := older
		if rate >= 0 {
			mean = (older + rate) / 2
		}
		need := mean * float64(at-from)
		if need > room {
			return at - mirror.Revision(room/mean), nil
		}
		room -= need
		at, rate = from, older
		if at == oldest {
			return oldest, nil
		}
		distance := p.now.Revision - at
		reach = probeGrowth * distance
		if rate*float64(reach-distance) > room {
			reach = distance + mirror.Revision(room/rate)
		}
		if reach < distance+distance/8 {
			return at, nil // not worth another look
		}
	}
	return at, nil
}

// look returns the bytes per revision of the history from the revision start on, judging by
// what etcd delivers at once, which is 1,000 revisions at most. Revisions that do not touch
// the prefix count.
func (p *sampler) look(ctx context.Context, start mirror.Revision) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	key, end := p.source.watched(p.prefix)
	l, err := p.source.openWatchStream(ctx, p.conn, key, end, start, p.now.ClusterID, new(atomic.Int64))
	if err != nil {
		return 0, err
	}
	defer l.close()
	for {
		r, err := l.receive(probeBytes)
		if err != nil {
			return 0, err
		}
		if n := len(r.Events); n > 0 {
			last := r.Events[n-1].Kv.ModRevision
			return float64(eventBytes(r.Events)) / float64(last-start+1), nil
		}
		if !p.source.eventsOnly && r.Header.Revision >= p.now.Revision {
			return 0, nil // nothing has happened to the prefix
		}
	}
}
