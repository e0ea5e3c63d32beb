package metrics

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
		return registered(newCounters("apiserver_watch_cache_initialization_errors_total",
			"Counter of watch cache initialization errors broken by resource type."))
	})
	initializationDuration = sync.OnceValue(func() *metrics.HistogramVec {
		return registered(newHistograms("apiserver_watch_cache_initialization_duration_seconds",
			"Histogram of watch cache initialization duration in seconds, broken by resource type.",
			[]float64{.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 180, 600}))
	})
	dispatchDuration = sync.OnceValue(func() *metrics.HistogramVec {
		return registered(newHistograms("apiserver_watch_events_dispatch_duration_seconds",
			"Histogram of watch event dispatch latency broken by resource type and pipeline stage. The 'total' stage is the end-to-end latency of a delivered event.",
			[]float64{.0001, .0005, .001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}, "stage"))
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

// cacheMetricsInterval is the maximum age of upstream's metrics of a cache: the mirror counts
// events, and the counts are added at this interval, so that an event costs no look-up of a label.
const cacheMetricsInterval = time.Second

// Cache feeds upstream's metrics of the resources of one mirror.
type Cache struct {
	mirror *mirror.Mirror

	mu        sync.Mutex // leaf
	resources map[*mirror.Resource]*cachedResource
	clock     mirror.Revision
}

// cachedResource feed upstream's metrics of one resource. Each appears when it is first used, as
// upstream's do.
type cachedResource struct {
	group schema.GroupResource
	seen  mirror.ResourceStats // the mirror's counters that are in the metrics already
}

// NewCache returns the metrics of a mirror without resources.
func NewCache(m *mirror.Mirror) *Cache {
	cachermetrics.Register()
	return &Cache{mirror: m, resources: map[*mirror.Resource]*cachedResource{}}
}

// Add starts to report a resource, until the mirror drops it. A resource that is already reported
// under another name keeps that name: several storages may share it, also one after the other.
func (c *Cache) Add(r *mirror.Resource, g schema.GroupResource) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resources[r] == nil {
		c.resources[r] = &cachedResource{group: g}
	}
}

// Resources returns the reported resources.
func (c *Cache) Resources() map[*mirror.Resource]schema.GroupResource {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make(map[*mirror.Resource]schema.GroupResource, len(c.resources))
	for r, m := range c.resources {
		if !r.Removed() {
			all[r] = m.group
		}
	}
	return all
}

// Run reports until the mirror is closed.
func (c *Cache) Run(ctx context.Context) {
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

// report adds the events since the last call. Cost is O(resources).
func (c *Cache) report() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clock := c.mirror.PublishedRevision()
	for r, m := range c.resources {
		if r.Removed() {
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

func (m *cachedResource) report(now mirror.ResourceStats) {
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
	// More than one load between two reports is rare; each then took about the same time.
	observeMean(initializationDuration().WithLabelValues, now.Loads-m.seen.Loads, now.LoadTime-m.seen.LoadTime, group, resource)
	for i, p := range now.Publications { // durations at one index are in the same bucket
		seen := mirror.Publication{}
		if i < len(m.seen.Publications) {
			seen = m.seen.Publications[i]
		}
		observeMean(dispatchDuration().WithLabelValues, p.N-seen.N, p.Time-seen.Time, group, resource, "storage_to_cache")
	}
	if now.Events != m.seen.Events || !m.seen.Ready {
		cachermetrics.WatchCacheCapacity.WithLabelValues(group, resource).Set(float64(now.Events))
	}
	m.seen = now
}

// observeMean observes n durations, each the mean of the total.
func observeMean(vec func(...string) metrics.ObserverMetric, n int64, together time.Duration, labels ...string) {
	if n <= 0 {
		return
	}
	o := vec(labels...)
	for range n {
		o.Observe(together.Seconds() / float64(n))
	}
}
