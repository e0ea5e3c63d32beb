// Package target starts the servers that a benchmark measures: an etcd, and API servers on it, each
// a process of its own.
package target

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/process"
)

const (
	// startTimeout bounds a start: an engine with 400,000 objects takes 9 s, on a machine that is
	// busy otherwise several times that.
	startTimeout = 5 * time.Minute

	// stopGrace is the time that a process may take to end after SIGTERM.
	stopGrace = 20 * time.Second
)

// Etcd is a running etcd with a client of its own.
type Etcd struct {
	*process.Child
	Endpoint string
	Client   *clientv3.Client
}

// StartEtcd runs `binary etcd` on a data directory, on a free port of the loopback interface and
// without fsync: the API server is measured, not the disk. Its log goes into logDir. Further flags
// take precedence, such as --unsafe-no-fsync=false.
func StartEtcd(ctx context.Context, binary, dataDir, logDir string, flags ...string) (*Etcd, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	child, err := process.Start(process.Spec{
		Name: "etcd",
		Path: binary,
		Args: append([]string{
			"etcd", "--data-dir=" + dataDir, "--listen-client-url=http://127.0.0.1:0", "--unsafe-no-fsync",
			"--quota-backend-bytes=" + fmt.Sprint(64<<30),
		}, flags...),
		Log:   filepath.Join(logDir, filepath.Base(dataDir)+".log"),
		Lines: true,
	})
	if err != nil {
		return nil, err
	}
	e := &Etcd{Child: child}
	line, _, err := child.WaitLine(ctx, 0, "ready ")
	if err == nil {
		e.Endpoint = strings.TrimPrefix(line, "ready ")
		e.Client, err = clientv3.New(clientv3.Config{Endpoints: []string{e.Endpoint}, Logger: zap.NewNop()})
	}
	if err != nil {
		e.Stop()
		return nil, err
	}
	return e, nil
}

// Stop ends the etcd and returns when it is gone.
func (e *Etcd) Stop() {
	if e.Client != nil {
		e.Client.Close() // the only error is the cancellation that it causes itself
	}
	_ = e.Child.Stop(syscall.SIGTERM, stopGrace) // gone in any case
}

// Usage is the work of etcd for its clients since it started.
type Usage struct {
	// Requests counts unary calls when they end, and each message from a client of a stream:
	// opening a watch, or a progress request. Put, which API servers do not use, is left out: it is
	// the benchmark's.
	Requests float64
	Sent     float64 // bytes of its answers and of the events of its watches
}

// Usage reads etcd's own counters.
func (e *Etcd) Usage(ctx context.Context) (Usage, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, e.Endpoint+"/metrics", nil)
	if err != nil {
		return Usage{}, fmt.Errorf("etcd metrics: %w", err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return Usage{}, errors.Join(fmt.Errorf("etcd metrics: %w", err), e.Ended())
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return Usage{}, fmt.Errorf("etcd metrics: %s", response.Status)
	}
	usage, err := parseUsage(response.Body)
	return usage, errors.Join(err, e.Ended())
}

// parseUsage reads the counters of the gRPC server.
func parseUsage(r io.Reader) (Usage, error) {
	const unary, messages, sent = "grpc_server_handled_total", "grpc_server_msg_received_total", "etcd_network_client_grpc_sent_bytes_total"
	all, err := parseSeries(r, []string{unary, messages, sent})
	if err != nil {
		return Usage{}, fmt.Errorf("etcd metrics: %w", err)
	}
	usage, found := Usage{}, map[string]bool{}
	for _, s := range all {
		found[s.name] = true
		method := s.labels["grpc_method"]
		switch isStream := method == "Watch" || method == "LeaseKeepAlive"; {
		case s.name == sent:
			usage.Sent += s.value
		case method != "Put" && isStream == (s.name == messages):
			usage.Requests += s.value
		}
	}
	if len(found) < 3 {
		return Usage{}, fmt.Errorf("etcd metrics lack one of %s, %s and %s", unary, messages, sent)
	}
	return usage, nil
}
