// Package etcdfeed serves the read-only part of etcd's API from the memory of a mirror, so that
// further mirrors can follow it in place of etcd: ranges at a revision, watches with progress, and
// the status of a member. Revisions and the identity of the cluster are etcd's.
//
//	etcd ─▶ Source ─▶ tap ─▶ mirror ─▶ View ─▶ ranges
//	                   └───▶ log ─────────────▶ watches of any number of clients
//
// The store that it offers is etcd compacted to the start of the log: what docs/etcd-contract.md
// requires holds, except E9, a watch of all keys, and E13, which writes. Events of the compaction
// key are not served; the key can be read, and a watch of it from a compacted revision is canceled
// as in etcd. A client that is too slow for the log is canceled with the compacted revision, as by
// etcd.
package etcdfeed

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/version"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const (
	// defaultLogBytes bounds the events in memory for clients that resume: about 50,000 of 1 KB,
	// minutes under heavy load.
	defaultLogBytes = 64 << 20
	// maxEtcdReads bounds the requests that are passed on to etcd at once.
	maxEtcdReads = 16
	// minClientPing is the shortest interval of pings that a client may send; etcd accepts the
	// same.
	minClientPing = 5 * time.Second
	// Pings detect clients that have vanished.
	pingInterval, pingTimeout = 30 * time.Second, 10 * time.Second
)

// Options configure a Server.
type Options struct {
	// LogBytes bounds the memory of the log, from which watches are served. Default: 64 MiB.
	LogBytes int64
	// Logger receives messages for the operator. Default: slog.Default().
	Logger *slog.Logger
}

// Stats is a reading of a server's counters.
type Stats struct {
	Watches    int64 // open now
	Events     int64 // sent, over all watches
	EventBytes int64 // keys and values of them
	FromMemory int64 // ranges answered from memory
	FromEtcd   int64 // ranges passed on to etcd
	Refused    int64 // requests that would write, or read outside the prefix
	Canceled   int64 // watches whose revision the log did not have
	LogBytes   int64 // in memory for watches
}

// Server answers etcd's read requests. The zero value is not usable. Until Attach it answers
// Unavailable, or what Refuse says. All methods may be called concurrently.
type Server struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
	pb.UnimplementedMaintenanceServer
	pb.UnimplementedClusterServer

	opts     Options
	member   uint64 // a random ID, so that a client recognizes another process
	attached atomic.Pointer[attachment]
	refusal  atomic.Pointer[string] // why there will be no mirror
	places   chan struct{}          // for reads of etcd
	stats    counters

	life context.Context
	end  context.CancelFunc
}

type counters struct {
	watches, events, eventBytes, fromMemory, fromEtcd, refused, canceled atomic.Int64
}

// attachment is the mirror that a server reads.
type attachment struct {
	mirror *mirror.Mirror
	etcd   pb.KVClient
	prefix string
	end    string // of the prefix
	events *log
}

