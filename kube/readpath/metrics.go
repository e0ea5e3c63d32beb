package readpath

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

const namespace, subsystem = "strata", "readpath"

var (
	answered = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "requests_total", StabilityLevel: metrics.ALPHA,
		Help: "Number of reads answered from memory by the byte read path, including errors, by verb.",
	}, []string{"verb"})
	passed = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "passed_total", StabilityLevel: metrics.ALPHA,
		Help: "Number of reads passed on to the API server's own handlers, by reason.",
	}, []string{"reason"})
	probes = metrics.NewCounter(&metrics.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "probes_total", StabilityLevel: metrics.ALPHA,
		Help: "Number of probes of the API server's own handlers for the storage that serves a read: a few for each resource, " +
			"and one before each read of a custom resource for some seconds after a change of its definition.",
	})
)

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(answered, passed, probes)
})
