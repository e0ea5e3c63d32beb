package enginetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// lists counts the requests of a client that list keys, by kind.
type lists struct {
	streams, pages atomic.Int64
	received       atomic.Int64 // parts of streams, and their ends
	old            bool         // the client is answered like one of a server without RangeStream
}

// options are the options of the client's connection.
func (l *lists) options() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if r, ok := req.(*pb.RangeRequest); ok && len(r.RangeEnd) > 0 {
				l.pages.Add(1)
			}
			return invoke(ctx, method, req, reply, conn, opts...)
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, begin grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			if strings.HasSuffix(method, "/RangeStream") {
				if l.streams.Add(1); l.old {
					return nil, status.Error(codes.Unimplemented, "unknown method RangeStream for service etcdserverpb.KV")
				}
			}
			stream, err := begin(ctx, desc, conn, method, opts...)
			return &countedStream{stream, &l.received}, err
		}),
	}
}

// countedStream counts the attempts to receive that have ended.
type countedStream struct {
	grpc.ClientStream
	received *atomic.Int64
}

func (s *countedStream) RecvMsg(message any) error {
	defer s.received.Add(1)
	return s.ClientStream.RecvMsg(message)
}

// TestListStream_SlowReader_PartStaysValid: a part does not change while later ones are received
// and decoded.
func TestListStream_SlowReader_PartStaysValid(t *testing.T) {
	var requests lists
	client, prefix := open(t, requests.options()...)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	fill(t, client, prefix, strings.Repeat("v", 100_000), 200)
	const ahead = 3 // this part, one in the client's channel, and one that waits for the channel
	ctx, parts := contextFor(t), 0
	_, err := s.List(ctx, prefix, 0, func(page []driver.KV) error {
		before := cloned(page)
		for parts++; parts == 1 && requests.received.Load() < ahead; runtime.Gosched() {
			if ctx.Err() != nil {
				return fmt.Errorf("%d parts were received, want %d: %w", requests.received.Load(), ahead, ctx.Err())
			}
		}
		if !reflect.DeepEqual(page, before) {
			return errors.New("the part has changed")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if parts <= ahead {
		t.Errorf("%d parts, want more than %d", parts, ahead)
	}
}

// TestListStream_OfEtcd_EqualsPages: streams equal pages at the latest and at past revisions, with
// small and large values, during concurrent writes.
func TestListStream_OfEtcd_EqualsPages(t *testing.T) {
	var requests lists
	client, prefix := open(t, requests.options()...)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	fill(t, client, prefix+"small/", "v", 5000)
	past := fill(t, client, prefix+"large/", strings.Repeat("v", 100_000), 100)
	put(t, client, prefix+"large/00000", "changed since")
	fill(t, client, prefix+"more/", "v", 100)

	for _, at := range []mirror.Revision{0, past} {
		requests.streams.Store(0)
		requests.pages.Store(0)
		began := time.Now()
		header, parts := pages(t, s, prefix, at)
		// A request without an answer for 5 s is repeated.
		if (requests.streams.Load() != 1 || requests.pages.Load() != 0) && time.Since(began) < 4*time.Second {
			t.Errorf("at %d: %d stream and %d page requests, want one stream", at, requests.streams.Load(), requests.pages.Load())
		}
		wantHeader, want := pages(t, s.InPages(), prefix, at)
		if got, want := slices.Concat(parts...), slices.Concat(want...); header != wantHeader || !reflect.DeepEqual(got, want) {
			t.Errorf("at %d: the stream returns %d keys with header %v, pages %d with %v", at, len(got), header, len(want), wantHeader)
		}
		for i, part := range parts {
			if size(part) > 4<<20 {
				t.Errorf("part %d holds %d MiB", i, size(part)>>20)
			}
		}
	}
}

// TestListStream_OfOldEtcd_FallsBackToPages: the stream is tried once and not soon again.
func TestListStream_OfOldEtcd_FallsBackToPages(t *testing.T) {
	requests := lists{old: true}
	client, prefix := open(t, requests.options()...)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	fill(t, client, prefix, "v", 2000)
	for range 2 {
		header, all := pages(t, s, prefix, 0)
		requireKeys(t, all, prefix, 2000, "v")
		if header.ClusterID == 0 || header.Revision == 0 {
			t.Errorf("header %v", header)
		}
	}
	if requests.streams.Load() != 1 {
		t.Errorf("%d stream requests, want 1", requests.streams.Load())
	}
}

// TestListStream_AtCompactedRevision_ReturnsErrCompacted: also if the compaction happens during the
// list.
func TestListStream_AtCompactedRevision_ReturnsErrCompacted(t *testing.T) {
	e := newEtcd(t)
	e.run(t)
	client := connect(t, e.socket())
	const prefix = "/registry/"
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	past := fill(t, client, prefix, strings.Repeat("v", 10_000), 2000)
	compact := func(rev mirror.Revision) {
		if _, err := client.Compact(contextFor(t), rev, clientv3.WithCompactPhysical()); err != nil {
			t.Fatal(err)
		}
	}
	present := put(t, client, prefix+"later", "v")
	compacted := false
	_, err := s.List(contextFor(t), prefix, past, func([]driver.KV) error {
		if !compacted {
			compacted = true
			compact(present)
		}
		return nil
	})
	if !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("compacted in between: error %v, want ErrCompacted", err)
	}
	for _, s := range []*etcdsource.Source{s, s.InPages()} {
		if _, err := s.List(contextFor(t), prefix, past, func([]driver.KV) error { return nil }); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("compacted before: error %v, want ErrCompacted", err)
		}
	}
}

// TestListFigures measures a list of 300,000 keys of 1 KB in one stream and in pages: the duration,
// the peak of additional memory of etcd and of this process, and the delay of a concurrent writer.
func TestListFigures(t *testing.T) {
	if os.Getenv("STRATA_TEST_LONG") == "" {
		t.Skip("set STRATA_TEST_LONG=1")
	}
	const prefix, keys = "/registry/", 300_000
	e := startEtcds(t, 1)[0]
	fill(t, e.client, prefix, strings.Repeat("v", 1000), keys)
	self := &etcdProcess{pid: os.Getpid()}
	peak := func(p *etcdProcess) { _ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.pid), []byte("5"), 0) }
	s := etcdsource.New(e.client, t.Name(), prefix+"probe")
	t.Logf("list    took    parts  etcd before  peak  own before  peak  longest write")
	for range 3 {
		for name, s := range map[string]*etcdsource.Source{"stream": s, "pages": s.InPages()} {
			e.forget(t, "/other/")
			debug.FreeOSMemory()
			peak(self)
			etcdBefore, before := e.memory("VmRSS"), self.memory("VmRSS")
			stop, longest := make(chan struct{}), make(chan time.Duration)
			go func() {
				var most time.Duration
				for {
					select {
					case <-stop:
						longest <- most
						return
					case <-time.After(time.Millisecond):
						began := time.Now()
						put(t, e.client, "/beside", "v")
						most = max(most, time.Since(began))
					}
				}
			}()
			began, n, parts := time.Now(), 0, 0
			if _, err := s.List(contextFor(t), prefix, 0, func(kvs []driver.KV) error {
				n += len(kvs)
				parts++
				return nil
			}); err != nil || n != keys {
				t.Fatalf("%d keys, %v", n, err)
			}
			took := time.Since(began)
			close(stop)
			t.Logf("%-6s  %5.2fs  %5d  %7d MiB  %4d MiB  %5d MiB  %4d MiB  %v", name, took.Seconds(), parts,
				etcdBefore, e.memory("VmHWM"), before, self.memory("VmHWM"), <-longest)
		}
	}
}
