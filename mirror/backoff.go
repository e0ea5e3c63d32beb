package mirror

import "time"

// backoff spaces repetitions of an operation. The zero value is ready.
type backoff struct {
	last  time.Time
	delay time.Duration
}

// next returns the delay before this attempt: 0 if the previous one was long ago.
func (b *backoff) next(now time.Time) time.Duration {
	if now.Sub(b.last) > 10*retryLast {
		b.delay = 0
	} else {
		b.delay = min(max(2*b.delay, retryFirst), retryLast)
	}
	b.last = now
	return b.delay
}

const (
	retryFirst = 50 * time.Millisecond
	retryLast  = 5 * time.Second
)
