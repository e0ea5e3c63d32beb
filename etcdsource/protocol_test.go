package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

var errBroken = errors.New("broken")

// header is that of the cluster of streamServer.
func header(rev int64) *pb.ResponseHeader { return &pb.ResponseHeader{ClusterId: 7, Revision: rev} }

func event(key string, rev int64) *mvccpb.Event {
	return &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte(key), Value: []byte("v"), ModRevision: rev}}
}

// scriptedWatch is a stream with scripted responses, then an error. It counts what it is sent.
type scriptedWatch struct {
	grpc.BidiStreamingClient[pb.WatchRequest, pb.WatchResponse]
	responses []*pb.WatchResponse
	err       error
	sent      atomic.Int64
	broken    atomic.Bool // nothing can be sent
}

func (s *scriptedWatch) Send(*pb.WatchRequest) error {
	s.sent.Add(1)
	if s.broken.Load() {
		return errBroken
	}
	return nil
}

func (s *scriptedWatch) Recv() (*pb.WatchResponse, error) {
	if len(s.responses) == 0 {
		return nil, s.err
	}
	r := s.responses[0]
	s.responses = s.responses[1:]
	return r, nil
}

// TestWatchStream_Receive_JoinsFragmentsAndRefuses malformed responses, other clusters and ends of
// watches.
func TestWatchStream_Receive_JoinsFragmentsAndRefuses(t *testing.T) {
	event := func(rev int64) []*mvccpb.Event { return []*mvccpb.Event{event("/x/a", rev)} }
	created := &pb.WatchResponse{Header: header(1), Created: true}
	first := func() *pb.WatchResponse {
		return &pb.WatchResponse{Header: header(5), Events: event(2), Fragment: true}
	}
	second := &pb.WatchResponse{Header: header(5), Events: event(3)}
	size := int(eventBytes(event(2)))
	for name, c := range map[string]struct {
		responses []*pb.WatchResponse
		maxBytes  int
		events    int
		want      error // nil for any, unless events are wanted
		says      string
	}{
		"created is skipped": {[]*pb.WatchResponse{created, second}, 0, 1, nil, ""},
		"fragments":          {[]*pb.WatchResponse{first(), second}, 0, 2, nil, ""},
		"fragments fit":      {[]*pb.WatchResponse{first(), second}, size + 1, 2, nil, ""},
		"enough":             {[]*pb.WatchResponse{first(), second}, size, 1, nil, ""},
		"broken fragment":    {[]*pb.WatchResponse{first()}, 0, 0, errBroken, ""},
		"broken":             {nil, 0, 0, errBroken, ""},
		"no header":          {[]*pb.WatchResponse{{Events: event(2)}}, 0, 0, nil, "without a header"},
		"no event":           {[]*pb.WatchResponse{{Header: header(5), Events: []*mvccpb.Event{nil}}}, 0, 0, nil, "without a key"},
		"no key":             {[]*pb.WatchResponse{{Header: header(5), Events: []*mvccpb.Event{{}}}}, 0, 0, nil, "without a key"},
		"another cluster":    {[]*pb.WatchResponse{{Header: &pb.ResponseHeader{ClusterId: 8}}}, 0, 0, mirror.ErrRestored, "cluster ID 8, was 7"},
		"compacted":          {[]*pb.WatchResponse{{Header: header(5), CompactRevision: 4, Canceled: true}}, 0, 0, mirror.ErrCompacted, "oldest available 4"},
		"canceled":           {[]*pb.WatchResponse{{Header: header(5), Canceled: true, CancelReason: "no permission"}}, 0, 0, nil, "no permission"},
	} {
		var heard atomic.Int64
		l := &watchStream{stream: &scriptedWatch{responses: c.responses, err: errBroken}, cluster: 7, lastResponse: &heard}
		r, err := l.receive(c.maxBytes)
		if (err == nil) != (c.events > 0) || c.want != nil && !errors.Is(err, c.want) || err != nil && !strings.Contains(err.Error(), c.says) || err == nil && len(r.Events) != c.events {
			t.Errorf("%s: %v, %v", name, r, err)
		}
		if answered := len(c.responses) > 0; heard.Load() > 0 != answered || l.responded.Load() != answered {
			t.Errorf("%s: heard at %d", name, heard.Load())
		}
		if old := (*compactedError)(nil); errors.As(err, &old) && old.oldestRevision != 4 {
			t.Errorf("%s: oldest revision %d", name, old.oldestRevision)
		}
	}
}