// New returns a server without a mirror.
func New(opts Options) *Server {
	if opts.LogBytes == 0 {
		opts.LogBytes = defaultLogBytes
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	s := &Server{opts: opts, member: rand.Uint64() | 1, places: make(chan struct{}, maxEtcdReads)}
	s.life, s.end = context.WithCancel(context.Background())
	return s
}

// Tap is the connection of a server to the source of a mirror. It is not used by several mirrors.
type Tap struct {
	server *Server
	source *tap
}

// Tap returns a tap of a source, for the mirror of the prefix.
func (s *Server) Tap(source driver.Source, prefix string) *Tap {
	return &Tap{s, &tap{Source: source, prefix: prefix, log: newLog(s.opts.LogBytes)}}
}

// Source returns the source for the mirror.
func (t *Tap) Source() driver.Source { return t.source }

// Attach makes the server answer from the mirror of the tap's source. The same etcd is read for the
// compaction key and for reads that memory cannot answer. Error: the server has a mirror already.
func (t *Tap) Attach(m *mirror.Mirror, etcd pb.KVClient) error {
	s := t.server
	a := &attachment{mirror: m, etcd: etcd, prefix: t.source.prefix, end: clientv3.GetPrefixRangeEnd(t.source.prefix), events: t.source.log}
	if !s.attached.CompareAndSwap(nil, a) {
		return errors.New("a feed serves one etcd cluster, and has one already")
	}
	return nil
}

// Refuse makes the server answer FailedPrecondition with the reason to all requests, because it
// will get no mirror. It has no effect after Attach.
func (s *Server) Refuse(reason string) { s.refusal.Store(&reason) }

// Stats returns the counters.
func (s *Server) Stats() Stats {
	st := Stats{Watches: s.stats.watches.Load(), Events: s.stats.events.Load(), EventBytes: s.stats.eventBytes.Load(), FromMemory: s.stats.fromMemory.Load(),
		FromEtcd: s.stats.fromEtcd.Load(), Refused: s.stats.refused.Load(), Canceled: s.stats.canceled.Load()}
	if a := s.attached.Load(); a != nil {
		st.LogBytes = a.events.state().bytes
	}
	return st
}

// Close ends the watches of the server; it does not wait for them.
func (s *Server) Close() { s.end() }

// GRPC returns a server with the services. The options should have credentials: stored values
// include Secrets.
func (s *Server) GRPC(opts ...grpc.ServerOption) *grpc.Server {
	opts = append(opts,
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minClientPing, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingInterval, Timeout: pingTimeout}),
		grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error { return s.refuse("this request") }))
	g := grpc.NewServer(opts...)
	pb.RegisterKVServer(g, s)
	pb.RegisterWatchServer(g, s)
	pb.RegisterMaintenanceServer(g, s)
	pb.RegisterClusterServer(g, s)
	return g
}

// refuse returns the error of a request that is not served here.
func (s *Server) refuse(request string) error {
	s.stats.refused.Add(1)
	return status.Errorf(codes.PermissionDenied, "%s is refused: this endpoint is the feed of a replica, which only reads; send it to etcd", request)
}

// current returns the mirror. Errors: there is none yet, or it has not listed etcd; there will be
// none.
func (s *Server) current() (*attachment, error) {
	a := s.attached.Load()
	if reason := s.refusal.Load(); a == nil && reason != nil {
		return nil, status.Error(codes.FailedPrecondition, *reason)
	}
	if a == nil || a.mirror.PublishedRevision() == 0 {
		return nil, errNotBegun
	}
	return a, nil
}

func (s *Server) header(a *attachment, rev mirror.Revision) *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: a.mirror.Cluster(), MemberId: s.member, Revision: rev, RaftTerm: 1}
}

// Status implements pb.MaintenanceServer. The version is that of the API whose answers are given
// here, and the size is that of the log.
func (s *Server) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	a, err := s.current()
	if err != nil {
		return nil, err
	}
	st := a.events.state()
	size := st.bytes + 1 // 0 would mean that it is unknown
	return &pb.StatusResponse{Header: s.header(a, a.mirror.PublishedRevision()), Version: version.Version, DbSize: size, DbSizeInUse: size, Leader: s.member,
		RaftTerm: 1, RaftIndex: uint64(st.end), RaftAppliedIndex: uint64(st.end)}, nil
}

// MemberList implements pb.ClusterServer. The only member is this server; it has no URL, since
// clients reach it at addresses that it does not know.
func (s *Server) MemberList(context.Context, *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	a, err := s.current()
	if err != nil {
		return nil, err
	}
	return &pb.MemberListResponse{Header: s.header(a, a.mirror.PublishedRevision()), Members: []*pb.Member{{ID: s.member, Name: etcdsource.FeedMember}}}, nil
}

// serves reports whether a range is inside the prefix.
func (a *attachment) serves(key, end string) bool {
	return strings.HasPrefix(key, a.prefix) && (end == "" || end > key && end <= a.end && end != "\x00")
}

// isMarker reports whether a range is the compaction key alone.
func isMarker(key, end string) bool {
	return key == etcdsource.CompactionKey && (end == "" || end == key+"\x00")
}

// oldest returns the oldest revision that is served: the start of the log, or the compaction of
// etcd if that is newer. See log.offered for the one that is reported.
func (a *attachment) oldest(st state) mirror.Revision {
	return max(st.floor, min(a.mirror.CompactRevision(), st.end))
}
