package etcdread

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"
)

// TestForClient_EtcdUnavailable_Is429: with Retry-After, so that clients retry. Other errors, and
// those of a request that has ended, stay as they are.
func TestForClient_EtcdUnavailable_Is429(t *testing.T) {
	loading := status.Error(codes.Unavailable, "the replica is loading, and cannot feed others yet; retry")
	for name, err := range map[string]error{
		"a loading replica":  loading,
		"wrapped":            fmt.Errorf("read: %w", loading),
		"no leader":          rpctypes.ErrNoLeader,
		"a timeout of etcd":  rpctypes.ErrTimeout,
		"an overloaded etcd": rpctypes.ErrTooManyRequests,
	} {
		got := ForClient(t.Context(), err)
		if seconds, ok := apierrors.SuggestsClientDelay(got); !apierrors.IsTooManyRequests(got) || !ok || seconds < 1 {
			t.Errorf("%s: %v, want 429 with Retry-After", name, got)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := ForClient(ended, loading); err != loading {
		t.Errorf("after the end of the request: %v", err)
	}
	for _, err := range []error{nil, context.Canceled, errors.New("broken"), rpctypes.ErrCompacted, storage.NewKeyNotFoundError("a", 1),
		apierrors.NewTimeoutError("late", 1), status.Error(codes.PermissionDenied, "no")} {
		if got := ForClient(t.Context(), err); got != err {
			t.Errorf("%v became %v", err, got)
		}
	}
}
