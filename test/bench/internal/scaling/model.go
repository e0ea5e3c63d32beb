// Package scaling predicts the CPU time, memory and network of an API server and of its etcd from the number of nodes and pods. Its
// coefficients are measured (measured.json), one operation at a time; `make scaling` measures them, and compares predictions with simulated
// clusters. docs/scaling.md has the tables that this package prints.
//
//	Cluster ─▶ Rates (operations per second) ─┐
//	measured costs (CPU and bytes of one) ────┴─▶ Load (cores, bytes per second)
package scaling

// Cluster describes a cluster and its activity. The rates of Rates follow from it.
type Cluster struct {
	Nodes int `json:"nodes"`
	Pods  int `json:"pods"`

	// PodLifetime is the mean lifetime of a pod in seconds: Pods/PodLifetime pods are created per second, and as many deleted.
	PodLifetime float64 `json:"podLifetime"`

	// SliceEndpoints is the number of endpoints in an EndpointSlice. Half of all pods are endpoints.
	SliceEndpoints int `json:"sliceEndpoints"`

	// Speed divides all intervals of clients: with 4, a lease is renewed every 2.5 s. Bookmarks, which the server sends, stay at one a minute.
	Speed float64 `json:"speed"`
}

// Assumptions on clients. The first group follows from the defaults of kubelet, kube-proxy and client-go; the second is an assumption on
// the use of the cluster.
const (
	leaseInterval    = 10.0      // seconds between two renewals of a node's lease
	statusInterval   = 300.0     // seconds between two updates of an unchanged node status
	tokenInterval    = 48 * 60.0 // seconds until a kubelet replaces the token of a pod: 80 % of an hour
	watchInterval    = 450.0     // seconds after which client-go reopens a watch: 5 to 10 minutes
	bookmarkInterval = 60.0      // seconds between two bookmarks of a watch
	proxySliceWatch  = 1         // watches of EndpointSlices of a node (kube-proxy)
	NodeWatches      = 15        // watches of a node, all together; WatchPaths lists them
	ObjectWatches    = 6         // of these, of single ConfigMaps and Secrets
	eventsPerPod     = 5         // Scheduled, Pulling, Pulled, Created, Started
	statusPerPod     = 2         // status patches of a kubelet: running, terminated; each follows a GET
	slicesPerPod     = 1.0       // updates of an EndpointSlice in the life of a pod: half of the pods are endpoints, and each is added and removed
	PodInformers     = 4         // informers of all pods: kube-controller-manager, kube-scheduler, two controllers
	NodeInformers    = 4         // of all nodes
	LeaseInformers   = 1         // of all node leases: kube-controller-manager
	EventInformers   = 1         // of all Events: an exporter
	SliceInformers   = 2         // of all EndpointSlices, beside those of nodes
	getInterval      = 60.0      // seconds between two GETs of an agent on each node
	listNodes        = 1000.0    // nodes for each LIST of a namespace per second
	ListPods         = 100       // pods in such a namespace
	eventTTL         = 3600.0    // seconds that an Event is stored
	historyAge       = 3600.0    // seconds that replaced values stay in memory (--strata-history-age)
	historyLimit     = 256 << 20 // bytes of history (--strata-history-bytes)
)

// Op names an operation with a cost.
type Op string

// Operations. The first ones are requests, those from deliver on are frames of watches.
const (
	LeaseUpdate Op = "lease-update"
	NodeStatus  Op = "node-status"
	PodCreate   Op = "pod-create"
	PodBind     Op = "pod-bind"
	PodStatus   Op = "pod-status"
	PodDelete   Op = "pod-delete"
	PodRemove   Op = "pod-remove"
	EventCreate Op = "event-create"
	SliceUpdate Op = "slice-update"
	Token       Op = "token"
	Get         Op = "get"
	List        Op = "list"
	WatchOpen   Op = "watch-open"

	DeliverPod   Op = "deliver-pod"   // to a watch of one node's pods
	DeliverAll   Op = "deliver-all"   // to an informer of everything
	DeliverSlice Op = "deliver-slice" // of an EndpointSlice of 20 endpoints, to one of many watches
	Bookmark     Op = "bookmark"      // to an idle watch

	Feed Op = "feed" // of one revision, to one more server on the same etcd
	Idle Op = "idle" // one second of a server and an etcd without clients
)

// Ops are all operations, in the order of the tables.
var Ops = []Op{
	LeaseUpdate, NodeStatus, PodCreate, PodBind, PodStatus, PodDelete, PodRemove, EventCreate, SliceUpdate, Token, Get, List, WatchOpen,
	DeliverPod, DeliverAll, DeliverSlice, Bookmark, Feed, Idle,
}

// Writes are the operations that write to etcd, each one revision.
var Writes = []Op{LeaseUpdate, NodeStatus, PodCreate, PodBind, PodStatus, PodDelete, PodRemove, EventCreate, SliceUpdate}

// Rates are operations per second.
type Rates map[Op]float64

// Churn is the number of pods created per second, in compressed time.
func (c Cluster) Churn() float64 { return float64(c.Pods) / c.PodLifetime * c.Speed }

// Watches is the number of watches of all nodes and informers.
func (c Cluster) Watches() float64 {
	return float64(c.Nodes*NodeWatches + PodInformers + NodeInformers + LeaseInformers + EventInformers + SliceInformers)
}

