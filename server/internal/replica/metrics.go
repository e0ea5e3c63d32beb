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
	proxyRequests = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "strata_replica_proxy_requests_total",
		Help:           "Requests sent to a primary, by response code; error: without a response.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"primary", "code"})
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
	documentRequests = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "strata_replica_documents_total",
		Help:           "Requests for discovery and OpenAPI documents, by result: cached, unchanged, fetched, stale, passed.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"result"})
	refusedWrites = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "strata_replica_refused_writes_total",
		Help:           "Refused writes of parts of the replica itself.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"resource"})

	lagDesc = metrics.NewDesc("strata_replica_lag_seconds",
		"Time since memory fell behind the newest known revision of etcd, 0 when it is level.", []string{"endpoints", "prefix"}, nil, metrics.ALPHA, "")
)

// lags computes strata_replica_lag_seconds. Other commands of the program have no series of these
// metrics.
var lags = &lagCollector{}

func init() {
	legacyregistry.MustRegister(proxyRequests, proxySeconds, primaryHealthy, documentRequests, refusedWrites)
	legacyregistry.CustomMustRegister(lags, fed)
}

// feedCollector computes the metrics of the feed for other replicas at each scrape.
type feedCollector struct {
	metrics.BaseStableCollector
	server atomic.Pointer[etcdfeed.Server] // nil: there is no feed
}

var (
	// fed computes the metrics of the feed. Servers without one have no series of them.
	fed = &feedCollector{}

	feedWatches = metrics.NewDesc("strata_replica_feed_watches", "Open watches of other replicas.", nil, nil, metrics.ALPHA, "")
	feedEvents  = metrics.NewDesc("strata_replica_feed_events_total", "Events sent to other replicas.", nil, nil, metrics.ALPHA, "")
	feedBytes   = metrics.NewDesc("strata_replica_feed_event_bytes_total", "Keys and values of the events sent to other replicas.", nil, nil, metrics.ALPHA, "")
	feedRanges  = metrics.NewDesc("strata_replica_feed_requests_total",
		"Reads of other replicas, by result: memory, etcd (passed on), refused.", []string{"result"}, nil, metrics.ALPHA, "")
	feedCanceled = metrics.NewDesc("strata_replica_feed_canceled_watches_total", "Watches of other replicas canceled because the log no longer had their revision.",
		nil, nil, metrics.ALPHA, "")
	feedLogBytes = metrics.NewDesc("strata_replica_feed_log_bytes", "Memory of the log that serves other replicas.", nil, nil, metrics.ALPHA, "")
)

// DescribeWithStability implements metrics.StableCollector.
func (c *feedCollector) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, d := range []*metrics.Desc{feedWatches, feedEvents, feedBytes, feedRanges, feedCanceled, feedLogBytes} {
		ch <- d
	}
}

// CollectWithStability implements metrics.StableCollector.
func (c *feedCollector) CollectWithStability(ch chan<- metrics.Metric) {
	server := c.server.Load()
	if server == nil {
		return
	}
	s := server.Stats()
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

// lagCollector computes the lag at each scrape.
type lagCollector struct {
	metrics.BaseStableCollector
	engine atomic.Pointer[kubestorage.Engine] // nil: there is no replica
}

// DescribeWithStability implements metrics.StableCollector.
func (c *lagCollector) DescribeWithStability(ch chan<- *metrics.Desc) { ch <- lagDesc }

// CollectWithStability implements metrics.StableCollector.
func (c *lagCollector) CollectWithStability(ch chan<- metrics.Metric) {
	engine := c.engine.Load()
	if engine == nil {
		return
	}
	for _, lag := range engine.Lags() {
		ch <- metrics.NewLazyConstMetric(lagDesc, metrics.GaugeValue, lag.Behind.Seconds(), lag.Endpoints, lag.Prefix)
	}
}
