package main

import (
	"fmt"
	"net"
	"net/rpc"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/test/testetcd"
)

// startReady is how long an etcd may take to serve. Only a failing test waits that long.
const startReady = time.Minute

// servers are the etcds of this process, by directory. Its methods are called by net/rpc.
type servers struct {
	mu      sync.Mutex
	running map[string]*embed.Etcd
}

// Start starts an etcd, with the data that the directory has, and returns when it serves.
func (s *servers) Start(arg testetcd.Request, _ *bool) error {
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(arg.Directory, testetcd.DataName)
	cfg.ListenClientUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(arg.Directory, testetcd.SocketName)}}
	// not used by any client
	cfg.AdvertiseClientUrls = []url.URL{{Scheme: "unix", Host: "localhost:0"}}
	cfg.UnsafeNoFsync = true
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	if c := arg.Config; c.Cluster == "" {
		cfg.ListenPeerUrls = nil
		cfg.TickMs, cfg.ElectionMs = 10, 100
	} else {
		cfg.Name, cfg.InitialCluster = c.Name, c.Cluster
		for member := range strings.SplitSeq(c.Cluster, ",") {
			if peer, ok := strings.CutPrefix(member, c.Name+"="); ok {
				u, err := url.Parse(peer)
				if err != nil {
					return err
				}
				cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{*u}, []url.URL{*u}
			}
		}
	}
	if n := arg.Config.MaxTxnOps; n > 0 {
		cfg.MaxTxnOps = n
	}
	if n := arg.Config.QuotaBytes; n > 0 {
		cfg.QuotaBackendBytes = n
	}
	if d := arg.Config.ProgressInterval; d > 0 {
		cfg.WatchProgressNotifyInterval = d
	}
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	select {
	case <-server.Server.ReadyNotify():
	case <-time.After(startReady):
		server.Close()
		return fmt.Errorf("etcd is not ready after %s", startReady)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[arg.Directory] = server
	return nil
}

// Stop ends the etcd of the directory.
func (s *servers) Stop(directory string, _ *bool) error {
	s.mu.Lock()
	server := s.running[directory]
	delete(s.running, directory)
	s.mu.Unlock()
	if server == nil {
		return fmt.Errorf("no etcd runs in %s", directory)
	}
	server.Close()
	return nil
}

// serve runs the etcds that the test program on the other side of the socket asks for, until that
// program ends.
func serve(socket string) error {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	s := rpc.NewServer()
	if err := s.RegisterName(testetcd.RPCName, &servers{running: map[string]*embed.Etcd{}}); err != nil {
		return err
	}
	s.ServeConn(conn)
	return nil
}
