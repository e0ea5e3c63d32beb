package dropin

import (
	"context"
	"net"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/proxy/grpcproxy"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// requireRefusedOrServedDirectly starts a server on an etcd that cannot feed the engine. It may refuse, with exit code 1 and
// one line that says why, or serve from etcd directly, with one line that says so.
func requireRefusedOrServedDirectly(t *testing.T, ctx context.Context, env *harness.Env, etcd *harness.Etcd, reason string) {
	t.Helper()
	s := env.StartAPIServer(etcd, engine(harness.Strata))
	if err := s.Await(ctx, "/readyz"); err == nil {
		exercise(t, ctx, s.API())
		if n := strings.Count(s.Output(), reason); n != 1 {
			t.Errorf("served, and %q was said %d times, want once:\n%s", reason, n, s.Tail())
		}
		return
	}
	code, err := s.Wait(ctx)
	check(t, err)
	lines := strings.Split(strings.TrimSpace(s.Output()), "\n")
	last := lines[len(lines)-1]
	if code != 1 || !strings.HasPrefix(last, "strata: ") || !strings.Contains(last, reason) {
		t.Errorf("exit code %d, last line %q; want 1 and %q", code, last, reason)
	}
	// The way back works on the same etcd.
	exercise(t, ctx, env.APIServer(etcd, engine(harness.Upstream)).API())
}

// TestOldEtcd uses an etcd whose progress notifications may overtake events, if one is installed.
func TestOldEtcd(t *testing.T) {
	path, version := harness.OldEtcd(t)
	ctx := newContext(t)
	env := harness.New(t)
	requireRefusedOrServedDirectly(t, ctx, env, env.ProgramEtcd(ctx, path), "version "+version)
}

// TestEtcdWithoutProgress puts etcd's own gRPC proxy, which answers no request for progress, before an etcd.
func TestEtcdWithoutProgress(t *testing.T) {
	ctx := newContext(t)
	env := harness.New(t)
	etcd := env.Etcd()
	requireRefusedOrServedDirectly(t, ctx, env, startProxy(t, env, etcd, ""), "progress")
}

// TestEtcdThatSaysItIsOld does the same with a proxy that reports an old version.
func TestEtcdThatSaysItIsOld(t *testing.T) {
	ctx := newContext(t)
	env := harness.New(t)
	etcd := env.Etcd()
	requireRefusedOrServedDirectly(t, ctx, env, startProxy(t, env, etcd, "3.5.7"), "version 3.5.7")
}

// startProxy returns etcd behind etcd's gRPC proxy, which lasts as long as the environment's processes. If version is not empty, the proxy
// reports it as that of the server.
func startProxy(t *testing.T, env *harness.Env, etcd *harness.Etcd, version string) *harness.Etcd {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	client := etcd.Client()
	server := grpc.NewServer()
	kv, _ := grpcproxy.NewKvProxy(client)
	watch, watchDone := grpcproxy.NewWatchProxy(ctx, zap.NewNop(), client)
	lease, leaseDone := grpcproxy.NewLeaseProxy(ctx, client)
	pb.RegisterKVServer(server, kv)
	pb.RegisterWatchServer(server, watch)
	pb.RegisterLeaseServer(server, lease)
	pb.RegisterMaintenanceServer(server, maintenance{grpcproxy.NewMaintenanceProxy(client), version})
	serving := make(chan struct{})
	go func() {
		defer close(serving)
		_ = server.Serve(listener) // until Stop
	}()
	env.AtEnd(func() {
		cancel()
		server.Stop()
		<-serving
		<-watchDone
		<-leaseDone
	})
	proxied := *etcd
	proxied.URL = "http://" + listener.Addr().String()
	return &proxied
}

// maintenance reports another version.
type maintenance struct {
	pb.MaintenanceServer
	version string
}

func (m maintenance) Status(ctx context.Context, r *pb.StatusRequest) (*pb.StatusResponse, error) {
	resp, err := m.MaintenanceServer.Status(ctx, r)
	if err == nil && m.version != "" {
		resp.Version = m.version
	}
	return resp, err
}
