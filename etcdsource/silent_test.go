package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// member implements the part of etcd's protocol that a source needs, with a fixed history: the key
// /registry/x at each revision from 2 to newest that is not a multiple of ten.
type member struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
	pb.UnimplementedMaintenanceServer

	id     uint64
	newest int64
	lags   atomic.Int64 // revisions by which the headers of progress responses are behind
	batch  int64        // revisions per response
	hangs  atomic.Bool  // requests are not answered
	denies atomic.Bool  // watches are refused
	stop   func()
	// of every fifth segment of ten revisions, the first stream breaks in the segment
	breaks bool
	seed   uint64 // of the fragments

	ranges, watches atomic.Int64
	broken          sync.Map // by segment
}

func (m *member) header() *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: 1, MemberId: m.id, Revision: m.newest}
}

func (m *member) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	m.ranges.Add(1)
	if m.hangs.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &pb.RangeResponse{Header: m.header()}, nil
}

func (m *member) Watch(stream pb.Watch_WatchServer) error {
	m.watches.Add(1)
	if m.hangs.Load() {
		<-stream.Context().Done()
		return nil
	}
	if m.denies.Load() {
		return status.Error(codes.PermissionDenied, "permission denied")
	}
	at, sent, breaks := int64(0), int64(0), false
	send := func(r *pb.WatchResponse) error {
		if sent++; breaks && sent > 3 {
			return errors.New("broken")
		}
		r.Header = m.header()
		return stream.Send(r)
	}
	for {
		req, err := stream.Recv()
		if err != nil {
			return err
		}
		if c := req.GetCreateRequest(); c != nil {
			// A segment whose stream breaks twice in a row ends the replay, so each breaks once.
			if segment := (c.StartRevision - 2) / 10; m.breaks && segment%5 == 1 {
				_, again := m.broken.LoadOrStore(segment, true)
				breaks = !again
			}
			if err := send(&pb.WatchResponse{Created: true}); err != nil {
				return err
			}
			// Segments are read concurrently, so the fragments of each follow from its start.
			rnd := rand.New(rand.NewPCG(m.seed, uint64(c.StartRevision)))
			for at = c.StartRevision; at <= m.newest; {
				var events []*mvccpb.Event
				for n := int64(0); n < m.batch && at <= m.newest; at++ {
					if at%10 != 0 {
						n++
						events = append(events, m.event(at))
					}
				}
				// Fragments are split at any place.
				for len(events) > 0 {
					n := 1 + rnd.IntN(len(events))
					if err := send(&pb.WatchResponse{Events: events[:n], Fragment: n < len(events)}); err != nil {
						return err
					}
					events = events[n:]
				}
			}
		}
		if req.GetProgressRequest() != nil {
			header := m.header()
			header.Revision -= m.lags.Load()
			if err := stream.Send(&pb.WatchResponse{WatchId: -1, Header: header}); err != nil {
				return err
			}
		}
	}
}

func (m *member) event(rev int64) *mvccpb.Event {
	return &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("/registry/x"), Value: fmt.Appendf(nil, "%d", rev), CreateRevision: 2, ModRevision: rev, Version: rev}}
}

// serveMembers returns a client of the members, without sockets: also for a bubble of synctest, but
// not for watches of the client there, which wait on a channel of its package.
func serveMembers(t *testing.T, members ...*member) *clientv3.Client {
	t.Helper()
	var endpoints []string
	listeners := map[string]*bufconn.Listener{}
	for i, m := range members {
		m.id = uint64(i + 1)
		listener, server := bufconn.Listen(1<<16), grpc.NewServer()
		pb.RegisterKVServer(server, m)
		pb.RegisterWatchServer(server, m)
		pb.RegisterMaintenanceServer(server, m)
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
		m.stop = server.Stop
		endpoints = append(endpoints, fmt.Sprintf("member-%d:2379", m.id))
		listeners[endpoints[i]] = listener
	}
	dial := func(ctx context.Context, address string) (net.Conn, error) {
		return listeners[address].DialContext(ctx)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop(), DialOptions: []grpc.DialOption{grpc.WithContextDialer(dial)}})
	testcheck.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// replayAll replays events, which must be complete, unique and in order.
func replayAll(t *testing.T, s *Source, after, through int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	next := after + 1
	err := s.Replay(ctx, "/registry/", driver.Header{ClusterID: 1, Revision: after}, through, func(b driver.Batch) error {
		for _, c := range b.Changes {
			if next%10 == 0 {
				next++
			}
			if c.ModRevision != next || string(c.Value) != fmt.Sprint(next) {
				t.Fatalf("event of %d, want %d", c.ModRevision, next)
			}
			next++
		}
		return nil
	})
	if err != nil {
		t.Fatalf("after %d through %d: %v", after, through, err)
	}
	if next <= through && (next != through || through%10 != 0) {
		t.Fatalf("events end before %d, want them through %d", next, through)
	}
}

