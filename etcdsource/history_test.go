package etcdsource

import (
	"context"
	"math"
	"regexp"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

func TestRevisionsWithin_FollowsMeasuredTime(t *testing.T) {
	const pause, distance = 200 * time.Millisecond, 60_000 // the reads of a replay may take 100 ms
	for _, c := range []struct {
		pause, took time.Duration
		want        mirror.Revision
	}{
		{pause, syncInterval + 100*time.Millisecond, distance},
		{pause, syncInterval + 50*time.Millisecond, 2 * distance},
		{pause, syncInterval + 400*time.Millisecond, distance / 4},
		{pause, 50 * time.Millisecond, 2 * distance},     // a round of other watches was between
		{pause, time.Hour, fewRevisions},                 // a stall is no reason to restore nothing
		{pause, 0, math.MaxInt64},                        // unknown
		{0, time.Hour, math.MaxInt64},                    // no bound
		{time.Duration(math.MaxInt64), 1, math.MaxInt32}, // no overflow
	} {
		if got := revisionsWithin(c.pause, c.took, distance); got != c.want {
			t.Errorf("a pause of %v, after %v: %d revisions, want %d", c.pause, c.took, got, c.want)
		}
	}
}

// pastMember is a member of an etcd with a history, for a bubble of synctest.
type pastMember struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
	pb.UnimplementedMaintenanceServer
	pb.UnimplementedClusterServer

	cluster    uint64
	newest     int64
	compacted  int64  // 0: never
	onWatch    func() // with mu held; may be nil
	unreadable bool   // the oldest revision
	accepts    bool   // watches below the compacted revision
	size       *pb.StatusResponse
	name       string // of the only member
	// watch answers a watch from the revision start, after a response that it is created.
	watch func(ctx context.Context, start int64, send func(events ...*mvccpb.Event) error) error
	// behind returns the revisions by which the next progress is behind; nil: none.
	behind func() int64

	mu      sync.Mutex
	reads   int // of revisions
	watches int
}

func (m *pastMember) header() *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: m.cluster, Revision: m.newest}
}

func (m *pastMember) Range(_ context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reads++
	switch {
	case r.Revision > 0 && m.unreadable:
		return nil, status.Error(codes.Internal, "broken")
	case r.Revision > 0 && r.Revision < m.compacted:
		return nil, rpctypes.ErrGRPCCompacted
	}
	return &pb.RangeResponse{Header: m.header()}, nil
}

func (m *pastMember) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	if m.size == nil {
		return nil, status.Error(codes.Internal, "broken")
	}
	return m.size, nil
}

func (m *pastMember) MemberList(context.Context, *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	return &pb.MemberListResponse{Members: []*pb.Member{{Name: m.name}}}, nil
}

func (m *pastMember) Watch(stream pb.Watch_WatchServer) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		header := m.header()
		if create := r.GetCreateRequest(); create != nil {
			m.mu.Lock()
			m.watches++
			if m.onWatch != nil {
				m.onWatch()
			}
			compacted := m.compacted
			m.mu.Unlock()
			err = stream.Send(&pb.WatchResponse{Header: header, Created: true})
			switch {
			case err != nil:
			case create.StartRevision < compacted && !m.accepts:
				err = stream.Send(&pb.WatchResponse{Header: header, Canceled: true, CompactRevision: compacted})
			default:
				err = m.watch(stream.Context(), create.StartRevision, func(events ...*mvccpb.Event) error {
					return stream.Send(&pb.WatchResponse{Header: header, Events: events})
				})
			}
		} else {
			if m.behind != nil {
				header.Revision -= m.behind()
			}
			err = stream.Send(&pb.WatchResponse{Header: header})
		}
		if err != nil {
			return err
		}
	}
}

// watched returns the number of watches.
func (m *pastMember) watched() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.watches
}

// pause returns after d, or with ctx.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// pastEvents returns events of the key /registry/x from start to end, inclusive, of the given bytes
// each (eventBytes).
func pastEvents(start, end int64, bytes func(rev int64) int) (events []*mvccpb.Event) {
	for rev := start; rev <= end; rev++ {
		e := event("/registry/x", rev)
		e.Kv.Value = make([]byte, bytes(rev)-len(e.Kv.Key)-eventOverhead)
		events = append(events, e)
	}
	return events
}