// TestWatchStream_Silent_RequestsProgress once in each interval, on request at once, and not after
// a response or a failed request.
func TestWatchStream_Silent_RequestsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stream := &scriptedWatch{}
		ctx, cancel := context.WithCancel(t.Context())
		l := &watchStream{stream: stream, cancel: cancel, progressRequested: make(chan struct{}, 1)}
		l.wg.Go(func() { l.requestProgressLoop(ctx) })
		expect := func(wait time.Duration, want int64) {
			t.Helper()
			time.Sleep(wait)
			synctest.Wait()
			if sent := stream.sent.Load(); sent != want {
				t.Errorf("%d requests, want %d", sent, want)
			}
		}
		expect(progressInterval, 1)
		expect(progressInterval, 2)
		l.responded.Store(true)
		expect(progressInterval, 2)
		expect(progressInterval, 3)
		l.requestProgress()
		expect(0, 4)
		stream.broken.Store(true)
		expect(3*progressInterval, 5)
		l.close()
		if ctx.Err() == nil {
			t.Error("close does not end the stream")
		}
		l.requestProgress()
		l.requestProgress() // does not wait
	})
}

// TestAttempts_NoAnswer_DoublesTimeout, and any other error ends it.
func TestAttempts_NoAnswer_DoublesTimeout(t *testing.T) {
	hang := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	for name, c := range map[string]struct {
		f     func(ctx context.Context, call int) error
		calls int
		took  time.Duration
		want  error
	}{
		"never": {func(ctx context.Context, _ int) error { return hang(ctx) }, 3, 7 * time.Second, context.DeadlineExceeded},
		"third": {func(ctx context.Context, call int) error {
			return map[bool]func(context.Context) error{true: hang, false: func(context.Context) error { return nil }}[call < 3](ctx)
		}, 3, 3 * time.Second, nil},
		"other error":     {func(context.Context, int) error { return errBroken }, 1, 0, errBroken},
		"late other":      {func(ctx context.Context, _ int) error { _ = hang(ctx); return errBroken }, 1, time.Second, errBroken},
		"canceled early":  {func(context.Context, int) error { return context.Canceled }, 1, 0, context.Canceled},
		"status canceled": {func(ctx context.Context, _ int) error { _ = hang(ctx); return status.Error(codes.Canceled, "") }, 3, 7 * time.Second, context.DeadlineExceeded},
		"status deadline": {func(ctx context.Context, _ int) error { _ = hang(ctx); return status.Error(codes.DeadlineExceeded, "") }, 3, 7 * time.Second, context.DeadlineExceeded},
		"own deadline":    {func(ctx context.Context, _ int) error { _ = hang(ctx); return context.DeadlineExceeded }, 3, 7 * time.Second, context.DeadlineExceeded},
	} {
		synctest.Test(t, func(t *testing.T) {
			began, calls := time.Now(), 0
			answer, err := attempts(t.Context(), time.Second, 3, func(ctx context.Context) (int, error) {
				calls++
				return calls, c.f(ctx, calls)
			})
			if took := time.Since(began); answer != c.calls || took != c.took || !errors.Is(err, c.want) || c.want == nil && err != nil {
				t.Errorf("%s: call %d, %v after %s", name, answer, err, took)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		calls := 0
		_, err := attempts(ctx, time.Second, 3, func(ctx context.Context) (int, error) { calls++; return 0, hang(ctx) })
		if calls != 1 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the caller's context ends: %d calls, %v", calls, err)
		}
	})
}

// txnServer is a streamServer with transactions of reads.
type txnServer struct {
	*streamServer
	maxOps int
	errs   []error // of the next requests
	ops    []int   // of the requests
}

func (s *txnServer) fail(ops int) error {
	s.ops = append(s.ops, ops)
	if len(s.errs) > 0 {
		err := s.errs[0]
		s.errs = s.errs[1:]
		return err
	}
	if ops > s.maxOps {
		return rpctypes.ErrGRPCTooManyOps
	}
	return nil
}

func (s *txnServer) Range(ctx context.Context, in *pb.RangeRequest, opts ...grpc.CallOption) (*pb.RangeResponse, error) {
	if err := s.fail(1); err != nil {
		return nil, err
	}
	return s.one(in), nil
}

func (s *txnServer) one(in *pb.RangeRequest) *pb.RangeResponse {
	resp := &pb.RangeResponse{Header: header(s.revision)}
	for _, kv := range s.keys {
		if string(kv.Key) == string(in.Key) {
			resp.Kvs = []*mvccpb.KeyValue{kv}
		}
	}
	return resp
}

func (s *txnServer) Txn(ctx context.Context, in *pb.TxnRequest, _ ...grpc.CallOption) (*pb.TxnResponse, error) {
	if err := s.fail(len(in.Success)); err != nil {
		return nil, err
	}
	resp := &pb.TxnResponse{Header: header(s.revision), Succeeded: true}
	for _, op := range in.Success {
		resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: s.one(op.GetRequestRange())}})
	}
	return resp, nil
}

