package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	apimachineryversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/apimachinery/pkg/watch"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/client-go/dynamic"

	"github.com/stratakube/strata/internal/test/testcheck"
)

const (
	testTimeout  = 5 * time.Minute
	pollInterval = 50 * time.Millisecond
)

// TestEngines_PassSameServerChecks runs the same checks on both engines. Where the two differ,
// upstream's result shows that the check can fail.
func TestEngines_PassSameServerChecks(t *testing.T) {
	t.Parallel()
	for _, engine := range []engineKind{engineStrata, engineUpstream} {
		t.Run(string(engine), func(t *testing.T) {
			t.Parallel()
			proxy := startCountingProxy(t, startEtcd(t))
			s := startServer(t, proxy.url, "--engine="+string(engine))

			t.Run("reports its version", func(t *testing.T) { checkVersion(t, s) })
			t.Run("serves built-in resources", func(t *testing.T) { checkConfigMaps(t, s) })
			t.Run("serves custom resources", func(t *testing.T) { checkCustomResources(t, s) })
			t.Run("opens no etcd connection for a resource", func(t *testing.T) { checkConnections(t, s, engine, proxy) })
			t.Run("touches no upstream cacher", func(t *testing.T) { checkCacher(t, s, engine) })
			t.Run("runs no upstream compactor", func(t *testing.T) { checkCompactor(t, s, engine) })
			t.Run("counts latest reads", func(t *testing.T) {
				if !cacheSample.MatchString(s.get(t, "/metrics")) {
					t.Errorf("none of the metrics that both engines record is there: %v", cacheSample)
				}
			})
			t.Run("documents its metrics", func(t *testing.T) { checkDocumented(t, s, engine) })
		})
	}
}

// checkDocumented compares the metrics of Strata and their types with docs/reference.md.
func checkDocumented(t *testing.T, s *server, engine engineKind) {
	reference, err := os.ReadFile("../../../docs/reference.md")
	testcheck.NoError(t, err)
	found := regexp.MustCompile(`(?m)^# TYPE (strata_\w+) (\w+)$`).FindAllStringSubmatch(s.get(t, "/metrics"), -1)
	if (len(found) > 0) != (engine == engineStrata) {
		t.Errorf("%d metrics with --engine=%s", len(found), engine)
	}
	for _, metric := range found {
		if row := fmt.Sprintf("\n| `%s` | %s |", metric[1], metric[2]); !strings.Contains(string(reference), row) {
			t.Errorf("docs/reference.md has no row %q", strings.TrimSpace(row))
		}
	}
}

func checkVersion(t *testing.T, s *server) {
	var got apimachineryversion.Info
	testcheck.NoError(t, json.Unmarshal([]byte(s.get(t, "/version")), &got))
	if !strings.HasPrefix(got.GitVersion, "v1.37.2+strata.") || got.Major != "1" || got.Minor != "37" {
		t.Errorf("/version = %+v, want v1.37.2+strata.*, major 1, minor 37", got)
	}
}

func checkConfigMaps(t *testing.T, s *server) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	maps := s.client.CoreV1().ConfigMaps(metav1.NamespaceDefault)

	before, err := maps.List(ctx, metav1.ListOptions{})
	testcheck.NoError(t, err)
	events, err := maps.Watch(ctx, metav1.ListOptions{ResourceVersion: before.ResourceVersion})
	testcheck.NoError(t, err)
	defer events.Stop()

	created, err := maps.Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "one"},
		Data:       map[string]string{"k": "first"},
	}, metav1.CreateOptions{})
	testcheck.NoError(t, err)
	got, err := maps.Get(ctx, "one", metav1.GetOptions{})
	if err != nil || got.ResourceVersion != created.ResourceVersion || got.Data["k"] != "first" {
		t.Fatalf("get after create = %v (%v), want the created object", got, err)
	}
	list, err := maps.List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != len(before.Items)+1 {
		t.Fatalf("list after create has %d items (%v), want one more than %d", len(list.Items), err, len(before.Items))
	}
	got.Data["k"] = "second"
	updated, err := maps.Update(ctx, got, metav1.UpdateOptions{})
	testcheck.NoError(t, err)
	if err := maps.Delete(ctx, "one", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	requireEvent(t, ctx, events, watch.Added, "one", func(o metav1.Object) bool { return o.GetResourceVersion() == created.ResourceVersion })
	requireEvent(t, ctx, events, watch.Modified, "one", func(o metav1.Object) bool { return o.GetResourceVersion() == updated.ResourceVersion })
	requireEvent(t, ctx, events, watch.Deleted, "one", func(o metav1.Object) bool {
		return o.(*corev1.ConfigMap).Data["k"] == "second" && o.GetResourceVersion() != updated.ResourceVersion
	})
}

