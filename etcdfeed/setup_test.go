package etcdfeed_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const prefix = "/registry/"

// patience bounds every wait. Only a failing test waits that long.
const patience = 2 * time.Minute

func contextFor(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// ranges is an etcd that answers reads of the in-memory store.
type ranges struct {
	pb.UnimplementedKVServer
	etcd *memory.Store
}

func (r ranges) Range(ctx context.Context, in *pb.RangeRequest) (*pb.RangeResponse, error) {
	start, end := string(in.Key), string(in.RangeEnd)
	if end == "" {
		end = start + "\x00"
	}
	resp := &pb.RangeResponse{}
	header, err := r.etcd.List(ctx, "", in.Revision, func(kvs []driver.KV) error {
		for _, kv := range kvs {
			if string(kv.Key) < start || string(kv.Key) >= end {
				continue
			}
			if resp.Count++; in.Limit > 0 && resp.Count > in.Limit {
				resp.More = true
			} else {
				resp.Kvs = append(resp.Kvs, &mvccpb.KeyValue{Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version})
			}
		}
		return nil
	})
	if errors.Is(err, mirror.ErrCompacted) {
		return nil, rpctypes.ErrGRPCCompacted
	}
	resp.Header = &pb.ResponseHeader{ClusterId: header.ClusterID, Revision: r.etcd.Revision()}
	return resp, err
}

// serve serves on a unix socket until the test ends, and returns its path.
func serve(t testing.TB, g *grpc.Server) (socket string) {
	t.Helper()
	// short, because the length of a socket path is limited
	dir, err := os.MkdirTemp("", "strata-feed-")
	testcheck.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket = filepath.Join(dir, "sock")
	listener, err := net.Listen("unix", socket)
	testcheck.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- g.Serve(listener) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-ended; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return socket
}

func connect(t testing.TB, socket string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + socket}, DialTimeout: patience, Logger: zap.NewNop()})
	testcheck.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// served is a feed that serves a mirror of an in-memory etcd.
type served struct {
	etcd   *memory.Store
	server *etcdfeed.Server
	mirror *mirror.Mirror
	socket string

	streams atomic.Int64 // watches of etcd that the feed has opened
}

// put writes a key, and returns its revision.
func (f *served) put(key, value string) mirror.Revision { return f.etcd.Put(prefix+key, value) }

// serveFeed serves a mirror of an etcd with one key. wrap may change the source of the mirror.
func serveFeed(t testing.TB, opts etcdfeed.Options, wrap ...func(driver.Source) driver.Source) *served {
	t.Helper()
	etcd := memory.New()
	etcd.Put(prefix+"key", "value")
	return serveStore(t, etcd, opts, wrap...)
}

// serveStore is serveFeed of an etcd.
func serveStore(t testing.TB, etcd *memory.Store, opts etcdfeed.Options, wrap ...func(driver.Source) driver.Source) *served {
	t.Helper()
	opts.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	f := &served{etcd: etcd, server: etcdfeed.New(opts)}
	var source driver.Source = f.etcd
	for _, wrap := range wrap {
		source = wrap(source)
	}
	tap := f.server.Tap(source, prefix)
	f.mirror = newMirror(t, tap.Source(), func(o *mirror.Options) {
		o.UnclaimedBytes = 200 // of most keys without a claim only the revision is in memory
	})
	g := grpc.NewServer(grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
		f.streams.Add(1)
		return status.Error(codes.Unimplemented, "only ranges")
	}))
	pb.RegisterKVServer(g, ranges{etcd: f.etcd})
	testcheck.NoError(t, tap.Attach(f.mirror, pb.NewKVClient(connect(t, serve(t, g)).ActiveConnection())))
	f.socket = serve(t, f.server.GRPC())
	t.Cleanup(f.server.Close)
	catchUp(t, f.mirror)
	return f
}

func newMirror(t testing.TB, source driver.Source, change func(*mirror.Options)) *mirror.Mirror {
	t.Helper()
	opts := mirror.Options{Prefix: prefix, Source: source, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	change(&opts)
	m, err := mirror.New(opts)
	testcheck.NoError(t, err)
	t.Cleanup(m.Close)
	return m
}

// below returns a mirror of the feed, and its keys below more/.
func (f *served) below(t testing.TB, wrap func(driver.Source) driver.Source) (*mirror.Mirror, *mirror.Resource) {
	t.Helper()
	m := newMirror(t, wrap(etcdsource.New(connect(t, f.socket), "feed", prefix+"probe")), func(*mirror.Options) {})
	r, err := m.Claim(prefix + "more/")
	testcheck.NoError(t, err)
	testcheck.NoError(t, r.WaitReady(contextFor(t)))
	return m, r
}

// eventsUntil reads events to a revision.
func eventsUntil(t *testing.T, responses clientv3.WatchChan, through int64) {
	t.Helper()
	for last := int64(0); last < through; {
		resp, ok := <-responses
		if !ok || resp.Err() != nil {
			t.Fatalf("watch ended after revision %d of %d: %v", last, through, resp.Err())
		}
		for _, e := range resp.Events {
			last = max(last, e.Kv.ModRevision)
		}
	}
}

// sameEvents fails unless a watch of all keys at the feed, after a revision, has the changes of the
// store.
func sameEvents(t *testing.T, client *clientv3.Client, etcd *memory.Store, after mirror.Revision) {
	t.Helper()
	responses, last := client.Watch(contextFor(t), prefix, clientv3.WithPrefix(), clientv3.WithRev(after+1)), etcd.Revision()
	var got, want []string
	for _, c := range etcd.Changes(prefix, after) {
		want = append(want, fmt.Sprintf("%d %s=%s %t", c.ModRevision, c.Key, c.Value, c.Deleted))
	}
	for at := after; at < last; {
		resp, ok := <-responses
		if !ok || resp.Err() != nil {
			t.Fatalf("watch ended after revision %d of %d: %v", at, last, resp.Err())
		}
		for _, e := range resp.Events {
			at = e.Kv.ModRevision
			got = append(got, fmt.Sprintf("%d %s=%s %t", at, e.Kv.Key, e.Kv.Value, e.Type == clientv3.EventTypeDelete))
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("watch after %d: %v, want %v", after, got, want)
	}
}

// catchUp returns the revision of etcd, which the mirror has reached.
func catchUp(t testing.TB, m *mirror.Mirror) mirror.Revision {
	t.Helper()
	ctx := contextFor(t)
	rev, err := m.ReadRevision(ctx)
	if err == nil {
		err = m.Wait(ctx, rev)
	}
	testcheck.NoError(t, err)
	return rev
}