// TestGetAll_Refusals_AreRetriedOrReadOneByOne. The number of keys of a transaction grows while the
// values are small.
func TestGetAll_Refusals_AreRetriedOrReadOneByOne(t *testing.T) {
	unavailable, exhausted := status.Error(codes.Unavailable, "no leader"), status.Error(codes.ResourceExhausted, "too large")
	for name, c := range map[string]struct {
		keys, maxOps int
		errs         []error
		ops          []int
		took         time.Duration
		want         error
	}{
		"one":               {1, 128, nil, []int{1}, 0, nil},
		"growing":           {32 + 64 + 128 + 128 + 5, 128, nil, []int{32, 64, 128, 128, 5}, 0, nil},
		"too many":          {3, 1, nil, []int{3, 1, 1, 1}, 0, nil},
		"too large":         {2, 128, []error{exhausted}, []int{2, 1, 1}, 0, nil},
		"unimplemented":     {2, 128, []error{status.Error(codes.Unimplemented, "")}, []int{2, 1, 1}, 0, nil},
		"unknown":           {2, 128, []error{status.Error(codes.Unknown, "")}, []int{2, 1, 1}, 0, nil},
		"restart":           {2, 128, []error{unavailable, unavailable}, []int{2, 2, 2}, getRetry * 3, nil},
		"overload":          {2, 128, []error{rpctypes.ErrGRPCRequestTooManyRequests}, []int{2, 2}, getRetry, nil},
		"down":              {2, 128, slices.Repeat([]error{unavailable}, 10), slices.Repeat([]int{2}, 6), getRetry * 31, rpctypes.ErrNoLeader},
		"compacted":         {2, 128, []error{rpctypes.ErrGRPCCompacted}, []int{2}, 0, mirror.ErrCompacted},
		"future":            {2, 128, []error{rpctypes.ErrGRPCFutureRev}, []int{2}, 0, mirror.ErrRestored},
		"one is compacted":  {1, 128, []error{rpctypes.ErrGRPCCompacted}, []int{1}, 0, mirror.ErrCompacted},
		"permission denied": {2, 128, []error{rpctypes.ErrGRPCPermissionDenied}, []int{2}, 0, rpctypes.ErrPermissionDenied},
	} {
		synctest.Test(t, func(t *testing.T) {
			server := &txnServer{streamServer: newStreamServer(c.keys), maxOps: c.maxOps, errs: c.errs}
			s := New(&clientv3.Client{KV: clientv3.NewKVFromKVClient(server, nil)}, "test", "/x/probe")
			var keys, got []string
			for _, kv := range server.keys {
				keys = append(keys, string(kv.Key))
			}
			began := time.Now()
			err := s.GetAll(t.Context(), keys, 5, func(kv driver.KV) error { got = append(got, string(kv.Key)); return nil })
			took := time.Since(began)
			wrong := c.want == nil && (err != nil || !slices.Equal(got, keys)) || c.want != nil && (err == nil || len(got) > 0)
			if c.want != nil && name != "down" && !errors.Is(err, c.want) {
				wrong = true
			}
			if wrong || !slices.Equal(server.ops, c.ops) || took != c.took {
				t.Errorf("%s: requests of %v keys, want %v; %v after %s, want %s", name, server.ops, c.ops, err, took, c.took)
			}
			if err := s.GetAll(t.Context(), keys, 5, func(driver.KV) error { return errBroken }); c.want == nil && !errors.Is(err, errBroken) {
				t.Errorf("%s: the error of found becomes %v", name, err)
			}
		})
	}
}

