package scaling

import (
	"fmt"
	"math"
	"strings"
)

// titles describe the operations in the tables.
var titles = map[Op]string{
	LeaseUpdate:  "PUT of a node's lease",
	NodeStatus:   "PATCH of a Node's status, 4 conditions",
	PodCreate:    "POST of a pod",
	PodBind:      "POST of a binding",
	PodStatus:    "PATCH of a pod's status",
	PodDelete:    "DELETE of a pod with a grace period",
	PodRemove:    "DELETE of a pod without one",
	EventCreate:  "POST of an Event",
	SliceUpdate:  "PUT of an EndpointSlice of 20 endpoints",
	Token:        "POST of a TokenRequest, RSA key of 2,048 bits",
	Get:          "GET of a pod, consistent",
	List:         "LIST of a namespace with 100 pods, from memory",
	WatchOpen:    "watch reopened at a revision",
	DeliverPod:   "event of a pod to the watch of its node, encoded for it",
	DeliverAll:   "event of a pod to one of 4 informers, their shared encoding included",
	DeliverSlice: "event of an EndpointSlice to one of 200 watches",
	Bookmark:     "bookmark to an idle watch, with all else that the watch costs in a minute",
	Feed:         "change of a lease that another server wrote",
	Idle:         "one second without clients",
}

// Sizes are the clusters of the extension: nodes and pods.
var Sizes = []struct{ Nodes, Pods int }{{5_000, 150_000}, {20_000, 500_000}, {100_000, 1_000_000}}

// Lifetimes of pods of the extension, in seconds.
const (
	MeanLifetime = 24 * 3600.0 // on a usual day
	PeakLifetime = 3 * 3600.0  // during rollouts: all pods within three hours
)

// Tables returns the tables of docs/scaling.md, by the name of their place in it.
func (m *Measured) Tables() map[string]string {
	return map[string]string{
		"costs":  m.costTable(),
		"memory": m.memoryTable(),
		"etcd":   m.etcdTable(),
		"checks": m.checkTable(),
		"rates":  rateTable(),
		"plan":   m.planTable(),
		"etcds":  m.etcdsTable(),
	}
}

func (m *Measured) costTable() string {
	var b strings.Builder
	b.WriteString("| operation | server CPU | etcd CPU | to clients | from clients | from etcd | fsyncs |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n")
	for _, op := range Ops {
		c := m.Costs[op]
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %.2f |\n", titles[op], micros(c.Server), micros(c.Etcd), bytes(c.Sent), bytes(c.Received), bytes(c.FromEtcd), c.Fsyncs)
	}
	return b.String()
}

func (m *Measured) memoryTable() string {
	k := m.Memory
	var b strings.Builder
	b.WriteString("| memory | live bytes |\n| --- | ---: |\n")
	for _, row := range []struct {
		title string
		value float64
	}{
		{"a server without objects and clients", k.Base},
		{"each pod", k.Pod}, {"each Node with its lease", k.Node}, {"each EndpointSlice of 20 endpoints", k.Slice}, {"each Event", k.Event},
		{fmt.Sprintf("each idle watch, with its share of a connection of %d", NodeWatches), k.Watch},
		{"each revision in history, up to 256 MiB together", k.Revision},
		{"etcd, resident: without objects", k.EtcdBase}, {"etcd, resident: each pod", k.EtcdPod},
		{"etcd's database: each pod", k.StoredPod}, {"etcd's database: each Event", k.StoredRest},
	} {
		fmt.Fprintf(&b, "| %s | %s |\n", row.title, bytes(row.value))
	}
	return b.String()
}

func (m *Measured) etcdTable() string {
	e := m.Etcd
	return fmt.Sprintf("| one etcd, 256 writers, fsync | writes per second | CPU of one |\n| --- | ---: | ---: |\n| values of 300 bytes | %s | %s |\n| values of 4,096 bytes | %s | %s |\n",
		grouped(e.Small), micros(e.SmallCPU), grouped(e.Large), micros(e.LargeCPU))
}

