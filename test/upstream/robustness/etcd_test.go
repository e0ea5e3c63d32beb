package robustness

import (
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// startTimeout bounds the start of an etcd; it needs about 0.3 s.
const startTimeout = 5 * time.Minute

// etcd is a server of one member in this process, on a unix socket.
type etcd struct {
	server   *embed.Etcd
	endpoint string
	data     string // its data directory, which ends with the test
}

// startEtcd starts an etcd with an empty store. Its write-ahead log keeps every request: the
// validators replay them.
func startEtcd(t *testing.T) *etcd {
	t.Helper()
	dir, err := os.MkdirTemp("", "strata-etcd-") // short: the path of a socket is limited
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "client.sock")
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(dir, "data")
	cfg.ListenPeerUrls = nil
	cfg.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	cfg.AdvertiseClientUrls = []url.URL{{Scheme: "unix", Host: "localhost:0"}}
	cfg.TickMs, cfg.ElectionMs = 10, 100
	cfg.UnsafeNoFsync = true
	cfg.MaxWalFiles, cfg.MaxSnapFiles = 0, 0 // 0 keeps all
	cfg.SnapshotCount = 10_000_000
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatalf("start etcd: %v", err)
	}
	e := &etcd{server: server, endpoint: "unix://" + socket, data: cfg.Dir}
	t.Cleanup(func() {
		e.stop()
		_ = os.RemoveAll(dir)
	})
	select {
	case <-server.Server.ReadyNotify():
	case <-time.After(startTimeout):
		t.Fatal("etcd is not ready")
	}
	return e
}

// stop stops the server; its files stay.
func (e *etcd) stop() {
	if e.server != nil {
		e.server.Close()
		e.server = nil
	}
}
