package readclients

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	clientfeatures "k8s.io/client-go/features"
	clientfeaturestesting "k8s.io/client-go/features/testing"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/test/harness"
)

var (
	mapResource   = corev1.SchemeGroupVersion.WithResource("configmaps")
	gizmoResource = schema.GroupVersionResource{Group: gizmoGroup, Version: "v1", Resource: "gizmos"}
)

// reads are the operations of a client on the objects of one namespace. The functions return
// client-go's objects and errors.
type reads struct {
	get   func(name string) (runtime.Object, error)
	list  func(metav1.ListOptions) (runtime.Object, error)
	watch func(metav1.ListOptions) (watch.Interface, error)
}

// expectReads makes a client read objects that create writes: two existing ones, and one that is
// created, changed and deleted during a watch.
func expectReads(t *testing.T, ctx context.Context, path string, create func(name string) object, r reads) {
	t.Helper()
	api := cluster.API()
	for _, name := range []string{"one", "two"} {
		_, err := api.Create(ctx, path, create(name))
		harness.Check(t, err)
	}
	o, err := r.get("one")
	harness.Check(t, err)
	if name := harness.Must[metav1.Object](t)(meta.Accessor(o)).GetName(); name != "one" {
		t.Errorf("got %q, want one", name)
	}
	if _, err := r.get("missing"); !apierrors.IsNotFound(err) {
		t.Errorf("get a missing object: %v, want NotFound", err)
	}
	names := func(options metav1.ListOptions) (names []string, list metav1.ListInterface) {
		t.Helper()
		o, err := r.list(options)
		harness.Check(t, err)
		items, err := meta.ExtractList(o)
		harness.Check(t, err)
		for _, item := range items {
			if name := harness.Must[metav1.Object](t)(meta.Accessor(item)).GetName(); !strings.HasSuffix(name, ".crt") {
				// made by Kubernetes
				names = append(names, name)
			}
		}
		return names, harness.Must[metav1.ListInterface](t)(meta.ListAccessor(o))
	}
	all, list := names(metav1.ListOptions{})
	current := list.GetResourceVersion()
	for what, options := range map[string]metav1.ListOptions{
		"any":        {ResourceVersion: current},
		"exact":      {ResourceVersion: current, ResourceVersionMatch: metav1.ResourceVersionMatchExact},
		"not older":  {ResourceVersion: current, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan},
		"everything": {},
	} {
		if got, _ := names(options); !slices.Equal(got, []string{"one", "two"}) || !slices.Equal(got, all) {
			t.Errorf("list (%s) returned %q, want one and two", what, got)
		}
	}
	if got, _ := names(metav1.ListOptions{FieldSelector: "metadata.name=two"}); !slices.Equal(got, []string{"two"}) {
		t.Errorf("list by name returned %q, want two", got)
	}
	var paged []string
	for options := (metav1.ListOptions{Limit: 1}); ; {
		page, list := names(options)
		paged = append(paged, page...)
		if options.Continue = list.GetContinue(); options.Continue == "" {
			break
		}
	}
	if !slices.Equal(paged, all) {
		t.Errorf("list by pages returned %q, want %q", paged, all)
	}

	w, err := r.watch(metav1.ListOptions{ResourceVersion: current, AllowWatchBookmarks: true})
	harness.Check(t, err)
	defer w.Stop()
	sendInitialEvents := true
	initial, err := r.watch(metav1.ListOptions{SendInitialEvents: &sendInitialEvents, AllowWatchBookmarks: true, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan})
	harness.Check(t, err)
	defer initial.Stop()
	var got []string
	for e := range initial.ResultChan() {
		accessor := harness.Must[metav1.Object](t)(meta.Accessor(e.Object))
		if e.Type == watch.Bookmark && accessor.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
			break
		}
		if name := accessor.GetName(); !strings.HasSuffix(name, ".crt") {
			got = append(got, fmt.Sprint(e.Type, " ", name))
		}
	}
	if want := []string{"ADDED one", "ADDED two"}; !slices.Equal(got, want) {
		t.Errorf("the initial events are %q, want %q", got, want)
	}
	_, err = api.Create(ctx, path, create("three"))
	harness.Check(t, err)
	_, err = api.Patch(ctx, path+"/three", `{"metadata":{"labels":{"changed":"yes"}}}`)
	harness.Check(t, err)
	harness.Check(t, api.Delete(ctx, path+"/three"))
	for _, w := range []watch.Interface{w, initial} {
		var got []string
		for len(got) < 3 {
			select {
			case e, ok := <-w.ResultChan():
				if !ok {
					t.Fatalf("the watch has ended after %q", got)
				}
				name := harness.Must[metav1.Object](t)(meta.Accessor(e.Object)).GetName()
				if e.Type != watch.Bookmark && !strings.HasSuffix(name, ".crt") {
					// not made by Kubernetes
					got = append(got, fmt.Sprint(e.Type, " ", name))
				}
			case <-ctx.Done():
				t.Fatalf("%v: %q so far", context.Cause(ctx), got)
			}
		}
		if want := []string{"ADDED three", "MODIFIED three", "DELETED three"}; !slices.Equal(got, want) {
			t.Errorf("the events are %q, want %q", got, want)
		}
	}
}

