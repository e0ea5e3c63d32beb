package apiserver

import (
	"context"
	"crypto/tls"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/statusline"
)

const (
	// etcdPatience is the time that a server waits for an etcd that starts at the same time. It
	// equals upstream's dial timeout, after which its first storage fails.
	etcdPatience = 20 * time.Second
	// etcdRetry is the pause between two attempts; a guess.
	etcdRetry = 250 * time.Millisecond
)

// awaitEtcd returns nil when the etcd of t and those of the overrides each have a server that
// responds. If ctx ends first, the error names the cluster that does not respond and the reason
// (connection refused, wrong certificate); upstream would only report "context deadline exceeded".
func awaitEtcd(ctx context.Context, t storagebackend.TransportConfig, overrides overrides) error {
	clusters := [][]string{t.ServerList}
	for _, c := range overrides.clusters {
		clusters = append(clusters, c.servers)
	}
	for _, servers := range clusters {
		t.ServerList = servers
		if err := awaitServers(ctx, t); err != nil {
			return fmt.Errorf("etcd at %s cannot be reached: %w", strings.Join(servers, ","), err)
		}
	}
	return nil
}

// awaitServers returns nil when one of the servers responds, even with an error.
func awaitServers(ctx context.Context, t storagebackend.TransportConfig) error {
	client, err := lazyClient(t)
	if err != nil {
		return err
	}
	defer client.Close()
	health := healthpb.NewHealthClient(client.ActiveConnection())

	var last atomic.Pointer[string]
	defer statusline.Every(func(elapsed time.Duration) bool {
		if reason := last.Load(); reason != nil {
			klog.InfoS("Waiting for etcd", "servers", t.ServerList, "err", *reason, "took", elapsed.Round(time.Millisecond))
		}
		return true
	})()
	err = wait.PollUntilContextCancel(ctx, etcdRetry, true, func(ctx context.Context) (bool, error) {
		_, err := health.Check(ctx, &healthpb.HealthCheckRequest{})
		switch status.Code(err) {
		case codes.Unavailable:
			reason := dialFailure(status.Convert(err).Message())
			last.Store(&reason)
			return false, nil
		case codes.DeadlineExceeded, codes.Canceled:
			return false, nil
		default:
			return true, nil // not every server has a health service; an error response suffices
		}
	})
	if reason := last.Load(); err != nil && reason != nil {
		return fmt.Errorf("%s; %s", *reason, nextStep(*reason, t.ServerList))
	}
	return err
}

// grpcPrefix matches the words that gRPC puts before the cause of a failed connection.
var grpcPrefix = regexp.MustCompile(`^connection error: desc = "(?:transport: )?(?:Error while dialing: |authentication handshake failed: )?(.*)"$`)

// dialFailure returns the cause in a message of gRPC.
func dialFailure(message string) string {
	if m := grpcPrefix.FindStringSubmatch(message); m != nil {
		return m[1]
	}
	return message
}

// nextStep returns what the operator should check after a failure. A server that requires a client
// certificate may close the connection without a reason.
func nextStep(reason string, servers []string) string {
	const running, files = "that etcd is running, and --etcd-servers", "--etcd-cafile, --etcd-certfile and --etcd-keyfile"
	switch {
	case strings.Contains(reason, "tls:") || strings.Contains(reason, "x509:"):
		return "check " + files
	case !strings.Contains(reason, "refused") && slices.ContainsFunc(servers, func(s string) bool { return strings.HasPrefix(s, "https:") }):
		return "check " + running + ", and " + files
	}
	return "check " + running + " (address, http or https)"
}

// EtcdTLS returns the client's TLS configuration, nil if the flags name no file.
func EtcdTLS(t storagebackend.TransportConfig) (*tls.Config, error) {
	if t.CertFile == "" && t.KeyFile == "" && t.TrustedCAFile == "" {
		return nil, nil
	}
	info := transport.TLSInfo{CertFile: t.CertFile, KeyFile: t.KeyFile, TrustedCAFile: t.TrustedCAFile}
	config, err := info.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("read the client certificate: %w; check --etcd-cafile, --etcd-certfile and --etcd-keyfile", err)
	}
	return config, nil
}
