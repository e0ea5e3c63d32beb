package dropin

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestService_OfSystemd_ReportsReadinessAndLogsJSON: the server does what kube-apiserver does as a
// service: it reports readiness to systemd (Type=notify in deploy/systemd), logs JSON if the flag
// says so, and has the metrics of its build and of its clients. In a new cluster it has created the
// system's priority classes.
func TestService_OfSystemd_ReportsReadinessAndLogsJSON(t *testing.T) {
	ctx := harness.Context(t, testTimeout) // not in parallel: it sets an environment variable
	dir, err := os.MkdirTemp("", "notify") // the path of a socket has at most 107 bytes
	harness.Check(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unixgram"})
	harness.Check(t, err)
	t.Cleanup(func() { _ = socket.Close() })
	t.Setenv("NOTIFY_SOCKET", socket.LocalAddr().String())
	env := harness.New(t)
	server := env.APIServer(env.Etcd(), "--logging-format=json")

	deadline, _ := ctx.Deadline()
	harness.Check(t, socket.SetReadDeadline(deadline))
	for notified := ""; !strings.Contains(notified, "READY=1"); {
		message := make([]byte, 4096)
		n, err := socket.Read(message)
		harness.Check(t, err)
		notified = string(message[:n])
	}
	for _, metric := range []string{`kubernetes_build_info{`, `rest_client_requests_total{`} {
		_, err := server.API().Metric(ctx, metric)
		harness.Check(t, err)
	}
	requirePriorityClass(t, ctx, server.API())
	harness.Check(t, server.Stop())
	lines := strings.Split(strings.TrimSpace(server.Output()), "\n")
	if len(lines) < 5 {
		t.Fatalf("the log has %d lines", len(lines))
	}
	for _, line := range lines {
		if !json.Valid([]byte(line)) {
			t.Errorf("a line of the log is no JSON: %s", line)
		}
	}
}
