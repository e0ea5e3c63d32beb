package target

import (
	"maps"
	"strings"
	"testing"
)

func TestParseSeries_ReturnsSelectedMetrics(t *testing.T) {
	const exposition = `# HELP etcd_requests_total Requests.
# TYPE etcd_requests_total counter
etcd_requests_total{group="",operation="list",resource="configmaps"} 3
etcd_requests_total{group="",operation="get",resource="configmaps"} 2
etcd_requests_total{group="",operation="listWithCount",resource="configmaps"} 50
etcd_requests_total{group="",operation="list",resource="pods"} 60
etcd_requests_total{group="apps",operation="list",resource="configmaps"} 70
etcd_requests_total_more{group="",operation="list",resource="configmaps"} 80
# TYPE strata_representation_bytes gauge
strata_representation_bytes 1.5e+08
`
	all, err := parseSeries(strings.NewReader(exposition), []string{"etcd_requests_total", "strata_representation_bytes", "absent"})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 6 {
		t.Errorf("%d series, want 6: %v", len(all), all)
	}
	for _, s := range all {
		if s.name == "strata_representation_bytes" && (s.value != 1.5e8 || len(s.labels) != 0) {
			t.Errorf("got %+v", s)
		}
	}
	if _, err := parseSeries(strings.NewReader("x{a=\"b\"} many\n"), []string{"x"}); err == nil {
		t.Error("a broken metric is accepted")
	}
}

func TestPassedOn_SumsByReason(t *testing.T) {
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
			all, err := parseSeries(strings.NewReader(c.exposition), []string{passedOnMetric, servedMetric})
			got := sumPassedOn(all)
			if err != nil || !maps.Equal(got, c.want) || (got == nil) != (c.want == nil) {
				t.Errorf("got %v, %v, want %v", got, err, c.want)
			}
		})
	}
}
