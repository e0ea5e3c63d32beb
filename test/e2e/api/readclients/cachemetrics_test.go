package readclients

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// cacheMetrics are the metrics of the watch cache that Kubernetes' scale tests and dashboards read,
// except two that count failures: apiserver_watch_cache_initialization_errors_total and
// apiserver_terminated_watchers_total (kube/kubestorage, metrics_cache_test.go).
var cacheMetrics = []string{
	"apiserver_watch_cache_resource_version",
	"apiserver_watch_cache_events_received_total",
	"apiserver_watch_cache_events_dispatched_total",
	"apiserver_watch_cache_initializations_total",
	"apiserver_watch_cache_initialization_duration_seconds",
	"apiserver_watch_events_dispatch_duration_seconds",
	"apiserver_cache_list_total",
	"apiserver_cache_list_fetched_objects_total",
	"apiserver_cache_list_returned_objects_total",
	"apiserver_storage_list_total",
	"apiserver_storage_list_fetched_objects_total",
	"apiserver_storage_list_evaluated_objects_total",
	"apiserver_storage_list_returned_objects_total",
}

// TestCacheMetrics_EqualUpstream: the same requests increase the same time series of the watch
// cache in both engines, for a built-in and a custom resource that are listed, watched and written.
// Event counters increase by the number of events.
func TestCacheMetrics_EqualUpstream(t *testing.T) {
	ctx := harness.Context(t, testTimeout) // not in parallel: other tests read these resources
	api := both.strata.API()
	createGizmos(t, ctx, api, both.upstream.API())
	namespace := harness.Namespace(t, ctx, api, harness.NewName("cache-metrics"))
	resources := map[string]string{"podtemplates": "/api/v1/namespaces/" + namespace + "/podtemplates", "gizmos": gizmos(namespace)}
	objects := map[string]func(name string) object{
		"podtemplates": func(name string) object {
			return object{"metadata": object{"name": name}, "template": object{"spec": object{"containers": []any{object{"name": "c", "image": "i"}}}}}
		},
		"gizmos": func(name string) object { return gizmo(name, "x") },
	}
	before := map[string][]sample{}
	watches := map[string][]*harness.Watch{}
	for _, engine := range both.each() {
		before[engine.name] = harness.Must[[]sample](t)(scrape(ctx, engine.API(), cacheMetrics...))
		for resource, path := range resources {
			_, err := engine.API().List(ctx, path, "resourceVersion=0")
			harness.Check(t, err)
			w, response, err := engine.API().Watch(ctx, path, "resourceVersion=0")
			harness.Check(t, err)
			if w == nil {
				t.Fatalf("%s: watch of %s: %d", engine.name, resource, response.Code)
			}
			t.Cleanup(w.Close)
			watches[resource] = append(watches[resource], w)
		}
	}
	const writes = 5
	for resource, path := range resources {
		for i := range writes {
			_, err := api.Create(ctx, path, objects[resource]("object-"+strconv.Itoa(i)))
			harness.Check(t, err)
			for _, w := range watches[resource] { // each write is delivered separately
				_, err := w.Next(ctx)
				harness.Check(t, err)
			}
		}
	}

	// The engine updates its counters once a second; upstream counts an event after sending it.
	grown := func(engine *engine) (map[string]float64, error) {
		now, err := scrape(ctx, engine.API(), cacheMetrics...)
		series := map[string]float64{}
		for _, s := range since(before[engine.name], now) {
			// Lists from etcd and initializations happen at the start, and the engines report them
			// at different times.
			started := s.labels["storage"] == "etcd" || strings.HasPrefix(s.name, "apiserver_watch_cache_initialization")
			if resources[s.labels["resource"]] != "" && !started && !strings.HasSuffix(s.name, "_seconds_sum") {
				series[s.String()] = s.value
			}
		}
		return series, err
	}
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		var differ []string
		series := map[string]map[string]float64{}
		for _, engine := range both.each() {
			var err error
			if series[engine.name], err = grown(engine); err != nil {
				return false, err
			}
			for resource := range resources {
				group := map[string]string{"gizmos": gizmoGroup}[resource]
				labels := fmt.Sprintf("group=%q,resource=%q", group, resource)
				if rv := series[engine.name]["apiserver_watch_cache_resource_version{"+labels+"}"]; rv <= 0 {
					differ = append(differ, fmt.Sprintf("%s: the resource version of %s has grown by %v", engine.name, resource, rv))
				}
				for _, name := range []string{
					"apiserver_watch_cache_events_received_total{" + labels + "}",
					"apiserver_watch_events_dispatch_duration_seconds_count{" + labels + `,stage="total"}`,
					"apiserver_watch_events_dispatch_duration_seconds_count{" + labels + `,stage="cache_to_watcher"}`,
					"apiserver_watch_events_dispatch_duration_seconds_count{" + labels + `,stage="storage_to_cache"}`,
				} {
					if n := series[engine.name][name]; n != writes {
						differ = append(differ, fmt.Sprintf("%s: %s has grown by %v, want %d", engine.name, name, n, writes))
					}
				}
			}
		}
		for name := range series[harness.Upstream] {
			if _, ok := series[harness.Strata][name]; !ok {
				differ = append(differ, name+" has grown at upstream only")
			}
		}
		for name := range series[harness.Strata] {
			if _, ok := series[harness.Upstream][name]; !ok {
				differ = append(differ, name+" has grown at strata only")
			}
		}
		slices.Sort(differ)
		return len(differ) == 0, fmt.Errorf("the metrics differ: %q", differ)
	}))

	// Series that count the start.
	for _, engine := range both.each() {
		started := harness.Must[[]sample](t)(scrape(ctx, engine.API(), cacheMetrics...))
		for resource := range resources {
			labels := map[string]string{"resource": resource}
			for _, name := range []string{"apiserver_watch_cache_initializations_total", "apiserver_watch_cache_initialization_duration_seconds_count"} {
				named := slices.DeleteFunc(slices.Clone(started), func(s sample) bool { return s.name != name })
				if n := total(named, labels); n < 1 {
					t.Errorf("%s: %s of %s is %v, want at least 1", engine.name, name, resource, n)
				}
			}
		}
	}
}