// syncCost is the CPU time of etcd for one fsync with all that it does for a batch, µs: the difference between a write alone and one of many.
func (m *Measured) syncCost() float64 {
	alone := m.Costs[LeaseUpdate]
	return max(0, (alone.Etcd-m.Etcd.SmallCPU)/(alone.Fsyncs-m.Etcd.SmallFsync))
}

// Prediction is the prediction for a check, from the rates that its clients reached, and from the fsyncs of etcd: how many writes
// share one depends on the speed of disk and processors, not on the cluster.
func (m *Measured) Prediction(c Check) Load {
	l := m.Load(c.Rates)
	l.Etcd -= m.syncCost() / 1e6 * (l.Fsyncs - c.Measured.Fsyncs)
	l.Memory = m.Predict(c.Cluster, c.Seconds).Memory
	return l
}

// Reached is the part of the writes of Cluster.Rates that the clients of a check reached.
func (c Check) Reached() float64 { return c.Rates.Writes() / c.Cluster.Rates().Writes() }

// KwokCheck is the name of the check whose kubelets are kwok.
const KwokCheck = "kwok"

// Quantities are the parts of a load that a check compares.
var Quantities = []struct {
	Name   string
	Of     func(Load) float64
	format func(float64) string
}{
	{"server CPU", func(l Load) float64 { return l.Server }, cores},
	{"etcd CPU", func(l Load) float64 { return l.Etcd }, cores},
	{"live memory of the server", func(l Load) float64 { return l.Memory }, bytes},
	{"server to clients", func(l Load) float64 { return l.Sent }, perSecond},
	{"clients to server", func(l Load) float64 { return l.Received }, perSecond},
	{"etcd to server", func(l Load) float64 { return l.FromEtcd }, perSecond},
}

func (m *Measured) checkTable() string {
	var b strings.Builder
	b.WriteString("| nodes / pods / intervals divided by | quantity | predicted | measured | error |\n| --- | --- | ---: | ---: | ---: |\n")
	for _, c := range m.Checks {
		predicted, writes := m.Prediction(c), c.Rates.Writes()
		fmt.Fprintf(&b, "| %s | writes per second, from nodes and pods | %s | %s | %+.0f %% |\n", c.title(), grouped(c.Cluster.Rates().Writes()), grouped(writes), (1/c.Reached()-1)*100)
		fmt.Fprintf(&b, "| | fsyncs per write | - | %.2f | |\n", c.Measured.Fsyncs/writes)
		for _, q := range Quantities {
			want, got := q.Of(c.Measured), q.Of(predicted)
			if want == 0 {
				continue
			}
			fmt.Fprintf(&b, "| | %s | %s | %s | %+.0f %% |\n", q.Name, q.format(got), q.format(want), (got/want-1)*100)
		}
	}
	return b.String()
}

// title names a check in the table.
func (c Check) title() string {
	name := fmt.Sprintf("%s / %s / %g", grouped(float64(c.Cluster.Nodes)), grouped(float64(c.Cluster.Pods)), c.Cluster.Speed)
	if c.Name == KwokCheck {
		name += ", kwok"
	}
	return name
}

// extended returns the clusters of the extension, with a lifetime of pods.
func extended(lifetime float64) []Cluster {
	var list []Cluster
	for _, size := range Sizes {
		list = append(list, Cluster{Nodes: size.Nodes, Pods: size.Pods, PodLifetime: lifetime, SliceEndpoints: 20, Speed: 1})
	}
	return list
}

// sizeHead begins a table with a column for each size and lifetime.
func sizeHead() string {
	head, line := "| nodes / pods, lifetime of a pod", "| ---"
	for _, lifetime := range []float64{MeanLifetime, PeakLifetime} {
		for _, c := range extended(lifetime) {
			head += fmt.Sprintf(" | %s / %s, %.0f h", grouped(float64(c.Nodes)), grouped(float64(c.Pods)), lifetime/3600)
			line += " | ---:"
		}
	}
	return head + " |\n" + line + " |\n"
}

