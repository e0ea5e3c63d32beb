// Package stats summarizes observations of a benchmark.
package stats

import (
	"cmp"
	"slices"
	"time"
)

// Percentile returns the nearest-rank percentile of sorted (ascending): the smallest observation
// such that at least the share p, with 0 < p <= 1, of all observations is not larger. It is always
// one of the observations. Percentile of nothing is the zero value.
func Percentile[T cmp.Ordered](sorted []T, p float64) T {
	if len(sorted) == 0 {
		var zero T
		return zero
	}
	// Integers, so that no rounding of p*n moves the rank: 0.9*10 observations must be the 9th, not
	// the 10th.
	const scale = 1_000_000
	rank := (len(sorted)*int(p*scale+0.5) + scale - 1) / scale
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Percentiles returns the percentiles ps over several runs of one measurement.
//
// When every run has at least perRun observations, each run's percentile is taken and the median of
// those is the result, so that one disturbed run does not decide the tail. With fewer observations
// a run has no tail of its own, and the observations are pooled. The runs are sorted in place.
func Percentiles(runs [][]time.Duration, perRun int, ps ...float64) []time.Duration {
	pooled := len(runs) == 0
	for _, r := range runs {
		slices.Sort(r)
		pooled = pooled || len(r) < perRun
	}
	result := make([]time.Duration, len(ps))
	if pooled {
		all := slices.Concat(runs...)
		slices.Sort(all)
		for i, p := range ps {
			result[i] = Percentile(all, p)
		}
		return result
	}
	for i, p := range ps {
		each := make([]time.Duration, len(runs))
		for j, r := range runs {
			each[j] = Percentile(r, p)
		}
		slices.Sort(each)
		result[i] = Percentile(each, 0.5)
	}
	return result
}

// Median returns the middle of values, the mean of the two middle ones when their number is even,
// and 0 when there are none. It does not change values.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	mid := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[mid]
	}
	return (sorted[mid-1] + sorted[mid]) / 2
}
