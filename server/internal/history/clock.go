package history

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stratakube/strata/kube/revisiontimes"
)

// speed is a multiple of the real time. It is the value of a flag: 10x, 0.5x, 0x (frozen) or max.
type speed float64

func (s *speed) Type() string { return "speed" }

func (s *speed) String() string {
	if math.IsInf(float64(*s), 1) {
		return "max"
	}
	return strconv.FormatFloat(float64(*s), 'g', -1, 64) + "x"
}

func (s *speed) Set(text string) error {
	if text == "max" {
		*s = speed(math.Inf(1))
		return nil
	}
	value, err := strconv.ParseFloat(strings.TrimSuffix(text, "x"), 64)
	if err != nil || value < 0 || math.IsInf(value, 0) || math.IsNaN(value) {
		return fmt.Errorf("%q is no speed: give a factor such as 10x or 0.5x, 0x for a time that stands still, or max", text)
	}
	*s = speed(value)
	return nil
}

// clock is the time of a replay. It begins with the revision from, and ends with the revision to.
// It may be used concurrently.
type clock struct {
	times    *revisiontimes.RevisionTimes
	from, to int64
	begin    time.Time // the replayed time at the start
	speed    speed

	start sync.Once
	began time.Time // the real time at the start
}

// newClock returns a clock of the window. Revisions without a time happen at its beginning.
func newClock(w window, since time.Time, s speed) *clock {
	c := &clock{times: w.times, from: w.from, to: w.to, begin: since, speed: s}
	if c.begin.IsZero() {
		c.begin = w.times.Now
		if t, ok := w.times.TimeOf(w.from); ok {
			c.begin = t
		} else if len(w.times.Times) > 0 {
			c.begin = w.times.Times[0].Time
		}
	}
	return c
}

// elapsed returns the replayed time since the start, which the first call is.
func (c *clock) elapsed() time.Duration {
	c.start.Do(func() { c.began = time.Now() })
	if c.speed == 0 {
		return 0
	}
	if d := float64(time.Since(c.began)) * float64(c.speed); d < math.MaxInt64 {
		// 0 times infinity is not
		return time.Duration(d)
	}
	return math.MaxInt64
}

// due returns the replayed time between the start and a revision.
func (c *clock) due(revision int64) time.Duration {
	t, ok := c.times.TimeOf(revision)
	if !ok {
		if len(c.times.Times) == 0 || revision < c.times.Times[0].Revision {
			return 0
		}
		t = c.times.Now
	}
	return max(0, t.Sub(c.begin))
}

// reached reports whether the replay has reached a revision.
func (c *clock) reached(revision int64) bool {
	return revision <= c.from || revision <= c.to && c.speed != 0 && c.due(revision) <= c.elapsed()
}

// revision returns the newest revision that the replay has reached.
func (c *clock) revision() int64 {
	if c.reached(c.to) {
		return c.to
	}
	low, high := c.from, c.to // reached(low), not reached(high)
	for low+1 < high {
		if middle := low + (high-low)/2; c.reached(middle) {
			low = middle
		} else {
			high = middle
		}
	}
	return low
}

// wait returns when the replay has reached a revision. Revisions after the end, or of a time that
// stands still, are never reached.
func (c *clock) wait(ctx context.Context, revision int64) error {
	if c.reached(revision) {
		return ctx.Err()
	}
	if revision > c.to || c.speed == 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	remaining := time.Duration(float64(c.due(revision)-c.elapsed()) / float64(c.speed))
	timer := time.NewTimer(max(0, remaining) + time.Microsecond)
	defer timer.Stop()
	for !c.reached(revision) {
		select {
		case <-timer.C:
			timer.Reset(time.Millisecond)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
