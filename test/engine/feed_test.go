package enginetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/etcdsource/contracttest"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// served is a feed that serves a mirror of a prefix on a unix socket.
type served struct {
	server *etcdfeed.Server
	mirror *mirror.Mirror
	socket string
}

// serveFeed mirrors the prefix of an etcd and serves the mirror until the test ends. wrap may
// change the source of the mirror.
func serveFeed(t testing.TB, etcd *clientv3.Client, prefix string, opts etcdfeed.Options, wrap ...func(driver.Source) driver.Source) *served {
	t.Helper()
	opts.Logger = quiet()
	f := &served{server: etcdfeed.New(opts), socket: filepath.Join(newEtcd(t).Directory(), "feed.sock")}
	var source driver.Source = etcdsource.New(etcd, "feed", prefix+"probe")
	for _, wrap := range wrap {
		source = wrap(source)
	}
	tap := f.server.Tap(source, prefix)
	f.mirror = newMirror(t, etcd, prefix, func(o *mirror.Options) {
		o.Source = tap.Source()
		o.UnclaimedBytes = 200 // of most keys without a claim only the revision is in memory
	})
	testcheck.NoError(t, tap.Attach(f.mirror, pb.NewKVClient(etcd.ActiveConnection())))
	listener, err := net.Listen("unix", f.socket)
	testcheck.NoError(t, err)
	g := f.server.GRPC()
	ended := make(chan error, 1)
	go func() { ended <- g.Serve(listener) }()
	t.Cleanup(func() {
		f.server.Close()
		g.Stop()
		if err := <-ended; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	catchUp(t, f.mirror)
	return f
}

// split is a client that reads at a feed and writes to etcd.
type split struct {
	clientv3.KV
	etcd clientv3.KV
}

func (s split) Put(ctx context.Context, key, value string, opts ...clientv3.OpOption) (*clientv3.PutResponse, error) {
	return s.etcd.Put(ctx, key, value, opts...)
}

func (s split) Delete(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.DeleteResponse, error) {
	return s.etcd.Delete(ctx, key, opts...)
}

func (s split) Compact(ctx context.Context, rev int64, opts ...clientv3.CompactOption) (*clientv3.CompactResponse, error) {
	return s.etcd.Compact(ctx, rev, opts...)
}

func (s split) Txn(ctx context.Context) clientv3.Txn { return s.etcd.Txn(ctx) }

// TestFeedServer_Contract_MatchesEtcd: reads at a feed meet the requirements of the engine, while
// writes go to etcd. A watch of all keys (E9) is refused, as to a user of etcd who may read the
// prefix only. Large revisions arrive in separate responses, where etcd makes fragments of one
// (E4), and memory serves revisions for longer than etcd (E6).
func TestFeedServer_Contract_MatchesEtcd(t *testing.T) {
	t.Parallel()
	e := newEtcd(t)
	e.run(t)
	etcd := connect(t, e.socket())
	const prefix = "/registry/"
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{})
	client := func() *clientv3.Client {
		c := connect(t, f.socket)
		c.KV = split{c.KV, etcd}
		return c
	}
	s := &contracttest.Store{Client: client(), Other: client(), Prefix: prefix + "contract/"}
	for _, r := range contracttest.Requirements() {
		t.Run(r.ID, func(t *testing.T) {
			answer, err := r.Test(contextFor(t), s)
			if r.ID == "E9" {
				if err == nil || !strings.Contains(err.Error(), "a watch outside "+prefix+" is refused") {
					t.Errorf("%s, %s: %q, %v", r.ID, r.Name, answer, err)
				}
				return
			}
			want := contracttest.Yes
			switch r.ID {
			case "E4":
				want = contracttest.No
			case "E6":
				want = "later"
			}
			if err != nil || answer != want {
				t.Errorf("%s, %s: %q, %v", r.ID, r.Name, answer, err)
			}
		})
	}
}

// sameRange compares the answers of both to a range. The revision of the header is the newest at
// the time of the answer, so it may differ, and leases are not part of a mirror.
func sameRange(t *testing.T, feed, etcd *clientv3.Client, key string, opts ...clientv3.OpOption) {
	t.Helper()
	got, err := feed.Get(contextFor(t), key, opts...)
	want, wantErr := etcd.Get(contextFor(t), key, opts...)
	if err != nil || wantErr != nil {
		if !errors.Is(err, wantErr) {
			t.Fatalf("range of %q: %v, etcd %v", key, err, wantErr)
		}
		return
	}
	if got.Header.ClusterId != want.Header.ClusterId {
		t.Fatalf("cluster %x, want %x", got.Header.ClusterId, want.Header.ClusterId)
	}
	if g, w := describe(got), describe(want); g != w {
		t.Fatalf("range of %q at the feed:\n%.2000s\nat etcd:\n%.2000s", key, g, w)
	}
}

// describe returns an answer as text, without the header and leases.
func describe(r *clientv3.GetResponse) string {
	text := fmt.Sprintf("count %d, more %v", r.Count, r.More)
	for _, kv := range r.Kvs {
		text += fmt.Sprintf("\n%s=%s created %d modified %d version %d", kv.Key, short(kv.Value), kv.CreateRevision, kv.ModRevision, kv.Version)
	}
	return text
}

// TestFeedServer_RandomWrites_RangesAndWatchesEqualEtcd: after random transactions, over claimed
// resources, nested ones, one that is not cached, and keys without a claim, ranges at random
// revisions and watches from random revisions have the answers of etcd.
func TestFeedServer_RandomWrites_RangesAndWatchesEqualEtcd(t *testing.T) {
	t.Parallel()
	_, etcd := newRunning(t)
	const prefix = "/registry/"
	put(t, etcd, prefix+"first", "value")
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{})
	for _, resource := range []string{"pods/", "pods/nested/", "secrets/"} {
		claim(t, f.mirror, prefix+resource)
	}
	if _, err := f.mirror.Exclude(prefix + "uncached/"); err != nil {
		t.Fatal(err)
	}
	client := connect(t, f.socket)
	r := rand.New(rand.NewPCG(testseed.New(t), 1))
	dirs := []string{"pods/", "pods/nested/", "secrets/", "uncached/", "other/", ""}
	first := catchUp(t, f.mirror)
	live := client.Watch(contextFor(t), prefix, clientv3.WithPrefix(), clientv3.WithRev(first+1))
	newest := first
	for range 300 {
		var ops []clientv3.Op
		written := map[string]bool{}
		for range 1 + r.IntN(4) {
			key := fmt.Sprintf("%s%sk%d", prefix, dirs[r.IntN(len(dirs))], r.IntN(12))
			if written[key] {
				continue
			}
			written[key] = true
			if r.IntN(4) == 0 {
				ops = append(ops, clientv3.OpDelete(key))
			} else {
				ops = append(ops, clientv3.OpPut(key, fmt.Sprint(r.Uint64())))
			}
		}
		resp, err := etcd.Txn(contextFor(t)).Then(ops...).Commit()
		testcheck.NoError(t, err)
		newest = resp.Header.Revision
		if r.IntN(50) == 0 { // a revision of several fragments
			big := strings.Repeat("x", 500<<10)
			resp, err := etcd.Txn(contextFor(t)).Then(clientv3.OpPut(prefix+"secrets/big1", big), clientv3.OpPut(prefix+"other/big2", big),
				clientv3.OpPut(prefix+"pods/big3", big[:400<<10])).Commit()
			testcheck.NoError(t, err)
			newest = resp.Header.Revision
		}
		if r.IntN(10) == 0 { // reads after writes
			sameRange(t, client, etcd, prefix, clientv3.WithPrefix())
		}
	}
	for range 200 {
		at := first + r.Int64N(newest-first+1)
		dir := prefix + dirs[r.IntN(len(dirs))]
		opts := []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithRev(at)}
		switch r.IntN(4) {
		case 0:
			opts = append(opts, clientv3.WithKeysOnly())
		case 1:
			opts = append(opts, clientv3.WithCountOnly())
		case 2:
			opts = append(opts, clientv3.WithLimit(1+r.Int64N(10)))
		}
		sameRange(t, client, etcd, dir, opts...)
		sameRange(t, client, etcd, fmt.Sprintf("%sk%d", dir, r.IntN(12)), clientv3.WithRev(at))
	}
	sameRange(t, client, etcd, prefix, clientv3.WithPrefix(), clientv3.WithRev(newest+1000))
	// the revision of the last event below each directory
	written, last := newest, map[string]int64{}
	for _, dir := range dirs {
		newest = put(t, etcd, prefix+dir+"end", "end")
		for _, above := range dirs {
			if strings.HasPrefix(dir, above) {
				last[prefix+above] = newest
			}
		}
	}
	sameEvents(t, live, etcd, prefix, first+1, newest)
	if s := f.server.Stats(); s.FromMemory < 100 || s.FromEtcd < 10 {
		t.Errorf("%d ranges from memory and %d from etcd: both must occur", s.FromMemory, s.FromEtcd)
	}
	for range 20 {
		from := first + 1 + r.Int64N(written-first)
		dir := prefix + dirs[r.IntN(len(dirs))]
		sameEvents(t, client.Watch(contextFor(t), dir, clientv3.WithPrefix(), clientv3.WithRev(from), clientv3.WithFragment()), etcd, dir, from, last[dir])
	}
}

