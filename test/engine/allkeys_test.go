package enginetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/proxy/grpcproxy"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"pgregory.net/rapid"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// TestFeedOfAllKeys_WriteOutsidePrefix_AdvancesProgress: a write outside the prefix advances
// progress; the server's progress notifications do not.
func TestFeedOfAllKeys_WriteOutsidePrefix_AdvancesProgress(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe").OfAllKeys()
	rev := put(t, client, prefix+"a", "1")
	f := watch(t, s, prefix, driver.Header{ClusterID: header(t, s).ClusterID, Revision: rev - 1})
	next := func(through mirror.Revision) (changes []driver.Change) {
		t.Helper()
		for at := mirror.Revision(0); at < through; {
			select {
			case b := <-f.batches:
				changes, at = append(changes, b.Changes...), b.Through
			case err := <-f.ended:
				t.Fatalf("the watch ended: %v", err)
			case <-contextFor(t).Done():
				t.Fatalf("no batch through %d", through)
			}
		}
		return changes
	}
	if c := next(rev); len(c) != 1 || string(c[0].Key) != prefix+"a" {
		t.Fatalf("%+v, want the key", c)
	}
	for range 3 {
		if c := next(put(t, client, "/elsewhere"+prefix, "1")); len(c) != 0 {
			t.Fatalf("%+v for a write to another prefix, want progress", c)
		}
	}
	// Both in one transaction.
	resp, err := client.Txn(contextFor(t)).Then(clientv3.OpPut("/elsewhere"+prefix, "2"), clientv3.OpPut(prefix+"b", "1"), clientv3.OpPut("/zzz"+prefix, "2")).Commit()
	testcheck.NoError(t, err)
	if c := next(resp.Header.Revision); len(c) != 1 || string(c[0].Key) != prefix+"b" {
		t.Errorf("%+v, want the key of the prefix", c)
	}
}

// TestReplayOfAllKeys_EqualsWatch: the replayed history of the prefix equals the events of a watch
// on it, with one segment and with many, also if it begins or ends with writes outside the prefix.
func TestReplayOfAllKeys_EqualsWatch(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe").OfAllKeys()
	began := header(t, s)
	put(t, client, "/elsewhere"+prefix, "v")
	writeHistory(t, client, prefix, rand.New(rand.NewPCG(5, 6)), 600)
	put(t, client, "/elsewhere"+prefix, "v")
	now := header(t, s)
	want := watchEvents(t, client, prefix, began.Revision, now.Revision)
	for _, segment := range []int64{50, 499, 1 << 20} {
		requireEqual(t, replayed(t, s.WithSegments(segment, 8), prefix, began, now.Revision), want)
	}
	if oldest := oldestOf(t, s, prefix, ample); oldest > began.Revision {
		t.Errorf("history reaches back to %d, want %d or less", oldest, began.Revision)
	}
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		if n++; n > 5 { // each takes a few rounds of 100 ms in etcd
			return
		}
		through := rapid.Int64Range(began.Revision, now.Revision).Draw(rt, "through")
		requireEqual(rt, replayed(rt, s.WithSegments(200, 8), prefix, began, through), watchEvents(t, client, prefix, began.Revision, through))
	})
}

// TestMirror_BehindGRPCProxy_ServesLatestRevision: etcd's proxy does not answer progress requests.
// The probe detects this, and a mirror that watches all keys serves reads of the latest revision
// without progress requests, also after writes outside the prefix.
func TestMirror_BehindGRPCProxy_ServesLatestRevision(t *testing.T) {
	direct, prefix := open(t)
	client := throughProxy(t, direct)
	requireProbe(t, client, prefix+"probe", etcdsource.ByEvents)
	before := put(t, direct, prefix+"a/x", "0")
	put(t, direct, prefix+"a/x", "1")
	s := etcdsource.New(client, "feed", prefix+"probe").OfAllKeys()
	m := newMirror(t, client, prefix, func(o *mirror.Options) { o.Source, o.EveryRevision = s, true })
	a := claim(t, m, prefix+"a/")
	testcheck.NoError(t, a.WaitHistory(contextFor(t), before))
	if _, err := a.At(before); err != nil {
		t.Errorf("the history of before the start: %v", err)
	}
	for i := range 20 {
		put(t, direct, prefix+"a/x", fmt.Sprint(i))
		rev := put(t, direct, "/elsewhere"+prefix, fmt.Sprint(i))
		if got := catchUp(t, m); got < rev {
			t.Fatalf("caught up with %d, etcd was at %d", got, rev)
		}
		snap, err := a.Latest()
		if err != nil || snap.Rev < rev {
			t.Fatalf("memory is at %d, %v; want %d", snap.Rev, err, rev)
		}
		want, err := readEtcd(t, direct, prefix+"a/", snap.Rev)
		testcheck.NoError(t, err)
		if d := diff(read(snap), want); d != "" {
			t.Fatalf("at %d:%s", snap.Rev, d)
		}
	}
	if n := m.Stats().ProgressRequests; n != 0 {
		t.Errorf("%d progress requests", n)
	}
	if !m.VerifiesVersions() {
		t.Error("etcd counts the writes to a key, and arrival is not checked")
	}
}

// throughProxy returns a client of an etcd gRPC proxy in front of direct's etcd.
func throughProxy(t *testing.T, direct *clientv3.Client) *clientv3.Client {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	server := grpc.NewServer()
	kv, _ := grpcproxy.NewKvProxy(direct)
	watch, watchDone := grpcproxy.NewWatchProxy(ctx, zap.NewNop(), direct)
	pb.RegisterKVServer(server, kv)
	pb.RegisterWatchServer(server, watch)
	pb.RegisterMaintenanceServer(server, grpcproxy.NewMaintenanceProxy(direct))
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // until Stop
	}()
	t.Cleanup(func() {
		cancel()
		server.Stop()
		<-served
		<-watchDone
	})
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{listener.Addr().String()}, Logger: zap.NewNop()})
	testcheck.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}
