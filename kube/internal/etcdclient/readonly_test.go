package etcdclient

import (
	"context"
	"errors"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// TestReadOnlyClient_Requests_AreSentIfTheyOnlyRead: reads are sent; writes, and methods that are
// not known, are refused without being sent.
func TestReadOnlyClient_Requests_AreSentIfTheyOnlyRead(t *testing.T) {
	read := &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{}}}
	write := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{}}}
	remove := &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{}}}
	nested := func(op *pb.RequestOp) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{Failure: []*pb.RequestOp{op}}}}
	}
	for _, c := range []struct {
		method string
		req    any
		sent   bool
	}{
		{pb.KV_Range_FullMethodName, &pb.RangeRequest{}, true},
		{pb.KV_Txn_FullMethodName, &pb.TxnRequest{Success: []*pb.RequestOp{read}, Failure: []*pb.RequestOp{nested(read)}}, true},
		{pb.KV_Txn_FullMethodName, &pb.TxnRequest{Success: []*pb.RequestOp{read, write}}, false},
		{pb.KV_Txn_FullMethodName, &pb.TxnRequest{Failure: []*pb.RequestOp{remove}}, false},
		{pb.KV_Txn_FullMethodName, &pb.TxnRequest{Success: []*pb.RequestOp{nested(write)}}, false},
		{pb.KV_Put_FullMethodName, &pb.PutRequest{}, false},
		{pb.KV_DeleteRange_FullMethodName, &pb.DeleteRangeRequest{}, false},
		{pb.KV_Compact_FullMethodName, &pb.CompactionRequest{}, false},
		{pb.Lease_LeaseGrant_FullMethodName, &pb.LeaseGrantRequest{}, false},
		{pb.Lease_LeaseRevoke_FullMethodName, &pb.LeaseRevokeRequest{}, false},
		{pb.Cluster_MemberRemove_FullMethodName, &pb.MemberRemoveRequest{}, false},
		{"/etcdserverpb.KV/NewInALaterRelease", &pb.RangeRequest{}, false},
	} {
		sent := false
		err := refuseUnaryWrites(t.Context(), c.method, c.req, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			sent = true
			return nil
		})
		if sent != c.sent || errors.Is(err, ErrReadOnly) == c.sent {
			t.Errorf("%s %v: sent %v, error %v, want sent %v", c.method, c.req, sent, err, c.sent)
		}
	}
	for method, want := range map[string]bool{
		pb.Watch_Watch_FullMethodName: true, pb.KV_RangeStream_FullMethodName: true, pb.Lease_LeaseKeepAlive_FullMethodName: false,
	} {
		sent := false
		_, err := refuseStreamWrites(t.Context(), nil, nil, method, func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
			sent = true
			return nil, nil
		})
		if sent != want || errors.Is(err, ErrReadOnly) == want {
			t.Errorf("stream %s: sent %v, error %v, want sent %v", method, sent, err, want)
		}
	}
}
