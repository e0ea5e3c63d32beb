package shards

import (
	"context"
	"net/http"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/kubernetes/pkg/controller/namespace/deletion"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// TestOverrides_ReachEveryResource stores events, leases, custom resources, their definitions and APIServices in etcds of their own. Both
// engines read the same objects.
func TestOverrides_ReachEveryResource(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	rest, events, leases, custom := env.Etcd(), env.Etcd(), env.Etcd(), env.Etcd()
	flag := overrides(map[string]*harness.Etcd{
		"events.k8s.io/events": events, "coordination.k8s.io/leases": leases, "shards.example.com/*": custom,
		"apiextensions.k8s.io/customresourcedefinitions": custom, "apiregistration.k8s.io/apiservices": custom,
		"nowhere.example.com/things": custom,
	})
	server := env.APIServer(rest, flag)
	api := server.API()
	defineWidgets(t, ctx, api)
	for path, o := range map[string]object{mapsPath: named("one"), eventsPath: event("one"), leasesPath: named("one"), widgetsPath: widget("one")} {
		_, err := api.Create(ctx, path, o)
		harness.Check(t, err)
	}
	clients := map[*harness.Etcd]*clientv3.Client{}
	for _, etcd := range []*harness.Etcd{rest, events, leases, custom} {
		clients[etcd] = etcd.Client()
	}
	for path, home := range map[string]*harness.Etcd{
		"configmaps/default/one": rest, "events/default/one": events, "leases/default/one": leases, "shards.example.com/widgets/default/one": custom,
		"apiextensions.k8s.io/customresourcedefinitions/": custom, "apiregistration.k8s.io/apiservices/": custom,
	} {
		for etcd, client := range clients {
			if n := keys(t, ctx, client, path); (n > 0) != (etcd == home) {
				t.Errorf("%d keys of %s in the etcd %s", n, path, etcd.URL)
			}
		}
	}
	for _, path := range []string{mapsPath, eventsPath, newerEvents, leasesPath, widgetsPath} {
		requireCode(t, ctx, api, path+"/one", http.StatusOK)
	}
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return strings.Contains(server.Output(), `resource="things.nowhere.example.com"`), nil
	}))

	upstream := env.APIServer(rest, flag, "--engine="+harness.Upstream).API()
	for _, path := range []string{mapsPath, eventsPath, newerEvents, leasesPath, widgetsPath} {
		awaitCode(t, ctx, upstream, path+"/one", http.StatusOK)
	}
}

// TestOverrides_InvalidValue_IsMisuse starts servers whose flag is wrong.
func TestOverrides_InvalidValue_IsMisuse(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	for flag, want := range map[string]string{
		"--etcd-servers-overrides=events#http://127.0.0.1:1":                          `"events#http://127.0.0.1:1" is not group/resource#servers`,
		"--etcd-servers-overrides=/events#127.0.0.1:1":                                "is not the URL of an etcd",
		"--etcd-servers-overrides=/events#http://b:1,events.k8s.io/events#http://c:1": "events is in two etcds, http://b:1 and http://c:1",
	} {
		server := env.StartAPIServer(etcd, flag)
		code, err := server.Wait(ctx)
		harness.Check(t, err)
		if output := server.Output(); code != 2 || !strings.Contains(output, want) {
			t.Errorf("%s: exit code %d, want 2 and %q:\n%s", flag, code, want, server.Tail())
		}
	}
}

// TestStart_WithoutOneEtcd_ServesTheOthers starts a server while the etcd of events and widgets is
// down, and then that etcd. Meanwhile no namespace is deleted completely, because its events remain.
func TestStart_WithoutOneEtcd_ServesTheOthers(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t) // upstream does not start
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	rest, down := env.Etcd(), env.Etcd()
	down.Stop()
	server := env.StartAPIServer(rest, overrides(map[string]*harness.Etcd{"/events": down, "shards.example.com/*": down}))
	harness.Check(t, server.Await(ctx, "/readyz?exclude=etcd-overrides"))
	api := server.API()
	address := strings.TrimPrefix(down.URL, "http://")
	body := string(requireCode(t, ctx, api, "/readyz", http.StatusInternalServerError).Body)
	if !strings.Contains(body, "[-]etcd-override-0:") || !strings.Contains(body, "events") || !strings.Contains(body, address) {
		t.Errorf("/readyz does not name events and %s:\n%s", address, body)
	}
	requireCode(t, ctx, api, "/livez", http.StatusOK)
	_, err := api.Create(ctx, mapsPath, named("one"))
	harness.Check(t, err)
	requireCode(t, ctx, api, mapsPath+"/one", http.StatusOK)
	refused := requireCode(t, ctx, api, eventsPath, http.StatusServiceUnavailable)
	if message := refused.Status().Message; !strings.Contains(message, address) || !strings.Contains(message, "events") {
		t.Errorf("the refusal %q does not name events and %s", message, address)
	}
	_, err = api.Create(ctx, definitions, definition())
	harness.Check(t, err)
	awaitCode(t, ctx, api, widgetsPath, http.StatusServiceUnavailable)
	emptied := emptying(t, ctx, server, "emptied")
	if err := emptied(); err == nil || !strings.Contains(err.Error(), address) {
		t.Errorf("a namespace was emptied without the etcd of events: %v", err)
	}
	requireCode(t, ctx, api, "/api/v1/namespaces/emptied", http.StatusOK)

	down.Start()
	harness.Check(t, server.Await(ctx, "/readyz"))
	for path, o := range map[string]object{eventsPath: event("one"), widgetsPath: widget("one")} {
		awaitCode(t, ctx, api, path, http.StatusOK)
		_, err := api.Create(ctx, path, o)
		harness.Check(t, err)
		requireCode(t, ctx, api, path+"/one", http.StatusOK)
	}
	harness.Check(t, emptied())
	requireCode(t, ctx, api, "/api/v1/namespaces/emptied", http.StatusNotFound)
}

// emptying creates and deletes a namespace, and returns a function that empties it as
// kube-controller-manager does.
func emptying(t *testing.T, ctx context.Context, server *harness.Server, name string) func() error {
	t.Helper()
	client, err := kubernetes.NewForConfig(server.Config)
	harness.Check(t, err)
	all, err := metadata.NewForConfig(server.Config)
	harness.Check(t, err)
	_, err = server.API().Create(ctx, "/api/v1/namespaces", object{"metadata": object{"name": name}})
	harness.Check(t, err)
	harness.Check(t, client.CoreV1().Namespaces().Delete(ctx, name, metav1.DeleteOptions{}))
	deleter := deletion.NewNamespacedResourcesDeleter(ctx, client.CoreV1().Namespaces(), all, client.CoreV1(),
		client.Discovery().ServerPreferredNamespacedResources, corev1.FinalizerKubernetes)
	return func() error { return deleter.Delete(ctx, name) }
}