func createMap(name string) object { return configMap(name, "data") }

func createGizmo(name string) object { return gizmo(name, "more") }

func useTyped(t *testing.T, ctx context.Context, contentType string) {
	namespace := newClusterNamespace(t, ctx)
	client, err := kubernetes.NewForConfig(withContentType(cluster.Config, contentType))
	harness.Check(t, err)
	secrets := client.CoreV1().Secrets(namespace)
	expectReads(t, ctx, "/api/v1/namespaces/"+namespace+"/secrets", func(name string) object {
		return object{"metadata": object{"name": name}, "stringData": object{"key": name}}
	}, reads{
		get:   func(name string) (runtime.Object, error) { return secrets.Get(ctx, name, metav1.GetOptions{}) },
		list:  func(o metav1.ListOptions) (runtime.Object, error) { return secrets.List(ctx, o) },
		watch: func(o metav1.ListOptions) (watch.Interface, error) { return secrets.Watch(ctx, o) },
	})
	one, err := secrets.Get(ctx, "one", metav1.GetOptions{ResourceVersion: "0"})
	harness.Check(t, err)
	if got := string(one.Data["key"]); got != "one" {
		t.Errorf("the secret's key is %q, want one", got)
	}
	// Kinds of other groups, and kinds that are converted or defaulted on read.
	for what, list := range map[string]func() (int, error){
		"nodes": func() (int, error) {
			l, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
			return len(l.Items), err
		},
		"services": func() (int, error) {
			l, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
			return len(l.Items) - 1, err
		},
		"pods": func() (int, error) {
			l, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName="})
			return len(l.Items), err
		},
		"deployments": func() (int, error) {
			l, err := client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{})
			return len(l.Items), err
		},
	} {
		if n, err := list(); err != nil || n < 0 {
			t.Errorf("list %s: %d more than the least; %v", what, n, err)
		}
	}
}

func withContentType(config *rest.Config, contentType string) *rest.Config {
	config = rest.CopyConfig(config)
	config.ContentType = contentType
	config.AcceptContentTypes = contentType + ",application/json"
	return config
}

func useDynamic(t *testing.T, ctx context.Context) {
	client, err := dynamic.NewForConfig(cluster.Config)
	harness.Check(t, err)
	namespace := newClusterNamespace(t, ctx)
	for resource, create := range map[schema.GroupVersionResource]func(string) object{mapResource: createMap, gizmoResource: createGizmo} {
		in := client.Resource(resource).Namespace(namespace)
		path := map[bool]string{true: maps(namespace), false: gizmos(namespace)}[resource == mapResource]
		expectReads(t, ctx, path, create, reads{
			get:   func(name string) (runtime.Object, error) { return in.Get(ctx, name, metav1.GetOptions{}) },
			list:  func(o metav1.ListOptions) (runtime.Object, error) { return in.List(ctx, o) },
			watch: func(o metav1.ListOptions) (watch.Interface, error) { return in.Watch(ctx, o) },
		})
	}
	one, err := client.Resource(gizmoResource).Namespace(namespace).Get(ctx, "one", metav1.GetOptions{})
	harness.Check(t, err)
	if want, _, _ := unstructured.NestedString(one.Object, "spec", "want"); want != "more" || one.GetKind() != "Gizmo" {
		t.Errorf("the custom resource is %v", one.Object)
	}
}

func useMetadata(t *testing.T, ctx context.Context) {
	namespace := newClusterNamespace(t, ctx)
	for _, contentType := range []string{"application/vnd.kubernetes.protobuf", "application/json"} {
		config := metadata.ConfigFor(cluster.Config)
		if contentType == "application/json" {
			config = withContentType(cluster.Config, contentType)
		}
		client, err := metadata.NewForConfig(config)
		harness.Check(t, err)
		for resource, create := range map[schema.GroupVersionResource]func(string) object{mapResource: createMap, gizmoResource: createGizmo} {
			in := client.Resource(resource).Namespace(namespace)
			path := map[bool]string{true: maps(namespace), false: gizmos(namespace)}[resource == mapResource]
			expectReads(t, ctx, path, create, reads{
				get:   func(name string) (runtime.Object, error) { return in.Get(ctx, name, metav1.GetOptions{}) },
				list:  func(o metav1.ListOptions) (runtime.Object, error) { return in.List(ctx, o) },
				watch: func(o metav1.ListOptions) (watch.Interface, error) { return in.Watch(ctx, o) },
			})
			for _, name := range []string{"one", "two"} {
				harness.Check(t, in.Delete(ctx, name, metav1.DeleteOptions{}))
			}
		}
	}
}

