package main

import "testing"

func TestWanted_FormatsBoundVerdicts(t *testing.T) {
	row := Row{Name: "m", Unit: Seconds, Values: map[string]float64{"strata": 2, "upstream": 16, "limit": 1}}
	for _, c := range []struct {
		bounds []Bound
		quick  bool
		want   string
	}{
		{nil, false, ""},
		{[]Bound{toUpstream("other", 1)}, false, ""},
		{[]Bound{{Measure: "m", Of: "limit", AtMost: 1.6}}, false, "≤ 1.6 × limit: NO"},
		{[]Bound{{Measure: "m", Of: "limit", AtMost: 2}}, false, "≤ 2 × limit: yes"},
		{[]Bound{{Measure: "m", Of: "limit", AtMost: 2}}, true, "≤ 2 × limit"},
		{[]Bound{toUpstream("m", 1./8)}, false, "≤ 1/8 × upstream: yes"},
		{[]Bound{toUpstream("m", 1./12)}, false, "≤ 1/12 × upstream: NO"},
		{[]Bound{{Measure: "m", Of: "upstream", AtLeast: 0.1}}, false, "≥ 1/10 × upstream: yes"},
		{[]Bound{absolute("m", 4e-3)}, false, "≤ 4.00 ms: NO"},
		{[]Bound{toUpstream("m", 1), absolute("m", 1)}, false, "≤ 1 × upstream: yes; ≤ 1.00 s: NO"},
		{[]Bound{{Measure: "m", Of: "unknown", AtMost: 1}}, false, "≤ 1 × unknown"},
		{[]Bound{none("m")}, false, "0: NO"},
	} {
		if got := wanted(c.bounds, row, "strata", c.quick); got != c.want {
			t.Errorf("%+v: got %q, want %q", c.bounds, got, c.want)
		}
	}
	row.Values["stock"] = 8
	for want, bound := range map[string]Bound{
		"≤ 1/3 × stock: yes": toUpstream("m", 1./3),
		"≤ 1/5 × stock: NO":  toUpstream("m", 1./5),
		"≤ 2 × limit: yes":   Bound{Measure: "m", Of: "limit", AtMost: 2},
	} {
		if got := wanted([]Bound{bound}, row, "strata", false); got != want {
			t.Errorf("%+v beside stock: got %q, want %q", bound, got, want)
		}
	}
	if got := wanted([]Bound{none("m")}, Row{Name: "m", Values: map[string]float64{"strata": 0}}, "strata", false); got != "0: yes" {
		t.Errorf("of nothing: %q", got)
	}
	if got := wanted([]Bound{absolute("m", 1)}, Row{Name: "m", Unit: Seconds}, "strata", false); got != "≤ 1.00 s" {
		t.Errorf("without a value: %q", got)
	}
}

// A bound on a measure that no engine reports would not be shown.
func TestWorkloadBounds_NameReportedEngines(t *testing.T) {
	for _, w := range workloads {
		for _, b := range w.Wanted {
			if b.Of != "" && b.Of != "upstream" || b.Of != "" && b.isNone() || b.Measure == "" {
				t.Errorf("%s: %+v", w.Name, b)
			}
		}
	}
}
