package etcdsource

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror/driver"
)

func TestCheckVersion(t *testing.T) {
	for version, supported := range map[string]bool{
		"3.4.23":        false, // Debian's; etcd#15220
		"3.4.25":        false, // etcd#17507
		"3.4.30":        false,
		"3.4.31":        true,
		"3.4.37":        true,
		"3.5.0":         false,
		"3.5.0-alpha.1": false,
		"3.5.7":         false,
		"3.5.8":         false,
		"3.5.12":        false,
		"3.5.12+distro": false,
		"3.5.13":        true,
		"3.5.13-rc.1":   true,
		"v3.5.21":       true,
		"3.5.100":       true,
		"3.6.0":         true,
		"3.6.0-rc.0":    true,
		"3.6.8":         true,
		"3.7.1":         true,
		"4.0.0":         true,
		"3.3.27":        false,
		"2.3.8":         false,
	} {
		err := checkVersion(version)
		if supported && err != nil {
			t.Errorf("%q: %v", version, err)
		}
		if !supported && (!errors.Is(err, ErrProgressBug) || !strings.Contains(err.Error(), version)) {
			t.Errorf("%q: %v, want ErrProgressBug that names it", version, err)
		}
	}
	for _, version := range []string{"", "kine", "3.5", "three.5.1", "not_decided"} {
		if err := checkVersion(version); err == nil || errors.Is(err, ErrProgressBug) {
			t.Errorf("%q: %v, want an unknown version", version, err)
		}
	}
}

// TestCheckVersions_OneEndpoint_DecidesForAll: one endpoint with the bug is sufficient; one without
// a version is ErrVersionUnknown.
func TestCheckVersions_OneEndpoint_DecidesForAll(t *testing.T) {
	defer func(d time.Duration) { versionTimeout = d }(versionTimeout)
	versionTimeout = time.Minute
	const silent = "silent"
	for _, tt := range []struct {
		versions []string
		want     error
	}{
		{[]string{"3.6.8"}, nil},
		{[]string{"3.4.31", "3.5.13", "3.6.0"}, nil},
		{[]string{"3.4.30"}, ErrProgressBug},
		{[]string{"3.5.12"}, ErrProgressBug},
		{[]string{"3.6.8", "3.6.8", "3.5.12"}, ErrProgressBug},
		{[]string{"3.5.12", "3.6.8"}, ErrProgressBug},
		{[]string{"kine", "3.5.12"}, ErrProgressBug},
		{[]string{silent, "3.5.12"}, ErrProgressBug},
		{[]string{"kine"}, ErrVersionUnknown},
		{[]string{"3.6.8", "kine"}, ErrVersionUnknown},
		{[]string{silent}, ErrVersionUnknown},
		{[]string{"3.6.8", silent}, ErrVersionUnknown},
	} {
		t.Run(strings.Join(tt.versions, " "), func(t *testing.T) {
			var endpoints []string
			for _, v := range tt.versions {
				listener, err := net.Listen("tcp", "127.0.0.1:0")
				testcheck.NoError(t, err)
				server := grpc.NewServer()
				pb.RegisterMaintenanceServer(server, &fake{version: v, noStatus: v == silent})
				go func() { _ = server.Serve(listener) }()
				defer server.Stop()
				endpoints = append(endpoints, listener.Addr().String())
			}
			client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop()})
			testcheck.NoError(t, err)
			defer client.Close()
			if err := CheckVersions(context.Background(), client); !errors.Is(err, tt.want) {
				t.Errorf("%v, want %v", err, tt.want)
			}
		})
	}
}

// TestCheckVersions_EndpointWithoutListener_TimesOut: an endpoint without a listener delays the
// others by the timeout at most, and makes the result ErrVersionUnknown only if they are new
// enough.
func TestCheckVersions_EndpointWithoutListener_TimesOut(t *testing.T) {
	defer func(d time.Duration) { versionTimeout = d }(versionTimeout)
	versionTimeout = 200 * time.Millisecond
	const address = "127.0.0.1:1"
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{address}, Logger: zap.NewNop()})
	testcheck.NoError(t, err)
	defer client.Close()
	if err := CheckVersions(context.Background(), client); !errors.Is(err, ErrVersionUnknown) || !strings.Contains(err.Error(), address) {
		t.Errorf("%v, want ErrVersionUnknown that names %s", err, address)
	}
}