// TestGetAll_RequestEnds_WaitsNoLonger: a pause before the next attempt ends with the request.
func TestGetAll_RequestEnds_WaitsNoLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &txnServer{streamServer: newStreamServer(2), maxOps: 128, errs: []error{status.Error(codes.Unavailable, "no leader")}}
		s := New(&clientv3.Client{KV: clientv3.NewKVFromKVClient(server, nil)}, "test", "/x/probe")
		ctx, cancel := context.WithTimeout(t.Context(), getRetry/2)
		defer cancel()
		began := time.Now()
		if err := s.GetAll(ctx, []string{"a", "b"}, 5, nil); err == nil || time.Since(began) != getRetry/2 {
			t.Errorf("%v after %v, want an error after %v", err, time.Since(began), getRetry/2)
		}
	})
}

// TestWatched_AllKeys_HasNoPrefix: a watch is of the prefix, which a user of etcd may be limited
// to, unless the source needs one of all keys.
func TestWatched_AllKeys_HasNoPrefix(t *testing.T) {
	s := newStreamServer(1).source()
	for all, want := range map[bool][2]string{false: {"/x/", "/x0"}, true: {allKeys, allKeys}} {
		s.allKeys = all
		if key, end := s.watched("/x/"); key != want[0] || end != want[1] {
			t.Errorf("all keys %v: the watch is of %q to %q, want %q", all, key, end, want)
		}
		if outside := s.outside("/x/", []byte("/y")); outside != all {
			t.Errorf("all keys %v: an event outside the prefix is %v", all, outside)
		}
	}
}

