package etcdfeed

import (
	"context"
	"errors"
	"io"
	"math"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/mirror"
)

const (
	// responseBytes is the size of events that are gathered in one response, about that at which
	// etcd makes fragments.
	responseBytes = 1 << 20
	// idleProgress is the interval of progress notifications of a watch that requested them; etcd's
	// is 10 minutes unless configured.
	idleProgress = 5 * time.Second
	// confirmTimeout bounds the read of etcd's revision, and the wait for it, of a progress
	// request. An unanswered request is repeated by the client.
	confirmTimeout = 3 * time.Second
	// maxWatches bounds the watches of one stream. A mirror needs one.
	maxWatches = 100
)

var (
	// errRestarted ends a stream whose log began another epoch. The client must not resume it
	// without a check of the revision and the cluster, which may be those of a restored etcd, so
	// the code is one after which clientv3 returns the error to the caller of the watch.
	errRestarted = status.Error(codes.Aborted, "the feed of the replica restarted; verify the revision of etcd, then resume")
	// errNotBegun refuses a request while there is no state, or no epoch of the log, that it needs.
	// The client retries it.
	errNotBegun = status.Error(codes.Unavailable, "the replica is loading, and cannot feed others yet; retry")
)

// feedStream is one Watch call: several watches, whose responses are sent under one lock.
type feedStream struct {
	s      *Server
	a      *attachment
	stream grpc.BidiStreamingServer[pb.WatchRequest, pb.WatchResponse]
	ctx    context.Context
	fail   context.CancelCauseFunc
	wg     sync.WaitGroup

	wantProgress chan struct{} // contains a value if progress was requested
	moved        chan struct{} // contains a value if a watch has advanced

	sending sync.Mutex      // held during a Send; taken before mu
	ended   bool            // the call is about to return; guarded by sending
	sent    mirror.Revision // the highest revision of a header or an event; guarded by sending

	mu      sync.Mutex // leaf; guards the fields below
	watches map[int64]*watch
	lastID  int64
}

// watch is one watch of a stream.
type watch struct {
	id         int64
	start, end string
	all        bool // every event of the log is in the range
	from       mirror.Revision
	epoch      int64
	fragment   bool
	notify     bool
	cancel     context.CancelFunc

	pos mirror.Revision // all events up to here were sent; guarded by feedStream.mu
}

