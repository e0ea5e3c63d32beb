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
	inFlightBytes = metrics.NewGauge(&metrics.GaugeOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "in_flight_bytes", StabilityLevel: metrics.ALPHA,
		Help: "Bytes of lists from memory that are being encoded and sent, as they were expected when the lists began; " +
			"those whose clients hold them up are not counted.",
	})
	inFlightLimit = metrics.NewGauge(&metrics.GaugeOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "in_flight_limit_bytes", StabilityLevel: metrics.ALPHA,
		Help: "Bound of strata_readpath_in_flight_bytes; other lists wait.",
	})
	inFlightRefused = metrics.NewCounter(&metrics.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "in_flight_refused_total", StabilityLevel: metrics.ALPHA,
		Help: "Lists that were answered with 429 because as many bytes as the server can send in time were under way.",
	})
)

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(answered, passed, probes, inFlightBytes, inFlightLimit, inFlightRefused)
})
