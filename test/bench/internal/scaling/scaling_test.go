package scaling

import (
	"flag"
	"math"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the tables of docs/scaling.md")

// document is docs/scaling.md.
const document = "../../../../docs/scaling.md"

func current(t *testing.T) *Measured {
	t.Helper()
	m, err := Current()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestDocument_Tables_AreThoseOfTheModel compares the tables of docs/scaling.md with the output of the model; -update writes them.
func TestDocument_Tables_AreThoseOfTheModel(t *testing.T) {
	data, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for name, table := range current(t).Tables() {
		begin, end := "<!-- table "+name+" -->\n", "<!-- end -->\n"
		before, rest, found := strings.Cut(text, begin)
		old, after, ended := strings.Cut(rest, end)
		if !found || !ended {
			t.Errorf("the document has no place for the table %s", name)
			continue
		}
		if !*update && old != table {
			t.Errorf("table %s is not that of the model; write it with -update. The model's:\n%s", name, table)
		}
		text = before + begin + table + end + after
	}
	if *update {
		if err := os.WriteFile(document, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestMeasured_EveryOperation_HasACost(t *testing.T) {
	m := current(t)
	for _, op := range Ops {
		if cost := m.Costs[op]; cost.Server <= 0 && op != Idle {
			t.Errorf("%s costs the server %v µs", op, cost.Server)
		}
		if titles[op] == "" {
			t.Errorf("%s has no title", op)
		}
	}
	for name, value := range map[string]float64{
		"a server": m.Memory.Base, "a pod": m.Memory.Pod, "a watch": m.Memory.Watch, "a stored pod": m.Memory.StoredPod, "writes of etcd": m.Etcd.Large,
	} {
		if value <= 0 {
			t.Errorf("%s has no measurement", name)
		}
	}
}

func TestRates_TwiceTheSpeed_IsTwiceTheRequests(t *testing.T) {
	c := Cluster{Nodes: 300, Pods: 9000, PodLifetime: 600, SliceEndpoints: 20, Speed: 1}
	slow := c.Rates()
	c.Speed = 2
	for op, rate := range c.Rates() {
		want := 2 * slow[op]
		if op == Bookmark || op == Idle {
			want = slow[op] // the server's, not the clients'
		}
		if math.Abs(rate-want) > 1e-9*want {
			t.Errorf("%s: %v per second at twice the speed, want %v", op, rate, want)
		}
	}
}

func TestRates_OneSecond_CountsEveryStepOfAPod(t *testing.T) {
	r := Cluster{Nodes: 10, Pods: 1000, PodLifetime: 100, SliceEndpoints: 20, Speed: 1}.Rates()
	const churn = 10.0
	for op, want := range map[Op]float64{
		LeaseUpdate: 1, PodCreate: churn, PodBind: churn, PodStatus: 2 * churn, PodDelete: churn, PodRemove: churn, EventCreate: 5 * churn,
		SliceUpdate: churn, DeliverPod: 5 * churn, DeliverSlice: churn * (10 + SliceInformers),
	} {
		if math.Abs(r[op]-want) > 1e-9 {
			t.Errorf("%s: %v per second, want %v", op, r[op], want)
		}
	}
	if want := 1 + 10./300 + 12*churn; math.Abs(r.Writes()-want) > 1e-9 {
		t.Errorf("%v writes per second, want %v", r.Writes(), want)
	}
}

func TestPlan_LargerCluster_NeedsNoFewerServers(t *testing.T) {
	m := current(t)
	var last Plan
	for _, c := range extended(MeanLifetime) {
		p := m.Plan(c)
		if p.Replica.Servers < last.Replica.Servers || p.APIServer.Servers < last.APIServer.Servers || p.APIServer.Servers < leastServers {
			t.Errorf("%d nodes have %d API servers and %d replicas, fewer nodes %d and %d",
				c.Nodes, p.APIServer.Servers, p.Replica.Servers, last.APIServer.Servers, last.Replica.Servers)
		}
		for _, g := range []Group{p.APIServer, p.Replica} {
			if g.Cores > BudgetCores || g.Memory > BudgetMemory || g.Network > BudgetNetwork {
				t.Errorf("%d nodes: a server exceeds the budget: %+v", c.Nodes, g)
			}
		}
		last = p
	}
}

// allowedError is the largest error that the document claims for the quantities that it does not name as worse.
const allowedError = 0.25

// worse are the quantities, by check, with larger errors, which docs/scaling.md explains.
var worse = map[string]bool{}

func TestChecks_Errors_AreAsTheDocumentSays(t *testing.T) {
	m := current(t)
	if len(m.Checks) < 4 {
		t.Fatalf("%d simulated clusters, want three sizes and kwok", len(m.Checks))
	}
	for _, c := range m.Checks {
		predicted := m.Prediction(c)
		for _, q := range Quantities {
			want, got := q.Of(c.Measured), q.Of(predicted)
			if want == 0 {
				continue
			}
			key := c.Name + " " + q.Name
			if off := math.Abs(got/want - 1); off > allowedError != worse[key] {
				t.Errorf("%s: predicted %.4g, measured %.4g, an error of %.0f %%; listed as worse: %v", key, got, want, off*100, worse[key])
			}
		}
	}
}