// TestVerify_OtherClusterOrOlderState_IsRestored.
func TestVerify_OtherClusterOrOlderState_IsRestored(t *testing.T) {
	s := newStreamServer(1).source() // of the cluster 7, at revision 1000
	for after, want := range map[driver.Header]error{
		{ClusterID: 7, Revision: 999}:  nil,
		{ClusterID: 7, Revision: 1000}: nil,
		{ClusterID: 7, Revision: 1001}: mirror.ErrRestored,
		{ClusterID: 8, Revision: 1000}: mirror.ErrRestored,
	} {
		if err := s.verify(t.Context(), after); !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("%v: %v, want %v", after, err, want)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.verify(ended, driver.Header{ClusterID: 7}); !errors.Is(err, context.Canceled) {
		t.Errorf("without an answer: %v", err)
	}
}

// TestKeys_Error_EndsList: that of the caller, or of etcd.
func TestKeys_Error_EndsList(t *testing.T) {
	for name, c := range map[string]struct {
		compacted bool
		fails     error // of the caller
		pages     int
		want      error
	}{
		"complete":  {false, nil, 4, nil},
		"of caller": {false, errBroken, 1, errBroken},
		"compacted": {true, nil, 0, mirror.ErrCompacted},
	} {
		server, pages := newStreamServer(10), 0
		server.compacted = c.compacted
		header, err := server.source().Keys(t.Context(), "/x/", 0, func(string) int { return 3 }, func([]driver.KV) error { pages++; return c.fails })
		if !errors.Is(err, c.want) || (err == nil) != (header.Revision == 1000) || pages != c.pages {
			t.Errorf("%s: %v, %v after %d pages", name, header, err, pages)
		}
	}
}

// TestPager_Keys_AreInRangeAndAscend, otherwise the page is an error.
func TestPager_Keys_AreInRangeAndAscend(t *testing.T) {
	for text, ok := range map[string]bool{"": true, "b": true, "b c d": true, "c": true, "a": false, "b b": false, "c b": false, "e": false, "b f": false} {
		var kvs []*mvccpb.KeyValue
		for _, key := range strings.Fields(text) {
			kvs = append(kvs, &mvccpb.KeyValue{Key: []byte(key)})
		}
		if err := (&Pager{key: "b", end: "e"}).checkOrder(kvs); (err == nil) != ok {
			t.Errorf("%q in [b, e): %v", text, err)
		}
		for _, open := range []string{"", "\x00"} {
			if err := (&Pager{key: "a", end: open}).checkOrder(kvs); (err == nil) != (text != "b b" && text != "c b") {
				t.Errorf("%q in [a, %q): %v", text, open, err)
			}
		}
	}
}

// TestPager_Limit_FollowsValuesAndRefusals: a page that is too large for the client is read in
// quarters.
func TestPager_Limit_FollowsValuesAndRefusals(t *testing.T) {
	kvs := func(n, bytes int) (all []*mvccpb.KeyValue) {
		for range n {
			all = append(all, &mvccpb.KeyValue{Value: make([]byte, bytes)})
		}
		return all
	}
	for _, c := range []struct {
		limit int64
		kvs   []*mvccpb.KeyValue
		want  int64
	}{{500, kvs(10, 1), 1000}, {9000, kvs(10, 1), maxPageKeys}, {500, kvs(10, 1<<20), 7}, {500, kvs(1, 16<<20), 1}} {
		if got := nextLimit(c.limit, c.kvs); got != c.want {
			t.Errorf("%d keys after a page of %d with %d, want %d", got, c.limit, len(c.kvs), c.want)
		}
	}
	server := &txnServer{streamServer: newStreamServer(1), maxOps: 128, errs: slices.Repeat([]error{status.Error(codes.ResourceExhausted, "")}, 20)}
	p := NewPager(clientv3.NewKVFromKVClient(server, nil), "/x/", "/x0", 0)
	if _, err := p.Next(t.Context(), 0); status.Code(err) != codes.ResourceExhausted || p.limit != 1 || len(server.ops) != 5 {
		t.Errorf("%v after %d requests, the last of %d keys", err, len(server.ops), p.limit)
	}
}

// TestEachField_Malformed_IsRefused at any length, and the error of the function is returned.
func TestEachField_Malformed_IsRefused(t *testing.T) {
	message := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 300)
	message = protowire.AppendFixed64(protowire.AppendTag(message, 2, protowire.Fixed64Type), 1)
	message = protowire.AppendBytes(protowire.AppendTag(message, 3, protowire.BytesType), []byte("abc"))
	whole := map[int]bool{0: true, 3: true, 12: true, len(message): true}
	for n := range len(message) + 1 {
		fields := 0
		err := eachField(message[:n], func(field protowire.Number, number uint64, bytes []byte) error {
			fields++
			if field == 1 && number != 300 || field == 3 && string(bytes) != "abc" || field == 2 {
				t.Errorf("field %d is %d, %q", field, number, bytes)
			}
			return nil
		})
		if whole[n] != (err == nil) || err != nil && !errors.Is(err, errMalformed) || n == len(message) && fields != 2 {
			t.Errorf("%d bytes: %d fields, %v", n, fields, err)
		}
		if count, err := countFields(message[:n], 3); (err == nil) != whole[n] || err == nil && (count == 1) != (n == len(message)) {
			t.Errorf("%d bytes: counted %d, %v", n, count, err)
		}
	}
	cut := protowire.AppendBytes(protowire.AppendTag(nil, streamResponse, protowire.BytesType), message[:len(message)-1])
	if err := newRangeCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(cut)}, &pb.RangeStreamResponse{}); !errors.Is(err, errMalformed) {
		t.Errorf("a part of a stream: %v", err)
	}
	if err := eachField(message, func(protowire.Number, uint64, []byte) error { return errBroken }); err != errBroken {
		t.Errorf("the error of the function becomes %v", err)
	}
}

// TestHistoryReader_Pass_SkipsDelivered changes and stops at the first error.
func TestHistoryReader_Pass_SkipsDelivered(t *testing.T) {
	batch := func(revs ...int64) (b driver.Batch) {
		for _, rev := range revs {
			b.Changes, b.Through = append(b.Changes, driver.Change{KV: driver.KV{ModRevision: rev}}), rev
		}
		return b
	}
	s := &segment{batches: []driver.Batch{batch(1, 2), batch(3, 3, 4), batch(6)}, through: 20}
	var got []int64
	var fail error
	r := &historyReader{after: driver.Header{Revision: 2}, through: 10, deliver: func(b driver.Batch) error {
		for _, c := range b.Changes {
			got = append(got, c.ModRevision)
		}
		return fail
	}}
	if err := r.pass(t.Context(), s); err != nil || !slices.Equal(got, []int64{3, 3, 4, 6}) || r.after.Revision != 10 {
		t.Errorf("delivered %v up to %d, %v", got, r.after.Revision, err)
	}
	fail, got, r.after.Revision = errBroken, nil, 2
	if err := r.pass(t.Context(), s); !errors.As(err, &permanent{}) || !errors.Is(err, errBroken) || len(got) != 3 || r.after.Revision != 2 {
		t.Errorf("delivered %v up to %d, %v", got, r.after.Revision, err)
	}
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errBroken)
	got = nil
	if err := r.pass(ended, s); err != errBroken || len(got) > 0 {
		t.Errorf("the context has ended: %v, %v", got, err)
	}
}

