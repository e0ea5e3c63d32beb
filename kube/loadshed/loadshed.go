// Package loadshed refuses requests of overloaded flows in front of the queues of priority and
// fairness.
//
// Those queues bound the number of waiting requests only while a priority level uses exactly all of
// its seats, and their wait at a quarter of the request timeout. Requests of several seats rarely
// fill a level exactly, so under persistent overload a backlog of up to 15 seconds of work builds
// up. Nothing is gained by it: the level is busy either way, each answer is late, and the backlog
// competes for the processors with all other levels after the overload has ended.
//
// A Shedder therefore measures the sojourn time of queued requests, as CoDel does (RFC 8289), for
// each flow. A burst that the server works off within a second is never refused.
package loadshed

import (
	"container/list"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	flowcontrol "k8s.io/api/flowcontrol/v1"
	genericapiserver "k8s.io/apiserver/pkg/server"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/apiserver/pkg/util/flowcontrol/fairqueuing"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// standing is the wait of a flow's oldest queued request above which the flow's queue is a standing
// one rather than a burst. It is Kubernetes' objective for the latency of requests for single
// objects. At k times the load that the level serves, the backlog is k times as long when the first
// request is refused.
const standing = time.Second

// Shedder is the interface of priority and fairness with a bound of the queues. A request is
// refused when it arrives if
//
//   - the oldest queued request of its flow has waited for longer than standing, and
//   - its flow has as many requests queued as its queues hold, handSize times the level's
//     queueLengthLimit, divided by the number of flows with queued requests, and at least
//     queueLengthLimit. So a level always has queued requests while it is overloaded, and clients
//     with some dozen concurrent requests are queued as by upstream: a refusal would make them wait
//     longer, for its Retry-After.
//
// A flow is what a FlowSchema distinguishes, such as a user. Requests that are queued already are
// served. Upstream's filter answers a refused request with 429 and a Retry-After that doubles with
// repeated refusals of the level, up to 32 seconds. Upstream's metrics count it as one that timed
// out in its queue. Exempt levels, and levels without queues, have no overloaded flows.
//
// Safe for concurrent use. The cost of a request is a few allocations and three short critical
// sections.
type Shedder struct {
	utilflowcontrol.Interface

	queued atomic.Int64 // requests of all levels

	mu      sync.Mutex        // leaf
	levels  map[string]*level // with queued requests
	refused map[refusal]int64
}

// refusal has the labels of a refused request.
type refusal struct{ level, schema string }

// level are the queued requests of a priority level. Guarded by Shedder.mu.
type level struct {
	queuing flowcontrol.QueuingConfiguration
	flows   map[flow]*list.List // of time.Time of arrival, in that order; none is empty
}

// flow identifies a flow within its level.
type flow struct{ schema, distinguisher string }

// Install installs a Shedder in c, which must not be completed yet. It does nothing without
// priority and fairness. The caller calls remove when the server has stopped.
func Install(c *genericapiserver.Config) (remove func()) {
	if c.FlowControl == nil {
		return func() {}
	}
	s := New(c.FlowControl)
	c.FlowControl = s
	return s.Close
}

// New returns a Shedder in front of queues, which implement priority and fairness. The caller
// closes it.
func New(queues utilflowcontrol.Interface) *Shedder {
	s := &Shedder{Interface: queues, levels: map[string]*level{}, refused: map[refusal]int64{}}
	shedders.add(s)
	return s
}

// Close removes the Shedder from the metrics of the process, which otherwise keep it in memory.
func (s *Shedder) Close() { shedders.remove(s) }

// Handle implements utilflowcontrol.Interface.
func (s *Shedder) Handle(ctx context.Context, digest utilflowcontrol.RequestDigest,
	note func(*flowcontrol.FlowSchema, *flowcontrol.PriorityLevelConfiguration, string),
	estimate func() flowcontrolrequest.WorkEstimate, queueNote fairqueuing.QueueNoteFn, exec func()) {
	var cancel context.CancelFunc // nil while no request is queued: none can be refused
	if s.queued.Load() > 0 {
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
	}
	var (
		levelName         string
		queuing           flowcontrol.QueuingConfiguration
		of                flow
		place             *list.Element
		refused, executed bool
	)
	s.Interface.Handle(ctx, digest,
		func(fs *flowcontrol.FlowSchema, pl *flowcontrol.PriorityLevelConfiguration, distinguisher string) {
			note(fs, pl, distinguisher)
			levelName, of = pl.Name, flow{fs.Name, distinguisher}
			if limited := pl.Spec.Limited; limited != nil && limited.LimitResponse.Queuing != nil {
				queuing = *limited.LimitResponse.Queuing
			}
			if cancel != nil && s.overloaded(levelName, of) {
				refused = true
				cancel() // the request leaves its queue at once
			}
		},
		estimate,
		func(inQueue bool) {
			if queueNote != nil {
				queueNote(inQueue)
			}
			if inQueue {
				place = s.enqueued(levelName, queuing, of)
			} else {
				s.dequeued(levelName, of, place)
			}
		},
		func() {
			executed = true // possibly in spite of a refusal, by a seat that became free
			exec()
		})
	if refused && !executed {
		s.mu.Lock()
		s.refused[refusal{levelName, of.schema}]++
		s.mu.Unlock()
	}
}

// overloaded reports whether a request of the flow would be refused.
func (s *Shedder) overloaded(levelName string, of flow) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.levels[levelName]
	return l != nil && l.overloadedLocked(l.flows[of])
}

