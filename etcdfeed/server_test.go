package etcdfeed_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// compactRevision returns the compacted revision of a watch of all keys, 0 if the watch is served.
func compactRevision(t *testing.T, client *clientv3.Client, from mirror.Revision) mirror.Revision {
	t.Helper()
	ctx, cancel := context.WithCancel(contextFor(t))
	defer cancel()
	resp, ok := <-client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(from))
	if err := resp.Err(); !ok || err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
		t.Fatalf("watch from %d ended (%v), want events, or that it is compacted", from, err)
	}
	return resp.CompactRevision
}

// TestFeedServer_WatchBelowLog_IsCompactedAboveItsStart: a watch that begins at the floor of the
// log, or below, is canceled with a compacted revision above its start, so that its client relists;
// all watches from above the floor are served. The log is full, or has room because it has just
// dropped a large event.
func TestFeedServer_WatchBelowLog_IsCompactedAboveItsStart(t *testing.T) {
	for name, large := range map[string]bool{"full": false, "room": true} {
		t.Run(name, func(t *testing.T) {
			f := serveFeed(t, etcdfeed.Options{LogBytes: 10_000})
			start := f.etcd.Revision()
			for i := range 100 {
				f.put(fmt.Sprintf("more/%d", i%10), "value")
			}
			if large {
				f.put("key", strings.Repeat("x", 6000))
				for i := range 18 {
					f.put(fmt.Sprintf("more/%d", i%10), "value")
				}
			}
			newest := catchUp(t, f.mirror)
			client := connect(t, f.socket)
			served := int64(0)
			for from := newest; from >= start; from-- {
				oldest := compactRevision(t, client, from)
				switch {
				case oldest == 0 && from < newest-served:
					t.Fatalf("a watch from %d is served, and one from above is not", from)
				case oldest == 0:
					served++
				case oldest <= from:
					t.Fatalf("a watch from %d is compacted to %d, want a revision above its start", from, oldest)
				}
			}
			if served < 10 || served > 40 {
				t.Errorf("watches from %d revisions are served, want about 30, or 18 after the large event", served)
			}
		})
	}
}

// busySource is a source whose store is written to after each part of a restore.
type busySource struct {
	driver.Source
	write func()
}

func (s busySource) Oldest(ctx context.Context, prefix string, now driver.Header, bounds driver.ReplayBounds) (mirror.Revision, error) {
	defer s.write()
	return s.Source.Oldest(ctx, prefix, now, bounds)
}

func (s busySource) Replay(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	defer s.write()
	return s.Source.Replay(ctx, prefix, after, through, deliver)
}

// TestFeedServer_WritesDuringRestoreBelow_HistoryIsRestored: a mirror of a feed whose log is full
// restores history, although each write moves the floor of the log.
func TestFeedServer_WritesDuringRestoreBelow_HistoryIsRestored(t *testing.T) {
	f := serveFeed(t, etcdfeed.Options{LogBytes: 10_000})
	written := 0
	write := func(n int) {
		for range n {
			f.put(fmt.Sprintf("more/%d", written%10), fmt.Sprint(written))
			written++
		}
		catchUp(t, f.mirror)
	}
	write(200)
	client := connect(t, f.socket)
	before := compactRevision(t, client, 1)
	m, r := f.below(t, func(s driver.Source) driver.Source { return busySource{s, func() { write(2) }} })
	now := catchUp(t, m)
	ctx := contextFor(t)
	for m.LoadState().Restoring {
		testcheck.NoError(t, r.WaitHistory(ctx, now-1))
		testcheck.NoError(t, ctx.Err())
	}
	if n := m.Stats().Replays; n == 0 {
		t.Fatal("no history was restored")
	}
	_, floor, err := r.Oldest()
	if err != nil || floor > before+10 {
		t.Errorf("floor of the history %d (%v), want about %d", floor, err, before)
	}
	if after := compactRevision(t, client, 1); after <= before {
		t.Errorf("compacted to %d, was %d before the restore: the test has no effect", after, before)
	}
}