// requireEvent fails the test unless the next event about name has the type and properties wanted.
func requireEvent(t *testing.T, ctx context.Context, events watch.Interface, kind watch.EventType, name string, ok func(metav1.Object) bool) {
	t.Helper()
	testcheck.NoError(t, expectEvent(ctx, events, kind, name, ok))
}

func expectEvent(ctx context.Context, events watch.Interface, kind watch.EventType, name string, ok func(metav1.Object) bool) error {
	for {
		select {
		case e, open := <-events.ResultChan():
			if !open {
				return fmt.Errorf("watch ended before %s of %s", kind, name)
			}
			o, isObject := e.Object.(metav1.Object)
			if isObject && o.GetName() != name {
				continue
			}
			if !isObject || e.Type != kind || !ok(o) {
				return fmt.Errorf("got %s %v, want %s of %s", e.Type, e.Object, kind, name)
			}
			return nil
		case <-ctx.Done():
			return fmt.Errorf("no %s of %s: %w", kind, name, ctx.Err())
		}
	}
}

func checkCustomResources(t *testing.T, s *server) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	things, err := createKind(ctx, s, "things")
	testcheck.NoError(t, err)

	before, err := things.List(ctx, metav1.ListOptions{})
	testcheck.NoError(t, err)
	events, err := things.Watch(ctx, metav1.ListOptions{ResourceVersion: before.GetResourceVersion()})
	testcheck.NoError(t, err)
	defer events.Stop()
	created, err := things.Create(ctx, customObject("things", "one"), metav1.CreateOptions{})
	testcheck.NoError(t, err)
	got, err := things.Get(ctx, "one", metav1.GetOptions{})
	if err != nil || got.GetUID() != created.GetUID() {
		t.Fatalf("get after create = %v (%v), want the created object", got, err)
	}
	list, err := things.List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || list.Items[0].GetKind() != "Things" {
		t.Fatalf("list after create = %v (%v), want the one object with its kind", list, err)
	}
	requireEvent(t, ctx, events, watch.Added, "one", func(o metav1.Object) bool { return o.GetUID() == created.GetUID() })
}

// createKind creates a CRD of the resource and returns a client of its default namespace when it is
// served.
func createKind(ctx context.Context, s *server, resource string) (dynamic.ResourceInterface, error) {
	const group = "engine.example.com"
	kind := kindOf(resource)
	preserve := true
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: resource + "." + group},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: group,
			Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: resource, Kind: kind, ListKind: kind + "List"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
					Type: "object", XPreserveUnknownFields: &preserve,
				}},
			}},
		},
	}
	crds := apiextensionsclient.NewForConfigOrDie(s.config).ApiextensionsV1().CustomResourceDefinitions()
	if _, err := crds.Create(ctx, crd, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	client := dynamic.NewForConfigOrDie(s.config).
		Resource(schema.GroupVersionResource{Group: group, Version: "v1", Resource: resource}).
		Namespace(metav1.NamespaceDefault)
	var last error
	err := wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
		_, last = client.List(ctx, metav1.ListOptions{})
		return last == nil, nil
	})
	if err != nil {
		return nil, fmt.Errorf("%s is not served: %w", resource, last)
	}
	return client, nil
}

func kindOf(resource string) string { return strings.ToUpper(resource[:1]) + resource[1:] }

