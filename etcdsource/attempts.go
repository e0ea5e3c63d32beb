package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Timeouts of requests to members that may hang. The next attempt goes to another
// member, because the client's balancer takes them in turn, and has twice the time, because the
// member may just be slow. Guesses.
const (
	pageTimeout   = 5 * time.Second        // a page of a list: 8 MiB over a slow connection
	pageAttempts  = 5                      // two and a half minutes
	revisionWait  = 500 * time.Millisecond // the revision alone
	revisionTries = 4                      // 7.5 s
)

// attempts calls f with a context that ends after the timeout. It calls f again with twice the
// timeout while the timeout is the only reason for a missing answer, n times in all.
//
// The context is canceled and has no deadline: etcd would receive the deadline and answer that it
// has passed, and the client would retry on the next member shortly before it. With three members,
// attempts could then reach the same two each time.
func attempts[T any](ctx context.Context, timeout time.Duration, n int, f func(context.Context) (T, error)) (T, error) {
	for {
		attempt, cancel := context.WithCancel(ctx)
		timer := time.AfterFunc(timeout, cancel)
		answer, err := f(attempt)
		timer.Stop()
		late := attempt.Err() != nil && ctx.Err() == nil
		cancel()
		n--
		if err == nil || !late || !outOfTime(err) {
			return answer, err
		}
		if n == 0 {
			return answer, fmt.Errorf("no response within %s: %w", timeout, context.DeadlineExceeded)
		}
		timeout *= 2
	}
}

// outOfTime reports whether the error is caused by the end of a context.
func outOfTime(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || status.Code(err) == codes.DeadlineExceeded || status.Code(err) == codes.Canceled
}
