package harness

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const pollInterval = 50 * time.Millisecond

// Poll calls condition until it returns true or ctx ends. An error of condition explains why it is
// not true yet; Poll's error includes the last one.
func Poll(ctx context.Context, condition func(context.Context) (bool, error)) error {
	return PollEvery(ctx, pollInterval, condition)
}

// PollEvery is Poll with another interval, for a condition that costs the server much and is true
// only after seconds.
func PollEvery(ctx context.Context, interval time.Duration, condition func(context.Context) (bool, error)) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var last error
	for {
		ok, err := condition(ctx)
		if ok {
			return nil
		}
		if err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) || last == nil {
			last = err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			if last != nil {
				return fmt.Errorf("%w: %w", context.Cause(ctx), last)
			}
			return context.Cause(ctx)
		}
	}
}

// Pause waits for d, or until ctx ends.
func Pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
