package kubestorage_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing/synctest"
	_ "unsafe" // for go:linkname

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"google.golang.org/grpc"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// neverDone is the channel that etcd's client waits on in place of the end of a watch's context. As
// it was not made in a bubble, synctest would take the wait for a busy one. A wait on nil never
// ends, and synctest knows that.
//
//go:linkname neverDone go.etcd.io/etcd/client/v3.valCtxCh
var neverDone chan struct{}

func init() { neverDone = nil }

// simClient is the connection of one server to a member of etcd, below etcd's own client. By itself
// it does nothing: the simulation decides when a request is answered, and which revisions a watch
// delivers and reports as progress.
type simClient struct {
	pb.KVClient // of the log
	etcd        *simEtcd
	at          *simMember // of new requests and watches
	// feed returns the feed at which new requests and watches of a replica arrive; nil: they
	// arrive at etcd.
	feed func() *etcdfeed.Server
	work chan struct{} // contains a value if there is a request

	// mu guards the fields below. The simulation may write calm, failing and at without it, while
	// all goroutines wait.
	mu sync.Mutex
	// calm: everything that can be answered is, at once.
	calm    bool
	failing bool         // requests fail
	waiting []*simCall   // oldest first
	streams []*simStream // oldest first
	lose    context.CancelCauseFunc
	round   int // of the simulation
}

// simStep is the key of a name in the context of a request: of the step that sent it.
type simStep struct{}

// simCall is a request that waits for its answer.
type simCall struct {
	name    string // orders the calls of one round, which goroutines make in any order
	round   int
	write   bool
	index   mirror.Revision // that the member has to apply first; 0: the leader was not asked yet
	execute func(*simMember) error
	answer  chan error
}

// client returns etcd's client on the connection.
func (c *simClient) client() *kubernetes.Client {
	client := &kubernetes.Client{Client: clientv3.NewCtxClient(context.Background())}
	client.KV = clientv3.NewKVFromKVClient(c, client.Client)
	client.Watcher = clientv3.NewWatchFromWatchClient(c, client.Client)
	client.Kubernetes = client
	return client
}

// call executes a request when the simulation decides so.
func (c *simClient) call(ctx context.Context, call *simCall) error {
	call.answer = make(chan error, 1)
	c.mu.Lock()
	call.round = c.round
	c.waiting = append(c.waiting, call)
	slices.SortStableFunc(c.waiting, func(a, b *simCall) int {
		return cmp.Or(cmp.Compare(a.round, b.round), cmp.Compare(a.name, b.name))
	})
	c.mu.Unlock()
	c.signal()
	select {
	case err := <-call.answer:
		return err
	case <-ctx.Done():
		c.mu.Lock()
		defer c.mu.Unlock()
		c.waiting = slices.DeleteFunc(c.waiting, func(other *simCall) bool { return other == call })
		return ctx.Err()
	}
}

// Range implements pb.KVClient. A linearizable one is answered when the member has applied what the
// leader had when it was asked.
func (c *simClient) Range(ctx context.Context, in *pb.RangeRequest, _ ...grpc.CallOption) (resp *pb.RangeResponse, err error) {
	execute := func(m *simMember) (err error) {
		resp, err = c.read(ctx, m, in)
		return err
	}
	if c.feed != nil {
		execute = func(*simMember) error { return nil } // it arrives at the feed
	}
	if in.Serializable && c.feed == nil {
		err = execute(c.at)
	} else {
		err = c.call(ctx, &simCall{name: fmt.Sprintf("%v range %s %d", ctx.Value(simStep{}), in.Key, in.Revision), execute: execute})
	}
	switch {
	case err != nil:
		return nil, err
	case c.feed != nil:
		return c.feed().Range(ctx, in)
	}
	return resp, nil
}