// Watch implements pb.WatchServer. A client that does not read its responses delays only itself:
// there is no queue, and a watch that falls behind the log is canceled with the compacted revision.
func (s *Server) Watch(stream grpc.BidiStreamingServer[pb.WatchRequest, pb.WatchResponse]) error {
	a, err := s.current()
	if err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(stream.Context())
	w := &feedStream{s: s, a: a, stream: stream, ctx: ctx, fail: fail, wantProgress: make(chan struct{}, 1), moved: make(chan struct{}, 1),
		watches: map[int64]*watch{}}
	defer context.AfterFunc(s.life, func() { fail(status.Error(codes.Unavailable, "the replica stops; resume")) })()
	requests := make(chan error, 1)
	// it ends with the stream, when this function has returned
	go func() { requests <- w.receive() }()
	w.wg.Go(w.answerProgress)
	select {
	case err = <-requests:
		fail(err)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	w.sending.Lock()
	w.ended = true // so that a request that is still being read starts nothing
	w.sending.Unlock()
	w.wg.Wait()
	if errors.Is(err, io.EOF) {
		return nil
	}
	if stream.Context().Err() != nil {
		return status.FromContextError(stream.Context().Err()).Err()
	}
	return err
}

// receive reads the requests of the stream until it ends.
func (w *feedStream) receive() error {
	for {
		r, err := w.stream.Recv()
		if err != nil {
			return err
		}
		switch r := r.RequestUnion.(type) {
		case *pb.WatchRequest_CreateRequest:
			err = w.create(r.CreateRequest)
		case *pb.WatchRequest_CancelRequest:
			err = w.remove(r.CancelRequest.GetWatchId(), &pb.WatchResponse{})
		case *pb.WatchRequest_ProgressRequest:
			signal(w.wantProgress)
		}
		if err != nil {
			return err
		}
	}
}

func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// send sends responses with no other response between them. Their header has the revision, or that
// of an earlier header if it is higher, because revisions of a stream do not decrease. The client
// uses the revision of progress only, see sendProgress.
func (w *feedStream) send(rev mirror.Revision, responses ...*pb.WatchResponse) error {
	w.sending.Lock()
	defer w.sending.Unlock()
	return w.sendLocked(rev, responses...)
}

// sendLocked is send for a caller that holds sending.
func (w *feedStream) sendLocked(rev mirror.Revision, responses ...*pb.WatchResponse) error {
	if w.ended {
		return context.Canceled
	}
	w.sent = max(w.sent, rev)
	for _, resp := range responses {
		resp.Header = w.s.header(w.a, w.sent)
		if err := w.stream.Send(resp); err != nil {
			return err
		}
	}
	return nil
}

// sendProgress reports that all events up to the revision of one watch were sent. A client resumes
// after that revision, so nothing is sent if the stream has passed it.
func (w *feedStream) sendProgress(id int64, rev mirror.Revision) (sent bool, err error) {
	w.sending.Lock()
	defer w.sending.Unlock()
	if rev < w.sent {
		return false, nil
	}
	return true, w.sendLocked(rev, &pb.WatchResponse{WatchId: id})
}

// create adds a watch. A request that is not served is answered by a canceled watch, as in etcd.
func (w *feedStream) create(r *pb.WatchCreateRequest) error {
	x := &watch{start: string(r.Key), end: string(r.RangeEnd), fragment: r.Fragment, notify: r.ProgressNotify}
	if x.end == x.start+"\x00" {
		x.end = ""
	}
	if isMarker(x.start, x.end) {
		return w.refuseMarker(r)
	}
	x.all = x.start == w.a.prefix && x.end == w.a.end
	// until the response is sent, whose revision precedes that of a watch from now on
	w.sending.Lock()
	defer w.sending.Unlock()
	if w.ended {
		return context.Canceled
	}
	st := w.a.events.state()
	x.epoch = st.epoch
	now := max(st.end, w.sent)
	if x.from = r.StartRevision; x.from <= 0 {
		x.from = now + 1
	}
	x.pos = max(x.from-1, 1) // the first revision of etcd, 1, has no event
	refusal := ""
	switch {
	case !w.a.serves(x.start, x.end):
		refusal = status.Convert(w.s.refuse("a watch outside " + w.a.prefix)).Message()
	case r.PrevKv || len(r.Filters) > 0:
		refusal = "the feed of a replica serves no watches with previous values or filters; send the request to etcd"
	case st.epoch == 0:
		return errNotBegun
	}
	ctx, cancel := context.WithCancel(w.ctx)
	x.cancel = cancel
	w.mu.Lock()
	if refusal == "" && len(w.watches) >= maxWatches {
		refusal = "too many watches on one stream of the feed of a replica"
	}
	if refusal == "" {
		x.id, refusal = w.freeID(r.WatchId)
	}
	if refusal == "" {
		w.watches[x.id] = x
	}
	w.mu.Unlock()
	if refusal != "" {
		cancel()
		return w.sendLocked(now, &pb.WatchResponse{WatchId: clientv3.InvalidWatchID, Created: true, Canceled: true, CancelReason: refusal})
	}
	if err := w.sendLocked(now, &pb.WatchResponse{WatchId: x.id, Created: true}); err != nil {
		cancel()
		return err
	}
	w.s.stats.watches.Add(1)
	w.wg.Go(func() {
		defer w.s.stats.watches.Add(-1)
		defer cancel()
		if err := w.run(ctx, x); err != nil {
			w.fail(err)
		}
	})
	return nil
}

// freeID returns the ID of a new watch, the requested one unless that is 0, or the reason why there
// is none. The caller holds mu.
func (w *feedStream) freeID(requested int64) (id int64, refusal string) {
	if _, taken := w.watches[requested]; requested != 0 && taken {
		return 0, "etcdserver: mvcc: watcher with this ID already exists"
	}
	if requested != 0 {
		return requested, ""
	}
	for _, taken := w.watches[w.lastID]; taken; _, taken = w.watches[w.lastID] {
		w.lastID++
	}
	id = w.lastID
	w.lastID++
	return id, ""
}

// refuseMarker answers a request for a watch of the compaction key, whose events the replica does
// not follow. One from a revision that etcd is known to have compacted is canceled with the
// compacted revision, which the compactor of a replica below asks for in this way. Any other is
// refused, because a watch without events would look like a key without writes.
func (w *feedStream) refuseMarker(r *pb.WatchCreateRequest) error {
	w.sending.Lock()
	defer w.sending.Unlock()
	if w.ended {
		return context.Canceled
	}
	now, compacted := max(w.a.events.state().end, w.sent), w.a.mirror.CompactRevision()
	id, refusal := int64(clientv3.InvalidWatchID), "the feed of a replica sends no events of the compaction key; read the key instead"
	if 0 < r.StartRevision && r.StartRevision < compacted {
		w.mu.Lock()
		id, refusal = w.freeID(r.WatchId)
		w.mu.Unlock()
	}
	if refusal != "" {
		return w.sendLocked(now, &pb.WatchResponse{WatchId: clientv3.InvalidWatchID, Created: true, Canceled: true, CancelReason: refusal})
	}
	return w.sendLocked(now, &pb.WatchResponse{WatchId: id, Created: true},
		&pb.WatchResponse{WatchId: id, Canceled: true, CompactRevision: compacted, CancelReason: rpctypes.ErrorDesc(rpctypes.ErrGRPCCompacted)})
}

// remove ends a watch with a response. It has no effect if there is no such watch.
func (w *feedStream) remove(id int64, resp *pb.WatchResponse) error {
	w.mu.Lock()
	x := w.watches[id]
	delete(w.watches, id)
	w.mu.Unlock()
	if x == nil {
		return nil
	}
	x.cancel()
	resp.WatchId, resp.Canceled = id, true
	return w.send(w.a.events.state().end, resp)
}

// run sends the events of a watch until it is canceled. Error: the stream must end.
func (w *feedStream) run(ctx context.Context, x *watch) error {
	ticker := time.NewTicker(idleProgress)
	defer ticker.Stop()
	if err := w.first(ctx, x); err != nil {
		return err
	}
	reported := x.from - 1 // revision that the client knows
	for ctx.Err() == nil {
		events, through, st, whole := w.a.events.read(x.pos, responseBytes)
		switch {
		case st.epoch != x.epoch:
			return errRestarted
		case !whole && x.pos >= st.awaited:
			// Wait for the restored history.
		case !whole:
			return w.compacted(x, st)
		default:
			if selected := selected(events, x.start, x.end, x.all); len(selected) > 0 {
				if err := w.sendEvents(x, selected, through); err != nil {
					return err
				}
				reported = selected[len(selected)-1].Kv.ModRevision
			} else {
				w.advance(x, through)
			}
			if through < st.end {
				continue
			}
		}
		select {
		case <-ctx.Done():
		case <-st.changed:
		case <-ticker.C:
			if x.notify && whole && x.pos > reported {
				sent, err := w.sendProgress(x.id, x.pos)
				if err != nil {
					return err
				}
				if sent {
					reported = x.pos
				}
			}
		}
	}
	return nil
}

// first lets a watch of one key that begins at the floor of the log begin there: the write at the
// floor, if there was one, is the state of the key at that revision, as in an etcd that is
// compacted to it.
func (w *feedStream) first(ctx context.Context, x *watch) error {
	st := w.a.events.state()
	if x.pos != st.floor-1 || x.end != "" || x.all || st.restoring() {
		return nil
	}
	v, err := w.a.mirror.View(ctx, st.floor, x.start, x.start+"\x00")
	if err != nil || !v.Covers(x.start, x.start+"\x00") {
		return nil // it is canceled as compacted
	}
	for e := range v.All(x.start, x.start+"\x00") {
		if e.ModRevision() != st.floor {
			continue
		}
		if !e.HasValue() {
			return nil
		}
		kv := &mvccpb.KeyValue{Key: []byte(e.Key()), Value: e.Value(), CreateRevision: e.CreateRevision(), ModRevision: e.ModRevision(), Version: int64(e.WriteCount())}
		if err := w.sendEvents(x, []*mvccpb.Event{{Type: mvccpb.PUT, Kv: kv}}, st.floor); err != nil {
			return err
		}
	}
	w.advance(x, st.floor)
	return nil
}

// compacted cancels a watch whose next revision the log does not have. It reports a revision above
// that one, since the client could resume at it otherwise, and above the floor, so that the client
// can still read it when the floor has moved. While history is awaited, it reports the start of
// that.
func (w *feedStream) compacted(x *watch, st state) error {
	w.s.stats.canceled.Add(1)
	next := x.pos + 1
	oldest := max(min(w.a.mirror.CompactRevision(), st.end), next+1)
	if st.restoring() {
		oldest = max(oldest, st.awaited)
	} else {
		oldest = max(oldest, w.a.events.offered())
	}
	return w.remove(x.id, &pb.WatchResponse{CompactRevision: oldest, CancelReason: rpctypes.ErrorDesc(rpctypes.ErrGRPCCompacted)})
}

// advance records that all events of a watch up to the revision were sent.
func (w *feedStream) advance(x *watch, rev mirror.Revision) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if rev > x.pos {
		x.pos = rev
		signal(w.moved)
	}
}

