package readpath

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	kubemetrics "github.com/stratakube/strata/kube/internal/metrics"
)

const namespace, subsystem = "strata", "readpath"

var (
	answered = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "requests_total", StabilityLevel: metrics.ALPHA,
		Help: "Reads answered with bytes from memory, errors included, by verb (get, list, watch).",
	}, []string{"verb"})
	passed = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "passed_total", StabilityLevel: metrics.ALPHA,
		Help: "Reads passed on to the handlers of the API server, by reason.",
	}, []string{"reason"})
	probes = metrics.NewCounter(&metrics.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "probes_total", StabilityLevel: metrics.ALPHA,
		Help: "Requests to the API server's handlers that find the storage of a resource.",
	})
)

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(answered, passed, probes)
})

// Gets returns the number of GETs that were answered here, by all Servers of the process.
func Gets() (n int64) {
	registerMetrics()
	kubemetrics.EachValue(answered, func(labels map[string]string, v int64) {
		if labels["verb"] == "get" {
			n += v
		}
	})
	return n
}
