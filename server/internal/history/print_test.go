package history

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func TestTable_Print_AlignsColumns(t *testing.T) {
	table := &table{header: []string{"A", "LONGER"}}
	table.add(green, "wörter", "1")
	table.add(plain, "b", "")
	for _, c := range []struct {
		colours bool
		want    string
	}{
		{false, "A        LONGER\nwörter   1\nb\n"},
		{true, "A        LONGER\n" + green + "wörter   1" + reset + "\nb\n"},
	} {
		var out bytes.Buffer
		if err := table.print(&out, c.colours); err != nil || out.String() != c.want {
			t.Errorf("colours %v: %q, %v; want %q", c.colours, out.String(), err, c.want)
		}
	}
}

func TestColours_OutputThatIsNoTerminal_HasNone(t *testing.T) {
	file, err := os.CreateTemp(t.TempDir(), "")
	testcheck.NoError(t, err)
	defer file.Close()
	if colours(file) || colours(&bytes.Buffer{}) {
		t.Error("output to a file has colours")
	}
}

func TestCell_Value_IsShortAndPrintable(t *testing.T) {
	if got := cell("a\x1b[31mb\n", false); got != "a [31mb " {
		t.Errorf("%q", got)
	}
	long := strings.Repeat("ä", cellWidth+1)
	if got := cell(long, false); got != strings.Repeat("ä", cellWidth-1)+"…" {
		t.Errorf("%q", got)
	}
	if got := cell(long, true); got != long {
		t.Errorf("%q", got)
	}
}

func TestOutput_Formats_AreChecked(t *testing.T) {
	for _, format := range append([]string{""}, formats...) {
		if err := (&output{format}).check(); err != nil {
			t.Error(err)
		}
	}
	if err := (&output{"xml"}).check(); err == nil || !strings.Contains(err.Error(), "json, yaml, name, wide") {
		t.Errorf("xml: %v", err)
	}
}

func TestSetAges_PastTable_HasAgesOfThatTime(t *testing.T) {
	columns := []metav1.TableColumnDefinition{{Name: "Name"}, {Name: "Age"}}
	object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.Time{Time: noon}}}
	table := &metav1.Table{Rows: []metav1.TableRow{
		{Cells: []any{"a", "1h"}, Object: runtime.RawExtension{Object: object}}, {Cells: []any{"b", "1h"}}}}
	setAges(table, columns, noon.Add(90*time.Second))
	if table.Rows[0].Cells[1] != "90s" || table.Rows[1].Cells[1] != "1h" {
		t.Errorf("ages %v, %v", table.Rows[0].Cells, table.Rows[1].Cells)
	}
}

const sampleMetrics = `
apiserver_watch_cache_consistent_read_total{fallback="false",group="",resource="pods",success="true"} 9
apiserver_watch_cache_consistent_read_total{fallback="true",group="",resource="pods",success="false"} 1
apiserver_request_total{code="200",group="",resource="pods",subresource="",verb="GET"} 6
apiserver_request_total{code="200",group="",resource="pods",subresource="log",verb="GET"} 50
apiserver_request_total{code="200",group="",resource="pods",subresource="",verb="LIST"} 5
strata_lists_total{group="",reason="exact",resource="pods",source="memory_past"} 2
strata_lists_total{group="",reason="consistent",resource="pods",source="memory_present"} 3
strata_lists_total{group="apps",reason="older_than_memory",resource="deployments",source="etcd"} 4
apiserver_longrunning_requests{group="",resource="pods",scope="cluster",verb="WATCH"} 2
apiserver_longrunning_requests{group="",resource="pods",scope="namespace",verb="WATCH"} 1
strata_watch_lag_events{group="",resource="pods"} 8
strata_mirror_resource_objects{prefix="/registry/",resource="/registry/pods/"} 10
strata_mirror_resource_objects{prefix="/registry/",resource="/registry/services/specs/"} 1
strata_mirror_resource_objects{prefix="/registry/",resource="/registry/deployments/"} 5
strata_mirror_resource_objects{prefix="/registry/",resource="/registry/example.com/widgets/"} 7
strata_mirror_resource_stored_bytes{prefix="/registry/",resource="/registry/pods/"} 2048
`

func TestParseUsage_Metrics_AreSummedByResource(t *testing.T) {
	all, err := parseUsage([]byte(sampleMetrics))
	testcheck.NoError(t, err)
	for name, want := range map[string]usage{
		"pods":                {Resource: "pods", Objects: 10, Bytes: 2048, Lag: 8, Watchers: 3, Memory: 8, Past: 2, Etcd: 1},
		"services":            {Resource: "services", Objects: 1},
		"deployments.apps":    {Resource: "deployments.apps", Objects: 5, Etcd: 4},
		"widgets.example.com": {Resource: "widgets.example.com", Objects: 7},
	} {
		if all[name] == nil || *all[name] != want {
			t.Errorf("%s: %+v, want %+v", name, all[name], want)
		}
	}
	if got := all["pods"].hitRatio(); got != "90.9%" {
		t.Errorf("hit ratio %s", got)
	}
	if _, err := parseUsage([]byte("up 1\n")); err == nil || !strings.Contains(err.Error(), "not Strata") {
		t.Errorf("metrics of another server: %v", err)
	}
}
