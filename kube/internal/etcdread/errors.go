package etcdread

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// ForClient returns the error of a read of etcd for the client: 429 with Retry-After if etcd, or
// the replica that feeds this server, cannot answer now, as for reads from memory. Upstream's
// handlers would answer 500, after which clients do not retry. Other errors, and those after the
// end of ctx, are returned as they are.
func ForClient(ctx context.Context, err error) error {
	if ctx.Err() != nil || !isUnavailable(err) {
		return err
	}
	return apierrors.NewTooManyRequests("etcd cannot answer now: "+err.Error(), retrySeconds)
}

// isUnavailable reports whether the same request to etcd may succeed later: no member answers, one
// restarts, has no leader or is overloaded, or the replica in its place is loading.
func isUnavailable(err error) bool {
	if errors.Is(err, rpctypes.ErrTooManyRequests) {
		return true
	}
	var answer rpctypes.EtcdError // hides the code of gRPC
	if errors.As(err, &answer) {
		return answer.Code() == codes.Unavailable
	}
	return status.Code(err) == codes.Unavailable
}
