package readclients

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// crowd is the priority level of a user whose requests are executed one at a time: it has one seat.
const crowd = "crowd"

// createCrowd creates a priority level with a single seat, and assigns the reader's requests to it.
func createCrowd(t *testing.T, ctx context.Context, engine *engine) {
	t.Helper()
	api := engine.API()
	grantReader(t, ctx, engine)
	const flowcontrol = "/apis/flowcontrol.apiserver.k8s.io/v1"
	_, err := api.Create(ctx, flowcontrol+"/prioritylevelconfigurations", object{"metadata": object{"name": crowd}, "spec": object{
		"type": "Limited", "limited": object{"nominalConcurrencyShares": 1, "lendablePercent": 0, "borrowingLimitPercent": 0,
			"limitResponse": object{"type": "Queue", "queuing": object{"queues": 1, "handSize": 1, "queueLengthLimit": 1000}}},
	}})
	harness.Check(t, err)
	_, err = api.Create(ctx, flowcontrol+"/flowschemas", object{"metadata": object{"name": crowd}, "spec": object{
		"matchingPrecedence": 2, "priorityLevelConfiguration": object{"name": crowd},
		"rules": []any{object{
			"subjects":      []any{object{"kind": "User", "user": object{"name": "reader"}}},
			"resourceRules": []any{object{"verbs": []string{"*"}, "apiGroups": []string{"*"}, "resources": []string{"*"}, "namespaces": []string{"*"}, "clusterScope": true}},
		}},
	}})
	harness.Check(t, err)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		samples, err := scrape(ctx, api, "apiserver_flowcontrol_nominal_limit_seats")
		if err != nil {
			return false, err
		}
		for _, s := range samples {
			if s.labels["priority_level"] == crowd {
				return true, nil
			}
		}
		return false, fmt.Errorf("the server has not loaded the priority level yet")
	}))
}

// grantReader lets the reader read all objects.
func grantReader(t *testing.T, ctx context.Context, engine *engine) {
	t.Helper()
	const rbac = "/apis/rbac.authorization.k8s.io/v1"
	for path, o := range map[string]object{
		rbac + "/clusterroles": {"metadata": object{"name": "reader"}, "rules": []any{
			object{"apiGroups": []string{"*"}, "resources": []string{"*"}, "verbs": []string{"get", "list", "watch"}}}},
		rbac + "/clusterrolebindings": {"metadata": object{"name": "reader"},
			"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reader"},
			"subjects": []any{object{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "readers"}}},
	} {
		r := harness.Must[*harness.Response](t)(engine.API().Do(ctx, http.MethodPost, path, "", o))
		if r.Code != http.StatusCreated && r.Code != http.StatusConflict {
			t.Fatal(r.Err())
		}
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := engine.send(ctx, readerToken, http.MethodGet, "/api/v1/configmaps", "limit=1", nil)
		return err == nil && r.Code == http.StatusOK, err
	}))
}

// seats returns the numbers of executing and of queued requests of the crowd.
func seats(ctx context.Context, api *harness.API) (executing, waiting float64, err error) {
	samples, err := scrape(ctx, api, "apiserver_flowcontrol_current_executing_seats", "apiserver_flowcontrol_current_inqueue_requests")
	for _, s := range samples {
		if s.labels["priority_level"] != crowd {
			continue
		}
		if s.name == "apiserver_flowcontrol_current_executing_seats" {
			executing += s.value
		} else {
			waiting += s.value
		}
	}
	return executing, waiting, err
}

// awaitFreeSeats returns when the crowd has no executing and no queued requests.
func awaitFreeSeats(ctx context.Context, api *harness.API) error {
	return harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		executing, waiting, err := seats(ctx, api)
		if err == nil && executing+waiting > 0 {
			err = fmt.Errorf("%v seats are taken, %v requests wait for one", executing, waiting)
		}
		return err == nil, err
	})
}

// TestWatch_AfterInitialEvents_ReleasesSeat: at a priority level with one seat, many watches of
// every form are open at the same time, and receive later events: each has released its seat after
// its initial events.
func TestWatch_AfterInitialEvents_ReleasesSeat(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	engine := both.strata
	api, reader := engine.API(), engine.APIFor(engine.ConfigFor(readerToken))
	namespace := fillPaths(t, ctx, "seats")
	createCrowd(t, ctx, engine)

	const times = 4 // more watches than seats, of each form
	const initialEvents = "resourceVersionMatch=NotOlderThan&sendInitialEvents=true&allowWatchBookmarks=true"
	var watches []*harness.Watch
	for _, path := range []string{maps(namespace), gizmos(namespace)} {
		for query, initial := range map[string]int{
			"":                                    1, // the existing object
			"resourceVersion=0":                   1,
			initialEvents:                         2, // and the bookmark after the existing object
			initialEvents + "&resourceVersion=0":  2,
			"labelSelector=none":                  0,
			"fieldSelector=metadata.name%3Dlater": 0,
			"labelSelector=none&" + initialEvents: 1,
			"fieldSelector=metadata.name%3Done":   1,
			"resourceVersion=REVISION":            0,
		} {
			list, err := api.List(ctx, path, "")
			harness.Check(t, err)
			query = strings.ReplaceAll(query, "REVISION", list.Metadata.ResourceVersion)
			for range times {
				w := harness.StartWatch(t, ctx, reader, path, query)
				watches = append(watches, w)
				for range initial {
					if _, err := w.Next(ctx); err != nil {
						t.Fatalf("watch %s?%s: initial events: %v", path, query, err)
					}
				}
			}
		}
	}
	if err := awaitFreeSeats(ctx, api); err != nil {
		t.Errorf("%d watches are open: %v", len(watches), err)
	}
	// A new request is served.
	r := harness.Must[*harness.Response](t)(reader.Do(ctx, http.MethodGet, maps(namespace)+"/one", "", nil))
	if r.Code != http.StatusOK {
		t.Error(r.Err())
	}
}
