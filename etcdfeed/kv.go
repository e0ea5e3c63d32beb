package etcdfeed

import (
	"context"
	"errors"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/mirror"
)

const (
	// memoryWait bounds the wait of a range for memory to reach its revision. It is that of a
	// consistent read of the engine.
	memoryWait = 3 * time.Second
	// keyWait is the same bound for one key, which is then read from etcd: so clients learn etcd's
	// revision, and their own lag, also while this replica is behind.
	keyWait = 250 * time.Millisecond
	// etcdTimeout bounds a request that is passed on to etcd.
	etcdTimeout = 10 * time.Second
	// sendTimeout bounds the time for a part of a streamed range, whose view keeps old versions in
	// memory.
	sendTimeout = 30 * time.Second
	// chunkBytes is the size of a part of a streamed range, about that of etcd.
	chunkBytes = 1 << 20
	// chunkKeys bounds the keys of a part that is read from etcd.
	chunkKeys = 1000
)

// errNotInMemory marks a range that has to be passed on to etcd.
var errNotInMemory = errors.New("range is not in memory")

// Put implements pb.KVServer: it is refused.
func (s *Server) Put(context.Context, *pb.PutRequest) (*pb.PutResponse, error) {
	return nil, s.refuse("Put")
}

// DeleteRange implements pb.KVServer: it is refused.
func (s *Server) DeleteRange(context.Context, *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	return nil, s.refuse("DeleteRange")
}

// Compact implements pb.KVServer: it is refused.
func (s *Server) Compact(context.Context, *pb.CompactionRequest) (*pb.CompactionResponse, error) {
	return nil, s.refuse("Compact")
}

// Range implements pb.KVServer, linearizably unless the request is serializable or has a revision.
func (s *Server) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	a, err := s.admit(r)
	if err != nil {
		return nil, err
	}
	if isMarker(string(r.Key), string(r.RangeEnd)) {
		return s.fromEtcd(ctx, a, r)
	}
	view, err := s.view(ctx, a, r, keysOf(r))
	if errors.Is(err, errNotInMemory) {
		return s.fromEtcd(ctx, a, r)
	}
	if err != nil {
		return nil, err
	}
	resp, err := s.read(view, r, 0)
	if errors.Is(err, errNotInMemory) {
		return s.fromEtcd(ctx, a, r)
	}
	if err != nil {
		return nil, err
	}
	s.stats.fromMemory.Add(1)
	resp.Header = s.header(a, view.Published)
	return resp, nil
}

// RangeStream implements pb.KVServer. The last part has the header, as etcd's. The compaction key,
// which is not in memory, is not streamed.
func (s *Server) RangeStream(r *pb.RangeRequest, stream grpc.ServerStreamingServer[pb.RangeStreamResponse]) error {
	ctx := stream.Context()
	a, err := s.admit(r)
	if err != nil {
		return err
	}
	if r.SortTarget != pb.RangeRequest_KEY || r.SortOrder == pb.RangeRequest_DESCEND {
		return status.Error(codes.InvalidArgument, "a streamed range is in ascending order of keys")
	}
	var view mirror.View
	if isMarker(string(r.Key), string(r.RangeEnd)) {
		err = errNotInMemory
	} else {
		view, err = s.view(ctx, a, r, keysOf(r))
	}
	switch {
	case errors.Is(err, errNotInMemory):
		return status.Error(codes.Unimplemented, "this range is not in memory: read it in pages")
	case err != nil:
		return err
	case r.CountOnly:
		resp, err := s.read(view, r, 0)
		if err != nil {
			return status.Error(codes.Unimplemented, "this range is not in memory: read it in pages")
		}
		resp.Header = s.header(a, view.Published)
		return stream.Send(&pb.RangeStreamResponse{RangeResponse: resp})
	}
	sent, rest := int64(0), &pb.RangeRequest{Key: r.Key, RangeEnd: r.RangeEnd, Revision: view.Rev, KeysOnly: r.KeysOnly}
	for {
		if rest.Limit = 0; r.Limit > 0 {
			rest.Limit = r.Limit - sent
		}
		resp, err := s.read(view, rest, chunkBytes)
		if errors.Is(err, errNotInMemory) {
			if rest.Limit == 0 || rest.Limit > chunkKeys {
				rest.Limit = chunkKeys
			}
			resp, err = s.fromEtcd(ctx, a, rest)
		} else if err == nil {
			s.stats.fromMemory.Add(1)
		}
		if err != nil {
			return err
		}
		sent += int64(len(resp.Kvs))
		part := &pb.RangeResponse{Kvs: resp.Kvs}
		done := !resp.More || len(resp.Kvs) == 0 || r.Limit > 0 && sent >= r.Limit
		if done {
			part.Header, part.More = s.header(a, view.Published), resp.More
			part.Count = sent - int64(len(resp.Kvs)) + resp.Count
		}
		if err := sendWithin(sendTimeout, stream, &pb.RangeStreamResponse{RangeResponse: part}); err != nil || done {
			return err
		}
		rest.Key = append(append([]byte(nil), resp.Kvs[len(resp.Kvs)-1].Key...), 0)
	}
}