// Rates returns the operations per second of one server that serves the whole cluster.
func (c Cluster) Rates() Rates {
	nodes, churn := float64(c.Nodes)*c.Speed, c.Churn()
	r := Rates{
		LeaseUpdate: nodes / leaseInterval,
		NodeStatus:  nodes / statusInterval,
		PodCreate:   churn,
		PodBind:     churn,
		PodStatus:   statusPerPod * churn,
		PodDelete:   churn,
		PodRemove:   churn,
		EventCreate: eventsPerPod * churn,
		SliceUpdate: slicesPerPod * churn,
		Token:       churn + float64(c.Pods)*c.Speed/tokenInterval,
		Get:         statusPerPod*churn + nodes/getInterval,
		List:        nodes / listNodes,
		WatchOpen:   c.Watches() * c.Speed / watchInterval,
		Bookmark:    c.Watches() / bookmarkInterval,
		Idle:        1,
	}
	// A node sees the binding, the status patches, the deletion and the removal of its pods.
	r[DeliverPod] = (3 + statusPerPod) * churn
	// A pod is also seen when it is created. A node watches its own Node twice, as kubelet and as kube-proxy.
	r[DeliverAll] = (4+statusPerPod)*churn*PodInformers + r[NodeStatus]*(NodeInformers+2) + r[LeaseUpdate]*LeaseInformers + r[EventCreate]*EventInformers
	r[DeliverSlice] = r[SliceUpdate] * float64(c.Nodes*proxySliceWatch+SliceInformers)
	return r
}

// Writes is the number of revisions per second.
func (r Rates) Writes() float64 {
	sum := 0.0
	for _, op := range Writes {
		sum += r[op]
	}
	return sum
}

// Cost is the cost of one operation.
type Cost struct {
	Server   float64 `json:"server"`   // CPU time of the server, µs
	Etcd     float64 `json:"etcd"`     // CPU time of etcd, µs
	Sent     float64 `json:"sent"`     // bytes from the server to its clients, with TLS and HTTP/2
	Received float64 `json:"received"` // bytes from clients to the server
	FromEtcd float64 `json:"fromEtcd"` // bytes from etcd to the server
	Fsyncs   float64 `json:"fsyncs"`   // fsyncs of etcd's log
}

// Memory has the coefficients of memory: of the server in live bytes, with stacks, after a garbage collection; of etcd in resident bytes.
type Memory struct {
	Base       float64 `json:"base"`       // a server without clients and objects of users
	Pod        float64 `json:"pod"`        // for each pod
	Node       float64 `json:"node"`       // for each node with its lease
	Event      float64 `json:"event"`      // for each Event
	Slice      float64 `json:"slice"`      // for each EndpointSlice
	Watch      float64 `json:"watch"`      // for each watch, with its share of a connection of NodeWatches
	Revision   float64 `json:"revision"`   // for each revision in history
	EtcdBase   float64 `json:"etcdBase"`   // an etcd without objects of users
	EtcdPod    float64 `json:"etcdPod"`    // resident bytes of etcd for each pod
	StoredPod  float64 `json:"storedPod"`  // bytes of a pod in etcd's database
	StoredRest float64 `json:"storedRest"` // bytes of another object, in the mean
}

// Load is the use of a server and its etcd.
type Load struct {
	Server   float64 `json:"server"`   // cores
	Etcd     float64 `json:"etcd"`     // cores
	Memory   float64 `json:"memory"`   // live bytes of the server, with stacks
	Resident float64 `json:"resident"` // resident bytes of the server, which are measured and not predicted
	Sent     float64 `json:"sent"`     // bytes per second to clients
	Received float64 `json:"received"` // bytes per second from clients
	FromEtcd float64 `json:"fromEtcd"` // bytes per second from etcd to the server
	Fsyncs   float64 `json:"fsyncs"`   // per second
}

// Load returns the load of these rates, without memory.
func (m *Measured) Load(r Rates) Load {
	var l Load
	for _, op := range Ops {
		rate, cost := r[op], m.Costs[op]
		l.Server += rate * cost.Server / 1e6
		l.Etcd += rate * cost.Etcd / 1e6
		l.Sent += rate * cost.Sent
		l.Received += rate * cost.Received
		l.FromEtcd += rate * cost.FromEtcd
		l.Fsyncs += rate * cost.Fsyncs
	}
	return l
}

// Predict returns the load of a server that alone serves c. seconds is the age of the activity, which bounds Events and history.
func (m *Measured) Predict(c Cluster, seconds float64) Load {
	r := c.Rates()
	l := m.Load(r)
	l.Memory = m.StateMemory(c, seconds) + m.Memory.Watch*c.Watches()
	return l
}

// StateMemory is the live memory of each server that mirrors the objects of c: all of it except watches.
func (m *Measured) StateMemory(c Cluster, seconds float64) float64 {
	r, k := c.Rates(), m.Memory
	return k.Base + k.Pod*float64(c.Pods) + k.Node*float64(c.Nodes) + k.Slice*c.Slices() +
		k.Event*r[EventCreate]*min(seconds, eventTTL) + min(historyLimit, k.Revision*r.Writes()*min(seconds, historyAge))
}

// Slices is the number of EndpointSlices.
func (c Cluster) Slices() float64 { return float64(c.Pods) / 2 / float64(c.SliceEndpoints) }

// Events is the number of Events that are stored.
func (c Cluster) Events() float64 { return c.Rates()[EventCreate] * eventTTL }
