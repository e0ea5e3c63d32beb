package consistency

import (
	"fmt"
	"hash/fnv"
	"testing"
	"time"
)

// TestChecker_WaitBetweenChecks_IsWithinBounds: resources are not compared in step, and often
// enough if comparisons are the only way to detect a lost event.
func TestChecker_WaitBetweenChecks_IsWithinBounds(t *testing.T) {
	for _, c := range []struct {
		interval      time.Duration
		checksArrival bool
		inconsistent  bool
		min, max      time.Duration
	}{
		{5 * time.Minute, true, false, 5 * time.Minute, 450 * time.Second},
		{5 * time.Minute, true, true, 30 * time.Second, 45 * time.Second},
		{5 * time.Minute, false, false, uncheckedInterval / 2, uncheckedInterval},
		{time.Second, false, false, time.Second, 1500 * time.Millisecond},
		{uncheckedInterval, false, false, uncheckedInterval / 2, uncheckedInterval},
	} {
		seen := map[time.Duration]bool{}
		for range 1000 {
			wait := checkWait(c.interval, c.checksArrival, c.inconsistent)
			if wait < c.min || wait > c.max {
				t.Fatalf("%+v: waits %v", c, wait)
			}
			seen[wait] = true
		}
		if len(seen) < 2 {
			t.Errorf("%+v: always waits the same", c)
		}
	}
}

// TestDigest_WithoutNamespace_HashesEmptyNamespace: the hash has an empty namespace.
func TestDigest_WithoutNamespace_HashesEmptyNamespace(t *testing.T) {
	d := newDigest("/registry/nodes/")
	d.add([]byte("/registry/nodes/n1"), 7)
	h := fnv.New64()
	fmt.Fprintf(h, "%s/%s/%s", "", "n1", "7")
	if want := fmt.Sprintf("%x", h.Sum64()); d.sum() != want {
		t.Errorf("without a namespace: %s, want %s", d.sum(), want)
	}
}
