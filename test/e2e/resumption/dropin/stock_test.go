package dropin

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestEngineSwitch_UpstreamDataAndBack_IsPreserved fills an etcd through the upstream cacher, as a
// stock kube-apiserver does, serves it with the engine, changes objects, serves it with both at
// once, and switches back: each server returns the same content as the previous one. Both engines
// are alike in their start, in the expiry of events, in memory and in etcd, and in their stop.
func TestEngineSwitch_UpstreamDataAndBack_IsPreserved(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()

	// The service account of pods in a namespace is created by a controller, which does not run
	// here.
	stock := env.APIServer(etcd, engine(harness.Upstream), "--disable-admission-plugins=ServiceAccount")
	fill(t, ctx, stock)
	before := read(t, ctx, stock.API())
	if paths, objects := len(before), before.objects(); paths < 60 || objects < 200 {
		t.Fatalf("%d resources with %d objects: this test compares too little", paths, objects)
	}
	checks := readyzChecks(t, ctx, stock)
	harness.Check(t, stock.Stop())

	const eventTTL = "--event-ttl=5s"
	strata := env.APIServer(etcd, engine(harness.Strata), eventTTL)
	requireStarted(t, ctx, strata, checks)
	api := strata.API()
	requireEqual(t, "after the switch", read(t, ctx, api), before)
	change(t, ctx, api)
	changed := read(t, ctx, api)

	both := env.APIServer(etcd, engine(harness.Upstream), eventTTL)
	requireEqual(t, "upstream on the same etcd", read(t, ctx, both.API()), changed)
	requireEqual(t, "the engine on the same etcd as upstream", read(t, ctx, api), changed)
	// A write through one server is visible to reads and watches through the other.
	list, err := api.List(ctx, defaultMaps, "")
	harness.Check(t, err)
	w := harness.StartWatch(t, ctx, api, defaultMaps, "resourceVersion="+list.Metadata.ResourceVersion)
	created := create(t, ctx, both.API(), defaultMaps, configMap("mixed"))
	if got, err := api.Get(ctx, defaultMaps+"/mixed", ""); err != nil || got.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
		t.Errorf("get of an object written by the other server: %+v, %v", got.Metadata, err)
	}
	expectEvent(t, ctx, w, "ADDED", "mixed")
	// A continue token of one server is valid on the other, both ways.
	for name, servers := range map[string][2]*harness.API{"from the engine": {api, both.API()}, "from upstream": {both.API(), api}} {
		const everywhere = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
		first, err := servers[0].List(ctx, everywhere, "limit=7")
		harness.Check(t, err)
		rest, err := servers[1].List(ctx, everywhere, "continue="+first.Metadata.Continue)
		harness.Check(t, err)
		if first.Metadata.ResourceVersion != rest.Metadata.ResourceVersion {
			t.Errorf("%s: pages at %s and %s", name, first.Metadata.ResourceVersion, rest.Metadata.ResourceVersion)
		}
		whole, err := api.List(ctx, everywhere, "resourceVersionMatch=Exact&resourceVersion="+first.Metadata.ResourceVersion)
		harness.Check(t, err)
		if got, want := fmt.Sprint(append(first.Names(), rest.Names()...)), fmt.Sprint(whole.Names()); got != want {
			t.Errorf("%s: pages have %s, want %s", name, got, want)
		}
	}
	requireEventsExpire(t, ctx, api, both.API())
	requireQuietStop(t, strata)

	after := read(t, ctx, both.API())
	delete(after[defaultMapsEverywhere], "default/mixed")
	requireEqual(t, "after the way back", after, changed)

	_, err = etcd.Client().Delete(ctx, nodeCriticalKey) // the API rejects this deletion
	harness.Check(t, err)
	strata.Restart("--watch-cache-sizes=events#0",
		"--shutdown-delay-duration=1s", "--shutdown-watch-termination-grace-period=2s")
	requireStarted(t, ctx, strata, checks)
	requireEventsExpire(t, ctx, api, both.API())
	requireQuietStop(t, strata)
}

const defaultMapsEverywhere = "/api/v1/configmaps"