// sameEvents compares the events of a watch up to a revision, which is that of its last event, with
// those of the same watch of etcd. Each revision must be in one response.
func sameEvents(t *testing.T, responses clientv3.WatchChan, etcd *clientv3.Client, key string, from, through int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(contextFor(t))
	defer cancel()
	want := eventsUntil(t, etcd.Watch(ctx, key, clientv3.WithPrefix(), clientv3.WithRev(from)), through)
	got := eventsUntil(t, responses, through)
	if !slices.Equal(got, want) {
		t.Fatalf("watch of %q from %d:\n%.2000v\nat etcd:\n%.2000v", key, from, got, want)
	}
}

// eventsUntil returns the events of a watch through a revision.
func eventsUntil(t *testing.T, responses clientv3.WatchChan, through int64) (all []string) {
	t.Helper()
	last := int64(0)
	for last < through {
		resp, ok := <-responses
		if !ok || resp.Err() != nil {
			t.Fatalf("watch ended after revision %d of %d: %v", last, through, resp.Err())
		}
		for i, e := range resp.Events {
			if i == 0 && e.Kv.ModRevision <= last {
				t.Fatalf("revision %d is divided over two responses, or repeated", e.Kv.ModRevision)
			}
			last = max(last, e.Kv.ModRevision)
			if e.Kv.ModRevision <= through {
				all = append(all, fmt.Sprintf("%d %v %s=%s created %d version %d", e.Kv.ModRevision, e.Type, e.Kv.Key, short(e.Kv.Value), e.Kv.CreateRevision, e.Kv.Version))
			}
		}
	}
	return all
}

