package metrics

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
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