func customObject(resource, name string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "engine.example.com/v1",
		"kind":       kindOf(resource),
		"metadata":   map[string]any{"name": name},
		"spec":       map[string]any{"size": int64(3)},
	}}
}

// checkConnections counts connections to etcd before and after 20 new resources have been written,
// read and watched.
func checkConnections(t *testing.T, s *server, engine engineKind, proxy *countingProxy) {
	const resources = 20
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	before := proxy.open.Load()
	if before == 0 {
		t.Fatal("the proxy has seen no connection")
	}
	t.Logf("%d connections for the built-in resources", before)
	// Concurrently: upstream delays the first write to a new resource by 2 s.
	using, useCtx := errgroup.WithContext(ctx)
	for i := range resources {
		using.Go(func() error { return useNewResource(useCtx, s, fmt.Sprintf("widgets%d", i)) })
	}
	testcheck.NoError(t, using.Wait())
	if engine == engineUpstream {
		if after := proxy.open.Load(); after < before+resources {
			t.Errorf("%d connections grew to %d with %d resources: upstream opens one for each, so the count of this test is wrong",
				before, after, resources)
		}
		return
	}
	// A closed client (one is used from time to time to read the database size) may take a moment
	// to disconnect.
	var after int64
	err := wait.PollUntilContextTimeout(ctx, pollInterval, time.Minute, true, func(context.Context) (bool, error) {
		after = proxy.open.Load()
		// After a silence of etcd the feed has a connection of its own.
		return after <= before+1, nil
	})
	if err != nil {
		t.Errorf("%d connections grew to %d with %d resources, want no growth, or by one", before, after, resources)
	}
}

// useNewResource creates a resource, writes an object of it, and reads that with LIST and WATCH.
func useNewResource(ctx context.Context, s *server, resource string) error {
	client, err := createKind(ctx, s, resource)
	if err != nil {
		return err
	}
	events, err := client.Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	defer events.Stop()
	if _, err := client.Create(ctx, customObject(resource, "one"), metav1.CreateOptions{}); err != nil {
		return err
	}
	return expectEvent(ctx, events, watch.Added, "one", func(metav1.Object) bool { return true })
}

// cacherFrame is in the stack of the goroutines that every upstream cacher runs from its creation
// to its end.
const cacherFrame = "k8s.io/apiserver/pkg/storage/cacher."

// cacheSample matches values, not comments, of the metrics of reads that both engines record.
var cacheSample = regexp.MustCompile(`(?m)^apiserver_(watch_cache_(read_wait_seconds|consistent_read_total)|cache_list_)[^\n]*`)

// checkCacher lists every resource, then searches for traces of upstream's cacher.
func checkCacher(t *testing.T, s *server, engine engineKind) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	listed := listEverything(t, ctx, s)
	if listed < 50 {
		t.Errorf("discovery shows %d resources that can be listed, want all of them", listed)
	}

	frames := stacks(t, s, cacherFrame)
	switch {
	case engine == engineStrata && len(frames) > 0:
		t.Errorf("%d goroutines are in upstream's cacher, among them\n%s", len(frames), frames[0])
	case engine == engineUpstream && len(frames) == 0:
		t.Error("found no goroutine of upstream's cacher, which is in use: the detection of this test is wrong")
	}
}

// stacks returns the stacks of the server's goroutines that contain the text.
func stacks(t *testing.T, s *server, text string) (found []string) {
	t.Helper()
	for stack := range strings.SplitSeq(s.get(t, "/debug/pprof/goroutine?debug=2"), "\n\n") {
		if strings.Contains(stack, text) {
			found = append(found, stack)
		}
	}
	return found
}

