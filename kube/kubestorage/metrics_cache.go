package kubestorage

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/stratakube/strata/mirror"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Upstream's metrics of the watch cache, which the scale tests and dashboards of Kubernetes read.
// They are upstream's own collectors, so that both engines may run in one process. The
// collectors that v0.36 does not have are made here, with the names, labels and buckets of v0.37.
var (
	initializationErrors = sync.OnceValue(func() *metrics.CounterVec {
		return registered(metrics.NewCounterVec(&metrics.CounterOpts{
			Name: "apiserver_watch_cache_initialization_errors_total", StabilityLevel: metrics.ALPHA,
			Help: "Counter of watch cache initialization errors broken by resource type.",
		}, []string{"group", "resource"}))
	})
	initializationDuration = sync.OnceValue(func() *metrics.HistogramVec {
		return registered(metrics.NewHistogramVec(&metrics.HistogramOpts{
			Name: "apiserver_watch_cache_initialization_duration_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Histogram of watch cache initialization duration in seconds, broken by resource type.",
			Buckets: []float64{.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 180, 600},
		}, []string{"group", "resource"}))
	})
	dispatchDuration = sync.OnceValue(func() *metrics.HistogramVec {
		return registered(metrics.NewHistogramVec(&metrics.HistogramOpts{
			Name: "apiserver_watch_events_dispatch_duration_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Histogram of watch event dispatch latency broken by resource type and pipeline stage. The 'total' stage is the end-to-end latency of a delivered event.",
			Buckets: []float64{.0001, .0005, .001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
		}, []string{"group", "resource", "stage"}))
	})
)

// registered registers a collector, or returns the one of the same name that upstream has
// registered.
func registered[C metrics.Registerable](c C) C {
	cachermetrics.Register()
	var known prometheus.AlreadyRegisteredError
	switch err := legacyregistry.Register(c); {
	case err == nil:
		return c
	case errors.As(err, &known):
		if existing, ok := known.ExistingCollector.(C); ok {
			return existing
		}
		fallthrough
	default:
		panic(err) // a collector of another kind has the name
	}
}

// cacheMetricsInterval is how old upstream's metrics of a cache may be: events are counted by
// the mirror, and added up at this interval, so that an event costs no look-up of a label.
const cacheMetricsInterval = time.Second

// cacheMetrics feeds upstream's metrics of the resources of one mirror.
type cacheMetrics struct {
	mirror *mirror.Mirror

	mu        sync.Mutex // leaf
	resources map[*mirror.Resource]*resourceMetrics
	clock     mirror.Revision
}

// resourceMetrics feed upstream's metrics of one resource. Each appears when it is first used, as
// upstream's do.
type resourceMetrics struct {
	group schema.GroupResource
	seen  mirror.ResourceStats // what the metrics have of the mirror's counters
}

func newCacheMetrics(m *mirror.Mirror) *cacheMetrics {
	cachermetrics.Register()
	return &cacheMetrics{mirror: m, resources: map[*mirror.Resource]*resourceMetrics{}}
}

// add begins to report a resource, until the mirror forgets it. A resource that is reported under another
// name keeps that: several storages may share it, also one after the other.
func (c *cacheMetrics) add(r *mirror.Resource, g schema.GroupResource) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resources[r] == nil {
		c.resources[r] = &resourceMetrics{group: g}
	}
}

// run reports until the mirror is closed.
func (c *cacheMetrics) run(ctx context.Context) {
	tick := time.NewTicker(cacheMetricsInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			c.report()
		case <-ctx.Done():
			c.report()
			return
		}
	}
}

// report adds what has happened since the last time. Cost is O(resources).
func (c *cacheMetrics) report() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clock := c.mirror.Clock()
	for r, m := range c.resources {
		if r.Forgotten() {
			delete(c.resources, r)
			continue
		}
		ready := m.seen.Ready
		m.report(r.Stats())
		if m.seen.Ready && clock > 0 && (clock != c.clock || !ready) {
			cachermetrics.RecordResourceVersion(m.group, uint64(clock))
		}
	}
	c.clock = clock
}

func (m *resourceMetrics) report(now mirror.ResourceStats) {
	group, resource := m.group.Group, m.group.Resource
	for _, counter := range []struct {
		metric *metrics.CounterVec
		n      int64
	}{
		{cachermetrics.EventsReceivedCounter, now.Received - m.seen.Received},
		{cachermetrics.EventsCounter, now.Published - m.seen.Published},
		{cachermetrics.WatchCacheInitializations, now.Loads - m.seen.Loads},
		{initializationErrors(), now.LoadFailures - m.seen.LoadFailures},
	} {
		if counter.n > 0 {
			counter.metric.WithLabelValues(group, resource).Add(float64(counter.n))
		}
	}
	// More than one load between two reports is rare, and then each took about as long.
	observeMean(initializationDuration().WithLabelValues, now.Loads-m.seen.Loads, now.LoadTime-m.seen.LoadTime, group, resource)
	for i, p := range now.Publications { // all of one place are of the same bucket
		seen := m.seen.Publications[i]
		observeMean(dispatchDuration().WithLabelValues, p.N-seen.N, p.Time-seen.Time, group, resource, "storage_to_cache")
	}
	if now.Events != m.seen.Events || !m.seen.Ready {
		cachermetrics.WatchCacheCapacity.WithLabelValues(group, resource).Set(float64(now.Events))
	}
	m.seen = now
}

// observeMean observes n durations that make up the time together.
func observeMean(vec func(...string) metrics.ObserverMetric, n int64, together time.Duration, labels ...string) {
	if n <= 0 {
		return
	}
	o := vec(labels...)
	for range n {
		o.Observe(together.Seconds() / float64(n))
	}
}

// dispatchMetrics are the stages of apiserver_watch_events_dispatch_duration_seconds that a watch
// observes, once for each write, of the oldest event in it. The third stage, storage_to_cache, is the
// same for all watches.
type dispatchMetrics struct {
	// total is from the arrival of an event from etcd until it was handed to the client.
	total func() metrics.ObserverMetric
	// handOver is from when the event was ready for the client until then.
	handOver func() metrics.ObserverMetric
}

func newDispatchMetrics(r schema.GroupResource) dispatchMetrics {
	stage := func(name string) func() metrics.ObserverMetric {
		return sync.OnceValue(func() metrics.ObserverMetric {
			return dispatchDuration().WithLabelValues(r.Group, r.Resource, name)
		})
	}
	return dispatchMetrics{total: stage("total"), handOver: stage("cache_to_watcher")}
}

// observe records that an event was handed over now. The times are those of mirror.Now.
func (d *dispatchMetrics) observe(arrived, ready, now int64) {
	d.total().Observe(time.Duration(now - arrived).Seconds())
	d.handOver().Observe(time.Duration(now - ready).Seconds())
}