// sendEvents sends events of whole revisions, after which all events of the watch up to the
// revision through were sent, in fragments if they are large and the client accepts them.
func (w *feedStream) sendEvents(x *watch, events []*mvccpb.Event, through mirror.Revision) error {
	var responses []*pb.WatchResponse
	bytes := int64(0)
	for rest := events; len(rest) > 0; {
		n, size := 0, int64(0)
		for n < len(rest) && (n == 0 || !x.fragment || size+sizeOf(rest[n]) <= responseBytes) {
			size += sizeOf(rest[n])
			bytes += int64(len(rest[n].Kv.Key) + len(rest[n].Kv.Value))
			n++
		}
		responses = append(responses, &pb.WatchResponse{WatchId: x.id, Events: rest[:n], Fragment: n < len(rest)})
		rest = rest[n:]
	}
	w.sending.Lock()
	defer w.sending.Unlock()
	if err := w.sendLocked(through, responses...); err != nil {
		return err
	}
	w.advance(x, through) // before other responses are sent, such as progress
	w.s.stats.events.Add(int64(len(events)))
	w.s.stats.eventBytes.Add(bytes)
	return nil
}

// answerProgress answers progress requests until the stream ends: after the replica has read etcd's
// revision, linearizably, its memory has reached it, and all watches of the stream have sent their
// events up to it. Requests that arrive meanwhile share the next answer.
func (w *feedStream) answerProgress() {
	for {
		select {
		case <-w.ctx.Done():
			return
		case <-w.wantProgress:
		}
		rev, err := w.confirmed()
		if err != nil {
			continue // the client asks again
		}
		if err := w.answer(rev); err != nil {
			w.fail(err)
			return
		}
	}
}