// read reads what a member has applied.
func (c *simClient) read(ctx context.Context, m *simMember, in *pb.RangeRequest) (*pb.RangeResponse, error) {
	switch {
	case in.Revision > m.applied:
		return nil, rpctypes.ErrGRPCFutureRev
	case in.Revision > 0 && in.Revision < m.compacted:
		return nil, rpctypes.ErrGRPCCompacted
	case in.Revision == 0 && m.applied < c.etcd.Revision():
		in = &pb.RangeRequest{Key: in.Key, RangeEnd: in.RangeEnd, Limit: in.Limit, CountOnly: in.CountOnly, KeysOnly: in.KeysOnly, Revision: m.applied}
	}
	resp, err := c.KVClient.Range(ctx, in)
	if err == nil {
		resp.Header.Revision = m.applied
	}
	return resp, err
}

// Txn implements pb.KVClient. The member has applied the transaction when it answers.
func (c *simClient) Txn(ctx context.Context, in *pb.TxnRequest, _ ...grpc.CallOption) (resp *pb.TxnResponse, err error) {
	err = c.call(ctx, &simCall{name: fmt.Sprintf("%v txn", ctx.Value(simStep{})), write: true, execute: func(m *simMember) (err error) {
		c.etcd.apply(m, c.etcd.Revision())
		for _, op := range in.Success {
			if rev := op.GetRequestRange().GetRevision(); rev > 0 && rev < m.compacted {
				return rpctypes.ErrGRPCCompacted
			}
		}
		resp, err = c.KVClient.Txn(ctx, in)
		c.etcd.apply(m, c.etcd.Revision())
		return err
	}})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// signal reports a request to the simulation.
func (c *simClient) signal() {
	select {
	case c.work <- struct{}{}:
	default:
	}
}

// answer executes and answers the n-th request, or the next one that can be answered. It reports
// whether there was one.
func (c *simClient) answer(n int) bool {
	c.mu.Lock()
	var call *simCall
	for i := range c.waiting {
		if at := (n + i) % len(c.waiting); c.answerable(c.waiting[at]) {
			call = c.waiting[at]
			c.waiting = slices.Delete(c.waiting, at, at+1)
			break
		}
	}
	failing := c.failing
	c.mu.Unlock()
	switch {
	case call == nil:
		return false
	case failing:
		call.answer <- rpctypes.ErrGRPCNoLeader
	default:
		call.answer <- call.execute(c.at)
	}
	return true
}

// answerable reports whether a request can be answered now. It asks the leader for the revision.
func (c *simClient) answerable(call *simCall) bool {
	switch {
	case c.failing, c.feed != nil:
		return true
	case !c.etcd.agrees(c.at):
		return false
	case call.index == 0:
		call.index = c.etcd.Revision()
	}
	return call.write || c.at.applied >= call.index
}

// leaderChanged fails the requests that wait, one by one. A write may have happened nevertheless,
// as happened says.
func (c *simClient) leaderChanged(happened func() bool) {
	for _, call := range slices.Clone(c.waiting) {
		c.mu.Lock()
		at := slices.Index(c.waiting, call)
		if at >= 0 {
			c.waiting = slices.Delete(c.waiting, at, at+1)
		}
		c.mu.Unlock()
		if at < 0 {
			continue // it was canceled
		}
		if call.write && happened() && c.etcd.agrees(c.at) {
			_ = call.execute(c.at)
		}
		call.answer <- rpctypes.ErrGRPCLeaderChanged
		synctest.Wait()
	}
}

// simSource is etcdsource on a connection. History, which etcdsource reads over connections of its
// own, is read without delay or faults.
type simSource struct {
	*etcdsource.Source
	client *simClient
}

// Watch implements driver.Source.
func (s simSource) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s.client.mu.Lock()
	s.client.lose = cancel
	s.client.mu.Unlock()
	return s.Source.Watch(context.WithValue(ctx, simStep{}, "watch"), prefix, after, deliver)
}

// List implements driver.Source.
func (s simSource) List(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	return s.Source.List(context.WithValue(ctx, simStep{}, "list"), prefix, at, page)
}

