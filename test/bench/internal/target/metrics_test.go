package target

import (
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
	if got := sumReads(all, "configmaps"); got != 5 {
		t.Errorf("%v reads of objects, want 5", got)
	}
	for _, s := range all {
		if s.Name == "strata_representation_bytes" && (s.Value != 1.5e8 || len(s.Labels) != 0) {
			t.Errorf("got %+v", s)
		}
	}
	if _, err := parseSeries(strings.NewReader("x{a=\"b\"} many\n"), []string{"x"}); err == nil {
		t.Error("a broken metric is accepted")
	}
}
