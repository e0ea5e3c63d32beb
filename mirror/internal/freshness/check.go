package freshness

import (
	"fmt"
	"math"
)

// Check returns an error if a wait for the published revision or a lower one has not ended, or if
// the published revision's state contradicts its waits. The publisher's goroutine calls it. Cost is
// O(waits); for tests.
func (c *Published) Check() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now, lowest := c.rev.Load(), int64(math.MaxInt64)
	for i, w := range c.waiters {
		if w.rev <= now {
			return fmt.Errorf("wait for revision %d is pending at published revision %d", w.rev, now)
		}
		if w.index != i {
			return fmt.Errorf("wait %d has the index %d", i, w.index)
		}
		lowest = min(lowest, w.rev)
	}
	if m := c.min.Load(); m != lowest {
		return fmt.Errorf("lowest awaited revision is %d, recorded %d", lowest, m)
	}
	occupied := len(c.waiters) > 0
	if c.reportedWaits != occupied || closed(c.hasWaits) != occupied || closed(c.noWaits) == occupied {
		return fmt.Errorf("%d waits, reported: %t, waiting closed %t, resting closed %t",
			len(c.waiters), c.reportedWaits, closed(c.hasWaits), closed(c.noWaits))
	}
	return nil
}

// closed reports whether a channel that carries no values is closed.
func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