// Oldest implements driver.Source.
func (s simSource) Oldest(ctx context.Context, prefix string, now driver.Header, bounds driver.ReplayBounds) (mirror.Revision, error) {
	if now.Revision < s.client.at.compacted {
		return 0, fmt.Errorf("%w: simulated", mirror.ErrCompacted)
	}
	oldest, err := s.client.etcd.Oldest(ctx, prefix, now, bounds)
	return max(oldest, s.client.at.compacted), err
}

// Replay implements driver.Source.
func (s simSource) Replay(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	if after.Revision+1 < s.client.at.compacted {
		return fmt.Errorf("%w: simulated", mirror.ErrCompacted)
	}
	return s.client.etcd.Replay(ctx, prefix, after, through, deliver)
}

// GetAll implements driver.Source: old values for history.
func (s simSource) GetAll(ctx context.Context, keys []string, at mirror.Revision, found func(driver.KV) error) error {
	if at < s.client.at.compacted {
		return fmt.Errorf("%w: simulated", mirror.ErrCompacted)
	}
	return s.client.etcd.GetAll(ctx, keys, at, found)
}

// simStream is a stream of a member. Its client has one watch at a time.
type simStream struct {
	grpc.ClientStream
	ctx       context.Context
	member    *simMember
	cluster   uint64
	request   *pb.WatchCreateRequest // of the watch, nil if there is none
	id        int64
	created   bool
	synced    bool                // nothing was due at some time since its start
	sent      mirror.Revision     // the changes up to here were delivered
	reported  mirror.Revision     // the highest revision that was reported
	asked     int                 // requests for progress that are not answered
	broken    func()              // ends a stream to a feed at the feed
	held      []*pb.WatchResponse // of a feed, that were not delivered
	end       error               // of a stream to a feed, after held; nil: it runs
	responses chan *pb.WatchResponse
	ended     chan error
}