// TestFeedServer_LogShorterThanHistory_CancelsWatchAsCompacted: a watch from before the log gets
// the revision from which it can continue, and a mirror of the feed restores history from there.
func TestFeedServer_LogShorterThanHistory_CancelsWatchAsCompacted(t *testing.T) {
	f := serveFeed(t, etcdfeed.Options{LogBytes: 10_000})
	start := f.etcd.Revision()
	for i := range 200 {
		f.put(fmt.Sprintf("more/%d", i%10), "value")
	}
	catchUp(t, f.mirror)
	client := connect(t, f.socket)
	resp := <-client.Watch(contextFor(t), prefix, clientv3.WithPrefix(), clientv3.WithRev(start))
	if !errors.Is(resp.Err(), rpctypes.ErrCompacted) || resp.CompactRevision <= start {
		t.Fatalf("watch from %d: %v, compacted to %d", start, resp.Err(), resp.CompactRevision)
	}
	if _, err := client.Get(contextFor(t), prefix, clientv3.WithPrefix(), clientv3.WithRev(start)); !errors.Is(err, rpctypes.ErrCompacted) {
		t.Errorf("range at %d: %v, want compacted", start, err)
	}
	oldest := resp.CompactRevision
	m, r := f.below(t, func(s driver.Source) driver.Source { return s })
	catchUp(t, m)
	testcheck.NoError(t, r.WaitHistory(contextFor(t), oldest))
	if _, floor, err := r.Oldest(); err != nil || floor > oldest+1 {
		t.Errorf("floor of the history %d (%v), want %d", floor, err, oldest)
	}
}

// TestFeedServer_ClientDoesNotRead_DelaysItselfOnly: a watch whose client does not read delays
// neither another one nor the mirror, and is canceled with the compacted revision when the log has
// dropped its events.
func TestFeedServer_ClientDoesNotRead_DelaysItselfOnly(t *testing.T) {
	f := serveFeed(t, etcdfeed.Options{LogBytes: 1 << 20})
	start := f.etcd.Revision()
	stalled, err := pb.NewWatchClient(connect(t, f.socket).ActiveConnection()).Watch(contextFor(t), grpc.MaxCallRecvMsgSize(math.MaxInt32))
	testcheck.NoError(t, err)
	if err := stalled.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
		Key: []byte(prefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(prefix)), StartRevision: start + 1, Fragment: true,
	}}}); err != nil {
		t.Fatal(err)
	}
	if created, err := stalled.Recv(); err != nil || !created.Created || created.Canceled {
		t.Fatalf("created: %v, %v", created, err)
	}
	live := connect(t, f.socket).Watch(contextFor(t), prefix, clientv3.WithPrefix(), clientv3.WithRev(start+1))
	value := strings.Repeat("v", 100<<10)
	var newest int64
	for i := range 400 { // 40 MB: more than the windows of a connection and the log
		newest = f.put(fmt.Sprintf("key-%d", i%10), value)
		if i%5 == 0 {
			eventsUntil(t, live, newest)
		}
	}
	if got := catchUp(t, f.mirror); got < newest {
		t.Errorf("the mirror is at %d, want %d", got, newest)
	}
	if n := f.server.Stats().LogBytes; n > 1<<20 {
		t.Errorf("the log has %d bytes", n)
	}
	for last := start; ; {
		resp, err := stalled.Recv()
		testcheck.NoError(t, err)
		if resp.Canceled {
			if resp.CompactRevision <= last || resp.CompactRevision > newest {
				t.Errorf("canceled with compacted revision %d after %d of %d", resp.CompactRevision, last, newest)
			}
			return
		}
		for _, e := range resp.Events {
			if e.Kv.ModRevision <= last {
				t.Fatalf("revision %d after %d", e.Kv.ModRevision, last)
			}
			last = e.Kv.ModRevision
		}
		if last >= newest {
			t.Fatal("all events arrived, though the client did not read")
		}
	}
}

// TestFeedServer_ProgressDuringWrites_IsNotBelowEvents: on a stream whose progress is requested all
// the time, during writes, revisions of headers do not decrease, and progress is not below events
// that were sent before it.
func TestFeedServer_ProgressDuringWrites_IsNotBelowEvents(t *testing.T) {
	f := serveFeed(t, etcdfeed.Options{})
	for name, prefixes := range map[string][]string{"one watch": {""}, "two watches": {"", "a/"}} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(contextFor(t))
			var wg sync.WaitGroup
			defer wg.Wait()
			defer cancel()
			for i := range 4 {
				wg.Go(func() {
					// slower than etcd can send events
					ticker := time.NewTicker(2 * time.Millisecond)
					defer ticker.Stop()
					for n := 0; ctx.Err() == nil; n++ {
						<-ticker.C
						f.put(fmt.Sprintf("%c/%d", 'a'+i%2, n%10), "value")
					}
				})
			}
			progressAfterEvents(t, ctx, connect(t, f.socket), &wg, prefixes)
		})
	}
}