// sendWithin sends a part of a streamed range. Error: the client has not taken it within the
// timeout; the end of the call then ends the Send.
func sendWithin(timeout time.Duration, stream grpc.ServerStreamingServer[pb.RangeStreamResponse], part *pb.RangeStreamResponse) error {
	sent := make(chan error, 1)
	go func() { sent <- stream.Send(part) }()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case err := <-sent:
		return err
	case <-timer.C:
		return status.Errorf(codes.DeadlineExceeded, "the client has not read a part of the range within %s; read the rest in pages", timeout)
	}
}

// Txn implements pb.KVServer for transactions that only read.
func (s *Server) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	a, err := s.current()
	if err != nil {
		return nil, err
	}
	if err := s.onlyReads(a, r); err != nil {
		return nil, err
	}
	if len(r.Compare) == 0 && len(r.Success) > 0 {
		if resp, err := s.readAll(ctx, a, r.Success); !errors.Is(err, errNotInMemory) {
			return resp, err
		}
	}
	ctx, release, err := s.beginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	resp, err := a.etcd.Txn(ctx, r)
	if err != nil {
		return nil, err
	}
	resp.Header.MemberId = s.member
	return resp, nil
}

// readAll answers ranges of one revision from memory. Errors: errNotInMemory for others.
func (s *Server) readAll(ctx context.Context, a *attachment, ops []*pb.RequestOp) (*pb.TxnResponse, error) {
	first := ops[0].GetRequestRange()
	var all keys // around those of the ranges
	for i, op := range ops {
		r := op.GetRequestRange()
		if r == nil || r.Revision == 0 || r.Revision != first.GetRevision() || isMarker(string(r.Key), string(r.RangeEnd)) || !inOrder(r) {
			return nil, errNotInMemory
		}
		if k := keysOf(r); i == 0 {
			all = k
		} else {
			all.start, all.end = min(all.start, k.start), max(all.end, k.end)
		}
	}
	view, err := s.view(ctx, a, first, all)
	if err != nil {
		return nil, err
	}
	txn := &pb.TxnResponse{Header: s.header(a, view.Published), Succeeded: true}
	for _, op := range ops {
		resp, err := s.read(view, op.GetRequestRange(), 0)
		if err != nil {
			return nil, err
		}
		resp.Header = &pb.ResponseHeader{Revision: view.Published}
		txn.Responses = append(txn.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: resp}})
	}
	s.stats.fromMemory.Add(int64(len(ops)))
	return txn, nil
}

// onlyReads returns an error if an operation of the transaction, nested ones included, writes or
// reads outside the prefix.
func (s *Server) onlyReads(a *attachment, txn *pb.TxnRequest) error {
	for _, c := range txn.Compare {
		if key, end := string(c.Key), string(c.RangeEnd); !a.serves(key, end) && !isMarker(key, end) {
			return s.refuse("a comparison of keys outside " + a.prefix)
		}
	}
	for _, ops := range [][]*pb.RequestOp{txn.Success, txn.Failure} {
		for _, op := range ops {
			switch op := op.Request.(type) {
			case *pb.RequestOp_RequestRange:
				if _, err := s.admit(op.RequestRange); err != nil {
					return err
				}
			case *pb.RequestOp_RequestTxn:
				if err := s.onlyReads(a, op.RequestTxn); err != nil {
					return err
				}
			default:
				return s.refuse("a transaction that writes")
			}
		}
	}
	return nil
}

// admit returns the mirror for a range. Errors: it is outside the prefix, or the mirror is loading.
func (s *Server) admit(r *pb.RangeRequest) (*attachment, error) {
	a, err := s.current()
	if err != nil {
		return nil, err
	}
	key, end := string(r.Key), string(r.RangeEnd)
	switch {
	case key == "":
		return nil, rpctypes.ErrGRPCEmptyKey
	case !a.serves(key, end) && !isMarker(key, end):
		return nil, s.refuse("a range outside " + a.prefix)
	}
	return a, nil
}

// keys are those with start <= key < end.
type keys struct{ start, end string }

// keysOf returns the keys of a range, which has an upper bound (attachment.serves).
func keysOf(r *pb.RangeRequest) keys {
	k := keys{string(r.Key), string(r.RangeEnd)}
	if k.end == "" {
		k.end = k.start + "\x00"
	}
	return k
}

// isKey reports whether it is one key.
func (k keys) isKey() bool { return k.end == k.start+"\x00" }

