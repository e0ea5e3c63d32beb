package enginetest

import (
	"context"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/stratakube/strata/etcdfeed"
)

// TestFeedServer_ProgressDuringWrites_IsNotBelowEvents: on a stream whose progress is requested all the time, during writes, revisions of headers do
// not decrease, and progress is not below events that were sent before it.
func TestFeedServer_ProgressDuringWrites_IsNotBelowEvents(t *testing.T) {
	etcd, prefix := open(t)
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{})
	for name, prefixes := range map[string][]string{"one watch": {""}, "two watches": {"", "a/"}} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(contextFor(t))
			var wg sync.WaitGroup
			defer wg.Wait()
			defer cancel()
			for i := range 4 {
				wg.Go(func() {
					ticker := time.NewTicker(2 * time.Millisecond) // slower than etcd can send events
					defer ticker.Stop()
					for n := 0; ctx.Err() == nil; n++ {
						<-ticker.C
						if _, err := etcd.Put(ctx, fmt.Sprintf("%s%c/%d", prefix, 'a'+i%2, n%10), "value"); err != nil && ctx.Err() == nil {
							t.Error(err)
							return
						}
					}
				})
			}
			progressAfterEvents(t, ctx, connect(t, f.socket), &wg, prefix, prefixes)
		})
	}
}

// progressAfterEvents watches ranges below a prefix on one stream until 300 progress requests were answered.
func progressAfterEvents(t *testing.T, ctx context.Context, client *clientv3.Client, wg *sync.WaitGroup, prefix string, ranges []string) {
	t.Helper()
	stream, err := pb.NewWatchClient(client.ActiveConnection()).Watch(ctx, grpc.MaxCallRecvMsgSize(math.MaxInt32))
	if err != nil {
		t.Fatal(err)
	}
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
