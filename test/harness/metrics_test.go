package harness

import (
	"slices"
	"testing"
)

// TestNamesOf_Series_HasNameOfItsMetric: the filter of /metrics knows a histogram by the name
// without the suffix of its series.
func TestNamesOf_Series_HasNameOfItsMetric(t *testing.T) {
	for series, want := range map[string][]string{
		"strata_mirror_ready":                 {"strata_mirror_ready"},
		"strata_watch_delivery_seconds_count": {"strata_watch_delivery_seconds_count", "strata_watch_delivery_seconds"},
		"strata_watch_delivery_seconds_sum":   {"strata_watch_delivery_seconds_sum", "strata_watch_delivery_seconds"},
		"etcd_request_duration_bucket":        {"etcd_request_duration_bucket", "etcd_request_duration"},
	} {
		if got := namesOf(series)["name[]"]; !slices.Equal(got, want) {
			t.Errorf("%s: names %q, want %q", series, got, want)
		}
	}
}
