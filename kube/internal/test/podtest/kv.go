package podtest

import (
	"context"
	"errors"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// KV is a client of an in-memory etcd: ranges at any revision, puts and deletions of single keys,
// and transactions that depend on their revisions. It counts requests.
type KV struct {
	clientv3.KV
	rpc *rpc
}

// NewKV returns a client. before, unless it is nil, is called before each range; its error is the
// answer.
func NewKV(etcd *memory.Store, before func() error) *KV {
	r := &rpc{etcd: etcd, before: before}
	return &KV{clientv3.NewKVFromKVClient(r, nil), r}
}

// NewKVClient returns the client of a KV without the client's own code.
func NewKVClient(etcd *memory.Store) pb.KVClient { return &rpc{etcd: etcd} }

// Requests returns the number of ranges and of writes.
func (k *KV) Requests() (ranges, writes int) {
	k.rpc.mu.Lock()
	defer k.rpc.mu.Unlock()
	return k.rpc.ranges, k.rpc.writes
}

// rpc is a pb.KVClient. Its other methods panic.
type rpc struct {
	pb.KVClient
	etcd   *memory.Store
	before func() error

	mu             sync.Mutex // leaf; makes a comparison and its write one step
	ranges, writes int
}

// Range implements pb.KVClient.
func (r *rpc) Range(ctx context.Context, in *pb.RangeRequest, _ ...grpc.CallOption) (*pb.RangeResponse, error) {
	r.mu.Lock()
	r.ranges++
	r.mu.Unlock()
	if r.before != nil {
		if err := r.before(); err != nil {
			return nil, err
		}
	}
	return r.read(ctx, in)
}

func (r *rpc) read(ctx context.Context, in *pb.RangeRequest) (*pb.RangeResponse, error) {
	start, end := string(in.Key), string(in.RangeEnd)
	if end == "" {
		end = start + "\x00"
	}
	resp := &pb.RangeResponse{}
	header, err := r.etcd.List(ctx, "", in.Revision, func(kvs []driver.KV) error {
		for _, kv := range kvs {
			if string(kv.Key) < start || string(kv.Key) >= end {
				continue
			}
			if resp.Count++; in.CountOnly || in.Limit > 0 && resp.Count > in.Limit {
				resp.More = !in.CountOnly
				continue
			}
			resp.Kvs = append(resp.Kvs, &mvccpb.KeyValue{Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version})
		}
		return nil
	})
	switch {
	case errors.Is(err, mirror.ErrCompacted):
		return nil, rpctypes.ErrGRPCCompacted
	case errors.Is(err, mirror.ErrRestored):
		return nil, rpctypes.ErrGRPCFutureRev
	}
	resp.Header = &pb.ResponseHeader{ClusterId: header.ClusterID, Revision: r.etcd.Revision()}
	return resp, err
}

// RangeStream implements pb.KVClient like an etcd before 3.7.
func (r *rpc) RangeStream(context.Context, *pb.RangeRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[pb.RangeStreamResponse], error) {
	return nil, status.Error(codes.Unimplemented, "unknown method RangeStream")
}

// Put implements pb.KVClient, without leases.
func (r *rpc) Put(ctx context.Context, in *pb.PutRequest, _ ...grpc.CallOption) (*pb.PutResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writes++
	header, err := r.etcd.ReadRevision(ctx)
	return &pb.PutResponse{Header: &pb.ResponseHeader{ClusterId: header.ClusterID, Revision: r.etcd.Put(string(in.Key), string(in.Value))}}, err
}

// DeleteRange implements pb.KVClient for one key.
func (r *rpc) DeleteRange(ctx context.Context, in *pb.DeleteRangeRequest, _ ...grpc.CallOption) (*pb.DeleteRangeResponse, error) {
	if len(in.RangeEnd) > 0 {
		return nil, status.Error(codes.Unimplemented, "deletion of a range")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writes++
	header, err := r.etcd.ReadRevision(ctx)
	return &pb.DeleteRangeResponse{Header: &pb.ResponseHeader{ClusterId: header.ClusterID, Revision: r.etcd.Delete(string(in.Key))}}, err
}

// Txn implements pb.KVClient. Its conditions are that a key has a revision.
func (r *rpc) Txn(ctx context.Context, in *pb.TxnRequest, _ ...grpc.CallOption) (*pb.TxnResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writes++
	resp := &pb.TxnResponse{Succeeded: true}
	for _, is := range in.Compare {
		held, err := r.read(ctx, &pb.RangeRequest{Key: is.Key})
		if err != nil {
			return nil, err
		}
		var mod int64
		if len(held.Kvs) > 0 {
			mod = held.Kvs[0].ModRevision
		}
		if is.Target != pb.Compare_MOD || is.Result != pb.Compare_EQUAL {
			return nil, status.Errorf(codes.Unimplemented, "condition %v", is)
		}
		resp.Succeeded = resp.Succeeded && mod == is.GetModRevision()
	}
	ops := in.Success
	if !resp.Succeeded {
		ops = in.Failure
	}
	var writes []memory.Op
	for _, op := range ops {
		put, deleted := op.GetRequestPut(), op.GetRequestDeleteRange()
		switch {
		case put != nil:
			writes = append(writes, memory.Op{Key: string(put.Key), Value: string(put.Value)})
		case deleted != nil && deleted.RangeEnd == nil:
			writes = append(writes, memory.Op{Key: string(deleted.Key), Delete: true})
		default:
			found, err := r.read(ctx, op.GetRequestRange())
			if err != nil {
				return nil, err
			}
			resp.Responses = append(resp.Responses, &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: found}})
		}
	}
	header, err := r.etcd.ReadRevision(ctx)
	resp.Header = &pb.ResponseHeader{ClusterId: header.ClusterID, Revision: r.etcd.Txn(writes...)}
	return resp, err
}