// progressAfterEvents watches ranges below a prefix on one stream until 300 progress requests were
// answered.
func progressAfterEvents(t *testing.T, ctx context.Context, client *clientv3.Client, wg *sync.WaitGroup, ranges []string) {
	t.Helper()
	stream, err := pb.NewWatchClient(client.ActiveConnection()).Watch(ctx, grpc.MaxCallRecvMsgSize(math.MaxInt32))
	testcheck.NoError(t, err)
	for _, dir := range ranges {
		if err := stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
			Key: []byte(prefix + dir), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(prefix + dir)),
		}}}); err != nil {
			t.Fatal(err)
		}
	}
	wg.Go(func() {
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		for ; ctx.Err() == nil; <-ticker.C {
			if stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}) != nil {
				return
			}
		}
	})
	var header, sent int64
	events := 0
	for answers := 0; answers < 300; {
		resp, err := stream.Recv()
		if err != nil || resp.Canceled {
			t.Fatalf("after %d answers: %v, %v", answers, resp, err)
		}
		if resp.Header.Revision < header {
			t.Fatalf("header of revision %d after one of %d", resp.Header.Revision, header)
		}
		header = resp.Header.Revision
		for _, e := range resp.Events {
			sent = max(sent, e.Kv.ModRevision)
			events++
		}
		if len(resp.Events) == 0 && !resp.Created {
			answers++
			if header < sent {
				t.Fatalf("progress at %d after an event at %d", header, sent)
			}
		}
	}
	if events == 0 {
		t.Error("no events")
	}
}

// heldSource is a source whose replay, or whose events, wait until the channel is closed. A nil
// channel holds nothing.
type heldSource struct {
	driver.Source
	replay, events <-chan struct{}
}

func wait(ctx context.Context, held <-chan struct{}) error {
	if held == nil {
		return nil
	}
	select {
	case <-held:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s heldSource) Replay(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	if err := wait(ctx, s.replay); err != nil {
		return err
	}
	return s.Source.Replay(ctx, prefix, after, through, deliver)
}

func (s heldSource) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	return s.Source.Watch(ctx, prefix, after, func(b driver.Batch) error {
		if err := wait(ctx, s.events); err != nil {
			return err
		}
		return deliver(b)
	})
}

// TestProbe_FeedBehindEtcd_IsByProgress: a feed whose memory is behind etcd answers no progress
// request, and is known to do so later.
func TestProbe_FeedBehindEtcd_IsByProgress(t *testing.T) {
	held := make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	defer release()
	f := serveFeed(t, etcdfeed.Options{}, func(s driver.Source) driver.Source { return heldSource{Source: s, events: held} })
	f.put("key", "not in memory")
	client := connect(t, f.socket)
	if mode, err := etcdsource.Probe(contextFor(t), client, prefix+"probe"); mode != etcdsource.ByProgress || err == nil {
		t.Errorf("%s, %v; want progress, and an error", mode, err)
	}
	release()
	catchUp(t, f.mirror)
	ctx := contextFor(t)
	mode, err := etcdsource.Probe(ctx, client, prefix+"probe")
	for err != nil && ctx.Err() == nil { // a busy machine may answer too late
		mode, err = etcdsource.Probe(ctx, client, prefix+"probe")
	}
	if mode != etcdsource.ByProgress || err != nil {
		t.Errorf("%s, %v; want progress", mode, err)
	}
}

// TestFeedServer_RestoresHistory_MirrorBelowAwaitsIt: while a feed restores its history, a watch
// from before that is compacted at once, and a mirror below restores the history when it has
// arrived.
func TestFeedServer_RestoresHistory_MirrorBelowAwaitsIt(t *testing.T) {
	etcd := memory.New()
	var revs []mirror.Revision
	for i := range 100 {
		revs = append(revs, etcd.Put(fmt.Sprintf("%smore/%d", prefix, i%10), "value"))
	}
	compacted := revs[40]
	etcd.Compact(compacted)
	held := make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	defer release()
	f := serveStore(t, etcd, etcdfeed.Options{}, func(s driver.Source) driver.Source { return heldSource{Source: s, replay: held} })
	client := connect(t, f.socket)
	if got := compactRevision(t, client, 1); got != compacted {
		t.Errorf("a watch from 1 is compacted to %d, want %d", got, compacted)
	}
	_, r := f.below(t, func(s driver.Source) driver.Source { return busySource{s, release} })
	testcheck.NoError(t, r.WaitHistory(contextFor(t), compacted))
	if oldest, _, err := r.Oldest(); err != nil || oldest != compacted {
		t.Errorf("oldest revision %d (%v), want %d", oldest, err, compacted)
	}
	sameEvents(t, client, etcd, compacted)
}

// TestFeedServer_WatchFromFirstRevision_IsServed: a log that begins at the first revision of etcd,
// which has no event, has all events from there.
func TestFeedServer_WatchFromFirstRevision_IsServed(t *testing.T) {
	etcd := memory.New()
	f := serveStore(t, etcd, etcdfeed.Options{})
	etcd.Put(prefix+"key", "value")
	sameEvents(t, connect(t, f.socket), etcd, 0)
}

