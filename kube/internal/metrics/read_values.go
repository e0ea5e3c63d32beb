package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"k8s.io/apimachinery/pkg/runtime/schema"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
)

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
