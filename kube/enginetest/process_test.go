package enginetest

import (
	"bufio"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/loopback"
)

// Set in a process that is to be an etcd.
const (
	etcdDirectory = "STRATA_TEST_ETCD_DIRECTORY" // where
	etcdName      = "STRATA_TEST_ETCD_NAME"
	etcdCluster   = "STRATA_TEST_ETCD_CLUSTER" // all members, as --initial-cluster names them
)

// beEtcd serves until its standard input ends: a process of its own, so that its memory can be told
// from the test's, and so that it can be stopped.
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
	process *os.Process
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
	ready := make(chan error, n)
	out := make([]*etcdProcess, n)
	for i := range n {
		dir, err := os.MkdirTemp("", "strata-etcd-")
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), etcdDirectory+"="+dir, fmt.Sprintf("%s=m%d", etcdName, i), etcdCluster+"="+strings.Join(members, ","))
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		said, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = in.Close()
			late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
			_ = cmd.Wait()
			late.Stop()
			_ = os.RemoveAll(dir)
		})
		out[i] = &etcdProcess{process: cmd.Process, pid: cmd.Process.Pid}
		go func() {
			line, err := bufio.NewReader(said).ReadString('\n')
			if err == nil && line != "ready\n" {
				err = fmt.Errorf("it says %q", line)
			}
			ready <- err
		}()
		out[i].client = connect(t, filepath.Join(dir, "client.sock"))
	}
	for range n {
		if err := <-ready; err != nil {
			t.Fatalf("etcd: %v", err)
		}
	}
	return out
}
