package target

import (
	"maps"
	"strings"
	"testing"
)

func TestParsePassedOn_SumsByReason(t *testing.T) {
	const help = "# HELP strata_readpath_passed_total Reads.\n# TYPE strata_readpath_passed_total counter\n"
	for name, c := range map[string]struct {
		exposition string
		want       map[string]float64
	}{
		"no counter":        {"# HELP other Other.\nother 1\n", nil},
		"nothing passed on": {`strata_readpath_requests_total{verb="list"} 3` + "\n", map[string]float64{}},
		"counted": {
			help + `strata_readpath_passed_total{reason="table"} 3` + "\n" + `strata_readpath_passed_total{group="apps",reason="cbor"} 1e+06` + "\n" +
				`strata_readpath_passed_total{group="",reason="cbor"} 2` + "\n" + `strata_readpath_passed_totals{reason="x"} 2` + "\n",
			map[string]float64{"table": 3, "cbor": 1_000_002},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parsePassedOn(strings.NewReader(c.exposition))
			if err != nil || !maps.Equal(got, c.want) || (got == nil) != (c.want == nil) {
				t.Errorf("got %v, %v, want %v", got, err, c.want)
			}
		})
	}
	if _, err := parsePassedOn(strings.NewReader(`strata_readpath_passed_total{reason="x"} many`)); err == nil {
		t.Error("a broken metric is accepted")
	}
}
