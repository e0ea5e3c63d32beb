// Package etcdclient connects to etcd as kube-apiserver does.
package etcdclient

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"k8s.io/apiserver/pkg/server/egressselector"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/component-base/tracing"
)

// Timeouts of the connection to etcd, those of kube-apiserver: a dead member is detected within 40
// s, and slow TLS handshakes succeed.
const (
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 10 * time.Second

	// DialTimeout is the time that kube-apiserver waits for a connection.
	DialTimeout = 20 * time.Second
)

// Flow control windows: the bytes that etcd may send before they are read, per stream and per
// connection. They are about the size that gRPC's own estimate would reach. Setting them disables
// gRPC's estimator, which sends a ping with each message, a quarter of the cost of an event.
const (
	streamWindow     = 8 << 20
	connectionWindow = 16 << 20
)

// New connects to etcd and returns when a connection is up, or an error after the time timeout or
// at the end of ctx, which has no effect on a connected client. The error names the cause of the
// last failed attempt. The client serves all resources: writes, reads of the latest revision, and
// the feed. A read-only client sends no request that changes etcd; such requests return
// ErrReadOnly.
func New(ctx context.Context, timeout time.Duration, c storagebackend.TransportConfig, readOnly bool) (*kubernetes.Client, error) {
	client, err := unconnected(c, readOnly)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := awaitReady(ctx, client.ActiveConnection()); err != nil {
		_ = client.Close() // err is the reason
		return nil, fmt.Errorf("connect to etcd at %s: %w", strings.Join(c.ServerList, ","), err)
	}
	// A request's time in etcd is part of its latency record.
	client.KV = etcd3.NewETCDLatencyTracker(client.KV)
	return client, nil
}

// awaitReady connects, and returns when a connection is up. The client of etcd does not wait for
// one since v3.7.
func awaitReady(ctx context.Context, conn *grpc.ClientConn) error {
	for {
		state := conn.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Idle:
			conn.Connect()
		default: // it tries
		}
		if conn.WaitForStateChange(ctx, state) {
			continue
		}
		if state == connectivity.TransientFailure {
			// A request then fails at once, with the cause of the last failed attempt.
			at, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			if _, err := healthpb.NewHealthClient(conn).Check(at, &healthpb.HealthCheckRequest{}); err != nil {
				return fmt.Errorf("%w: %s", ctx.Err(), status.Convert(err).Message())
			}
		}
		return ctx.Err()
	}
}

// unconnected is New without waiting for a connection.
func unconnected(c storagebackend.TransportConfig, readOnly bool) (*kubernetes.Client, error) {
	cfg := clientv3.Config{
		Endpoints:            c.ServerList,
		DialKeepAliveTime:    keepaliveTime,
		DialKeepAliveTimeout: keepaliveTimeout,
		// relevant errors are returned, or logged by this package's callers
		Logger: zap.NewNop(),
	}
	cfg.DialOptions = []grpc.DialOption{
		grpc.WithInitialWindowSize(streamWindow),
		grpc.WithInitialConnWindowSize(connectionWindow),
	}
	if readOnly {
		cfg.DialOptions = append(cfg.DialOptions, grpc.WithChainUnaryInterceptor(refuseUnaryWrites), grpc.WithChainStreamInterceptor(refuseStreamWrites))
	}
	if c.CertFile != "" || c.KeyFile != "" || c.TrustedCAFile != "" {
		info := transport.TLSInfo{CertFile: c.CertFile, KeyFile: c.KeyFile, TrustedCAFile: c.TrustedCAFile}
		tlsConfig, err := info.ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("etcd client certificates: %w", err)
		}
		cfg.TLS = tlsConfig
	}
	if c.EgressLookup != nil {
		dial, err := c.EgressLookup(egressselector.Etcd.AsNetworkContext())
		if err != nil {
			return nil, fmt.Errorf("egress to etcd: %w", err)
		}
		if dial != nil {
			cfg.DialOptions = append(cfg.DialOptions, grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
				if strings.Contains(addr, "//") {
					u, err := url.Parse(addr)
					if err != nil {
						return nil, err
					}
					addr = u.Host
				}
				return dial(ctx, "tcp", addr)
			}))
		}
	}
	if c.TracerProvider != nil {
		cfg.DialOptions = append(cfg.DialOptions, grpc.WithStatsHandler(otelgrpc.NewClientHandler(
			otelgrpc.WithMessageEvents(otelgrpc.ReceivedEvents, otelgrpc.SentEvents),
			otelgrpc.WithPropagators(tracing.Propagators()),
			otelgrpc.WithTracerProvider(c.TracerProvider),
		)))
	}
	client, err := kubernetes.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("client of etcd at %s: %w", strings.Join(c.ServerList, ","), err)
	}
	return client, nil
}
