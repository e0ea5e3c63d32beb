package monitoring

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/VictoriaMetrics/metricsql"
	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/test/harness"
)

// rules is a file of Prometheus rules.
type rules struct {
	Groups []struct {
		Name  string `json:"name"`
		Rules []rule `json:"rules"`
	} `json:"groups"`
}

type rule struct {
	Record      string            `json:"record"`
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

func (r rules) all() (all []rule) {
	for _, group := range r.Groups {
		all = append(all, group.Rules...)
	}
	return all
}

// readYAML reads a file of deploy/monitoring.
func readYAML(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile(files + name)
	harness.Check(t, err)
	if err := yaml.UnmarshalStrict(text, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func readRules(t *testing.T) (r rules) {
	readYAML(t, "rules.yaml", &r)
	return r
}

// panel is a panel of a Grafana dashboard.
type panel struct {
	ID          int
	Title, Type string
	Description string
	GridPos     struct{ X, Y, W, H int }
	Targets     []struct{ Expr string }
}

type dashboard struct {
	UID        string
	Panels     []panel
	Templating struct {
		List []struct {
			Name  string
			Query json.RawMessage // an object, or the type of a data source
		}
	}
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	text, err := os.ReadFile(files + "dashboard.json")
	harness.Check(t, err)
	harness.Check(t, json.Unmarshal(text, &d))
	return d
}

// substitute replaces Grafana's variables in an expression.
func substitute(expr string) string {
	return strings.NewReplacer("$__rate_interval", "5m", "$job", ".+", "$instance", ".+").Replace(expr)
}

// expressions returns the PromQL expressions of the dashboard by panel.
func (d dashboard) expressions() map[string]string {
	found := map[string]string{}
	for _, p := range d.Panels {
		for i, target := range p.Targets {
			found[fmt.Sprintf("panel %q, query %d", p.Title, i+1)] = substitute(target.Expr)
		}
	}
	return found
}

// TestRules_NamesAndLabels_ExistOnServer: a name, a label or the value of a label that no server
// has is an alert that never fires.
func TestRules_NamesAndLabels_ExistOnServer(t *testing.T) {
	checker := newChecker(t)
	for _, r := range readRules(t).all() {
		checker.check(t, r.Record+r.Alert, r.Expr)
		text := fmt.Sprint(r.Annotations)
		for _, label := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(text, -1) {
			if !checker.resultHas(t, r.Expr, label[1]) {
				t.Errorf("%s: an annotation has the label %s, which its expression does not return", r.Alert, label[1])
			}
		}
	}
}

func TestDashboard_NamesAndLabels_ExistOnServer(t *testing.T) {
	checker := newChecker(t)
	d := readDashboard(t)
	for where, expr := range d.expressions() {
		checker.check(t, where, expr)
	}
	for _, v := range d.Templating.List {
		if query := regexp.MustCompile(`label_values\((\w+)`).FindSubmatch(v.Query); query != nil {
			checker.check(t, "variable "+v.Name, string(query[1]))
		}
	}
	ids := map[int]string{}
	for _, p := range d.Panels {
		if ids[p.ID] != "" {
			t.Errorf("panels %q and %q have the same id", ids[p.ID], p.Title)
		}
		ids[p.ID] = p.Title
		if p.Type != "row" && (p.Description == "" || len(p.Targets) == 0) {
			t.Errorf("panel %q has no description or no query", p.Title)
		}
		if p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %q is wider than the dashboard", p.Title)
		}
	}
}

// TestAlerts_AreDocumentedAndTested: docs/metrics.yaml names each alert, and names no other;
// rules_test.yaml tests each.
func TestAlerts_AreDocumentedAndTested(t *testing.T) {
	documented, err := os.ReadFile("../../../../docs/metrics.yaml")
	harness.Check(t, err)
	var tests struct {
		Tests []struct {
			Cases []struct {
				Alert    string `json:"alertname"`
				Expected []any  `json:"exp_alerts"`
			} `json:"alert_rule_test"`
		} `json:"tests"`
	}
	text, err := os.ReadFile(files + "rules_test.yaml")
	harness.Check(t, err)
	harness.Check(t, yaml.Unmarshal(text, &tests))
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, test := range tests.Tests {
		for _, c := range test.Cases {
			if len(c.Expected) > 0 {
				fires[c.Alert] = true
			} else {
				quiet[c.Alert] = true
			}
		}
	}
	alerts := map[string]bool{}
	for _, r := range readRules(t).all() {
		if r.Alert == "" {
			continue
		}
		alerts[r.Alert] = true
		if !fires[r.Alert] || !quiet[r.Alert] {
			t.Errorf("rules_test.yaml has no time at which %s fires, or none at which it does not", r.Alert)
		}
		if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s has no severity, summary or description", r.Alert)
		}
	}
	named := map[string]bool{}
	for _, name := range regexp.MustCompile(`\bStrata[A-Z]\w+`).FindAllString(string(documented), -1) {
		named[name] = true
	}
	if !maps.Equal(named, alerts) {
		t.Errorf("docs/metrics.yaml names the alerts %v, rules.yaml has %v", slices.Sorted(maps.Keys(named)), slices.Sorted(maps.Keys(alerts)))
	}
}

// checker knows the series of the server and of the recording rules.
type checker struct {
	server metrics
	// of metrics in docs/reference.md, which is generated from the code: labels and meaning
	rows     map[string]string
	recorded map[string]rule
}

func newChecker(t *testing.T) *checker {
	t.Helper()
	reference, err := os.ReadFile("../../../../docs/reference.md")
	harness.Check(t, err)
	c := &checker{rows: map[string]string{}, recorded: map[string]rule{}}
	c.server, _ = scrape(t)
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (?:counter|gauge|histogram) \\|.*").FindAllStringSubmatch(string(reference), -1) {
		c.rows[row[1]] = row[0]
	}
	for _, r := range readRules(t).all() {
		if r.Record != "" {
			c.recorded[r.Record] = r
		}
	}
	return c
}