// TestReplay_AnyFragmentsAndBreaks_IsComplete: any size of responses, any fragments, and streams
// that break at any place.
func TestReplay_AnyFragmentsAndBreaks_IsComplete(t *testing.T) {
	const newest = 200
	seed := testseed.New(t)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for _, batch := range []int64{1, 3, 1000} {
		for _, segment := range []int64{1, 9, 10, 11, 1000} {
			synctest.Test(t, func(t *testing.T) {
				m := &member{newest: newest, batch: batch, seed: seed}
				s := New(serveMembers(t, m), "test", "/probe").WithSegments(segment, 3)
				for range 3 {
					after := 1 + rnd.Int64N(newest-1)
					replayAll(t, s, after, after+rnd.Int64N(newest-after+1))
				}
				replayAll(t, s, 1, newest)
			})
		}
	}
	synctest.Test(t, func(t *testing.T) {
		m := &member{newest: newest, batch: 3, breaks: true, seed: seed}
		replayAll(t, New(serveMembers(t, m), "test", "/probe").WithSegments(10, 2), 1, newest)
		if n := m.watches.Load(); n < 23 {
			t.Errorf("%d streams, want 19 of segments and 4 that break once", n)
		}
	})
}

// TestReplay_MemberHangs_ContinuesOnAnother: the replay leaves a member that hangs before it
// begins, and ends with an error if all members hang.
func TestReplay_MemberHangs_ContinuesOnAnother(t *testing.T) {
	t.Parallel()
	members := []*member{{newest: 100, batch: 5}, {newest: 100, batch: 5}, {newest: 100, batch: 5}}
	s := New(serveMembers(t, members...), "test", "/probe").WithSegments(20, 3)
	s.replay.patience = 500 * time.Millisecond // a busy machine answers within it, or its double
	for i := range members {
		members[i].hangs.Store(true)
		replayAll(t, s, 1, 100)
		members[i].hangs.Store(false)
	}
	for _, m := range members {
		m.hangs.Store(true)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	err := s.Replay(ctx, "/registry/", driver.Header{ClusterID: 1, Revision: 1}, 100, func(driver.Batch) error { return nil })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Replay from a source without an answer: %v, want context.DeadlineExceeded", err)
	}
}

// TestFeed_AfterSilentFeed_StartsOnAnotherMember: after a silent feed the next one begins on
// another member if one creates it, otherwise on the same.
func TestFeed_AfterSilentFeed_StartsOnAnotherMember(t *testing.T) {
	t.Parallel()
	members := []*member{{newest: 100, batch: 5}, {newest: 100, batch: 5}, {newest: 100, batch: 5}}
	s := New(serveMembers(t, members...), "test", "/probe")
	// watch returns the member that delivers revision 100, and whether the feed has a connection of
	// its own.
	apart := false
	watch := func(cause error) uint64 {
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		var at uint64
		deliver := func(b driver.Batch) error {
			if b.Through >= 99 {
				at, apart = s.feeds.member.Load(), s.feeds.current.Load().watcher != clientv3.Watcher(s.client)
				cancel(cause)
			}
			return nil
		}
		after := driver.Header{ClusterID: 1, Revision: 90}
		err := s.Watch(ctx, "/registry/", after, deliver)
		// On a busy machine the first request of a feed may have no answer in time; the mirror
		// repeats it, too.
		for n := 0; n < 2 && at == 0 && err != nil && strings.Contains(err.Error(), "verify revision"); n++ {
			err = s.Watch(ctx, "/registry/", after, deliver)
		}
		if !errors.Is(err, cause) {
			t.Fatal(err)
		}
		return at
	}
	for range 4 {
		silent := watch(mirror.ErrFeedSilent)
		if next := watch(context.Canceled); next == silent || !apart {
			t.Fatalf("started at member %d after %d, on a connection of its own: %v", next, silent, apart)
		}
	}
	// No member creates it.
	watch(mirror.ErrFeedSilent)
	for _, m := range members {
		m.denies.Store(true)
	}
	err := s.Watch(t.Context(), "/registry/", driver.Header{ClusterID: 1, Revision: 90}, func(driver.Batch) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "no member created the watch") {
		t.Errorf("refused by all members: %v", err)
	}
	for _, m := range members {
		m.denies.Store(false)
	}
	if testing.Short() {
		t.Skip("short: members that hang take seconds")
	}
	// The other members hang.
	silent := watch(mirror.ErrFeedSilent)
	for _, m := range members {
		m.hangs.Store(m.id != silent)
	}
	if next := watch(context.Canceled); next != silent {
		t.Errorf("started at member %d, which hangs", next)
	}
	// One member hangs from the beginning, and the client has not detected it.
	for _, hanging := range members {
		for _, m := range members {
			m.hangs.Store(m == hanging)
		}
		if at := watch(context.Canceled); at == hanging.id {
			t.Errorf("started at member %d, which hangs", at)
		}
	}
}

