package freshness

import (
	"testing"
	"time"
)

// TestOutage_RetryAfter_Grows: the Retry-After of refusals is 1 s at first and 30 s at last; a new
// outage starts at 1 s again.
func TestOutage_RetryAfter_Grows(t *testing.T) {
	var o outage
	start := time.Now()
	for _, c := range []struct{ after, want time.Duration }{
		{0, time.Second},
		{5 * time.Second, time.Second},
		{12 * time.Second, 2 * time.Second},
		{30 * time.Second, 6 * time.Second},
		{time.Minute, 30 * time.Second},
		{time.Minute + outageGap, 30 * time.Second},
		{time.Hour, time.Second},
		{time.Hour + 12*time.Second, 2 * time.Second},
	} {
		if got := o.refuse(start.Add(c.after)); got != c.want {
			t.Errorf("after %s the pause is %s, want %s", c.after, got, c.want)
		}
	}
}
