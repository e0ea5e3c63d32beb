package stats

import (
	"slices"
	"testing"
	"time"
)

func upTo(n int) []time.Duration {
	d := make([]time.Duration, n)
	for i := range d {
		d[i] = time.Duration(i + 1)
	}
	return d
}

func TestPercentile_ReturnsNearestRank(t *testing.T) {
	for _, c := range []struct {
		n    int
		p    float64
		want time.Duration
	}{
		{0, 0.5, 0},
		{1, 0.5, 1}, {1, 0.99, 1},
		{2, 0.5, 1},
		{3, 0.5, 2},
		{10, 0.9, 9}, {10, 0.99, 10}, {10, 1, 10},
		{100, 0.5, 50}, {100, 0.9, 90}, {100, 0.99, 99},
		{1000, 0.99, 990}, {1000, 0.999, 999},
	} {
		if got := Percentile(upTo(c.n), c.p); got != c.want {
			t.Errorf("percentile %v of 1..%d is %d, want %d", c.p, c.n, got, c.want)
		}
	}
}

func TestPercentiles_FewObservations_ArePooled(t *testing.T) {
	runs := [][]time.Duration{{5}, {1}, {3}, {2}, {4}}
	if got, want := Percentiles(runs, 100, 0.5, 0.99), []time.Duration{3, 5}; !slices.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

func TestPercentiles_OneDisturbedRun_KeepsTail(t *testing.T) {
	disturbed := upTo(100)
	for i := range disturbed {
		disturbed[i] *= 1000
	}
	runs := [][]time.Duration{upTo(100), disturbed, upTo(100)}
	if got, want := Percentiles(runs, 100, 0.5, 0.99), []time.Duration{50, 99}; !slices.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

func TestPercentiles_NoRuns_ReturnsZero(t *testing.T) {
	if got := Percentiles(nil, 100, 0.5); got[0] != 0 {
		t.Fatalf("got %v, want 0", got)
	}
}

func TestMedian_OddAndEvenLengths_ReturnsMiddle(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{nil, 0}, {[]float64{4}, 4}, {[]float64{9, 1}, 5}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 3, 2}, 2.5},
	} {
		if got := Median(c.values); got != c.want {
			t.Errorf("median of %v is %v, want %v", c.values, got, c.want)
		}
	}
	values := []float64{3, 1, 2}
	Median(values)
	if !slices.Equal(values, []float64{3, 1, 2}) {
		t.Errorf("Median sorted its argument: %v", values)
	}
}