// TestOldest_FollowsBounds of revisions, bytes and pauses. Otherwise the database is too large, an
// event has 200 bytes, and 3,000 of them fit.
func TestOldest_FollowsBounds(t *testing.T) {
	const now, room = 1_000_000, 600_000
	type past struct {
		*pastMember
		driver.ReplayBounds
		last  int64                                       // revision with an event
		bytes func(rev int64) int                         // of an event
		round func(revisions time.Duration) time.Duration // the time in which etcd reads so many
	}
	paused := func(p *past) { p.size, p.Pause = &pb.StatusResponse{DbSizeInUse: room}, time.Second }
	for name, c := range map[string]struct {
		set     func(p *past)
		back    int64 // revisions from now to the oldest
		watches int
		fails   string
	}{
		"bytes":        {func(*past) {}, 3000, 2, ""},
		"large values": {func(p *past) { p.bytes = func(int64) int { return 2000 } }, 300, 1, ""},
		"older values are larger": {func(p *past) {
			p.bytes = func(rev int64) int { return map[bool]int{true: 600, false: 200}[rev <= now-2000] }
		}, 500 + 500_000/400, 2, ""},
		"no newer events":     {func(p *past) { p.last, p.bytes = now-501, func(int64) int { return 400 } }, 500 + room/200, 2, ""},
		"no events":           {func(p *past) { p.last = 0 }, now - 1, 5, ""},
		"no events for long":  {func(p *past) { p.last, p.newest, p.Revisions = 0, 1<<40, 1<<40 }, firstProbe << 21, maxProbes, ""},
		"revisions":           {func(p *past) { p.Revisions = 2000 }, 2000, 2, ""},
		"compacted":           {func(p *past) { p.compacted = now - 1000 }, 1000, 3, ""},
		"compacted to now":    {func(p *past) { p.compacted = now }, 0, 1, ""},
		"compacted after now": {func(p *past) { p.compacted = now + 5 }, 0, 1, "revision compacted"},
		"compacted meanwhile": {func(p *past) { p.onWatch = func() { p.compacted = now - 100 } }, 100, 3, ""},
		"watch is accepted":   {func(p *past) { p.compacted, p.accepts = now, true }, 0, triesPerMember, "accepted a watch"},
		"fits":                {func(p *past) { p.size = &pb.StatusResponse{DbSizeInUse: room, DbSize: 2 * room} }, now - 1, 0, ""},
		"kine fits":           {func(p *past) { p.size = &pb.StatusResponse{DbSize: room} }, now - 1, 0, ""},
		"kine is too large":   {func(p *past) { p.size = &pb.StatusResponse{DbSize: room + 1} }, 3000, 2, ""},
		"unknown size":        {func(p *past) { p.size = &pb.StatusResponse{} }, 3000, 2, ""},
		"no size":             {func(p *past) { p.size = nil }, 3000, 2, ""},
		"kine":                {func(p *past) { paused(p); p.cluster = 0 }, othersRevisions, 0, ""},
		"pause":               {paused, 500_000, 5, ""},
		"pause, slower before": {func(p *past) {
			paused(p)
			p.round = func(n time.Duration) time.Duration {
				return n * map[bool]time.Duration{true: 10_000, false: 1000}[n > 32_000]
			}
		}, 50_000, 4, ""},
		"pause, few":         {func(p *past) { paused(p); p.Revisions = fewRevisions }, fewRevisions, 0, ""},
		"pause, more":        {func(p *past) { paused(p); p.Revisions = fewRevisions + 1 }, fewRevisions + 1, 3, ""},
		"pause, feed server": {func(p *past) { paused(p); p.name = FeedMember }, now - 1, 0, ""},
		"unreadable":         {func(p *past) { p.unreadable = true }, 0, 0, "find oldest revision of /registry/"},
		"no answer":          {func(p *past) { p.last, p.behind = 0, func() int64 { return 1 } }, 0, triesPerMember, "(?i)deadline ?exceeded"},
		"another cluster":    {func(p *past) { p.cluster = 8 }, 0, 0, "cluster ID 8"},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := past{
				pastMember:   &pastMember{cluster: 7, newest: now, size: &pb.StatusResponse{DbSizeInUse: room + 1}},
				ReplayBounds: driver.ReplayBounds{Revisions: now, Bytes: room}, last: now,
				bytes: func(int64) int { return 200 },
				round: func(n time.Duration) time.Duration { return n * time.Microsecond },
			}
			p.watch = func(ctx context.Context, start int64, send func(...*mvccpb.Event) error) error {
				if start > p.last {
					return nil
				}
				pause(ctx, syncInterval+p.round(time.Duration(p.newest-start+1)))
				return send(pastEvents(start, min(start+99, p.last), p.bytes)...)
			}
			c.set(&p)
			header := driver.Header{ClusterID: 7, Revision: p.newest}
			if p.cluster == 0 {
				header.ClusterID = unidentified
			}
			oldest, err := New(serveInMemory(t, p), "test", "/probe").Oldest(t.Context(), "/registry/", header, p.ReplayBounds)
			failed := err != nil && c.fails != "" && regexp.MustCompile(c.fails).MatchString(err.Error()) && oldest == 0
			if !failed && (err != nil || c.fails != "" || oldest != header.Revision-c.back) || p.watched() != c.watches {
				t.Errorf("%s: %d revisions back after %d watches, %v; want %d after %d", name, header.Revision-oldest, p.watched(), err, c.back, c.watches)
			}
		})
	}
}

// TestOldest_WithoutHistory_IsNow, without a request.
func TestOldest_WithoutHistory_IsNow(t *testing.T) {
	now := driver.Header{ClusterID: 7, Revision: 1000}
	inProcess := New(clientv3.NewCtxClient(t.Context()), "test", "/probe")
	synctest.Test(t, func(t *testing.T) {
		m := &pastMember{cluster: 7, newest: 1000}
		s := New(serveInMemory(t, m), "test", "/probe")
		for _, c := range []struct {
			source *Source
			bounds driver.ReplayBounds
		}{
			{inProcess, driver.ReplayBounds{Revisions: 1, Bytes: 1}},
			{s.WithoutProgress(), driver.ReplayBounds{Revisions: 1, Bytes: 1}},
			{s, driver.ReplayBounds{Revisions: 0, Bytes: 1}},
			{s, driver.ReplayBounds{Revisions: 1, Bytes: 0}},
		} {
			if oldest, err := c.source.Oldest(t.Context(), "/registry/", now, c.bounds); oldest != 1000 || err != nil || m.reads > 0 {
				t.Errorf("%+v: %d, %v after %d requests", c.bounds, oldest, err, m.reads)
			}
		}
	})
}
