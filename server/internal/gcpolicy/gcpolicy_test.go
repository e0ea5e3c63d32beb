package gcpolicy

import "testing"

func TestPercentKeepsSmallHeapsLazyAndLargeOnesTight(t *testing.T) {
	for _, c := range []struct {
		live uint64
		want int
	}{
		{0, 100},
		{100 << 20, 100},
		{512 << 20, 55},
		{4 << 30, 33},
	} {
		if got := percent(c.live); got != c.want {
			t.Errorf("percent(%d MiB) = %d, want %d", c.live>>20, got, c.want)
		}
	}
}
