package listadmission

import (
	"slices"
	"testing"
)

// TestInterruptible_YieldsAllElementsInOrder: all elements are yielded in order, with any number of
// pauses, and a list that ends early is no longer counted.
func TestInterruptible_YieldsAllElementsInOrder(t *testing.T) {
	values := make([]int, 3*walkAtOnce+1)
	for i := range values {
		values[i] = i
	}
	computing.Add(1000) // all processors compute
	defer computing.Add(-1000)
	if got := slices.Collect(Interruptible(slices.Values(values))); !slices.Equal(got, values) {
		t.Errorf("%d values, want %d in order", len(got), len(values))
	}
	for v := range Interruptible(slices.Values(values)) {
		if v == walkAtOnce {
			break
		}
	}
	if n := computing.Load(); n != 1000 {
		t.Errorf("%d lists are computed", n-1000)
	}
}
