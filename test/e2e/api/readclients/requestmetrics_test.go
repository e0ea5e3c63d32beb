package readclients

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// requestMetrics are the metrics that upstream's handlers record for a request. Durations differ,
// their counts do not.
var requestMetrics = []string{
	"apiserver_request_total",
	"apiserver_request_duration_seconds",
	"apiserver_request_sli_duration_seconds",
	"apiserver_response_sizes",
	"apiserver_request_terminations_total",
	"apiserver_request_aborts_total",
	"apiserver_watch_events_total",
	"apiserver_watch_events_sizes",
	"apiserver_watch_list_duration_seconds",
	"apiserver_requested_deprecated_apis",
}

// TestRequestMetrics_EqualUpstream sends the same requests to both engines and compares the
// increase of each time series. No other test reads their resources.
func TestRequestMetrics_EqualUpstream(t *testing.T) {
	ctx := harness.Context(t, testTimeout) // not in parallel: other tests read these resources
	api := both.strata.API()
	createGizmos(t, ctx, api, both.upstream.API())
	namespace := harness.Namespace(t, ctx, api, harness.NewName("metrics"))
	templates, attachments, endpoints := "/api/v1/namespaces/"+namespace+"/podtemplates", "/apis/storage.k8s.io/v1/volumeattachments", "/api/v1/namespaces/"+namespace+"/endpoints"
	for path, create := range map[string]func(name string) object{
		gizmos(namespace): func(name string) object { return gizmo(name, strings.Repeat("x", 100)) },
		templates: func(name string) object {
			return object{"metadata": object{"name": name}, "template": object{"spec": object{"containers": []any{object{"name": "c", "image": "i"}}}}}
		},
		attachments: func(name string) object {
			return object{"metadata": object{"name": name}, "spec": object{"attacher": "a", "nodeName": "n", "source": object{"persistentVolumeName": "v"}}}
		},
		endpoints: func(name string) object { return object{"metadata": object{"name": name}} },
	} {
		for _, name := range []string{"one", "two"} {
			created, err := api.Create(ctx, path, create(name))
			harness.Check(t, err)
			harness.Check(t, both.awaitRevision(ctx, path, created.Metadata.ResourceVersion))
		}
	}

	const initial = "watch=true&timeoutSeconds=1&resourceVersionMatch=NotOlderThan&sendInitialEvents=true&allowWatchBookmarks=true"
	const protobuf, metadata = "application/vnd.kubernetes.protobuf", "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
	// GET and WATCH with an invalid resource version are omitted: upstream answers 500, Strata 400.
	var requests []measured
	for _, resource := range []struct{ all, in string }{
		{gizmoPrefix + "/gizmos", gizmos(namespace)}, {"/api/v1/podtemplates", templates}, {attachments, attachments}, {"/api/v1/endpoints", endpoints},
	} {
		get := func(token, target, accept string) {
			requests = append(requests, measured{token, http.MethodGet, target, accept})
		}
		get(adminToken, resource.in+"/one", "")
		get(adminToken, resource.in+"/one?resourceVersion=0", "")
		get(adminToken, resource.in+"/three", "")
		get(noRightsToken, resource.in+"/one", "")
		get("no such token", resource.in+"/one", "")
		get(adminToken, resource.in+"/one", "text/html")
		get(adminToken, resource.in+"/one?pretty=true", "")
		get(adminToken, resource.in+"/one/status", "")
		get(adminToken, resource.in+"/one/", "")
		get(adminToken, resource.in, "")
		get(adminToken, resource.all, "")
		get(adminToken, resource.all+"?resourceVersion=0", "")
		get(adminToken, resource.all+"?limit=1", "")
		get(adminToken, resource.all+"?fieldSelector=metadata.name%3Done", "")
		get(adminToken, resource.in+"?fieldSelector=metadata.name%3Done", "")
		get(adminToken, resource.in+"?fieldSelector=nonsense%3Done", "")
		get(adminToken, resource.in+"?labelSelector=%21%21", "")
		get(adminToken, resource.in+"?limit=x", "")
		get(adminToken, resource.in+"?continue=x", "")
		get(adminToken, resource.in, protobuf)
		get(adminToken, resource.in+"/one", protobuf)
		get(adminToken, resource.in, metadata)
		get(adminToken, resource.in, "application/json;as=Table;v=v1;g=meta.k8s.io")
		get(adminToken, resource.in+"?watch=true&timeoutSeconds=1&resourceVersion=0", "")
		get(adminToken, resource.in+"?watch=true&timeoutSeconds=1&resourceVersion=0", protobuf)
		get(adminToken, resource.all+"?watch=true&timeoutSeconds=1&resourceVersion=0", metadata)
		get(adminToken, resource.in+"?watch=true&timeoutSeconds=1&resourceVersion=0&fieldSelector=metadata.name%3Done", "")
		get(adminToken, resource.in+"/one?watch=true&timeoutSeconds=1&resourceVersion=0", "")
		get(adminToken, resource.in+"?"+initial, "")
		get(noRightsToken, resource.in+"?watch=true", "")
		get(adminToken, resource.in+"?dryRun=All", "")
		requests = append(requests, measured{adminToken, http.MethodHead, resource.in, ""}, measured{adminToken, http.MethodHead, resource.in + "/one", ""},
			measured{adminToken, http.MethodOptions, resource.in, ""})
	}
	// Upstream sends a watch that lasts longer than its second, on a busy machine, one more
	// bookmark, and a watch may end before its first event: the difference of a series counts if it
	// occurs each time.
	differences := requestMetricsDiffer(t, ctx, requests)
	for range 7 {
		if len(differences) == 0 {
			return
		}
		again := requestMetricsDiffer(t, ctx, requests)
		for series := range differences {
			if again[series] == "" {
				delete(differences, series)
			}
		}
	}
	for _, text := range differences {
		t.Error(text)
	}
}

