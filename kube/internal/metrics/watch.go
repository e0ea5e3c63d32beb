package metrics

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/stratakube/strata/mirror/driver"
)

// Metrics of watches, by resource.
var (
	watchReplayed  = newCounters("strata_watch_replayed_events_total", "Events before the start of a watch that it examined, before selectors.")
	watchBookmarks = newCounters("strata_watch_bookmarks_total", "Bookmarks sent, including those that end initial events.")
	watchesEnded   = newCounters("strata_watches_ended_total",
		"Watches that have ended, by reason: timeout, client, shutdown, storage, expired (410), slow_client, error.", "reason")
	watchesUnindexed = newCounters("strata_watches_unindexed_total", "Watches by a label or field beyond 8 others, which every event wakes.")
	watchDelivery    = newHistograms("strata_watch_delivery_seconds",
		"Time from the arrival of a batch from etcd to the end of the write to the client.",
		[]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30})

	registerWatchMetrics = sync.OnceFunc(func() {
		legacyregistry.MustRegister(watchReplayed, watchBookmarks, watchesEnded, watchesUnindexed, watchDelivery)
	})
)

// Watches are the metrics of the watches of one resource. Each appears on its first use.
type Watches struct {
	resource                 schema.GroupResource
	initial, replayed, marks func() metrics.CounterMetric
	terminated               func() metrics.CounterMetric
	delivery                 func() metrics.ObserverMetric
	// Stages of apiserver_watch_events_dispatch_duration_seconds, which a watch observes once for
	// each write, for its oldest event: from the arrival of the event from etcd, and from the time
	// when it was ready, to its delivery to the client. The third stage, storage_to_cache, is the
	// same for all watches.
	total, handOver func() metrics.ObserverMetric
}

// NewWatches returns the metrics of a resource.
func NewWatches(r schema.GroupResource) Watches {
	cachermetrics.Register()
	registerWatchMetrics()
	counter := func(vec *metrics.CounterVec) func() metrics.CounterMetric {
		return sync.OnceValue(func() metrics.CounterMetric { return vec.WithLabelValues(r.Group, r.Resource) })
	}
	stage := func(name string) func() metrics.ObserverMetric {
		return sync.OnceValue(func() metrics.ObserverMetric { return dispatchDuration().WithLabelValues(r.Group, r.Resource, name) })
	}
	return Watches{
		resource:   r,
		initial:    counter(cachermetrics.InitCounter),
		replayed:   counter(watchReplayed),
		marks:      counter(watchBookmarks),
		terminated: counter(cachermetrics.TerminatedWatchersCounter),
		total:      stage("total"),
		handOver:   stage("cache_to_watcher"),
		delivery:   sync.OnceValue(func() metrics.ObserverMetric { return watchDelivery.WithLabelValues(r.Group, r.Resource) }),
	}
}

// Started counts the initial entries and replayed events that the start of a watch has read:
// upstream's metric is the sum of both.
func (m *Watches) Started(entries, events int) {
	if n := entries + events; n > 0 {
		m.initial().Add(float64(n))
	}
	if events > 0 {
		m.replayed().Add(float64(events))
	}
}

// Bookmark counts a bookmark.
func (m *Watches) Bookmark() { m.marks().Inc() }

// Sharded counts a watch with a shard selector, and returns the function that counts its end.
func (m *Watches) Sharded() (ended func()) {
	cachermetrics.RecordShardedWatchStarted(m.resource)
	return func() { cachermetrics.RecordShardedWatchStopped(m.resource) }
}

// Filtered counts objects that a shard selector withholds from a watch.
func (m *Watches) Filtered(n int) {
	if n > 0 {
		cachermetrics.WatchFilteredEventsTotal.WithLabelValues(m.resource.Group, m.resource.Resource).Add(float64(n))
	}
}

// Unindexed counts a watch of one value that reads all events.
func (m *Watches) Unindexed() {
	watchesUnindexed.WithLabelValues(m.resource.Group, m.resource.Resource).Inc()
}

// Ended counts the end of a watch, by reason.
func (m *Watches) Ended(reason string) {
	watchesEnded.WithLabelValues(m.resource.Group, m.resource.Resource, reason).Inc()
}

// Terminated counts a watch that ends because its position has left the window.
func (m *Watches) Terminated() { m.terminated().Inc() }

// Delivered records that events have been written to the client now. arrived and ready are the
// times at which the oldest of them arrived and was ready to be written, on the clock of
// driver.Now.
func (m *Watches) Delivered(arrived, ready int64) {
	m.delivery().Observe(time.Duration(driver.Now() - arrived).Seconds())
	m.Dispatched(arrived, ready)
}

// Dispatched records that an event was sent to the client now; arrived and ready are as in
// Delivered.
func (m *Watches) Dispatched(arrived, ready int64) {
	now := driver.Now()
	m.total().Observe(time.Duration(now - arrived).Seconds())
	m.handOver().Observe(time.Duration(now - ready).Seconds())
}