// TestReplay_NothingToRead_ReadsNothing, and a source without progress cannot replay.
func TestReplay_NothingToRead_ReadsNothing(t *testing.T) {
	s := New(&clientv3.Client{}, "test", "/x/probe")
	if err := s.Replay(t.Context(), "/x/", driver.Header{ClusterID: 7, Revision: 5}, 5, nil); err != nil {
		t.Error(err)
	}
	if err := s.WithoutProgress().Replay(t.Context(), "/x/", driver.Header{ClusterID: 7, Revision: 5}, 6, nil); !errors.Is(err, ErrProgressBug) {
		t.Errorf("without progress: %v", err)
	}
}

// fakeWatcher is a clientv3.Watcher whose watches receive from a channel.
type fakeWatcher struct {
	responses chan clientv3.WatchResponse
	requests  int // of progress
	hangs     bool
}

func (w *fakeWatcher) Watch(ctx context.Context, _ string, _ ...clientv3.OpOption) clientv3.WatchChan {
	if w.hangs {
		<-ctx.Done()
	}
	return w.responses
}
func (w *fakeWatcher) RequestProgress(context.Context) error { w.requests++; return errBroken }
func (w *fakeWatcher) Close() error                          { return nil }

// TestFeed_Responses_BecomeBatches: of events and of progress, in order; anything else ends the
// watch or is skipped.
func TestFeed_Responses_BecomeBatches(t *testing.T) {
	created := clientv3.WatchResponse{Header: header(1000), Created: true}
	events := func(key string, rev int64) clientv3.WatchResponse {
		return clientv3.WatchResponse{Header: header(rev), Events: []*clientv3.Event{(*clientv3.Event)(event(key, rev))}}
	}
	progress := func(rev int64) clientv3.WatchResponse { return clientv3.WatchResponse{Header: header(rev)} }
	deleted, elsewhere := events("/x/a", 1001), events("/x/a", 1001)
	deleted.Events[0].Type = mvccpb.DELETE
	elsewhere.Header = &pb.ResponseHeader{ClusterId: 8}
	for name, c := range map[string]struct {
		responses []clientv3.WatchResponse
		allKeys   bool
		batches   string // changes@through, changes-@through of deletions
		want      error  // nil for the end of the channel
	}{
		"events and progress": {[]clientv3.WatchResponse{created, events("/x/a", 1001), progress(1005)}, false, "1@1001 0@1005", nil},
		"deleted":             {[]clientv3.WatchResponse{created, deleted}, false, "1-@1001", nil},
		"progress again":      {[]clientv3.WatchResponse{created, progress(1000)}, false, "0@1000", nil},
		"progress goes back":  {[]clientv3.WatchResponse{created, progress(999)}, false, "", nil},
		"restored":            {[]clientv3.WatchResponse{created, events("/x/a", 1001), progress(999)}, false, "1@1001", mirror.ErrRestored},
		"all keys":            {[]clientv3.WatchResponse{created, events("/y/a", 1001), progress(1005), events("/x/a", 1006)}, true, "0@1001 1@1006", nil},
		"another cluster":     {[]clientv3.WatchResponse{created, elsewhere}, false, "", mirror.ErrRestored},
		"compacted":           {[]clientv3.WatchResponse{created, {Header: header(1000), Canceled: true, CompactRevision: 5}}, false, "", mirror.ErrCompacted},
		"compacted at once":   {[]clientv3.WatchResponse{{Header: header(1000), Canceled: true, CompactRevision: 5}}, false, "", mirror.ErrCompacted},
		"created, canceled":   {[]clientv3.WatchResponse{{Header: header(1000), Created: true, Canceled: true, CompactRevision: 5}}, false, "", mirror.ErrCompacted},
		"closed at once":      {nil, false, "", nil},
		"deliver fails":       {[]clientv3.WatchResponse{created, events("/x/fail", 1001)}, false, "1@1001", errBroken},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := &fakeWatcher{responses: make(chan clientv3.WatchResponse, 10)}
			for _, r := range c.responses {
				w.responses <- r
			}
			close(w.responses)
			client := clientv3.NewCtxClient(t.Context())
			client.KV, client.Watcher = clientv3.NewKVFromKVClient(newStreamServer(1), nil), w
			s := New(client, "test", "/x/probe")
			if c.allKeys {
				s = s.OfAllKeys()
			}
			var got []string
			err := s.Watch(t.Context(), "/x/", driver.Header{ClusterID: 7, Revision: 1000}, func(b driver.Batch) error {
				sign := map[bool]string{true: "-"}[len(b.Changes) > 0 && b.Changes[0].Deleted]
				got = append(got, fmt.Sprintf("%d%s@%d", len(b.Changes), sign, b.Through))
				if err := s.RequestProgress(t.Context()); (err != nil) == c.allKeys {
					t.Errorf("%s: a request for progress: %v", name, err)
				}
				if len(b.Changes) > 0 && string(b.Changes[0].Key) == "/x/fail" {
					return errBroken
				}
				return nil
			})
			if strings.Join(got, " ") != c.batches || err == nil || c.want != nil && !errors.Is(err, c.want) || c.want == nil && !strings.Contains(err.Error(), "etcd closed the watch") {
				t.Errorf("%s: batches %q, %v", name, got, err)
			}
			if err := s.RequestProgress(t.Context()); err != nil || s.feeds.current.Load() != nil {
				t.Errorf("%s: a request without a feed: %v", name, err)
			}
		})
	}
}

