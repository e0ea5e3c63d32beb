// Package shards runs API servers whose resources are in several etcds: where objects are stored,
// and the effect of an etcd that is down, killed or paused on its own resources and on those of the
// others.
package shards

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

// object is an object to write; its shape is that of the API.
type object = map[string]any

const (
	mapsPath    = "/api/v1/namespaces/default/configmaps"
	eventsPath  = "/api/v1/namespaces/default/events"
	newerEvents = "/apis/events.k8s.io/v1/namespaces/default/events"
	leasesPath  = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
	widgetsPath = "/apis/shards.example.com/v1/namespaces/default/widgets"
	definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
)

// overrides returns the flag that stores resources, such as "/events", in an etcd.
func overrides(in map[string]*harness.Etcd) string {
	var all []string
	for resource, etcd := range in {
		all = append(all, resource+"#"+strings.ReplaceAll(etcd.URL, ",", ";"))
	}
	return "--etcd-servers-overrides=" + strings.Join(all, ",")
}

func named(name string) object {
	return object{"metadata": object{"name": name, "namespace": "default"}}
}

func widget(name string) object {
	return object{"apiVersion": "shards.example.com/v1", "kind": "Widget", "metadata": object{"name": name, "namespace": "default"}}
}

// event returns an event of the core group.
func event(name string) object {
	return object{"metadata": object{"name": name, "namespace": "default"}, "reason": "Tested", "type": "Normal",
		"involvedObject": object{"kind": "ConfigMap", "namespace": "default", "name": "some"}}
}

func definition() object {
	return object{
		"metadata": object{"name": "widgets.shards.example.com"},
		"spec": object{"group": "shards.example.com", "scope": "Namespaced",
			"names": object{"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
			"versions": []object{{"name": "v1", "served": true, "storage": true,
				"schema": object{"openAPIV3Schema": object{"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}}},
	}
}

// awaitCode returns when a GET of path is answered with code.
func awaitCode(t *testing.T, ctx context.Context, api *harness.API, path string, code int) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, path, "", nil)
		if err != nil {
			return false, err
		}
		return r.Code == code, fmt.Errorf("%s: %w, want %d", path, r.Err(), code)
	}))
}

// requireCode checks the code of a GET of path.
func requireCode(t *testing.T, ctx context.Context, api *harness.API, path string, code int) *harness.Response {
	t.Helper()
	r, err := api.Do(ctx, http.MethodGet, path, "", nil)
	harness.Check(t, err)
	if r.Code != code {
		t.Errorf("%s: %v, want %d", path, r.Err(), code)
	}
	return r
}

// keys returns the number of keys below /registry/ and a path.
func keys(t *testing.T, ctx context.Context, etcd *clientv3.Client, path string) int64 {
	t.Helper()
	r, err := etcd.Get(ctx, "/registry/"+path, clientv3.WithPrefix(), clientv3.WithCountOnly())
	harness.Check(t, err)
	return r.Count
}
