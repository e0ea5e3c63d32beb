package kubestorage

import (
	"testing"
	"time"
)

// TestReplicaLag_Samples_MeasureOldestMissingRevision: the lag counts from the oldest known
// revision that memory lacks, so writes that follow one another do not add up, and is 0 as soon as
// memory is level.
func TestReplicaLag_Samples_MeasureOldestMissingRevision(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	var lag replicaLag
	for _, step := range []struct {
		second          int
		published, etcd int64
		want            time.Duration
	}{
		{0, 10, 10, 0},
		{1, 10, 12, 0},               // falls behind
		{2, 10, 13, time.Second},     // a later write changes nothing
		{3, 11, 14, 2 * time.Second}, // 12 is still missing
		{4, 12, 15, 0},               // 12 has arrived; 15 is missing from now on
		{5, 14, 15, time.Second},
		{6, 15, 15, 0},
		{9, 15, 16, 0}, // behind again, from now on
		{11, 15, 16, 2 * time.Second},
	} {
		lag.sample(at(step.second), step.published, step.etcd)
		if got := lag.behind(at(step.second), step.published); got != step.want {
			t.Errorf("second %d, published %d of %d: behind for %v, want %v", step.second, step.published, step.etcd, got, step.want)
		}
	}
	if got := lag.behind(at(12), 16); got != 0 {
		t.Errorf("behind for %v when memory is level, before the next sample", got)
	}
}
