package embedetcd

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/pki"
)

func TestPeers_OneOfThreeStops_OthersServeAndItReturns(t *testing.T) {
	dir := t.TempDir()
	if _, err := pki.EnsureTemporary(filepath.Join(dir, "pki"), nil, time.Now()); err != nil {
		t.Fatal(err)
	}
	files, err := pki.EnsureCluster(filepath.Join(dir, "pki"), []string{"127.0.0.1"}, time.Now())
	testcheck.NoError(t, err)
	const count = 3
	var configs []Config
	var cluster, endpoints []string
	for i := range count {
		client, peer := reserve(t), reserve(t)
		name := fmt.Sprintf("member-%d", i)
		cluster = append(cluster, name+"=https://"+peer)
		endpoints = append(endpoints, "https://"+client)
		configs = append(configs, Config{
			Dir: filepath.Join(dir, name), ClientURL: "https://" + client,
			CertFile: files.EtcdMember, KeyFile: files.EtcdMember, TrustedCAFile: files.EtcdCA,
			UnsafeNoFsync: true, Logger: zap.NewNop(),
			Peers: &Peers{Name: name, CertFile: files.EtcdMember, KeyFile: files.EtcdMember, TrustedCAFile: files.EtcdCA},
		})
	}
	for i := range configs {
		configs[i].Peers.Cluster = strings.Join(cluster, ",")
	}

	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	members, errs := make([]*Server, count), make([]error, count)
	var starting sync.WaitGroup
	for i, config := range configs {
		starting.Go(func() { members[i], errs[i] = Start(ctx, config) })
	}
	starting.Wait()
	for i, err := range errs {
		testcheck.NoError(t, err)
		t.Cleanup(members[i].Close)
	}

	info := transport.TLSInfo{CertFile: files.EtcdClient, KeyFile: files.EtcdClient, TrustedCAFile: files.EtcdCA}
	tlsConfig, err := info.ClientConfig()
	testcheck.NoError(t, err)
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints[1:], TLS: tlsConfig, DialTimeout: timeout, Logger: zap.NewNop()})
	testcheck.NoError(t, err)
	defer client.Close()
	list, err := client.MemberList(ctx)
	if err != nil || len(list.Members) != count {
		t.Fatalf("members are %v, %v", list, err)
	}
	members[0].Close()
	// The member may have been the leader. Until the others have another one, a write may fail.
	_, err = client.Put(ctx, "key", "written by two")
	for err != nil && ctx.Err() == nil {
		time.Sleep(50 * time.Millisecond)
		_, err = client.Put(ctx, "key", "written by two")
	}
	if err != nil {
		t.Fatalf("write without the first member: %v", err)
	}
	again := start(t, configs[0])
	own, err := clientv3.New(clientv3.Config{Endpoints: []string{again.Endpoint()}, TLS: tlsConfig, DialTimeout: timeout, Logger: zap.NewNop()})
	testcheck.NoError(t, err)
	defer own.Close()
	if got, err := own.Get(ctx, "key"); err != nil || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "written by two" {
		t.Errorf("the first member has %v, %v after its return", got, err)
	}
}

// reserve returns an address that is reserved until the test ends.
func reserve(t *testing.T) string {
	t.Helper()
	port, err := loopback.Reserve()
	testcheck.NoError(t, err)
	t.Cleanup(func() { _ = port.Release() })
	return port.Address()
}

func TestPeers_WrongCluster_IsRefused(t *testing.T) {
	for name, cluster := range map[string]string{
		"no member of that name": "other=https://127.0.0.1:1",
		"no URL":                 "one",
	} {
		_, err := Start(t.Context(), Config{Dir: filepath.Join(t.TempDir(), "etcd"), Logger: zap.NewNop(), Peers: &Peers{Name: "one", Cluster: cluster}})
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("etcd members %q", cluster)) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
