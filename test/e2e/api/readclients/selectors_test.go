package readclients

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/stratakube/strata/test/harness"
)

// selectable is the number of objects in the namespaces of this test: a range of up to 64 objects
// is examined without an index.
const selectable = 160

// TestSelectors_Plan_IsInTrace: the first list of events by their object, through both APIs, and
// that of custom resources by a selectable field use an index; that by a label does from the second
// use. The first one finds candidates in stored values, or examines all objects of a kind without a
// finder. The initial events of a watch have a plan too. The answers are upstream's.
func TestSelectors_Plan_IsInTrace(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	api := both.strata.API()
	plural := createColors(t, ctx, api, both.upstream.API())
	namespace := harness.Namespace(t, ctx, api, harness.NewName("selectors"))
	services := "/api/v1/namespaces/" + namespace + "/services"
	events, colors := "/api/v1/namespaces/"+namespace+"/events", "/apis/"+gizmoGroup+"/v1/namespaces/"+namespace+"/"+plural
	harness.Check(t, harness.InParallel(ctx, selectable, func(ctx context.Context, i int) error {
		name := fmt.Sprintf("object-%03d", i)
		_, err := api.Create(ctx, events, object{"metadata": object{"name": name, "labels": object{"half": fmt.Sprint(i % 2)}},
			"involvedObject": object{"kind": "Pod", "namespace": namespace, "name": fmt.Sprint("pod-", i%40), "uid": fmt.Sprint("uid-", i%40)}, "reason": "Test", "type": "Normal"})
		if err != nil {
			return err
		}
		if _, err := api.Create(ctx, services, object{"metadata": object{"name": name, "labels": object{"half": fmt.Sprint(i % 2)}}, "spec": object{"clusterIP": "None"}}); err != nil {
			return err
		}
		_, err = api.Create(ctx, colors, object{"apiVersion": gizmoGroup + "/v1", "kind": "Color", "metadata": object{"name": name}, "spec": object{"color": fmt.Sprint("color-", i%40)}})
		return err
	}))
	const of4 = "plan=index examined=4"
	const keys4 = of4 + " or plan=keys examined=4" // keys are built from the second use on
	newEvents := "/apis/events.k8s.io/v1/namespaces/" + namespace + "/events"
	watch := "watch=true&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=1&fieldSelector="
	for i, test := range []struct{ name, path, query, handler, plan string }{
		{"events by object", events, "fieldSelector=" + fields("involvedObject.kind=Pod", "involvedObject.name=pod-7", "involvedObject.namespace="+namespace, "involvedObject.uid=uid-7"), "List", of4},
		{"events of the newer API by object", newEvents, "fieldSelector=" + fields("regarding.kind=Pod", "regarding.name=pod-8", "regarding.uid=uid-8"), "List", of4},
		{"events by another field once", events, "fieldSelector=" + fields("source=", "reason!=Test"), "List", fmt.Sprint("plan=scan examined=", selectable)},
		{"custom resources by a selectable field", colors, "fieldSelector=" + fields("spec.color=color-7"), "List", of4},
		{"events by a label once", events, "labelSelector=" + fields("half=1"), "List", fmt.Sprint("plan=stored examined=", selectable/2)},
		{"events by a label twice", events, "labelSelector=" + fields("half=1"), "List", fmt.Sprint("plan=index examined=", selectable/2)},
		{"services by a label once", services, "labelSelector=" + fields("half=1"), "List", fmt.Sprint("plan=scan examined=", selectable)},
		{"services by a label twice", services, "labelSelector=" + fields("half=1"), "List", fmt.Sprint("plan=index examined=", selectable/2)},
		{"watch of events by object", events, watch + fields("involvedObject.name=pod-7"), "WatchList", keys4},
	} {
		t.Run(test.name, func(t *testing.T) {
			// in order: the second use of the label makes its index
			trace := fmt.Sprintf("%032x", 0x5e1ec7000+i)
			header := http.Header{"Traceparent": {"00-" + trace + "-" + clientSpan + "-01"}}
			names := map[string][]string{}
			for _, engine := range both.each() {
				// A refused request has not used the label. A watch may be over before its last
				// initial event.
				r, err := engine.send(ctx, adminToken, http.MethodGet, test.path, test.query, header)
				for err == nil && (r.Refused() || strings.HasPrefix(test.query, "watch") && !strings.Contains(string(r.Body), "k8s.io/initial-events-end")) {
					harness.Pause(ctx, time.Second)
					r, err = engine.send(ctx, adminToken, http.MethodGet, test.path, test.query, header)
				}
				harness.Check(t, err)
				if r.Code != http.StatusOK {
					t.Fatalf("%s: %v", engine.name, r.Err())
				}
				for part := range strings.SplitSeq(string(r.Body), `"name":"object-`) {
					names[engine.name] = append(names[engine.name], part[:3])
				}
				names[engine.name] = names[engine.name][1:] // before the first name
				_, all, err := engine.traces.await(ctx, trace, test.handler)
				harness.Check(t, err)
				if engine.name == harness.Strata {
					harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
						if _, all, err = engine.traces.await(ctx, trace, test.handler); err != nil {
							return false, err
						}
						plan := planOf(named(all))
						return slices.Contains(strings.Split(test.plan, " or "), plan), fmt.Errorf("the trace has the plan %q, want %q", plan, test.plan)
					}))
				}
			}
			if got, want := names[harness.Strata], names[harness.Upstream]; !slices.Equal(got, want) {
				t.Errorf("got the objects %v, want upstream's %v", got, want)
			}
		})
	}
}

// named returns the spans with that of initial events as one of a list, so that planOf reads both.
func named(spans []*tracepb.Span) (renamed []*tracepb.Span) {
	for _, span := range spans {
		if span.Name == "cacher.InitialEvents" {
			span = &tracepb.Span{Name: "cacher.GetList", Events: span.Events}
		}
		renamed = append(renamed, span)
	}
	return renamed
}

// fields returns requirements as the value of a query parameter.
func fields(requirements ...string) string {
	return strings.NewReplacer("=", "%3D", ",", "%2C", "!", "%21").Replace(strings.Join(requirements, ","))
}

// createColors creates the definition of a custom resource with a selectable field, and returns its
// plural when all servers serve it.
func createColors(t *testing.T, ctx context.Context, servers ...*harness.API) (plural string) {
	t.Helper()
	const name = "colors"
	text := object{"type": "string"}
	harness.Check(t, harness.Define(ctx, gizmoGroup, name, "Color", object{
		"selectableFields": []any{object{"jsonPath": ".spec.color"}},
		"schema":           object{"openAPIV3Schema": object{"type": "object", "properties": object{"spec": object{"type": "object", "properties": object{"color": text}}}}},
	}, servers...))
	return name
}