// checkCompactor searches for the goroutines of the engines' compactors: the allocators of service
// addresses and ports have storages too, which do not belong to the engine.
func checkCompactor(t *testing.T, s *server, engine engineKind) {
	upstream := stacks(t, s, "k8s.io/apiserver/pkg/storage/etcd3.(*compactor).")
	own := stacks(t, s, "etcdsource.(*Compactor).takeTurns")
	if engine == engineStrata && (len(upstream) > 0 || len(own) != 1) {
		t.Errorf("%d goroutines of upstream's compactor, want none; %d of the engine's that compact, want 1: %v", len(upstream), len(own), upstream)
	}
	if engine == engineUpstream && (len(upstream) == 0 || len(own) > 0) {
		t.Errorf("%d goroutines of upstream's compactor, which is in use; %d of the engine's, which is not", len(upstream), len(own))
	}
}

// listEverything lists each resource in each version in the discovery documents and returns their
// number.
func listEverything(t *testing.T, ctx context.Context, s *server) int {
	t.Helper()
	_, groups, err := s.client.Discovery().ServerGroupsAndResources()
	testcheck.NoError(t, err)
	client := dynamic.NewForConfigOrDie(s.config)
	listed := 0
	for _, group := range groups {
		gv, err := schema.ParseGroupVersion(group.GroupVersion)
		testcheck.NoError(t, err)
		for _, r := range group.APIResources {
			if strings.Contains(r.Name, "/") || !slices.Contains(r.Verbs, "list") {
				continue
			}
			if _, err := client.Resource(gv.WithResource(r.Name)).List(ctx, metav1.ListOptions{}); err != nil {
				t.Errorf("list %s of %s: %v", r.Name, gv, err)
			}
			listed++
		}
	}
	return listed
}

func TestCacheEvents_Default_HoldsEventsOnly(t *testing.T) {
	for sizes, want := range map[string]bool{"": false, "pods#0": false, "events#0": true, "events#7,pods#0": true, "events.events.k8s.io#0": true, "events#x": false} {
		if got := namesEvents(strings.FieldsFunc(sizes, func(r rune) bool { return r == ',' })); got != want {
			t.Errorf("%q names events: %v", sizes, got)
		}
	}
	// as completed
	etcd := &genericoptions.EtcdOptions{EnableWatchCache: true, WatchCacheSizes: []string{"events.events.k8s.io#0", "pods#0", "events#0"}}
	cacheEvents(etcd)
	uncached, err := uncachedResources(etcd)
	testcheck.NoError(t, err)
	if uncached(schema.GroupResource{Resource: "events"}) || !uncached(schema.GroupResource{Resource: "pods"}) {
		t.Errorf("sizes %q", etcd.WatchCacheSizes)
	}
}

func TestUncachedResources_FollowWatchCacheFlags(t *testing.T) {
	pods, leases := schema.GroupResource{Resource: "pods"}, schema.GroupResource{Group: "coordination.k8s.io", Resource: "leases"}
	for name, tc := range map[string]struct {
		enabled  bool
		sizes    []string
		uncached map[schema.GroupResource]bool
	}{
		"all cached":         {true, nil, map[schema.GroupResource]bool{pods: false, leases: false}},
		"zero":               {true, []string{"pods#0"}, map[schema.GroupResource]bool{pods: true, leases: false}},
		"zero with a group":  {true, []string{"leases.coordination.k8s.io#0"}, map[schema.GroupResource]bool{pods: false, leases: true}},
		"another size":       {true, []string{"pods#1000"}, map[schema.GroupResource]bool{pods: false, leases: false}},
		"watch cache is off": {false, []string{"pods#1000"}, map[schema.GroupResource]bool{pods: true, leases: true}},
	} {
		t.Run(name, func(t *testing.T) {
			uncached, err := uncachedResources(&genericoptions.EtcdOptions{EnableWatchCache: tc.enabled, WatchCacheSizes: tc.sizes})
			testcheck.NoError(t, err)
			for resource, want := range tc.uncached {
				if got := uncached(resource); got != want {
					t.Errorf("uncached(%s) = %v, want %v", resource, got, want)
				}
			}
		})
	}
	if _, err := uncachedResources(&genericoptions.EtcdOptions{EnableWatchCache: true, WatchCacheSizes: []string{"pods#many"}}); err == nil {
		t.Error("no error for a size that is not a number")
	}
}
