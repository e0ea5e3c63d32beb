package kubestorage

import (
	"strconv"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// Where lists come from: the label source of strata_lists_total.
const (
	sourcePresent = "memory_present"
	sourcePast    = "memory_past"
	sourceEtcd    = "etcd"
)

// Why a list is of its revision, or why it is read from etcd: the label reason.
const (
	reasonConsistent   = "consistent"     // no resource version
	reasonAny          = "any"            // resource version 0
	reasonNotOlder     = "not_older_than" // a resource version, or a later one
	reasonExact        = "exact"          // resourceVersionMatch=Exact
	reasonLegacy       = "limit"          // exactly at a resource version because there is a limit
	reasonContinue     = "continue"       // at the revision of a token
	reasonInconsistent = "inconsistent"   // a token that goes on in the present

	reasonPast       = "older_than_memory"
	reasonSuspect    = "suspect"    // a check has found memory to differ from etcd
	reasonGate       = "gate"       // a gate is off
	reasonNotLoaded  = "not_loaded" // a small page, before memory is ready
	reasonNoProgress = "no_progress"
	reasonUncached   = "uncached" // the resource is not held in memory
)

// Metrics of lists, by resource.
var (
	listsTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "strata_lists_total", StabilityLevel: metrics.ALPHA,
		Help: "Lists, and pages of lists, by source (memory_present, memory_past, etcd) and reason: consistent (no resource version), any (resource version 0), " +
			"not_older_than, exact, limit (a resource version with a limit), continue, inconsistent (a token that goes on in the present); of those from etcd " +
			"older_than_memory, suspect (a consistency check has found a difference), gate (one is off), not_loaded, no_progress (etcd's cannot be believed), uncached.",
	}, []string{"group", "resource", "source", "reason"})
	listPages = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "strata_list_pages_total", StabilityLevel: metrics.ALPHA,
		Help: "Lists, of strata_lists_total, with a limit or a continue token.",
	}, []string{"group", "resource", "continued"})
	listsExpired = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "strata_lists_expired_total", StabilityLevel: metrics.ALPHA,
		Help: "Lists answered with 410, because etcd has compacted their revision or the key of their token is gone.",
	}, []string{"group", "resource"})

	registerListMetrics = sync.OnceFunc(func() {
		legacyregistry.MustRegister(listsTotal, listPages, listsExpired)
	})
)

// listMetrics are those of the lists of one resource.
type listMetrics struct{ group schema.GroupResource }

func newListMetrics(r schema.GroupResource) listMetrics {
	cachermetrics.Register()
	registerListMetrics()
	return listMetrics{r}
}

// read counts a list that memory answers, or that is older than memory.
func (m listMetrics) read(r *Reading) {
	source, reason := sourcePresent, r.request.reason()
	switch {
	case r.suspect:
		source, reason = sourceEtcd, reasonSuspect
	case r.FromEtcd():
		source, reason = sourceEtcd, reasonPast
	case !r.Snapshot.Present():
		source = sourcePast
	}
	m.count(r.request.opts, source, reason)
}

// fromEtcd counts a list that upstream's store answers.
func (m listMetrics) fromEtcd(opts storage.ListOptions, reason string) {
	m.count(opts, sourceEtcd, reason)
}

func (m listMetrics) count(opts storage.ListOptions, source, reason string) {
	listsTotal.WithLabelValues(m.group.Group, m.group.Resource, source, reason).Inc()
	if continued := opts.Predicate.Continue != ""; continued || opts.Predicate.Limit > 0 {
		listPages.WithLabelValues(m.group.Group, m.group.Resource, strconv.FormatBool(continued)).Inc()
	}
}

// failed counts the error of a list, if it is 410, and returns it.
func (m listMetrics) failed(err error) error {
	if apierrors.IsResourceExpired(err) {
		listsExpired.WithLabelValues(m.group.Group, m.group.Resource).Inc()
	}
	return err
}

// served feeds upstream's metrics of what lists from a cache cost, for those who watch them. What
// counts lists from etcd differs between its releases.
func (m listMetrics) served(r *Reading, walked, returned int) {
	if !r.FromEtcd() {
		cachermetrics.RecordListCacheMetrics(m.group, r.name, walked, returned)
	}
}

// reason says which revision the list is about.
func (q *listRequest) reason() string {
	continued := q.opts.Predicate.Continue != "" && q.opts.Recursive
	switch {
	case continued && q.exact > 0:
		return reasonContinue
	case continued:
		return reasonInconsistent
	case q.exact > 0 && q.opts.ResourceVersionMatch == metav1.ResourceVersionMatchExact:
		return reasonExact
	case q.exact > 0:
		return reasonLegacy
	case q.opts.ResourceVersion == "":
		return reasonConsistent
	case q.opts.ResourceVersion == "0":
		return reasonAny
	}
	return reasonNotOlder
}
