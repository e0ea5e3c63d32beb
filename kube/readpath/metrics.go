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
		Help: "Reads that were answered with bytes from memory, errors included, by verb.",
	}, []string{"verb"})
	passed = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "passed_total", StabilityLevel: metrics.ALPHA,
		Help: "Reads that were passed on to the API server's own handlers, by reason.",
	}, []string{"reason"})
	probes = metrics.NewCounter(&metrics.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "probes_total", StabilityLevel: metrics.ALPHA,
		Help: "Questions to the API server's own handlers which storage a read leads to: a few for each resource, " +
			"and one before each read of a custom resource for some seconds after its definition was seen in a new form.",
	})
)

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(answered, passed, probes)
})