// TestFeed_ResumedOnAnotherMember_AvoidsThatOne: etcd's client resumes a watch by itself, on any
// member. If that one is silent, the next feed avoids it, not the member that created the watch.
func TestFeed_ResumedOnAnotherMember_AvoidsThatOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &fakeWatcher{responses: make(chan clientv3.WatchResponse, 2)}
		for i, r := range []clientv3.WatchResponse{{Header: header(1000), Created: true}, {Header: header(1001)}} {
			r.Header.MemberId = uint64(i + 1)
			w.responses <- r
		}
		client := clientv3.NewCtxClient(t.Context())
		client.KV, client.Watcher = clientv3.NewKVFromKVClient(newStreamServer(1), nil), w
		s := New(client, "test", "/x/probe")
		ctx, cancel := context.WithCancelCause(t.Context())
		err := s.Watch(ctx, "/x/", driver.Header{ClusterID: 7, Revision: 1000}, func(driver.Batch) error {
			cancel(mirror.ErrFeedSilent)
			return context.Cause(ctx)
		})
		if !errors.Is(err, mirror.ErrFeedSilent) || !s.feeds.silent.Load() || s.feeds.member.Load() != 2 {
			t.Errorf("%v; the next feed avoids member %d, want 2", err, s.feeds.member.Load())
		}
	})
}

// TestFeed_NotCreatedOrCanceled_Ends: a watch that is not created in time fails, one whose context
// ends returns its cause.
func TestFeed_NotCreatedOrCanceled_Ends(t *testing.T) {
	for _, created := range []bool{true, false} {
		for _, hangs := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				w := &fakeWatcher{responses: make(chan clientv3.WatchResponse, 1), hangs: hangs && !created}
				if created {
					w.responses <- clientv3.WatchResponse{Header: header(1000), Created: true}
				}
				client := clientv3.NewCtxClient(t.Context())
				client.KV, client.Watcher = clientv3.NewKVFromKVClient(newStreamServer(1), nil), w
				s := New(client, "test", "/x/probe")
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				began := time.Now()
				time.AfterFunc(10*createTimeout, func() { cancel(mirror.ErrFeedSilent); close(w.responses) })
				err := s.Watch(ctx, "/x/", driver.Header{ClusterID: 7, Revision: 1000}, func(driver.Batch) error { return nil })
				want, took := context.DeadlineExceeded, createTimeout
				if created {
					want, took = mirror.ErrFeedSilent, 10*createTimeout
				}
				if !errors.Is(err, want) || time.Since(began) != took || s.feeds.silent.Load() != created {
					t.Errorf("created: %t: %v after %s", created, err, time.Since(began))
				}
				time.Sleep(10 * createTimeout)
			})
		}
	}
}