// confirmed returns a revision that etcd has had since the call, and that the log has reached.
func (w *feedStream) confirmed() (mirror.Revision, error) {
	ctx, cancel := context.WithTimeout(w.ctx, confirmTimeout)
	defer cancel()
	rev, err := w.a.mirror.ReadRevision(ctx)
	if err == nil {
		err = w.a.mirror.Wait(ctx, rev)
	}
	return rev, err
}

// answer reports progress when all watches of the stream have sent their events up to the revision,
// or up to the end of the log if that is lower. It reports nothing if the stream ends, if that
// takes too long, or if a watch begins later. Error: the stream must end.
func (w *feedStream) answer(rev mirror.Revision) error {
	timer := time.NewTimer(confirmTimeout)
	defer timer.Stop()
	for {
		if done, err := w.tryAnswer(rev); done || err != nil {
			return err
		}
		select {
		case <-w.moved:
		case <-timer.C:
			return nil
		case <-w.ctx.Done():
			return nil
		}
	}
}

// tryAnswer reports progress of all watches at the lowest of their positions, which may be above
// the revision by now. Between the reading of the positions and the answer no event is sent. The
// answer is for all watches, so none of them may have got an event above it. done is false while a
// watch is behind.
func (w *feedStream) tryAnswer(rev mirror.Revision) (done bool, err error) {
	w.sending.Lock()
	defer w.sending.Unlock()
	lowest, behind, err := w.lowest(rev)
	switch {
	case err != nil:
		return true, nil
	case behind || lowest < w.sent:
		return false, nil
	}
	return true, w.sendLocked(lowest, &pb.WatchResponse{WatchId: clientv3.InvalidWatchID})
}

// errNoProgress: the stream has no watch, or one that begins at a later revision.
var errNoProgress = errors.New("a watch has not begun")

// lowest returns the lowest position of the watches, and whether one of them is behind the revision
// and the end of the log.
func (w *feedStream) lowest(rev mirror.Revision) (lowest mirror.Revision, behind bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	lowest = math.MaxInt64
	end := w.a.events.state().end
	for _, x := range w.watches {
		if x.from > end {
			return 0, false, errNoProgress
		}
		lowest = min(lowest, x.pos)
		behind = behind || x.pos < min(rev, end)
	}
	if len(w.watches) == 0 {
		return 0, false, errNoProgress
	}
	return lowest, behind, nil
}