// labels returns the labels of a series, beside those of the target; ok is false if there is no
// such series. The labels of a metric without samples are those of docs/reference.md.
func (c *checker) labels(series string) (labels []string, ok bool) {
	if c.server.family(series) != nil {
		labels = slices.Collect(maps.Keys(c.server.labels(series)))
		ok = true
	}
	if row := strings.Split(c.rows[series], "|"); len(row) > 4 {
		labels, ok = append(labels, strings.Split(strings.Trim(row[3], " `"), ", ")...), true
	}
	if r, recorded := c.recorded[series]; recorded {
		exprs := seriesOf(r.Expr)
		for _, name := range exprs {
			more, _ := c.labels(name)
			labels = append(labels, more...)
		}
		ok = true
	}
	return labels, ok
}

// ofTarget are labels that Prometheus adds.
var ofTarget = []string{"job", "instance"}

// check checks the names, labels and values in an expression.
func (c *checker) check(t *testing.T, where, expr string) {
	t.Helper()
	parsed, err := metricsql.Parse(expr)
	if err != nil {
		t.Errorf("%s: %v", where, err)
		return
	}
	known := slices.Clone(ofTarget)
	metricsql.VisitAll(parsed, func(e metricsql.Expr) {
		selector, ok := e.(*metricsql.MetricExpr)
		if !ok {
			return
		}
		for _, filters := range selector.LabelFilterss {
			name := filters[0].Value
			labels, ok := c.labels(name)
			if filters[0].Label != "__name__" || !ok {
				t.Errorf("%s: no server has the metric %s", where, name)
				continue
			}
			known = append(known, labels...)
			for _, f := range filters[1:] {
				if !slices.Contains(labels, f.Label) && !slices.Contains(ofTarget, f.Label) {
					t.Errorf("%s: %s has no label %s, but %q", where, name, f.Label, labels)
				}
				for _, value := range strings.Split(f.Value, "|") {
					if !slices.Contains(ofTarget, f.Label) && value != "" && !c.server.labels(name)[f.Label][value] && !strings.Contains(c.rows[name], value) {
						t.Errorf("%s: the label %s of %s has no value %q", where, f.Label, name, value)
					}
				}
			}
		}
	})
	for _, label := range grouping(parsed) {
		if !slices.Contains(known, label) {
			t.Errorf("%s: no metric of the expression has the label %s", where, label)
		}
	}
}

// grouping returns the labels of aggregations and of matching.
func grouping(e metricsql.Expr) (labels []string) {
	metricsql.VisitAll(e, func(e metricsql.Expr) {
		switch e := e.(type) {
		case *metricsql.AggrFuncExpr:
			labels = append(labels, e.Modifier.Args...)
		case *metricsql.BinaryOpExpr:
			labels = append(append(labels, e.GroupModifier.Args...), e.JoinModifier.Args...)
		}
	})
	return labels
}

// seriesOf returns the names of the series in an expression.
func seriesOf(expr string) (names []string) {
	parsed, err := metricsql.Parse(expr)
	if err != nil {
		return nil
	}
	metricsql.VisitAll(parsed, func(e metricsql.Expr) {
		if m, ok := e.(*metricsql.MetricExpr); ok && len(m.LabelFilterss) > 0 {
			names = append(names, m.LabelFilterss[0][0].Value)
		}
	})
	return names
}

// resultHas reports whether the result of an expression has a label: a metric in it has the label,
// and no aggregation removes it.
func (c *checker) resultHas(t *testing.T, expr, label string) bool {
	t.Helper()
	if slices.Contains(ofTarget, label) {
		return true
	}
	parsed, err := metricsql.Parse(expr)
	harness.Check(t, err)
	has := false
	for _, name := range seriesOf(expr) {
		labels, _ := c.labels(name)
		has = has || slices.Contains(labels, label)
	}
	metricsql.VisitAll(parsed, func(e metricsql.Expr) {
		if a, ok := e.(*metricsql.AggrFuncExpr); ok {
			has = has && slices.Contains(a.Modifier.Args, label) == (strings.ToLower(a.Modifier.Op) == "by")
		}
	})
	return has
}