// fill creates the objects of testdata with kubectl.
func fill(t *testing.T, ctx context.Context, s *harness.Server) {
	t.Helper()
	kubectl := func(args ...string) {
		t.Helper()
		r, err := s.Kubectl(ctx, "", args...)
		harness.Check(t, err)
		if r.Code != 0 {
			t.Fatalf("kubectl %s: %s", strings.Join(args, " "), r.Stderr)
		}
	}
	directory, err := os.Getwd()
	harness.Check(t, err)
	kubectl("create", "-f", directory+"/testdata/objects.yaml")
	kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		// discovery has the kinds a moment after their definitions are established
		r, err := s.Kubectl(ctx, "", "create", "--dry-run=client", "-f", directory+"/testdata/custom.yaml")
		return err == nil && r.Code == 0, err
	}))
	kubectl("create", "-f", directory+"/testdata/custom.yaml")
	// Updated and deleted objects have a different history from created ones.
	kubectl("-n", "stock", "label", "configmap", "settings", "updated=yes")
	// its finalizer blocks the deletion
	kubectl("-n", "stock", "delete", "pod", "assigned", "--wait=false")
	kubectl("-n", "stock", "delete", "podtemplate", "template")
}

// change creates, updates and deletes objects through one server.
func change(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	const things = "/apis/stock.example.com/v1/namespaces/stock/things"
	create(t, ctx, api, defaultMaps, configMap("new"))
	create(t, ctx, api, things, object{"apiVersion": "stock.example.com/v1", "kind": "Thing", "metadata": object{"name": "three"}})
	for _, path := range []string{"/api/v1/namespaces/stock/configmaps/settings", things + "/one", "/apis/apps/v1/namespaces/stock/deployments/web", "/api/v1/nodes/node-1"} {
		_, err := api.Patch(ctx, path, `{"metadata":{"annotations":{"changed":"yes"}}}`)
		harness.Check(t, err)
	}
	_, err := api.Patch(ctx, "/api/v1/namespaces/stock/pods/assigned", `{"metadata":{"finalizers":null}}`)
	harness.Check(t, err)
	for _, path := range []string{"/api/v1/namespaces/stock/secrets/basic", "/apis/stock.example.com/v1/planets/venus", "/apis/batch/v1/namespaces/stock/cronjobs/nightly"} {
		harness.Check(t, api.Delete(ctx, path))
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, "/apis/batch/v1/namespaces/stock/cronjobs/nightly", "", nil)
		return err == nil && r.Code == http.StatusNotFound, err
	}))
}

// requireEventsExpire stores events with a lease in etcd, through both engines, and watches their
// expiry through Strata.
func requireEventsExpire(t *testing.T, ctx context.Context, strata, upstream *harness.API) {
	t.Helper()
	const path = "/api/v1/namespaces/default/events"
	event := func(name string) object {
		return object{"metadata": object{"name": name}, "reason": "Test", "type": "Normal",
			"involvedObject": object{"kind": "Pod", "name": "p", "namespace": "default"}}
	}
	list, err := strata.List(ctx, path, "")
	harness.Check(t, err)
	w := harness.StartWatch(t, ctx, strata, path, "resourceVersion="+list.Metadata.ResourceVersion)
	create(t, ctx, upstream, path, event("theirs"))
	create(t, ctx, strata, path, event("ours"))
	gone := map[string]bool{}
	for added := 0; len(gone) < 2; {
		e, err := w.Next(ctx)
		harness.Check(t, err)
		name := e.Object.Metadata.Name
		switch e.Type {
		case "ADDED":
			if want := []string{"theirs", "ours"}; added >= 2 || name != want[added] {
				t.Fatalf("event %s is number %d of %v", name, added, want)
			}
			added++
		case "DELETED":
			gone[name] = true
		case "BOOKMARK":
		default:
			t.Fatalf("%s of %s", e.Type, e.Object.Key())
		}
	}
	for _, api := range []*harness.API{upstream, strata} {
		list, err := api.List(ctx, path, "")
		harness.Check(t, err)
		if len(list.Items) != 0 {
			t.Errorf("%d events are left", len(list.Items))
		}
	}
}
