package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"k8s.io/apimachinery/pkg/runtime/schema"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// Reads are upstream's metrics of the reads of one resource, which the dashboards of Kubernetes
// use. Each appears on its first use, as upstream's do.
type Reads struct {
	wait func() metrics.ObserverMetric
	// Consistent reads: served from memory, by etcd instead, refused, and failed.
	fromMemory, fallback, refused, failed func() metrics.CounterMetric
}

// NewReads returns the metrics of a resource.
func NewReads(r schema.GroupResource) Reads {
	cachermetrics.Register()
	registerConversions()
	reads := func(success, fallback string) func() metrics.CounterMetric {
		return sync.OnceValue(func() metrics.CounterMetric {
			return cachermetrics.ConsistentReadTotal.WithLabelValues(r.Group, r.Resource, success, fallback)
		})
	}
	return Reads{
		wait: sync.OnceValue(func() metrics.ObserverMetric {
			return cachermetrics.WatchCacheReadWait.WithLabelValues(r.Group, r.Resource)
		}),
		fromMemory: reads("true", "false"),
		fallback:   reads("true", "true"),
		refused:    reads("false", "false"),
		failed:     reads("false", "true"),
	}
}

// Consistent counts a read of the latest revision. fallback: it was passed on to etcd.
func (m *Reads) Consistent(success, fallback bool) {
	switch {
	case success && !fallback:
		m.fromMemory().Inc()
	case success:
		m.fallback().Inc()
	case !fallback:
		m.refused().Inc()
	default:
		m.failed().Inc()
	}
}

// Waited records how long a read has waited for its revision.
func (m *Reads) Waited(d time.Duration) { m.wait().Observe(d.Seconds()) }

// EachValue calls f with the labels and the value of every counter of a registered vector.
func EachValue(vec *metrics.CounterVec, f func(labels map[string]string, value int64)) {
	series := make(chan prometheus.Metric, 64)
	go func() {
		defer close(series)
		vec.Collect(series)
	}()
	for m := range series {
		var value dto.Metric
		if m.Write(&value) != nil {
			continue
		}
		labels := map[string]string{}
		for _, l := range value.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		f(labels, int64(value.GetCounter().GetValue()))
	}
}

// ListCounts are counters of lists by the source of the answer.
type ListCounts struct{ Present, Past, Etcd int64 }

// CountedLists returns the counters of lists of each resource.
func CountedLists() map[schema.GroupResource]ListCounts {
	registerListMetrics()
	all := map[schema.GroupResource]ListCounts{}
	EachValue(listsTotal, func(labels map[string]string, n int64) {
		r := schema.GroupResource{Group: labels["group"], Resource: labels["resource"]}
		c := all[r]
		switch labels["source"] {
		case SourcePresent:
			c.Present += n
		case SourcePast:
			c.Past += n
		default:
			c.Etcd += n
		}
		all[r] = c
	})
	return all
}

// GetsFromEtcd returns the number of GETs that etcd answered, because memory could not in time.
func GetsFromEtcd() (n int64) {
	cachermetrics.Register()
	EachValue(cachermetrics.ConsistentReadTotal, func(labels map[string]string, v int64) {
		if labels["success"] == "true" && labels["fallback"] == "true" {
			n += v
		}
	})
	return n
}

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