// useInformers runs informers of each kind and requires that they follow changes.
func useInformers(t *testing.T, ctx context.Context, watchList bool) {
	clientfeaturestesting.SetFeatureDuringTest(t, clientfeatures.WatchListClient, watchList)
	namespace := newClusterNamespace(t, ctx)
	api := cluster.API()
	paths := map[string]func(string) object{maps(namespace): createMap, gizmos(namespace): createGizmo}
	for path, create := range paths {
		for i := range 20 {
			_, err := api.Create(ctx, path, create(fmt.Sprintf("early-%d", i)))
			harness.Check(t, err)
		}
	}
	type following struct {
		name     string
		path     string
		informer cache.SharedIndexInformer
	}
	var all []following
	var initial initialEvents
	for _, contentType := range []string{"application/vnd.kubernetes.protobuf", "application/json"} {
		config := withContentType(cluster.Config, contentType)
		config.Wrap(initial.wrap)
		typed, err := kubernetes.NewForConfig(config)
		harness.Check(t, err)
		factory := informers.NewSharedInformerFactoryWithOptions(typed, 0, informers.WithNamespace(namespace))
		all = append(all, following{"typed, " + contentType, maps(namespace), factory.Core().V1().ConfigMaps().Informer()})
		factory.Start(ctx.Done())
	}
	config := rest.CopyConfig(cluster.Config)
	config.Wrap(initial.wrap)
	untyped, err := dynamic.NewForConfig(config)
	harness.Check(t, err)
	partial, err := metadata.NewForConfig(config)
	harness.Check(t, err)
	for resource, path := range map[schema.GroupVersionResource]string{mapResource: maps(namespace), gizmoResource: gizmos(namespace)} {
		dynamicFactory := dynamicinformer.NewFilteredDynamicSharedInformerFactory(untyped, 0, namespace, nil)
		all = append(all, following{"dynamic, " + resource.Resource, path, dynamicFactory.ForResource(resource).Informer()})
		dynamicFactory.Start(ctx.Done())
		metadataFactory := metadatainformer.NewFilteredSharedInformerFactory(partial, 0, namespace, nil)
		all = append(all, following{"metadata, " + resource.Resource, path, metadataFactory.ForResource(resource).Informer()})
		metadataFactory.Start(ctx.Done())
	}
	for _, f := range all {
		if !cache.WaitForCacheSync(ctx.Done(), f.informer.HasSynced) {
			t.Fatalf("%s: not synced: %v", f.name, context.Cause(ctx))
		}
	}
	for path, create := range paths {
		for i := range 20 {
			early := fmt.Sprintf("%s/early-%d", path, i)
			_, err := api.Create(ctx, path, create(fmt.Sprintf("late-%d", i)))
			harness.Check(t, err)
			if i%2 == 0 {
				_, err = api.Patch(ctx, early, `{"metadata":{"labels":{"changed":"yes"}}}`)
				harness.Check(t, err)
			}
			if i%3 == 0 {
				harness.Check(t, api.Delete(ctx, early))
			}
		}
	}
	for _, f := range all {
		list, err := api.List(ctx, f.path, "")
		harness.Check(t, err)
		var want []string
		for _, o := range list.Items {
			want = append(want, o.Key()+"@"+o.Metadata.ResourceVersion)
		}
		slices.Sort(want)
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			got := held(f.informer.GetStore())
			return slices.Equal(got, want), fmt.Errorf("%s: holds %d objects, want %d:\n%q\n%q", f.name, len(got), len(want), got, want)
		}))
	}
	if n := initial.count(); (n > 0) != watchList {
		t.Errorf("%d informers began with a watch that sends initial events; they should: %v", n, watchList)
	}
}

// held returns the keys and versions of the objects in an informer's store.
func held(store cache.Store) []string {
	var keys []string
	for _, o := range store.List() {
		accessor, err := meta.Accessor(o)
		if err != nil {
			return []string{err.Error()}
		}
		keys = append(keys, cache.MetaObjectToName(accessor).String()+"@"+accessor.GetResourceVersion())
	}
	slices.Sort(keys)
	return keys
}

// initialEvents counts the watches that ask for initial events.
type initialEvents struct {
	mu sync.Mutex
	n  int
}

func (i *initialEvents) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		if req.URL.Query().Get("sendInitialEvents") == "true" {
			i.mu.Lock()
			i.n++
			i.mu.Unlock()
		}
		return next.RoundTrip(req)
	})
}

func (i *initialEvents) count() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.n
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }
