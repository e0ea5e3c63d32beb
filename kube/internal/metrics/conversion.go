package metrics

import (
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var (
	conversions = newGauges("strata_conversions",
		"Conversions in progress that may call a webhook, by state: awaited, abandoned by all readers.", "state")

	registerConversions = sync.OnceFunc(func() { legacyregistry.MustRegister(conversions) })
)

// Conversions returns a function that counts changes of the numbers of conversions of a resource.
// The metric appears on its first call.
func Conversions(r schema.GroupResource) (changed func(awaited, abandoned int)) {
	registerConversions()
	gauge := func(state string) func() metrics.GaugeMetric {
		return sync.OnceValue(func() metrics.GaugeMetric { return conversions.WithLabelValues(r.Group, r.Resource, state) })
	}
	awaited, abandoned := gauge("awaited"), gauge("abandoned")
	return func(a, b int) {
		awaited().Add(float64(a))
		abandoned().Add(float64(b))
	}
}