// inOrder reports whether the answer to a range is all of its keys in ascending order, which is
// that of memory.
func inOrder(r *pb.RangeRequest) bool {
	return r.SortTarget == pb.RangeRequest_KEY && r.SortOrder != pb.RangeRequest_DESCEND &&
		r.MinModRevision|r.MaxModRevision|r.MinCreateRevision|r.MaxCreateRevision == 0
}

// view returns the keys in memory at the revision of a range, after a linearizable read of etcd's
// revision if the range demands one. Errors: those of etcd; Unavailable if etcd or memory do not
// answer in time; errNotInMemory.
func (s *Server) view(ctx context.Context, a *attachment, r *pb.RangeRequest, k keys) (mirror.View, error) {
	m, rev := a.mirror, r.Revision
	if rev > 0 && rev < a.oldest(a.events.state()) {
		return mirror.View{}, rpctypes.ErrGRPCCompacted
	}
	if !inOrder(r) {
		return mirror.View{}, errNotInMemory
	}
	target := rev
	if rev == 0 && !r.Serializable || rev > m.PublishedRevision() {
		now, err := m.ReadRevision(ctx)
		if err != nil {
			return mirror.View{}, status.Errorf(codes.Unavailable, "etcd does not tell its revision to the replica: %v; retry", err)
		}
		if rev > now {
			return mirror.View{}, rpctypes.ErrGRPCFutureRev
		}
		target = max(target, now)
		if rev > 0 {
			target = rev
		}
	}
	if err := s.await(ctx, m, target, k.isKey()); err != nil {
		return mirror.View{}, err
	}
	v, err := m.View(ctx, rev, k.start, k.end)
	switch {
	case errors.Is(err, mirror.ErrNotReady), errors.Is(err, mirror.ErrFutureRevision), errors.Is(err, mirror.ErrClosed):
		return v, status.Errorf(codes.Unavailable, "the replica is loading: %v; retry", err)
	case err != nil:
		return v, status.FromContextError(err).Err()
	case v.Rev < target: // etcd was restored meanwhile
		return v, status.Error(codes.Unavailable, "the replica is loading; retry")
	}
	return v, nil
}

// await returns when memory has reached the revision. Errors: errNotInMemory for one key,
// Unavailable for others.
func (s *Server) await(ctx context.Context, m *mirror.Mirror, rev mirror.Revision, oneKey bool) error {
	if m.PublishedRevision() >= rev {
		return nil
	}
	limit := memoryWait
	if oneKey {
		limit = keyWait
	}
	wait, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	switch err := m.Wait(wait, rev); {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	case oneKey:
		return errNotInMemory
	}
	return status.Errorf(codes.Unavailable, "memory of the replica is at revision %d, behind %d; retry", m.PublishedRevision(), rev)
}

// read answers a range from a view, without a header. With maxBytes it ends after so many bytes, of
// keys and values, and More is set. Errors: errNotInMemory.
func (s *Server) read(v mirror.View, r *pb.RangeRequest, maxBytes int) (*pb.RangeResponse, error) {
	k := keysOf(r)
	if !v.Covers(k.start, k.end) {
		return nil, errNotInMemory
	}
	resp := &pb.RangeResponse{}
	if r.CountOnly {
		resp.Count = v.Count(k.start, k.end)
		return resp, nil
	}
	size := 0
	for e := range v.All(k.start, k.end) {
		if n := len(resp.Kvs); r.Limit > 0 && int64(n) == r.Limit || maxBytes > 0 && size >= maxBytes {
			resp.More = true
			break
		}
		kv := &mvccpb.KeyValue{Key: []byte(e.Key()), CreateRevision: e.CreateRevision(), ModRevision: e.ModRevision(), Version: int64(e.WriteCount())}
		if !r.KeysOnly {
			if !e.HasValue() {
				return nil, errNotInMemory
			}
			kv.Value = e.Value()
		}
		size += len(kv.Key) + len(kv.Value) + 16
		resp.Kvs = append(resp.Kvs, kv)
	}
	resp.Count = int64(len(resp.Kvs))
	if resp.More {
		resp.Count = v.Count(k.start, k.end)
	}
	return resp, nil
}

// fromEtcd passes a range on to etcd.
func (s *Server) fromEtcd(ctx context.Context, a *attachment, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	ctx, release, err := s.beginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	resp, err := a.etcd.Range(ctx, r, grpc.MaxCallRecvMsgSize(64<<20))
	if err != nil {
		return nil, err
	}
	resp.Header.MemberId = s.member
	return resp, nil
}

// beginRead waits for a place for a read of etcd, and returns the context of the read. release ends
// the context and frees the place.
func (s *Server) beginRead(ctx context.Context) (_ context.Context, release func(), err error) {
	select {
	case s.places <- struct{}{}:
	case <-ctx.Done():
		return nil, nil, status.FromContextError(ctx.Err()).Err()
	}
	s.stats.fromEtcd.Add(1)
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	return ctx, func() { cancel(); <-s.places }, nil
}