// fake implements the part of etcd's protocol that Probe needs.
type fake struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
	pb.UnimplementedMaintenanceServer
	pb.UnimplementedClusterServer

	version    string
	member     string // name of the only member
	noStatus   bool   // Status is not implemented
	noRange    bool   // Range is not implemented
	anonymous  bool   // no cluster ID
	noProgress bool   // progress requests are not answered; ProgressNotify is served
	noWatch    bool   // watches are not even created
	denies     bool   // watches on all keys are refused
	slow       int    // progress requests before the first answered one
	asked      atomic.Int64
	onAsked    func() // may be nil

	mu      sync.Mutex
	ranges  []*pb.RangeRequest
	streams []metadata.MD // of watches
}

func (f *fake) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	if f.noStatus {
		return nil, status.Error(codes.Unimplemented, "no status")
	}
	return &pb.StatusResponse{Version: f.version}, nil
}

func (f *fake) Range(_ context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	f.mu.Lock()
	f.ranges = append(f.ranges, r)
	f.mu.Unlock()
	if f.noRange {
		return nil, status.Error(codes.Unimplemented, "no range")
	}
	return &pb.RangeResponse{Header: f.header()}, nil
}

func (f *fake) MemberList(context.Context, *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	return &pb.MemberListResponse{Header: f.header(), Members: []*pb.Member{{ID: 1, Name: f.member}}}, nil
}

func (f *fake) header() *pb.ResponseHeader {
	if f.anonymous {
		return &pb.ResponseHeader{Revision: 7}
	}
	return &pb.ResponseHeader{ClusterId: 1, Revision: 7}
}

func (f *fake) Watch(stream pb.Watch_WatchServer) error {
	md, _ := metadata.FromIncomingContext(stream.Context())
	f.mu.Lock()
	f.streams = append(f.streams, md)
	f.mu.Unlock()
	for {
		req, err := stream.Recv()
		if err != nil {
			return err
		}
		header := f.header()
		switch {
		case req.GetCreateRequest() != nil && f.denies && string(req.GetCreateRequest().Key) == allKeys:
			err = stream.Send(&pb.WatchResponse{Header: header, WatchId: clientv3.InvalidWatchID, Created: true, Canceled: true, CancelReason: "etcdserver: permission denied"})
		case req.GetCreateRequest() != nil && !f.noWatch:
			err = stream.Send(&pb.WatchResponse{Header: header, Created: true})
			if f.noProgress && req.GetCreateRequest().ProgressNotify && err == nil {
				err = stream.Send(&pb.WatchResponse{Header: header}) // a notification, unasked
			}
		case req.GetProgressRequest() != nil:
			n := f.asked.Add(1)
			if f.onAsked != nil {
				f.onAsked()
			}
			if !f.noProgress && n > int64(f.slow) {
				err = stream.Send(&pb.WatchResponse{Header: header, WatchId: -1})
			}
		}
		if err != nil {
			return err
		}
	}
}

// probe runs Probe against the server.
func (f *fake) probe(t *testing.T, ctx context.Context) (ProgressMode, error) {
	t.Helper()
	return Probe(ctx, f.serve(t), "/registry/probe")
}

// serve returns a client of the server.
func (f *fake) serve(t *testing.T) *clientv3.Client { return serveInMemory(t, f) }

// server is the part of etcd's API that tests serve.
type server interface {
	pb.KVServer
	pb.WatchServer
	pb.MaintenanceServer
	pb.ClusterServer
}

// serveInMemory returns a client of the server, without sockets: also for a bubble of synctest.
func serveInMemory(t *testing.T, s server) *clientv3.Client {
	t.Helper()
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	pb.RegisterKVServer(server, s)
	pb.RegisterWatchServer(server, s)
	pb.RegisterMaintenanceServer(server, s)
	pb.RegisterClusterServer(server, s)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{"passthrough:///bufconn"},
		Logger:    zap.NewNop(),
		DialOptions: []grpc.DialOption{
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		},
	})
	testcheck.NoError(t, err)
	t.Cleanup(func() { client.Close() })
	return client
}