func rateTable() string {
	return sizeHead() + rows([]row[Cluster]{
		{"pods created per second", func(c Cluster) string { return number(c.Churn()) }},
		{"leases renewed per second", func(c Cluster) string { return number(c.Rates()[LeaseUpdate]) }},
		{"Events per second", func(c Cluster) string { return number(c.Rates()[EventCreate]) }},
		{"all writes per second", func(c Cluster) string { return number(c.Rates().Writes()) }},
		{"watches", func(c Cluster) string { return number(c.Watches()) }},
		{"EndpointSlices delivered per second", func(c Cluster) string { return number(c.Rates()[DeliverSlice]) }},
		{"other events delivered per second", func(c Cluster) string { return number(c.Rates()[DeliverPod] + c.Rates()[DeliverAll]) }},
	}, func(c Cluster) Cluster { return c })
}

func (m *Measured) planTable() string {
	total := func(f func(Group) float64) func(Plan) float64 {
		return func(p Plan) float64 {
			return f(p.APIServer)*float64(p.APIServer.Servers-1) + f(p.Replica)*float64(p.Replica.Servers-1)
		}
	}
	return sizeHead() + rows([]row[Plan]{
		{"API servers, one of them spare", func(p Plan) string { return bound(p.APIServer) }},
		{"cores of each", func(p Plan) string { return number(p.APIServer.Cores) }},
		{"memory of each", func(p Plan) string { return bytes(p.APIServer.Memory) }},
		{"replicas, one of them spare", func(p Plan) string { return bound(p.Replica) }},
		{"cores of each", func(p Plan) string { return number(p.Replica.Cores) }},
		{"memory of each", func(p Plan) string { return bytes(p.Replica.Memory) }},
		{"to clients from each", func(p Plan) string { return perSecond(p.Replica.Network) }},
		{"cores of all", func(p Plan) string { return number(total(func(g Group) float64 { return g.Cores })(p)) }},
		{"to clients from all", func(p Plan) string { return perSecond(total(func(g Group) float64 { return g.Network })(p)) }},
		{"cores of all for EndpointSlices", func(p Plan) string { return number(p.Rates[DeliverSlice] * m.Costs[DeliverSlice].Server / 1e6) }},
	}, m.Plan)
}

func (m *Measured) etcdsTable() string {
	var list []row[Plan]
	for i, e := range m.Plan(extended(MeanLifetime)[0]).Etcds {
		list = append(list, row[Plan]{e.Resources, func(p Plan) string {
			e := p.Etcds[i]
			return fmt.Sprintf("%d: %s/s, %s cores, %s", e.Clusters, number(e.Writes), number(e.Cores), bytes(e.DB))
		}})
	}
	return sizeHead() + rows(list, m.Plan)
}

// row is a row of a table with a column for each cluster of the extension.
type row[T any] struct {
	title string
	value func(T) string
}

func rows[T any](list []row[T], of func(Cluster) T) string {
	var b strings.Builder
	for _, row := range list {
		b.WriteString("| " + row.title)
		for _, lifetime := range []float64{MeanLifetime, PeakLifetime} {
			for _, c := range extended(lifetime) {
				b.WriteString(" | " + row.value(of(c)))
			}
		}
		b.WriteString(" |\n")
	}
	return b.String()
}

func bound(g Group) string { return fmt.Sprintf("%d (%s)", g.Servers, g.Bound) }

func micros(v float64) string {
	switch {
	case v == 0:
		return "-"
	case v < 10:
		return fmt.Sprintf("%.1f µs", v)
	}
	return grouped(v) + " µs"
}

func cores(v float64) string { return fmt.Sprintf("%.3f cores", v) }

func perSecond(v float64) string { return bytes(v) + "/s" }

func bytes(v float64) string {
	switch {
	case v == 0:
		return "-"
	case v < 1e3:
		return fmt.Sprintf("%.0f B", v)
	case v < 1e6:
		return fmt.Sprintf("%.1f kB", v/1e3)
	case v < 1e9:
		return fmt.Sprintf("%.1f MB", v/1e6)
	}
	return fmt.Sprintf("%.1f GB", v/1e9)
}

// number formats a value with two or more digits.
func number(v float64) string {
	if v < 10 {
		return fmt.Sprintf("%.1f", v)
	}
	return grouped(v)
}

// grouped formats a rounded number with commas.
func grouped(v float64) string {
	digits := fmt.Sprintf("%.0f", math.Round(v))
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
