package etcdclient

import (
	"context"
	"errors"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// ErrReadOnly is the error of a request to change etcd by a read-only client. The request was not
// sent.
var ErrReadOnly = errors.New("this server only reads from etcd")

// reading are the unary methods of etcd that change nothing. Txn is checked by its operations.
var reading = map[string]bool{
	"/etcdserverpb.KV/Range":              true,
	"/etcdserverpb.Maintenance/Status":    true,
	"/etcdserverpb.Maintenance/HashKV":    true,
	"/etcdserverpb.Cluster/MemberList":    true,
	"/etcdserverpb.Lease/LeaseTimeToLive": true,
	"/etcdserverpb.Auth/Authenticate":     true,
	"/grpc.health.v1.Health/Check":        true,
}

// readingStreams are the streams that change nothing.
var readingStreams = map[string]bool{
	"/etcdserverpb.Watch/Watch":          true,
	"/etcdserverpb.KV/RangeStream":       true,
	"/etcdserverpb.Maintenance/Snapshot": true,
	"/grpc.health.v1.Health/Watch":       true,
}

// refuseUnaryWrites refuses every request that is not known to change nothing.
func refuseUnaryWrites(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	txn, isTxn := req.(*pb.TxnRequest)
	if !reading[method] && !(isTxn && onlyReads(txn)) {
		return fmt.Errorf("%w: refused %s", ErrReadOnly, method)
	}
	return invoke(ctx, method, req, reply, conn, opts...)
}

// refuseStreamWrites refuses every stream that is not known to change nothing, such as the one that
// keeps leases alive.
func refuseStreamWrites(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if !readingStreams[method] {
		return nil, fmt.Errorf("%w: refused %s", ErrReadOnly, method)
	}
	return open(ctx, desc, conn, method, opts...)
}

// onlyReads reports whether no branch of the transaction, nested ones included, has an operation
// that writes.
func onlyReads(txn *pb.TxnRequest) bool {
	for _, ops := range [][]*pb.RequestOp{txn.Success, txn.Failure} {
		for _, op := range ops {
			switch op := op.Request.(type) {
			case *pb.RequestOp_RequestRange:
			case *pb.RequestOp_RequestTxn:
				if !onlyReads(op.RequestTxn) {
					return false
				}
			default:
				return false
			}
		}
	}
	return true
}
