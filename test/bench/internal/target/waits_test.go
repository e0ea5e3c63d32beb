package target

import (
	"fmt"
	"strings"
	"testing"
)

// exposed is the exposition of an engine when the given numbers of waits of PodTemplates took at most 5 ms, 25 ms and longer.
func exposed(within5, within25, total int) string {
	var b strings.Builder
	b.WriteString("# HELP other Other.\n# TYPE other counter\nother 1\n# HELP apiserver_watch_cache_read_wait_seconds Waits.\n")
	b.WriteString("# TYPE apiserver_watch_cache_read_wait_seconds histogram\n")
	for _, labels := range []string{`group="apps",resource="podtemplates"`, `group="",resource="pods"`, `group="",resource="podtemplates"`} {
		const name = "apiserver_watch_cache_read_wait_seconds"
		fmt.Fprintf(&b, "%s_bucket{%s,le=\"0.005\"} %d\n%s_bucket{%s,le=\"0.025\"} %d\n", name, labels, within5, name, labels, within25)
		fmt.Fprintf(&b, "%s_bucket{%s,le=\"+Inf\"} %d\n%s_sum{%s} 1\n%s_count{%s} %d\n", name, labels, total, name, labels, name, labels, total)
		within5, within25, total = within5+1, within25+1, total+1 // all but the last are others'
	}
	return b.String()
}

func TestWaits_AtMost_ReturnsBucketBound(t *testing.T) {
	parse := func(exposition string) Waits {
		t.Helper()
		w, err := parseWaits(strings.NewReader(exposition), "podtemplates")
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	none := parse("# TYPE other counter\nother 1\n")
	first := parse(exposed(8, 8, 8))
	if none.Total() != 0 || first.Total() != 10 || first.Since(none).Total() != 10 {
		t.Fatalf("%v and %v", none, first)
	}
	for _, c := range []struct {
		within5, within25, total int // after the first
		p, want                  float64
	}{
		{100, 100, 100, 0.99, 0.005},
		{99, 99, 100, 0.99, 0.005},
		{98, 99, 100, 0.99, 0.025},
		{0, 100, 100, 0.01, 0.025},
		{98, 98, 100, 0.99, 0},
	} {
		later := parse(exposed(8+c.within5, 8+c.within25, 8+c.total)).Since(first)
		if got, err := later.AtMost(c.p); got != c.want || (err != nil) != (c.want == 0) || later.Total() != uint64(c.total) {
			t.Errorf("%+v: %v, %v of %v", c, got, err, later)
		}
	}
	if _, err := none.AtMost(0.99); err == nil {
		t.Error("no waits have a bound")
	}
}
