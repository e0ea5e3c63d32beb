package history

import (
	"bytes"
	"fmt"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// usage is the use of one resource. Reads are counted since the start of the server.
type usage struct {
	Resource string `json:"resource"` // with its group
	Objects  int64  `json:"objects"`
	Bytes    int64  `json:"bytes"` // as stored
	Lag      int64  `json:"lagEvents"`
	Watchers int64  `json:"watchers"`
	// GETs and LISTs, by the source of the answer: the newest state in memory, a past one in
	// memory, or etcd.
	Memory int64 `json:"readsFromMemory"`
	Past   int64 `json:"readsOfPast"`
	Etcd   int64 `json:"readsFromEtcd"`
}

func (u usage) reads() int64 { return u.Memory + u.Past + u.Etcd }

// hitRatio is the part of the reads that memory answered, "-" without reads.
func (u usage) hitRatio() string {
	if u.reads() == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*float64(u.Memory+u.Past)/float64(u.reads()))
}

// storedAs has the resources whose keys in etcd have another name.
var storedAs = map[string]string{
	"services/specs": "services", "services/endpoints": "endpoints", "minions": "nodes", "controllers": "replicationcontrollers",
	"ingress": "ingresses",
}

// parseUsage returns the use of each resource from the metrics of a server, in the text format.
func parseUsage(text []byte) (map[string]*usage, error) {
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("parse the metrics: %w", err)
	}
	if families["strata_mirror_resource_objects"] == nil {
		return nil, fmt.Errorf("%w: the metrics have no strata_mirror_resource_objects, so the server is not Strata, or runs with --engine=upstream", errNoHistory)
	}
	all := map[string]*usage{}
	names := map[string]string{} // by the name of a resource without its group
	of := func(labels map[string]string) *usage {
		name := schema.GroupResource{Group: labels["group"], Resource: labels["resource"]}.String()
		if all[name] == nil {
			all[name] = &usage{Resource: name}
			names[labels["resource"]] = name
		}
		return all[name]
	}
	// Only the following counters know groups, so they are read first.
	each(families, "apiserver_watch_cache_consistent_read_total", func(labels map[string]string, v int64) {
		if u := of(labels); labels["fallback"] == "true" {
			u.Etcd += v
			u.Memory -= v // counted with the GETs below
		}
	})
	each(families, "strata_lists_total", func(labels map[string]string, v int64) {
		switch u := of(labels); labels["source"] {
		case "memory_present":
			u.Memory += v
		case "memory_past":
			u.Past += v
		default:
			u.Etcd += v
		}
	})
	each(families, "apiserver_request_total", func(labels map[string]string, v int64) {
		if labels["verb"] == "GET" && labels["subresource"] == "" && labels["resource"] != "" {
			of(labels).Memory += v
		}
	})
	each(families, "apiserver_longrunning_requests", func(labels map[string]string, v int64) {
		if labels["verb"] == "WATCH" && labels["resource"] != "" {
			of(labels).Watchers += v
		}
	})
	each(families, "strata_watch_lag_events", func(labels map[string]string, v int64) { u := of(labels); u.Lag = max(u.Lag, v) })
	stored := func(labels map[string]string) *usage {
		key := strings.Trim(strings.TrimPrefix(labels["resource"], strings.TrimSuffix(labels["prefix"], "/")), "/")
		if name := storedAs[key]; name != "" {
			key = name
		}
		group, resource, ok := strings.Cut(key, "/")
		if !ok {
			group, resource = "", key
		}
		if name := names[resource]; name != "" && (group == "" || all[resource+"."+group] == nil) {
			return all[name]
		}
		return of(map[string]string{"group": group, "resource": resource})
	}
	each(families, "strata_mirror_resource_objects", func(labels map[string]string, v int64) { stored(labels).Objects += v })
	each(families, "strata_mirror_resource_stored_bytes", func(labels map[string]string, v int64) { stored(labels).Bytes += v })
	for _, u := range all {
		u.Memory = max(0, u.Memory)
	}
	return all, nil
}

// each calls f for every series of a family.
func each(families map[string]*dto.MetricFamily, name string, f func(labels map[string]string, value int64)) {
	for _, metric := range families[name].GetMetric() {
		labels := map[string]string{}
		for _, l := range metric.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		f(labels, int64(metric.GetCounter().GetValue()+metric.GetGauge().GetValue()+metric.GetUntyped().GetValue()))
	}
}
