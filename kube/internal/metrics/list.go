package metrics

import (
	"strconv"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// Sources of lists: the label source of strata_lists_total.
const (
	SourcePresent = "memory_present"
	SourcePast    = "memory_past"
	SourceEtcd    = "etcd"
)

// Reasons for the revision of a list, or for a read from etcd: the label reason.
const (
	ReasonConsistent   = "consistent"     // no resource version
	ReasonAny          = "any"            // resource version 0
	ReasonNotOlder     = "not_older_than" // a resource version, or a later one
	ReasonExact        = "exact"          // resourceVersionMatch=Exact
	ReasonLegacy       = "limit"          // exactly at a resource version because there is a limit
	ReasonContinue     = "continue"       // at the revision of a token
	ReasonInconsistent = "inconsistent"   // a token that continues at the latest revision

	ReasonPast       = "older_than_memory"
	ReasonDifference = "memory_inconsistent" // a check has found memory to differ from etcd
	ReasonGate       = "gate"                // a gate is off
	ReasonNotLoaded  = "not_loaded"          // a small page, before memory is ready
	ReasonNoProgress = "no_progress"
	ReasonUncached   = "uncached" // the resource is not held in memory
)

// Metrics of lists.
var (
	listsTotal = newCounters("strata_lists_total",
		"Lists and pages of lists, by source (memory_present, memory_past, etcd) and reason.", "source", "reason")
	listPages    = newCounters("strata_list_pages_total", "Lists with a limit or a continue token; continued: with a token.", "continued")
	listsExpired = newCounters("strata_lists_expired_total",
		"Lists answered with 410: their revision was compacted, or the key of their token deleted.")
	listPlans = newCounters("strata_list_plans_total",
		"Lists and initial events with a selector, by plan: keys, index, stored, shard, scan.", "plan")
	listExamined  = newCounters("strata_list_examined_objects_total", "Objects that lists with a selector compared with it, by plan.", "plan")
	listSelected  = newCounters("strata_list_selected_objects_total", "Objects that lists with a selector returned, by plan.", "plan")
	listValues    = newCounters("strata_list_read_values_total", "Values of labels and fields that plans read, by source: stored, decoded.", "source")
	indexes       = newGauges("strata_indexes", "Labels and fields that are indexed.")
	indexBytes    = newGauges("strata_index_bytes", "Memory of the indexes, a part of strata_representation_bytes.")
	indexRefusals = newCounters("strata_index_refusals_total", "Indexes dropped for ten minutes for lack of room.")

	registerListMetrics = sync.OnceFunc(func() {
		legacyregistry.MustRegister(listsTotal, listPages, listsExpired, listPlans, listExamined, listSelected, listValues, indexes, indexBytes, indexRefusals)
	})
)

// newCounters returns counters with the labels group and resource, and others.
func newCounters(name, help string, others ...string) *metrics.CounterVec {
	return metrics.NewCounterVec(&metrics.CounterOpts{Name: name, Help: help, StabilityLevel: metrics.ALPHA}, byResource(others))
}

// newGauges returns gauges with the labels group and resource, and others.
func newGauges(name, help string, others ...string) *metrics.GaugeVec {
	return metrics.NewGaugeVec(&metrics.GaugeOpts{Name: name, Help: help, StabilityLevel: metrics.ALPHA}, byResource(others))
}

// newHistograms returns histograms with the labels group and resource, and others.
func newHistograms(name, help string, buckets []float64, others ...string) *metrics.HistogramVec {
	return metrics.NewHistogramVec(&metrics.HistogramOpts{Name: name, Help: help, Buckets: buckets, StabilityLevel: metrics.ALPHA}, byResource(others))
}

func byResource(others []string) []string { return append([]string{"group", "resource"}, others...) }

// Lists are the metrics of the lists of one resource.
type Lists struct{ group schema.GroupResource }

// NewLists returns the metrics of a resource.
func NewLists(r schema.GroupResource) Lists {
	cachermetrics.Register()
	registerListMetrics()
	return Lists{r}
}

// Count counts a list by its source and the reason for that.
func (m Lists) Count(opts storage.ListOptions, source, reason string) {
	listsTotal.WithLabelValues(m.group.Group, m.group.Resource, source, reason).Inc()
	if continued := opts.Predicate.Continue != ""; continued || opts.Predicate.Limit > 0 {
		listPages.WithLabelValues(m.group.Group, m.group.Resource, strconv.FormatBool(continued)).Inc()
	}
}

// Failed counts the error of a list, if it is 410, and returns it.
func (m Lists) Failed(err error) error {
	if apierrors.IsResourceExpired(err) {
		listsExpired.WithLabelValues(m.group.Group, m.group.Resource).Inc()
	}
	return err
}

// Served feeds upstream's metrics of the cost of lists from a cache: the index, the number of
// entries walked, and of objects returned.
func (m Lists) Served(index string, walked, returned int) {
	cachermetrics.RecordListCacheMetrics(m.group, index, walked, returned)
}

// Plans of lists with a selector: the label plan.
const (
	PlanKeys   = "keys"
	PlanIndex  = "index"
	PlanStored = "stored"
	PlanShard  = "shard"
	PlanScan   = "scan"
)

// Selected counts a list or the initial events of a watch with a selector: the objects that were
// compared with the selector, and those that were returned.
func (m Lists) Selected(plan string, examined, returned int) {
	listPlans.WithLabelValues(m.group.Group, m.group.Resource, plan).Inc()
	listExamined.WithLabelValues(m.group.Group, m.group.Resource, plan).Add(float64(examined))
	listSelected.WithLabelValues(m.group.Group, m.group.Resource, plan).Add(float64(returned))
}

// Read counts objects of which a plan has read a value.
func (m Lists) Read(stored, decoded int) {
	if stored > 0 {
		listValues.WithLabelValues(m.group.Group, m.group.Resource, "stored").Add(float64(stored))
	}
	if decoded > 0 {
		listValues.WithLabelValues(m.group.Group, m.group.Resource, "decoded").Add(float64(decoded))
	}
}

// Indexes records changes of the number of indexes and of their bytes.
func (m Lists) Indexes(n, bytes int64) {
	indexes.WithLabelValues(m.group.Group, m.group.Resource).Add(float64(n))
	indexBytes.WithLabelValues(m.group.Group, m.group.Resource).Add(float64(bytes))
}

// IndexRefused counts an index that is too large.
func (m Lists) IndexRefused() { indexRefusals.WithLabelValues(m.group.Group, m.group.Resource).Inc() }
