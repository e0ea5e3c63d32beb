package scaling

import "math"

// Budget is the part of a machine that a plan uses at most. The rest is for bursts, restarts of others, and the collector.
const (
	BudgetCores   = 16.0   // half of 32
	BudgetMemory  = 90e9   // bytes: seven tenths of 128 GB
	BudgetNetwork = 1.56e9 // bytes per second to clients: half of 25 Gbit/s
	BudgetDB      = 4e9    // bytes of etcd's database: half of the 8 GB that etcd's documentation advises at most

	compactionSeconds = 300.0 // etcd's database has the values that were replaced since the last compaction, at kube-apiserver's default
	leastServers      = 3     // one in each of three zones
	residentPerLive   = 2.0   // resident bytes for each live byte, if GOMEMLIMIT or a control group bounds the collector
)

// EtcdPlan is one group of etcd clusters, each of three members, that store the same resources.
type EtcdPlan struct {
	Resources string
	Writes    float64 // per second, all clusters together
	Cores     float64 // of each cluster's leader
	DB        float64 // bytes, all clusters together
	Clusters  int
}

// Group is servers of one kind behind a balancer.
type Group struct {
	Servers int     // with one that may fail
	Cores   float64 // of each, if that one has failed
	Memory  float64 // bytes of each, likewise
	Network float64 // bytes per second to clients of each, likewise
	Bound   string  // the resource that determines Servers
}

// Plan is the servers of a cluster.
type Plan struct {
	Cluster   Cluster
	Rates     Rates
	Watches   float64
	State     float64 // bytes of resident memory of every server before its watches
	Feed      float64 // cores of every server for the changes of all
	APIServer Group   // `strata apiserver`: writes
	Replica   Group   // `strata replica`: reads and watches
	Etcds     []EtcdPlan
}

// requestOps are the operations that only an API server answers; a replica passes them on.
var requestOps = append([]Op{Token}, Writes...)

// Plan returns the servers that c needs, if all writes go to API servers, and all reads and watches to replicas.
func (m *Measured) Plan(c Cluster) Plan {
	r := c.Rates()
	writes, reads := Rates{}, Rates{}
	for op, rate := range r {
		reads[op] = rate
	}
	delete(reads, Idle)
	for _, op := range requestOps {
		writes[op] = r[op]
		delete(reads, op)
	}
	p := Plan{
		Cluster: c, Rates: r, Watches: c.Watches(), State: residentPerLive * m.StateMemory(c, eventTTL),
		Feed: m.Costs[Feed].Server*r.Writes()/1e6 + m.Costs[Idle].Server/1e6,
	}
	p.APIServer = p.group(m.Load(writes), 0)
	p.Replica = p.group(m.Load(reads), residentPerLive*p.Watches*m.Memory.Watch)
	p.Etcds = m.etcds(c, r, float64(p.APIServer.Servers+p.Replica.Servers))
	return p
}

// group returns the servers for a load and the memory of its watches, which they share. Each of them also has the whole state, and applies
// all changes.
func (p *Plan) group(load Load, watches float64) Group {
	n, bound := 1.0, "zones"
	for _, need := range []struct {
		servers float64
		bound   string
	}{
		{load.Server / (BudgetCores - p.Feed), "CPU"},
		{watches / (BudgetMemory - p.State), "memory"},
		{load.Sent / BudgetNetwork, "network"},
	} {
		if math.Ceil(need.servers) > n {
			n, bound = math.Ceil(need.servers), need.bound
		}
	}
	if n < leastServers-1 {
		n, bound = leastServers-1, "zones"
	}
	return Group{Servers: int(n) + 1, Cores: p.Feed + load.Server/n, Memory: p.State + watches/n, Network: load.Sent / n, Bound: bound}
}

// etcds distributes the resources over etcd clusters: leases, Events, pods, and the rest.
func (m *Measured) etcds(c Cluster, r Rates, servers float64) []EtcdPlan {
	group := func(resources string, objects, bytes float64, ops ...Op) EtcdPlan {
		e := EtcdPlan{Resources: resources}
		for _, op := range ops {
			e.Writes += r[op]
			e.Cores += r[op] * m.Costs[op].Etcd / 1e6
		}
		e.Cores += e.Writes * m.Costs[Feed].Etcd / 1e6 * (servers - 1)
		e.DB = bytes * (objects + e.Writes*compactionSeconds)
		limit := m.Etcd.Large / 2
		if ops[0] == LeaseUpdate {
			limit = m.Etcd.Small / 2
		}
		e.Clusters = int(max(1, math.Ceil(e.Writes/limit), math.Ceil(e.DB/BudgetDB), math.Ceil(e.Cores/BudgetCores)))
		e.Cores /= float64(e.Clusters)
		return e
	}
	nodes := float64(c.Nodes)
	return []EtcdPlan{
		group("leases", nodes, m.Memory.StoredRest, LeaseUpdate),
		group("events", c.Events(), m.Memory.StoredRest, EventCreate),
		group("pods", float64(c.Pods), m.Memory.StoredPod, PodCreate, PodBind, PodStatus, PodDelete, PodRemove),
		group("nodes, EndpointSlices, all else", nodes+c.Slices(), m.Costs[NodeStatus].FromEtcd, NodeStatus, SliceUpdate),
	}
}