// short returns a value, or the length and the end of a long one.
func short(value []byte) string {
	if n := len(value); n > 100 {
		return fmt.Sprintf("%d bytes", n)
	}
	return string(value)
}

// TestFeedServer_MirrorOfMirror_IsAsFreshAsEtcd: a read after a write, at a mirror of a mirror,
// sees it, without a relist.
func TestFeedServer_MirrorOfMirror_IsAsFreshAsEtcd(t *testing.T) {
	etcd, prefix := open(t)
	put(t, etcd, prefix+"pods/first", "value")
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{})
	m := newMirror(t, connect(t, f.socket), prefix, nil)
	r := claim(t, m, prefix+"pods/")
	for i := range 100 {
		key := fmt.Sprintf("%spods/%d", prefix, i%10)
		rev := put(t, etcd, key, fmt.Sprint(i))
		if got := catchUp(t, m); got < rev {
			t.Fatalf("read revision %d after a write at %d", got, rev)
		}
		s, err := r.Latest()
		testcheck.NoError(t, err)
		if e, ok := s.Get(key); !ok || e.ModRevision() != rev {
			t.Fatalf("write %d at revision %d is not seen at %d", i, rev, s.Rev)
		}
	}
	put(t, etcd, "/elsewhere"+prefix, "moves the revision of etcd, without an event below")
	catchUp(t, m)
	if n := m.LoadState().Failed; n != 0 {
		t.Errorf("%d relists", n)
	}
}

// TestFeedServer_Compactions_ReachCompactorsBelow: a compactor that follows without a watch at a
// feed, which does so too, learns a compaction that was announced, and one that was not.
func TestFeedServer_Compactions_ReachCompactorsBelow(t *testing.T) {
	t.Parallel()
	e := newEtcd(t)
	e.run(t)
	etcd := connect(t, e.socket())
	const prefix = "/registry/"
	put(t, etcd, prefix+"key", "0")
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{})
	upper := etcdsource.NewCompactor(etcd, etcdsource.CompactorOptions{OnCompaction: f.mirror.Compact, CheckInterval: 20 * time.Millisecond, Logger: quiet(),
		WithoutWatch: true, Oldest: func() mirror.Revision { return 2 }})
	t.Cleanup(upper.Stop)
	compacted := make(chan mirror.Revision, 1000)
	lower := etcdsource.NewCompactor(connect(t, f.socket), etcdsource.CompactorOptions{Logger: quiet(), CheckInterval: 20 * time.Millisecond, WithoutWatch: true,
		OnCompaction: func(rev mirror.Revision) { compacted <- rev }, Oldest: func() mirror.Revision { return 2 }})
	t.Cleanup(lower.Stop)
	until := func(rev mirror.Revision) {
		t.Helper()
		for {
			select {
			case got := <-compacted:
				if got == rev {
					return
				}
				if got > rev {
					t.Fatalf("compacted to %d, want %d", got, rev)
				}
			case <-contextFor(t).Done():
				t.Fatalf("no compaction to %d", rev)
			}
		}
	}
	unannounced := put(t, etcd, prefix+"key", "1")
	if _, err := etcd.Compact(contextFor(t), unannounced); err != nil {
		t.Fatal(err)
	}
	until(unannounced)
	announced := put(t, etcd, prefix+"key", "2")
	put(t, etcd, etcdsource.CompactionKey, fmt.Sprint(announced))
	until(announced)
}