// measured is a request of requestMetricsDiffer.
type measured struct{ token, method, target, accept string }

// requestMetricsDiffer sends the requests to both engines, and returns the differences of the
// growth of metrics by series.
func requestMetricsDiffer(t *testing.T, ctx context.Context, requests []measured) (differences map[string]string) {
	t.Helper()
	differences = map[string]string{}
	grown := map[string]map[string]float64{}
	for _, engine := range both.each() {
		before := harness.Must[[]sample](t)(scrape(ctx, engine.API(), requestMetrics...))
		harness.Check(t, harness.InParallel(ctx, len(requests), func(ctx context.Context, i int) error {
			r, header := requests[i], http.Header{}
			if r.accept != "" {
				header.Set("Accept", r.accept)
			}
			_, err := engine.raw(ctx, r.token, r.method, r.target, header)
			return err
		}))
		// Some metrics are recorded after the answer's last byte: read until two readings are
		// equal.
		var last []sample
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			now, err := scrape(ctx, engine.API(), requestMetrics...)
			if err != nil {
				return false, err
			}
			now = since(before, now)
			same := slices.EqualFunc(now, last, func(a, b sample) bool { return a.String() == b.String() && a.value == b.value })
			last = now
			return same, fmt.Errorf("%s: the metrics still change", engine.name)
		}))
		grown[engine.name] = map[string]float64{}
		for _, s := range last {
			watched := s.labels["resource"] == "gizmos" || s.labels["resource"] == "podtemplates" || s.labels["resource"] == "volumeattachments" || s.labels["resource"] == "endpoints"
			if !watched || strings.HasSuffix(s.name, "_seconds_sum") {
				continue
			}
			grown[engine.name][s.String()] = s.value
		}
	}
	want, got := grown[harness.Upstream], grown[harness.Strata]
	if len(want) < 100 {
		t.Errorf("only %d time series of upstream's have grown: these requests show little", len(want))
	}
	for series, n := range want {
		tolerated := 0.0
		if strings.Contains(series, "_sum{") {
			// the number of digits of a list's or bookmark's revision may change in between
			tolerated = want[strings.Replace(series, "_sum{", "_count{", 1)]
		}
		if math.Abs(got[series]-n) > tolerated {
			differences[series] = fmt.Sprintf("%s has grown by %v, want %v", series, got[series], n)
		}
	}
	for series, n := range got {
		if _, ok := want[series]; !ok {
			differences[series] = fmt.Sprintf("%s has grown by %v, want 0", series, n)
		}
	}
	return differences
}

// TestWatch_Open_CountsAsLongRunning: an open watch counts as one long-running request until it
// ends.
func TestWatch_Open_CountsAsLongRunning(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	createGizmos(t, ctx, both.strata.API(), both.upstream.API())
	for path, labels := range map[string]map[string]string{ // watches that no other test has
		"/api/v1/namespaces/default/replicationcontrollers": {"verb": "WATCH", "group": "", "version": "v1", "resource": "replicationcontrollers", "subresource": "", "scope": "namespace", "component": "apiserver"},
		gizmoPrefix + "/gizmos":                             {"verb": "WATCH", "group": gizmoGroup, "version": "v1", "resource": "gizmos", "subresource": "", "scope": "cluster", "component": "apiserver"},
	} {
		for _, engine := range both.each() {
			api := engine.API()
			open := func(ctx context.Context) (float64, error) {
				samples, err := scrape(ctx, api, "apiserver_longrunning_requests")
				return total(samples, labels), err
			}
			w := harness.StartWatch(t, ctx, api, path, "")
			// Its handler returns, and another goroutine counts it from then on.
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				n, err := open(ctx)
				if err == nil && n != 1 {
					err = fmt.Errorf("%s: a watch of %s counts as %v long-running requests, want 1", engine.name, path, n)
				}
				return err == nil, err
			}))
			w.Close()
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				n, err := open(ctx)
				if err == nil && n != 0 {
					err = fmt.Errorf("%s: %v long-running requests for %s after the watch, want 0", engine.name, n, path)
				}
				return err == nil, err
			}))
		}
	}
}
