package monitoring

import (
	"maps"
	"slices"
	"testing"
)

// TestKubernetesMixin_MetricsAndLabels_Exist: the server has every series that the alerts,
// recording rules and dashboard of kubernetes-mixin select for kube-apiserver (version of August
// 2026), with the labels and values that they group by or filter. Names and labels are those of
// their expressions; up, cluster, job and instance are Prometheus' own. Read requests are answered
// by the byte read path, writes by upstream's handlers.
func TestKubernetesMixin_MetricsAndLabels_Exist(t *testing.T) {
	verbs := []string{"GET", "LIST", "POST", "PUT", "PATCH", "DELETE"}
	scopes := []string{"resource", "namespace", "cluster"}
	found, _ := scrape(t)
	for series, labels := range map[string]map[string][]string{
		// Availability, burn rate and the dashboard's rates and errors.
		"apiserver_request_total": {"verb": verbs, "code": {"200", "201"}, "resource": {"configmaps"}},
		"apiserver_request_sli_duration_seconds_bucket": {
			"verb": verbs, "scope": scopes, "subresource": {""}, "resource": {"configmaps"}, "le": {"1", "5", "30", "+Inf"},
		},
		"apiserver_request_sli_duration_seconds_count": {"verb": verbs, "scope": scopes, "subresource": {""}},
		// Alerts.
		"apiserver_request_terminations_total":                   {},
		"apiserver_client_certificate_expiration_seconds_bucket": {"le": {"+Inf"}},
		"apiserver_client_certificate_expiration_seconds_count":  {},
		"aggregator_unavailable_apiservice":                      {"name": {"v1.unavailable.example.com"}},
		"aggregator_unavailable_apiservice_total":                {"name": {"v1.unavailable.example.com"}, "reason": nil},
		"kubernetes_build_info":                                  {"git_version": nil},
		"rest_client_requests_total":                             {"code": {"200"}},
		// The dashboard's panels of the process.
		"workqueue_adds_total":                    {"name": nil},
		"workqueue_depth":                         {"name": nil},
		"workqueue_queue_duration_seconds_bucket": {"name": nil, "le": {"+Inf"}},
		"process_resident_memory_bytes":           {},
		"process_cpu_seconds_total":               {},
		"go_goroutines":                           {},
		// Used by earlier versions, and by the dashboards of others.
		"apiserver_request_duration_seconds_bucket":              {"verb": append(verbs, "WATCH"), "scope": scopes, "subresource": {""}, "le": {"0.1", "1", "+Inf"}},
		"apiserver_current_inflight_requests":                    {"request_kind": {"mutating", "readOnly"}},
		"apiserver_longrunning_requests":                         {"verb": nil, "resource": nil, "scope": nil},
		"apiserver_response_sizes_sum":                           {"verb": {"GET", "LIST"}, "resource": {"configmaps"}},
		"apiserver_watch_events_total":                           {"resource": {"configmaps"}},
		"apiserver_resource_objects":                             {"resource": {"configmaps"}},
		"apiserver_flowcontrol_current_executing_seats":          {"priority_level": nil, "flow_schema": nil},
		"apiserver_flowcontrol_request_execution_seconds_bucket": {"priority_level": nil, "le": {"+Inf"}},
		"etcd_request_duration_seconds_bucket":                   {"operation": nil, "le": {"+Inf"}},
	} {
		if found.family(series) == nil {
			t.Errorf("the server has no %s", series)
			continue
		}
		has := found.labels(series)
		for label, values := range labels {
			if _, ok := has[label]; !ok {
				t.Errorf("%s has no label %s", series, label)
			}
			for _, value := range values {
				if !has[label][value] && !(label == "le" && value == "+Inf") {
					// the text parser omits the last bucket
					t.Errorf("%s has no sample with %s=%q, but %q", series, label, value, slices.Sorted(maps.Keys(has[label])))
				}
			}
		}
	}
}