// TestFeedServer_RequestsOutsideContract_AreRefused: writes and keys outside the prefix are refused
// with an error that says so, and change nothing.
func TestFeedServer_RequestsOutsideContract_AreRefused(t *testing.T) {
	f := serveFeed(t, etcdfeed.Options{})
	client := connect(t, f.socket)
	ctx := contextFor(t)
	for name, request := range map[string]func() error{
		"put":    func() error { _, err := client.Put(ctx, prefix+"key", "other"); return err },
		"delete": func() error { _, err := client.Delete(ctx, prefix+"key"); return err },
		"txn": func() error {
			_, err := client.Txn(ctx).Then(clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpPut(prefix+"key", "other")}, nil)).Commit()
			return err
		},
		"compact":   func() error { _, err := client.Compact(ctx, 1); return err },
		"lease":     func() error { _, err := client.Grant(ctx, 60); return err },
		"other key": func() error { _, err := client.Get(ctx, "/elsewhere"); return err },
		"all keys":  func() error { _, err := client.Get(ctx, "\x00", clientv3.WithFromKey()); return err },
		"wider":     func() error { _, err := client.Get(ctx, prefix, clientv3.WithRange("\xff")); return err },
	} {
		err := request()
		var known rpctypes.EtcdError
		if errors.As(err, &known) || status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: %v, want PermissionDenied", name, err)
		}
	}
	if resp := <-client.Watch(ctx, "/elsewhere", clientv3.WithPrefix()); resp.Err() == nil || !strings.Contains(resp.Err().Error(), "is refused") {
		t.Errorf("a watch outside the prefix: %v", resp.Err())
	}
	if resp, err := client.Get(ctx, prefix, clientv3.WithPrefix()); err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != "value" {
		t.Errorf("a range of the prefix: %v, %v", resp, err)
	}
}

// TestFeedServer_WatchOfCompactionKey_IsAnsweredWithoutEtcd: a feed has no watch of the compaction
// key. A client that requests one learns that its revision is compacted, or that there are no
// events.
func TestFeedServer_WatchOfCompactionKey_IsAnsweredWithoutEtcd(t *testing.T) {
	etcd := memory.New()
	first := etcd.Put(prefix+"key", "0")
	compacted := etcd.Put(prefix+"key", "1")
	f := serveStore(t, etcd, etcdfeed.Options{})
	f.mirror.Compact(compacted)
	client := connect(t, f.socket)
	ctx, cancel := context.WithCancel(contextFor(t))
	defer cancel()
	// of the same stream
	other := client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	if resp := <-other; !resp.Created {
		t.Fatalf("a watch of the prefix: %+v", resp)
	}
	for range 2 {
		resp := <-client.Watch(ctx, etcdsource.CompactionKey, clientv3.WithRev(first))
		if resp.CompactRevision != compacted || !errors.Is(resp.Err(), rpctypes.ErrCompacted) {
			t.Errorf("a watch from %d: %+v (%v), want compacted to %d", first, resp, resp.Err(), compacted)
		}
		for _, rev := range []mirror.Revision{0, compacted, compacted + 1} {
			resp := <-client.Watch(ctx, etcdsource.CompactionKey, clientv3.WithRev(rev))
			if resp.CompactRevision != 0 || resp.Err() == nil || !strings.Contains(resp.Err().Error(), "read the key instead") {
				t.Errorf("a watch from %d: %+v (%v), want a refusal", rev, resp, resp.Err())
			}
		}
	}
	rev := f.put("key", "2")
	if resp := <-other; len(resp.Events) != 1 || resp.Events[0].Kv.ModRevision != rev {
		t.Errorf("the other watch: %+v (%v), want revision %d", resp, resp.Err(), rev)
	}
	if n := f.streams.Load(); n != 0 {
		t.Errorf("%d watches of etcd, want none", n)
	}
}

// TestFeedServer_StreamOfCompactionKey_IsRefused, because the key is not in memory: the answer
// would be that it does not exist. A range of it is answered by etcd.
func TestFeedServer_StreamOfCompactionKey_IsRefused(t *testing.T) {
	etcd := memory.New()
	etcd.Put(prefix+"key", "value")
	etcd.Put(etcdsource.CompactionKey, "1")
	f := serveStore(t, etcd, etcdfeed.Options{})
	client := connect(t, f.socket)
	if resp, err := client.Get(contextFor(t), etcdsource.CompactionKey); err != nil || len(resp.Kvs) != 1 {
		t.Errorf("a range of the key: %v, %v", resp, err)
	}
	for _, opts := range [][]clientv3.OpOption{nil, {clientv3.WithCountOnly()}} {
		parts, err := client.GetStream(contextFor(t), etcdsource.CompactionKey, opts...)
		testcheck.NoError(t, err)
		part := <-parts
		if status.Code(part.Err()) != codes.Unimplemented {
			t.Errorf("a stream of the key: %v, %v; want Unimplemented", part.RangeResponse, part.Err())
		}
	}
}
