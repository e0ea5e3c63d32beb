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

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// KV is a client of an in-memory etcd: ranges at any revision, and writes of single keys. It counts
// requests.
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
			if resp.Count++; in.Limit > 0 && resp.Count > in.Limit {
				resp.More = true
				continue
			}
			resp.Kvs = append(resp.Kvs, &mvccpb.KeyValue{Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision})
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

// Txn implements pb.KVClient for a write of one key that depends on its revision.
func (r *rpc) Txn(ctx context.Context, in *pb.TxnRequest, _ ...grpc.CallOption) (*pb.TxnResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writes++
	is, put := in.Compare[0], in.Success[0].GetRequestPut()
	held, err := r.read(ctx, &pb.RangeRequest{Key: is.Key})
	if err != nil {
		return nil, err
	}
	var mod int64
	if len(held.Kvs) > 0 {
		mod = held.Kvs[0].ModRevision
	}
	resp := &pb.TxnResponse{Header: held.Header, Succeeded: mod == is.GetModRevision()}
	if resp.Succeeded {
		resp.Header.Revision = r.etcd.Put(string(put.Key), string(put.Value))
	}
	return resp, nil
}