// TestFeed_ConnectionLost_Ends: the client would resume the watch by itself.
func TestFeed_ConnectionLost_Ends(t *testing.T) {
	t.Parallel()
	m := &member{newest: 100, batch: 5}
	s := New(serveMembers(t, m), "test", "/probe")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := s.Watch(ctx, "/registry/", driver.Header{ClusterID: 1, Revision: 98}, func(driver.Batch) error { m.stop(); return nil })
	if err == nil || !strings.Contains(err.Error(), "connection to etcd lost") {
		t.Error(err)
	}
}

// TestList_MemberHangs_IsRetried: the list is retried if the first member hangs.
func TestList_MemberHangs_IsRetried(t *testing.T) {
	n := 0
	got, err := attempts(context.Background(), time.Millisecond, 4, func(ctx context.Context) (int, error) {
		if n++; n < 3 {
			<-ctx.Done()
			return 0, ctx.Err()
		}
		return n, nil
	})
	if got != 3 || err != nil {
		t.Errorf("%d, %v", got, err)
	}
	mine := errors.New("refused")
	n = 0
	if _, err := attempts(context.Background(), time.Hour, 4, func(context.Context) (int, error) { n++; return 0, mine }); !errors.Is(err, mine) || n != 1 {
		t.Errorf("an answer that is an error: %v after %d attempts", err, n)
	}
	n = 0
	if _, err := attempts(context.Background(), time.Millisecond, 4, func(ctx context.Context) (int, error) { n++; <-ctx.Done(); return 0, ctx.Err() }); !errors.Is(err, context.DeadlineExceeded) || n != 4 {
		t.Errorf("no answer: %v after %d attempts", err, n)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	n = 0
	if _, err := attempts(ctx, time.Hour, 4, func(ctx context.Context) (int, error) { n++; return 0, ctx.Err() }); !errors.Is(err, context.Canceled) || n != 1 {
		t.Errorf("canceled: %v after %d attempts, want Canceled after 1", err, n)
	}
}

// TestFeed_MemberLags_DoesNotGoBack: progress below a delivered revision comes from a member that
// lags, if etcd has the delivered revision. It is not passed on: to the mirror it would be a
// restored etcd.
func TestFeed_MemberLags_DoesNotGoBack(t *testing.T) {
	t.Parallel()
	m := &member{newest: 100, batch: 5}
	m.lags.Store(50)
	s := New(serveMembers(t, m), "test", "/probe")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	done := errors.New("done")
	var delivered []int64
	err := s.Watch(ctx, "/registry/", driver.Header{ClusterID: 1, Revision: 90}, func(b driver.Batch) error {
		delivered = append(delivered, b.Through)
		switch b.Through {
		case 99: // the last event
			reads := m.ranges.Load()
			go func() {
				_ = s.RequestProgress(ctx)
				for m.ranges.Load() == reads && ctx.Err() == nil {
					// until the source has compared the revision
					time.Sleep(time.Millisecond)
				}
				m.lags.Store(0)
				_ = s.RequestProgress(ctx)
			}()
		case 50, 100:
			return done
		}
		return nil
	})
	if !errors.Is(err, done) || !slices.IsSorted(delivered) {
		t.Errorf("delivered through %v, %v; want no revision below another", delivered, err)
	}
}

// TestFeed_OlderStateOfCluster_IsRefused: an etcd without the mirrored revision is restored from a
// backup, also if its ID is the same.
func TestFeed_OlderStateOfCluster_IsRefused(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]driver.Header{"older state": {ClusterID: 1, Revision: 101}, "another cluster": {ClusterID: 2, Revision: 90}} {
		m := &member{newest: 100, batch: 5}
		s := New(serveMembers(t, m), "test", "/probe")
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		go func() {
			for m.watches.Load() == 0 && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			cancel() // the feed has begun
		}()
		err := s.Watch(ctx, "/registry/", after, func(driver.Batch) error { return nil })
		if cancel(); !errors.Is(err, mirror.ErrRestored) {
			t.Errorf("%s: %v, want ErrRestored", name, err)
		}
	}
}