// overloadedLocked is overloaded for the queued requests of a flow; nil are none.
func (l *level) overloadedLocked(requests *list.List) bool {
	if requests == nil {
		return false
	}
	n, length := requests.Len(), int(l.queuing.QueueLengthLimit)
	return n >= length && n*len(l.flows) >= length*int(l.queuing.HandSize) &&
		time.Since(requests.Front().Value.(time.Time)) > standing
}

// enqueued records a request that is queued now, and returns its place for dequeued.
func (s *Shedder) enqueued(levelName string, queuing flowcontrol.QueuingConfiguration, of flow) *list.Element {
	s.queued.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.levels[levelName]
	if l == nil {
		l = &level{flows: map[flow]*list.List{}}
		s.levels[levelName] = l
	}
	l.queuing = queuing
	requests := l.flows[of]
	if requests == nil {
		requests = list.New()
		l.flows[of] = requests
	}
	return requests.PushBack(time.Now())
}

// dequeued removes a request that is executed, or has left its queue.
func (s *Shedder) dequeued(levelName string, of flow, place *list.Element) {
	s.queued.Add(-1)
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.levels[levelName]
	requests := l.flows[of]
	if requests.Remove(place); requests.Len() > 0 {
		return
	}
	if delete(l.flows, of); len(l.flows) == 0 {
		delete(s.levels, levelName)
	}
}

// Metrics of the flows of this process.
var (
	descRefused = metrics.NewDesc("strata_requests_refused_total",
		"Requests refused with 429 because their flow has been overloaded for a second.",
		[]string{"priority_level", "flow_schema"}, nil, metrics.ALPHA, "")
	descOverloaded = metrics.NewDesc("strata_flows_overloaded",
		"Flows, such as users, whose further requests are refused now.",
		[]string{"priority_level"}, nil, metrics.ALPHA, "")

	shedders        = &collector{}
	registerMetrics sync.Once
)

// collector collects the state of all Shedders of the process.
type collector struct {
	metrics.BaseStableCollector
	mu  sync.Mutex // before Shedder.mu
	all []*Shedder
}

func (c *collector) add(s *Shedder) {
	c.mu.Lock()
	c.all = append(c.all, s)
	c.mu.Unlock()
	registerMetrics.Do(func() { legacyregistry.CustomMustRegister(c) })
}

func (c *collector) remove(s *Shedder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = slices.DeleteFunc(c.all, func(other *Shedder) bool { return other == s })
}

// DescribeWithStability implements metrics.StableCollector.
func (c *collector) DescribeWithStability(ch chan<- *metrics.Desc) {
	ch <- descRefused
	ch <- descOverloaded
}

// CollectWithStability implements metrics.StableCollector. It reports the sums over all Shedders of
// the process.
func (c *collector) CollectWithStability(ch chan<- metrics.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	refused, overloaded := map[refusal]int64{}, map[string]int{}
	for _, s := range c.all {
		s.mu.Lock()
		for name, l := range s.levels {
			n := overloaded[name]
			for _, requests := range l.flows {
				if l.overloadedLocked(requests) {
					n++
				}
			}
			overloaded[name] = n
		}
		for labels, n := range s.refused {
			refused[labels] += n
		}
		s.mu.Unlock()
	}
	for labels, n := range refused {
		ch <- metrics.NewLazyConstMetric(descRefused, metrics.CounterValue, float64(n), labels.level, labels.schema)
	}
	for name, n := range overloaded {
		ch <- metrics.NewLazyConstMetric(descOverloaded, metrics.GaugeValue, float64(n), name)
	}
}