// TestSource_Requests_AreLinearizable: revisions are read linearizably and without objects, lists
// linearizably, and the feed ends when its member has lost the leader.
func TestSource_Requests_AreLinearizable(t *testing.T) {
	f := &fake{version: "3.6.8"}
	s := New(f.serve(t), "feed", "/registry/probe")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	header, err := s.ReadRevision(ctx)
	testcheck.NoError(t, err)
	if _, err := s.List(ctx, "/registry/", 0, func([]driver.KV) error { return nil }); err != nil {
		t.Fatal(err)
	}
	enough := errors.New("enough")
	begun, opened := make(chan error, 1), time.Now()
	go func() {
		begun <- s.Watch(ctx, "/registry/", driver.Header{ClusterID: header.ClusterID, Revision: header.Revision - 1}, func(driver.Batch) error { return enough })
	}()
	for s.feeds.current.Load() == nil && ctx.Err() == nil {
		time.Sleep(10 * time.Millisecond)
	}
	testcheck.NoError(t, s.RequestProgress(ctx))
	if err := <-begun; !errors.Is(err, enough) {
		t.Fatal(err)
	}
	took := time.Since(opened)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.ranges {
		if r.Serializable {
			t.Errorf("%s is read without a quorum", r.Key)
		}
		if probe := string(r.Key) == "/registry/probe"; probe && !r.CountOnly {
			t.Errorf("a revision is read with objects: %v", r)
		}
	}
	for _, md := range f.streams {
		if len(md.Get("hasleader")) == 0 || len(md.Get("strata-stream")) == 0 {
			t.Errorf("a stream of watches has %v, want a separate one that requires a leader", md)
		}
	}
	// Another stream is opened if the first one's watch takes more than a second.
	if n := len(f.streams); n == 0 || n > 1 && took < createTimeout {
		t.Errorf("%d streams of watches in %v, want one", n, took)
	}
}

// probeWaits sets the timeouts of Probe until the test ends.
func probeWaits(t *testing.T, progress time.Duration) {
	was, answer := probeProgress, probeAnswer
	t.Cleanup(func() { probeProgress, probeAnswer = was, answer })
	probeProgress, probeAnswer = progress, time.Minute
}

func TestProbe_Server_ReturnsFreshness(t *testing.T) {
	if probeProgress > 3*time.Second {
		t.Errorf("a server without progress delays the start by %s, want at most 3 s", probeProgress)
	}
	const long, short = time.Minute, 200 * time.Millisecond // the test waits for all of short
	for _, tt := range []struct {
		name   string
		server *fake
		wait   time.Duration
		want   ProgressMode
		fails  bool
	}{
		{name: "etcd", server: &fake{version: "3.6.8"}, wait: long, want: ByProgress},
		{name: "unknown server with progress", server: &fake{version: "other"}, wait: long, want: ByProgress},
		{name: "watch not in step at first", server: &fake{version: "3.6.8", slow: 3}, wait: long, want: ByProgress},
		{name: "etcd that refuses a watch of all keys", server: &fake{version: "3.6.8", denies: true}, wait: long, want: ByProgress},
		{name: "gRPC proxy", server: &fake{version: "3.6.8", noProgress: true}, wait: short, want: ByEvents},
		{name: "kine", server: &fake{version: "3.6.8", anonymous: true}, wait: long, want: ByEvents},
		{name: "kine without progress", server: &fake{version: "3.6.8", anonymous: true, noProgress: true}, wait: long, want: ByEvents},
		{name: "no progress and no watch of all keys", server: &fake{version: "3.6.8", noProgress: true, denies: true}, wait: short, want: NoProgress},
		{name: "feed that is behind etcd", server: &fake{version: "3.7.3", member: FeedMember, noProgress: true, denies: true}, wait: short, fails: true},
		{name: "feed", server: &fake{version: "3.7.3", member: FeedMember, denies: true}, wait: long, want: ByProgress},
		{name: "no cluster and no watch of all keys", server: &fake{version: "3.6.8", anonymous: true, denies: true}, wait: long, want: NoProgress},
		{name: "no range", server: &fake{version: "3.6.8", noRange: true}, wait: long, fails: true},
		{name: "no watch", server: &fake{version: "3.6.8", noWatch: true}, wait: short, fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			probeWaits(t, tt.wait)
			got, err := tt.server.probe(t, context.Background())
			for !tt.fails && err != nil && strings.Contains(err.Error(), "not created within") && probeProgress < long {
				probeProgress *= 2 // the machine is busy
				got, err = tt.server.probe(t, context.Background())
			}
			if got != tt.want || (err != nil) != tt.fails {
				t.Errorf("%s, %v; want %s, and an error: %t", got, err, tt.want, tt.fails)
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("more than a line: %q", err)
			}
			if tt.server.anonymous && tt.server.asked.Load() > 0 {
				t.Error("progress was requested though its answers are not trusted")
			}
		})
	}
}

// TestProbe_Canceled_ReportsNoMissingCapability: a canceled probe does not report that the server
// lacks a capability.
func TestProbe_Canceled_ReportsNoMissingCapability(t *testing.T) {
	probeWaits(t, time.Minute)
	f := &fake{version: "3.6.8", noProgress: true}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	client := f.serve(t)
	f.onAsked = cancel
	if got, err := Probe(ctx, client, "/registry/probe"); !errors.Is(err, context.Canceled) || got != ByProgress {
		t.Errorf("%s, %v; want context.Canceled", got, err)
	}
}
