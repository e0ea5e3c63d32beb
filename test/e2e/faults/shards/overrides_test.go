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

	"github.com/stratakube/strata/test/harness"
)

// TestOverrides_OneEtcdDown_OthersServe starts a server with four etcds, one of them down. Then
// that etcd starts, and later fails twice.
func TestOverrides_OneEtcdDown_OthersServe(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t) // upstream does not start
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	s := &scene{rest: env.Etcd(), events: env.Etcd(), leases: env.Etcd(), custom: env.Etcd()}
	flag := overrides(map[string]*harness.Etcd{
		"events.k8s.io/events": s.events, "shards.example.com/*": s.events, "coordination.k8s.io/leases": s.leases,
		"apiextensions.k8s.io/customresourcedefinitions": s.custom, "apiregistration.k8s.io/apiservices": s.custom,
		"nowhere.example.com/things": s.custom,
	})
	s.events.Stop()
	s.server = env.StartAPIServer(s.rest, flag, "--etcd-compaction-interval=0")
	s.api = s.server.API()
	for _, phase := range []struct {
		name string
		run  func(t *testing.T, ctx context.Context)
	}{
		{"start without one etcd", s.startsWithoutOne},
		{"places of objects", s.placesObjects},
		{"faults are confined", s.confinesFaults},
	} {
		if !t.Run(phase.name, func(t *testing.T) { phase.run(t, ctx) }) {
			return
		}
	}
	upstream := env.APIServer(s.rest, flag, "--engine="+harness.Upstream).API()
	for _, path := range places {
		awaitCode(t, ctx, upstream, path+"/one", http.StatusOK)
	}
}

// scene is a server with resources in four etcds: events and widgets, leases, definitions and
// APIServices, and the rest.
type scene struct {
	rest, events, leases, custom *harness.Etcd
	server                       *harness.Server
	api                          *harness.API
}

// startsWithoutOne starts while the etcd of events and widgets is down, and then that etcd.
// Meanwhile no namespace is deleted completely, because its events remain.
func (s *scene) startsWithoutOne(t *testing.T, ctx context.Context) {
	harness.Check(t, s.server.Await(ctx, "/readyz?exclude=etcd-overrides"))
	address := strings.TrimPrefix(s.events.URL, "http://")
	body := string(requireCode(t, ctx, s.api, "/readyz", http.StatusInternalServerError).Body)
	if !strings.Contains(body, "[-]etcd-override-") || !strings.Contains(body, "events") || !strings.Contains(body, address) {
		t.Errorf("/readyz does not name events and %s:\n%s", address, body)
	}
	requireCode(t, ctx, s.api, "/livez", http.StatusOK)
	_, err := s.api.Create(ctx, mapsPath, named("one"))
	harness.Check(t, err)
	requireCode(t, ctx, s.api, mapsPath+"/one", http.StatusOK)
	refused := requireCode(t, ctx, s.api, eventsPath, http.StatusServiceUnavailable)
	if message := refused.Status().Message; !strings.Contains(message, address) || !strings.Contains(message, "events") {
		t.Errorf("the refusal %q does not name events and %s", message, address)
	}
	_, err = s.api.Create(ctx, definitions, definition())
	harness.Check(t, err)
	awaitCode(t, ctx, s.api, widgetsPath, http.StatusServiceUnavailable)
	emptied := emptying(t, ctx, s.server, "emptied")
	if err := emptied(); err == nil || !strings.Contains(err.Error(), address) {
		t.Errorf("a namespace was emptied without the etcd of events: %v", err)
	}
	requireCode(t, ctx, s.api, "/api/v1/namespaces/emptied", http.StatusOK)

	s.events.Start()
	harness.Check(t, s.server.Await(ctx, "/readyz"))
	for path, o := range map[string]object{eventsPath: event("one"), leasesPath: named("one"), widgetsPath: widget("one")} {
		awaitCode(t, ctx, s.api, path, http.StatusOK)
		_, err := s.api.Create(ctx, path, o)
		harness.Check(t, err)
	}
	harness.Check(t, emptied())
	requireCode(t, ctx, s.api, "/api/v1/namespaces/emptied", http.StatusNotFound)
}

// places are paths of resources with an object.
var places = []string{mapsPath, eventsPath, newerEvents, leasesPath, widgetsPath}

// placesObjects requires that each object is in the etcd of its resource.
func (s *scene) placesObjects(t *testing.T, ctx context.Context) {
	clients := map[*harness.Etcd]*clientv3.Client{}
	for _, etcd := range []*harness.Etcd{s.rest, s.events, s.leases, s.custom} {
		clients[etcd] = etcd.Client()
	}
	for path, home := range map[string]*harness.Etcd{
		"configmaps/default/one": s.rest, "events/default/one": s.events, "leases/default/one": s.leases, "shards.example.com/widgets/default/one": s.events,
		"apiextensions.k8s.io/customresourcedefinitions/": s.custom, "apiregistration.k8s.io/apiservices/": s.custom,
	} {
		for etcd, client := range clients {
			if n := keys(t, ctx, client, path); (n > 0) != (etcd == home) {
				t.Errorf("%d keys of %s in the etcd %s", n, path, etcd.URL)
			}
		}
	}
	for _, path := range places {
		requireCode(t, ctx, s.api, path+"/one", http.StatusOK)
	}
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return strings.Contains(s.server.Output(), `resource="things.nowhere.example.com"`), nil
	}))
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
