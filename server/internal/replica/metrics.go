package replica

import (
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/stratakube/strata/kube/kubestorage"
)

var (
	proxyRequests = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "strata_replica_proxy_requests_total",
		Help:           "Requests that a replica has sent to a primary, by response code; error: without a response.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"primary", "code"})
	proxySeconds = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name:           "strata_replica_proxy_duration_seconds",
		Help:           "Time from sending a request to a primary until the header of its response.",
		Buckets:        []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60},
		StabilityLevel: metrics.ALPHA,
	}, []string{"primary"})
	primaryHealthy = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name:           "strata_replica_primary_healthy",
		Help:           "1 while a replica sends requests to the primary, 0 after a failed connection or check.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"primary"})
	documentRequests = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "strata_replica_documents_total",
		Help: "Requests for discovery, OpenAPI documents and the version that a replica has answered: cached (a second old at most), unchanged or fetched (as a primary said), " +
			"stale (no primary answered), passed (answered by a primary, not cached).",
		StabilityLevel: metrics.ALPHA,
	}, []string{"result"})
	refusedWrites = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "strata_replica_refused_writes_total",
		Help:           "Writes that parts of the replica itself have attempted, and that were refused.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"resource"})

	lagDesc = metrics.NewDesc("strata_replica_lag_seconds",
		"Time since memory fell behind the newest revision of etcd that the replica knows, 0 when it is level.", []string{"endpoints", "prefix"}, nil, metrics.ALPHA, "")
)

// lags computes strata_replica_lag_seconds. Other commands of the program have no series of these metrics.
var lags = &lagCollector{}

func init() {
	legacyregistry.MustRegister(proxyRequests, proxySeconds, primaryHealthy, documentRequests, refusedWrites)
	legacyregistry.CustomMustRegister(lags)
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
