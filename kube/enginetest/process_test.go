package enginetest

import (
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/process"
)

// Set in a process that is to be an etcd.
const (
	etcdDirectory = "STRATA_TEST_ETCD_DIRECTORY" // where
	etcdName      = "STRATA_TEST_ETCD_NAME"
	etcdCluster   = "STRATA_TEST_ETCD_CLUSTER" // all members, as --initial-cluster names them
)

// beEtcd serves until its standard input ends: a separate process, whose memory can be
// measured apart from the memory of the test, and which can be stopped.
func beEtcd(dir string) error {
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(dir, "data")
	cfg.Name = os.Getenv(etcdName)
	cfg.InitialCluster = os.Getenv(etcdCluster)
	for member := range strings.SplitSeq(cfg.InitialCluster, ",") {
		if peer, ok := strings.CutPrefix(member, cfg.Name+"="); ok {
			u, err := url.Parse(peer)
			if err != nil {
				return err
			}
			cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{*u}, []url.URL{*u}
		}
	}
	cfg.ListenClientUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(dir, "client.sock")}}
	cfg.AdvertiseClientUrls = []url.URL{{Scheme: "unix", Host: "localhost:0"}}
	cfg.UnsafeNoFsync = true
	cfg.QuotaBackendBytes = 8 << 30
	cfg.MaxTxnOps = 10_000 // for fill
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer server.Close()
	<-server.Server.ReadyNotify()
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// etcdProcess is a member of an etcd, in a process of its own.
type etcdProcess struct {
	process *process.Child
	pid     int
	client  *clientv3.Client // of this member
}

// startEtcds starts a cluster of n members and returns when all serve.
func startEtcds(t testing.TB, n int) []*etcdProcess {
	t.Helper()
	var members []string
	for i := range n {
		port, err := loopback.Reserve()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = port.Release() })
		members = append(members, fmt.Sprintf("m%d=http://%s", i, port.Address()))
	}
	out := make([]*etcdProcess, n)
	for i := range n {
		dir, err := os.MkdirTemp("", "strata-etcd-")
		if err != nil {
			t.Fatal(err)
		}
		stdin, parent, err := os.Pipe() // the member ends when parent is closed
		if err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("m%d", i)
		child, err := process.Start(process.Spec{
			Name: name, Path: os.Args[0], Stdin: stdin, Log: filepath.Join(dir, "log"), Tee: os.Stderr, Lines: true,
			Env: append(os.Environ(), etcdDirectory+"="+dir, etcdName+"="+name, etcdCluster+"="+strings.Join(members, ",")),
		})
		_ = stdin.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = parent.Close()
			_, _ = child.Wait(contextFor(t))
			child.Kill()
			_ = os.RemoveAll(dir)
		})
		out[i] = &etcdProcess{process: child, pid: child.PID(), client: connect(t, filepath.Join(dir, "client.sock"))}
	}
	for _, e := range out {
		if line, _, err := e.process.WaitLine(contextFor(t), 0, ""); err != nil || line != "ready" {
			t.Fatalf("etcd printed %q: %v", line, err)
		}
	}
	return out
}
