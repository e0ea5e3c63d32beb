package feed

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// TestHistory_ConcurrentStarts_AreRestored starts two servers, in its long form three, on one etcd
// with a long history, which all of them read at the same time, under writes. It logs the cost; it
// requires that each server has restored the newest part of the history, which etcd reads without
// blocking a writer for long.
func TestHistory_ConcurrentStarts_AreRestored(t *testing.T) {
	harness.OnlyStrata(t)
	// with the writes beside fewer than the 10,000 that are restored of any etcd
	const restored, names = 5_000, 500
	revisions, size := harness.Pick(20_000, 200_000), 1<<10
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd := e.Etcd()
	client := etcd.Client()
	began := time.Now()
	value := strings.Repeat("x", size)
	fill := func(writes int) {
		group, groupCtx := errgroup.WithContext(ctx)
		group.SetLimit(64)
		for i := range writes {
			group.Go(func() error {
				op := maps.put(fmt.Sprintf("map-%03d", i%names), value)
				_, err := client.Put(groupCtx, string(op.KeyBytes()), string(op.ValueBytes()))
				return err
			})
		}
		harness.Check(t, group.Wait())
	}
	fill(revisions - restored)
	first := commit(t, ctx, client, maps.put("first", ""))
	fill(restored)
	filled, err := etcd.Resident()
	harness.Check(t, err)
	t.Logf("%d revisions of %d bytes were written in %v; etcd holds %d MB", revisions, size, time.Since(began).Round(time.Millisecond), filled>>20)

	background, stop := context.WithCancel(ctx)
	defer stop()
	var beside sync.WaitGroup
	var longest time.Duration
	var writes int
	var peak int64
	beside.Go(func() {
		for background.Err() == nil {
			began := time.Now()
			if _, err := client.Do(background, leases.put("beside", fmt.Sprint(writes))); err != nil && background.Err() == nil {
				t.Error(err)
				return
			}
			longest = max(longest, time.Since(began))
			writes++
			time.Sleep(time.Millisecond) // one of several clients
		}
	})
	beside.Go(func() {
		for background.Err() == nil {
			if n, err := etcd.Resident(); err == nil {
				peak = max(peak, n)
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	began = time.Now()
	var servers []*harness.Server
	for range harness.Pick(2, 3) {
		servers = append(servers, e.StartAPIServer(etcd, noServiceAccounts))
	}
	var starting errgroup.Group
	for i, s := range servers {
		starting.Go(func() error {
			err := s.Await(ctx, "/readyz")
			t.Logf("server %d is ready after %v", i, time.Since(began).Round(time.Millisecond))
			return err
		})
	}
	harness.Check(t, starting.Wait())
	stop()
	beside.Wait()
	t.Logf("during the start %d writes, the longest took %v; etcd held at most %d MB", writes, longest.Round(time.Millisecond), peak>>20)
	for _, s := range servers {
		logHistory(t, s)
	}

	last := commit(t, ctx, client, maps.put("last", ""))
	all := history(t, ctx, client, maps.prefix, first, last)
	for i, s := range servers {
		api := s.API()
		begins := []int64{first, last - 3000, last - 1}
		for _, after := range begins[min(i, 1):] { // read one recording from its start
			watch, cancel := context.WithCancel(ctx)
			record(t, watch, api, maps.path, "", after).requireEvents(t, ctx, later(all, after))
			cancel()
		}
		list, err := listAt(ctx, api, maps.path, first)
		harness.Check(t, err)
		if l, err := list.List(); err != nil || len(l.Items) != names+1 {
			t.Errorf("list at %d: %d objects, %v, want %d", first, len(l.Items), err, names+1)
		}
	}
}

// TestInitialLoad_SlowEtcd_ServerBecomesReady starts a server on an etcd whose content arrives
// slowly: the load takes longer than admission's wait for its informers, and the post-start hooks
// that write must not end the process.
func TestInitialLoad_SlowEtcd_ServerBecomesReady(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd := e.Etcd()
	value := strings.Repeat("x", 512<<10)
	var last int64
	for i := range 60 { // 30 MB, in parts of about 1.5 MiB
		last = commit(t, ctx, etcd.Client(), maps.put(fmt.Sprintf("map-%03d", i), value))
	}
	proxy := e.Proxy(etcd)
	proxy.Delay(func(method string) time.Duration {
		if method == etcdproxy.MethodStream {
			return 700 * time.Millisecond
		}
		return 0
	})
	defer proxy.Delay(nil)
	began := time.Now()
	server := e.StartAPIServer(proxy.Etcd(), noServiceAccounts, "--strata-feature-gates=WatchHistoryRestore=false")
	harness.Check(t, server.Await(ctx, "/readyz"))
	t.Logf("ready after %v", time.Since(began).Round(time.Millisecond))
	proxy.Delay(nil)
	list, err := listAt(ctx, server.API(), maps.path, last)
	harness.Check(t, err)
	if l, err := list.List(); err != nil || len(l.Items) != 60 {
		t.Errorf("list: %d objects, %v, want 60", len(l.Items), err)
	}
}
