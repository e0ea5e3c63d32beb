package etcdsource

import (
	"math"
	"testing"
	"time"

	"github.com/stratakube/strata/mirror"
)

func TestRevisionsWithin_FollowsMeasuredTime(t *testing.T) {
	const pause, distance = 200 * time.Millisecond, 60_000 // the reads of a replay may take 100 ms
	for _, c := range []struct {
		pause, took time.Duration
		want        mirror.Revision
	}{
		{pause, syncInterval + 100*time.Millisecond, distance},
		{pause, syncInterval + 50*time.Millisecond, 2 * distance},
		{pause, syncInterval + 400*time.Millisecond, distance / 4},
		{pause, 50 * time.Millisecond, 2 * distance},     // a round of other watches was between
		{pause, time.Hour, fewRevisions},                 // a stall is no reason to restore nothing
		{pause, 0, math.MaxInt64},                        // unknown
		{0, time.Hour, math.MaxInt64},                    // no bound
		{time.Duration(math.MaxInt64), 1, math.MaxInt32}, // no overflow
	} {
		if got := revisionsWithin(c.pause, c.took, distance); got != c.want {
			t.Errorf("a pause of %v, after %v: %d revisions, want %d", c.pause, c.took, got, c.want)
		}
	}
}
