package dropin

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// TestEngineSwitch_UpstreamDataAndBack_IsPreserved fills an etcd through the upstream cacher, as a stock kube-apiserver does, serves it with the
// engine, changes objects, serves it with both at once, and switches back: each server returns the same content as the previous
// one.
func TestEngineSwitch_UpstreamDataAndBack_IsPreserved(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()

	// The service account of pods in a namespace is created by a controller, which does not run here.
	stock := env.APIServer(etcd, engine(harness.Upstream), "--disable-admission-plugins=ServiceAccount")
	fill(t, ctx, stock)
	before := read(t, ctx, stock.API())
	if paths, objects := len(before), before.objects(); paths < 60 || objects < 200 {
		t.Fatalf("%d resources with %d objects: this test compares too little", paths, objects)
	}
	harness.Check(t, stock.Stop())

	strata := env.APIServer(etcd, engine(harness.Strata))
	api := strata.API()
	requireEqual(t, "after the switch", read(t, ctx, api), before)
	change(t, ctx, api)
	changed := read(t, ctx, api)

	both := env.APIServer(etcd, engine(harness.Upstream))
	requireEqual(t, "upstream on the same etcd", read(t, ctx, both.API()), changed)
	requireEqual(t, "the engine on the same etcd as upstream", read(t, ctx, api), changed)
	// A write through one server is visible to reads and watches through the other.
	list, err := api.List(ctx, defaultMaps, "")
	harness.Check(t, err)
	w := startWatch(t, ctx, api, defaultMaps, "resourceVersion="+list.Metadata.ResourceVersion)
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
	harness.Check(t, strata.Stop())

	after := read(t, ctx, both.API())
	delete(after[defaultMapsEverywhere], "default/mixed")
	requireEqual(t, "after the way back", after, changed)
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
	kubectl("create", "-f", directory+"/testdata/custom.yaml")
	// Updated and deleted objects have a different history from created ones.
	kubectl("-n", "stock", "label", "configmap", "settings", "updated=yes")
	kubectl("-n", "stock", "delete", "pod", "assigned", "--wait=false") // its finalizer blocks the deletion
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

// TestEventLease_Expired_WatchSendsDeleted stores events with a lease in etcd, through one engine, and watches their expiry through the other,
// served from memory, which is the default, and from etcd.
func TestEventLease_Expired_WatchSendsDeleted(t *testing.T) {
	t.Parallel() // it waits for the leases
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	stock := env.APIServer(etcd, engine(harness.Upstream), "--event-ttl=20s")
	uncached := env.StartAPIServer(etcd, "--watch-cache-sizes=events#0")
	cached := env.StartAPIServer(etcd, "--event-ttl=20s")
	const path = "/api/v1/namespaces/default/events"
	event := func(name string) object {
		return object{"metadata": object{"name": name}, "reason": "Test", "type": "Normal",
			"involvedObject": object{"kind": "Pod", "name": "p", "namespace": "default"}}
	}
	for _, s := range []*harness.Server{uncached, cached} {
		harness.Check(t, s.Await(ctx, "/readyz"))
	}
	watches := map[string]*harness.Watch{}
	for name, s := range map[string]*harness.Server{"uncached": uncached, "cached": cached} {
		list, err := s.API().List(ctx, path, "")
		harness.Check(t, err)
		watches[name] = startWatch(t, ctx, s.API(), path, "resourceVersion="+list.Metadata.ResourceVersion)
	}
	create(t, ctx, stock.API(), path, event("theirs"))
	create(t, ctx, cached.API(), path, event("ours"))
	for name, w := range watches {
		expectEvent(t, ctx, w, "ADDED", "theirs")
		expectEvent(t, ctx, w, "ADDED", "ours")
		gone := map[string]bool{}
		for len(gone) < 2 {
			e, err := w.Next(ctx)
			harness.Check(t, err)
			if e.Type == "DELETED" {
				gone[e.Object.Metadata.Name] = true
			} else if e.Type != "BOOKMARK" {
				t.Fatalf("%s: %s of %s", name, e.Type, e.Object.Key())
			}
		}
	}
	for _, s := range []*harness.Server{stock, uncached, cached} {
		list, err := s.API().List(ctx, path, "")
		harness.Check(t, err)
		if len(list.Items) != 0 {
			t.Errorf("%d events are left", len(list.Items))
		}
	}
}
