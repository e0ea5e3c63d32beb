package gcpolicy

import "testing"

func TestPercentKeepsSmallHeapsLazyAndLargeOnesTight(t *testing.T) {
	for _, c := range []struct {
		live, scanned uint64
		want          int
	}{
		{0, 0, 100},
		{100 << 20, 100 << 20, 100},
		{512 << 20, 512 << 20, 62},
		{512 << 20, 128 << 20, 25}, // the rest has no pointers
		{4 << 30, 4 << 30, 51},
		{1 << 30, 2 << 30, 56}, // samples of different moments
	} {
		if got := percent(c.live, c.scanned); got != c.want {
			t.Errorf("percent(%d MiB, %d MiB) = %d, want %d", c.live>>20, c.scanned>>20, got, c.want)
		}
	}
}
