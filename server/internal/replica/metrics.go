package replica

import (
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/kube/kubestorage"
)

var (
	proxyRequests = newCounters("strata_replica_proxy_requests_total",
		"Requests sent to a primary, by response code; error: without a response.", "primary", "code")
	proxySeconds = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name:           "strata_replica_proxy_duration_seconds",
		Help:           "Time until the header of a primary's response.",
		Buckets:        []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60},
		StabilityLevel: metrics.ALPHA,
	}, []string{"primary"})
	primaryHealthy = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name:           "strata_replica_primary_healthy",
		Help:           "1 while requests are sent to the primary, otherwise 0.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"primary"})
	documentRequests = newCounters("strata_replica_documents_total",
		"Requests for discovery and OpenAPI documents, by result: cached, unchanged, fetched, stale, passed.", "result")
	refusedWrites = newCounters("strata_replica_refused_writes_total", "Refused writes of parts of the replica itself.", "resource")

	lagSeconds   = newDesc("lag_seconds", "Time since memory fell behind the newest known revision of etcd, 0 when it is level.", "endpoints", "prefix")
	feedWatches  = newDesc("feed_watches", "Open watches of other replicas.")
	feedEvents   = newDesc("feed_events_total", "Events sent to other replicas.")
	feedBytes    = newDesc("feed_event_bytes_total", "Keys and values of the events sent to other replicas.")
	feedRanges   = newDesc("feed_requests_total", "Reads of other replicas, by result: memory, etcd (passed on), refused.", "result")
	feedCanceled = newDesc("feed_canceled_watches_total", "Watches of other replicas canceled because the log no longer had their revision.")
	feedLogBytes = newDesc("feed_log_bytes", "Memory of the log that serves other replicas.")

	// computed are the metrics of the replica that runs in this process.
	computed = &collector{}
)

func newCounters(name, help string, labels ...string) *metrics.CounterVec {
	return metrics.NewCounterVec(&metrics.CounterOpts{Name: name, Help: help, StabilityLevel: metrics.ALPHA}, labels)
}

func newDesc(name, help string, labels ...string) *metrics.Desc {
	return metrics.NewDesc("strata_replica_"+name, help, labels, nil, metrics.ALPHA, "")
}

func init() {
	legacyregistry.MustRegister(proxyRequests, proxySeconds, primaryHealthy, documentRequests, refusedWrites)
	legacyregistry.CustomMustRegister(computed)
}

// collector computes the lag, and the metrics of the feed for other replicas, at each scrape. Other
// commands of the program, and replicas without a feed, have no series of them.
type collector struct {
	metrics.BaseStableCollector
	engine atomic.Pointer[kubestorage.Engine] // nil: there is no replica
	feed   atomic.Pointer[etcdfeed.Server]    // nil: there is no feed
}

// DescribeWithStability implements metrics.StableCollector.
func (c *collector) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, d := range []*metrics.Desc{lagSeconds, feedWatches, feedEvents, feedBytes, feedRanges, feedCanceled, feedLogBytes} {
		ch <- d
	}
}

// CollectWithStability implements metrics.StableCollector.
func (c *collector) CollectWithStability(ch chan<- metrics.Metric) {
	if engine := c.engine.Load(); engine != nil {
		for _, lag := range engine.Lags() {
			ch <- metrics.NewLazyConstMetric(lagSeconds, metrics.GaugeValue, lag.Behind.Seconds(), lag.Endpoints, lag.Prefix)
		}
	}
	feed := c.feed.Load()
	if feed == nil {
		return
	}
	s := feed.Stats()
	counter := func(d *metrics.Desc, n int64, labels ...string) {
		ch <- metrics.NewLazyConstMetric(d, metrics.CounterValue, float64(n), labels...)
	}
	ch <- metrics.NewLazyConstMetric(feedWatches, metrics.GaugeValue, float64(s.Watches))
	ch <- metrics.NewLazyConstMetric(feedLogBytes, metrics.GaugeValue, float64(s.LogBytes))
	counter(feedEvents, s.Events)
	counter(feedBytes, s.EventBytes)
	counter(feedCanceled, s.Canceled)
	counter(feedRanges, s.FromMemory, "memory")
	counter(feedRanges, s.FromEtcd, "etcd")
	counter(feedRanges, s.Refused, "refused")
}

// observe records one attempt to send a request.
func observe(primary string, resp *http.Response, err error, took time.Duration) {
	code := "error"
	if err == nil {
		code = strconv.Itoa(resp.StatusCode)
	}
	proxyRequests.WithLabelValues(primary, code).Inc()
	proxySeconds.WithLabelValues(primary).Observe(took.Seconds())
}