// Watch implements pb.WatchClient.
func (c *simClient) Watch(ctx context.Context, _ ...grpc.CallOption) (pb.Watch_WatchClient, error) {
	if c.feed != nil {
		return c.openFeed(ctx, c.feed()), nil
	}
	header, err := c.etcd.ReadRevision(ctx)
	if err != nil {
		return nil, err
	}
	st := &simStream{ctx: ctx, member: c.at, cluster: header.ClusterID, responses: make(chan *pb.WatchResponse, 64), ended: make(chan error, 1)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams = append(c.streams, st)
	return simSending{st, c}, nil
}

// simSending is a stream for its client, which guards the requests by the mutex of the connection.
type simSending struct {
	*simStream
	client *simClient
}

// Send implements pb.Watch_WatchClient.
func (s simSending) Send(in *pb.WatchRequest) error {
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	switch in := in.RequestUnion.(type) {
	case *pb.WatchRequest_CreateRequest:
		s.request, s.created, s.asked = in.CreateRequest, false, 0
		s.id++
	case *pb.WatchRequest_CancelRequest:
		if in.CancelRequest.WatchId == s.id {
			s.request = nil
		}
	case *pb.WatchRequest_ProgressRequest:
		s.asked++
	}
	s.client.signal()
	return nil
}

// Recv implements pb.Watch_WatchClient.
func (s *simStream) Recv() (*pb.WatchResponse, error) {
	select {
	case resp := <-s.responses:
		return resp, nil
	case err := <-s.ended:
		return nil, err
	case <-s.ctx.Done():
		return nil, rpctypes.Error(s.ctx.Err())
	}
}

// CloseSend implements pb.Watch_WatchClient.
func (s *simStream) CloseSend() error { return nil }

// send sends a response of the watch. Its client reads at once.
func (s *simStream) send(resp *pb.WatchResponse) {
	resp.Header = &pb.ResponseHeader{ClusterId: s.cluster, MemberId: uint64(s.member.number + 1), Revision: s.reported}
	if resp.WatchId == 0 {
		resp.WatchId = s.id
	}
	select {
	case s.responses <- resp:
	case <-s.ctx.Done():
	}
}

// current returns the stream with the running watch, nil if there is none. It creates a watch whose
// request has arrived, and cancels one that needs compacted revisions.
func (c *simClient) current() *simStream {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams = slices.DeleteFunc(c.streams, func(st *simStream) bool { return st.ctx.Err() != nil })
	for _, st := range c.streams {
		m := st.member
		switch {
		case st.request == nil, !st.created && m.cut:
			continue
		case !st.created:
			st.created = true
			st.sent = st.request.StartRevision - 1
			st.synced = st.sent >= m.applied
			st.reported = m.applied
			st.send(&pb.WatchResponse{Created: true})
			st.reported = st.sent
		}
		if (!st.synced || len(c.due(st)) > 0) && st.sent+1 < m.compacted {
			st.request = nil
			st.send(&pb.WatchResponse{Canceled: true, CompactRevision: m.compacted})
			return nil
		}
		return st
	}
	return nil
}

// due returns the changes that a watch has not delivered.
func (c *simClient) due(st *simStream) []driver.Change {
	all := c.etcd.Changes(string(st.request.Key), st.sent)
	n := slices.IndexFunc(all, func(d driver.Change) bool { return d.ModRevision > st.member.applied })
	if n < 0 {
		return all
	}
	return all[:n]
}

// deliver makes the watch deliver the changes of at most n revisions in one response, of several
// fragments. With broken the stream ends before the last one. It reports whether there were any.
func (c *simClient) deliver(n, fragments int, broken bool) bool {
	st := c.current()
	if c.feed != nil {
		return c.pass(n)
	}
	if st == nil {
		return false
	}
	sent := st.sent
	var events []*mvccpb.Event
	due := c.due(st)
	for _, d := range due {
		if d.ModRevision != sent {
			if n--; n < 0 {
				break
			}
		}
		sent = d.ModRevision
		e := &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: d.Key, Value: d.Value, CreateRevision: d.CreateRevision, ModRevision: d.ModRevision, Version: d.Version}}
		if d.Deleted {
			e.Type = mvccpb.DELETE
		}
		events = append(events, e)
	}
	st.synced = st.synced || len(events) == len(due)
	if len(events) == 0 {
		return false
	}
	st.sent, st.reported = sent, max(st.reported, sent)
	fragments = min(fragments, len(events))
	for i := range fragments {
		if i == fragments-1 && broken {
			c.end()
			return true
		}
		part := events[i*len(events)/fragments : (i+1)*len(events)/fragments]
		st.send(&pb.WatchResponse{Events: part, Fragment: i < fragments-1})
	}
	return true
}

// progress answers requests for progress, as far behind as lag revisions. It reports whether there
// was a request. A member that has not applied the revision before the start of the watch sends
// nothing.
func (c *simClient) progress(lag mirror.Revision) bool {
	st := c.current()
	if st == nil {
		return false
	}
	rev := st.member.applied
	if due := c.due(st); len(due) > 0 {
		rev = due[0].ModRevision - 1
	}
	rev -= lag
	c.mu.Lock()
	asked := st.asked
	st.asked = 0
	c.mu.Unlock()
	if asked == 0 {
		return false
	}
	if st.member.applied < st.request.StartRevision || rev < st.reported {
		return true
	}
	st.reported = rev
	st.send(&pb.WatchResponse{WatchId: clientv3.InvalidWatchID})
	return true
}

// end ends the watch: the client resumes it, maybe at another member.
func (c *simClient) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, st := range c.streams {
		if st.ctx.Err() == nil {
			st.ended <- rpctypes.ErrGRPCStopped
		}
		if st.broken != nil {
			st.broken()
		}
	}
	c.streams = nil
}

// disconnect ends the watch with the error of etcdsource for a lost connection.
func (c *simClient) disconnect() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lose != nil {
		c.lose(errDisconnected)
	}
}

var errDisconnected = errors.New("connection to etcd lost")
