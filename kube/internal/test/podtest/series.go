package podtest

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/metrics/legacyregistry"
)

// Series returns the value of a metric of a resource in the process's registry, for a histogram its
// count, and whether it exists. labels are the names and values of its other labels.
func Series(t testing.TB, name string, r schema.GroupResource, labels ...string) (float64, bool) {
	t.Helper()
	return Labels(t, name, append([]string{"group", r.Group, "resource", r.Resource}, labels...)...)
}

// Labels is Series of a metric with these labels only.
func Labels(t testing.TB, name string, labels ...string) (float64, bool) {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	for i := 0; i+1 < len(labels); i += 2 {
		want[labels[i]] = labels[i+1]
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		if !strings.HasPrefix(f.GetHelp(), "[ALPHA] ") {
			t.Errorf("%s has the help %q, want it to be ALPHA", name, f.GetHelp())
		}
	next:
		for _, m := range f.GetMetric() {
			if len(m.GetLabel()) != len(want) {
				t.Fatalf("%s has the labels %v, want %v", name, m.GetLabel(), want)
			}
			for _, l := range m.GetLabel() {
				if want[l.GetName()] != l.GetValue() {
					continue next
				}
			}
			switch {
			case m.GetHistogram() != nil:
				return float64(m.GetHistogram().GetSampleCount()), true
			case m.GetGauge() != nil:
				return m.GetGauge().GetValue(), true
			default:
				return m.GetCounter().GetValue(), true
			}
		}
	}
	return 0, false
}
