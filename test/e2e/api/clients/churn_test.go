package clients

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/stratakube/strata/test/harness"
)

// Most objects are custom resources whose status a controller writes, or ConfigMaps. They have a
// limited lifetime: each creation also deletes an earlier object, unless it is one of the
// survivors.
var (
	mapCount   = harness.Pick(1050, 7000)
	gizmoCount = harness.Pick(450, 3000)
)

const (
	lifetime    = 200 // an object is deleted after this many further creations
	survivors   = 10  // one of this many objects is not deleted
	updated     = 3   // one of this many objects is updated
	inNamespace = 8   // namespaces
)

// TestInformers_ObjectChurn_CachesEqualFreshList runs informers and a manager over the lifetime of
// 1,500 objects, or 10,000 in the long form. In the end every cache equals a fresh list, every
// reconciler has seen the last state of every object, and no informer has relisted.
func TestInformers_ObjectChurn_CachesEqualFreshList(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	createGizmos(t, ctx, api)
	for i := range inNamespace {
		_, err := api.Create(ctx, "/api/v1/namespaces", object{"metadata": object{"name": namespace(i)}})
		harness.Check(t, err)
	}

	informing := startInformers(t, ctx)
	managing := startManager(t, ctx)

	churn := func(count int, path func(i int) string, body func(i int) object) {
		t.Helper()
		harness.Check(t, harness.InParallel(ctx, count, func(ctx context.Context, i int) error {
			if _, err := api.Create(ctx, path(i), body(i)); err != nil {
				return err
			}
			if i%updated == 0 {
				if _, err := api.Patch(ctx, path(i)+"/"+name(i), `{"metadata":{"annotations":{"changed":"yes"}},"spec":{"want":"more"}}`); err != nil {
					return err
				}
			}
			if old := i - lifetime; old >= 0 && old%survivors != 0 {
				return api.Delete(ctx, path(old)+"/"+name(old))
			}
			return nil
		}))
	}
	mapPath := func(i int) string { return "/api/v1/namespaces/" + namespace(i) + "/configmaps" }
	gizmoPath := func(i int) string { return "/apis/" + gizmoGroup + "/v1/namespaces/" + namespace(i) + "/gizmos" }
	var writing sync.WaitGroup
	writing.Go(func() {
		churn(mapCount, mapPath, func(i int) object {
			return object{"metadata": object{"name": name(i)}, "data": object{"i": fmt.Sprint(i)}}
		})
	})
	writing.Go(func() {
		churn(gizmoCount, gizmoPath, func(i int) object {
			return object{"apiVersion": gizmoGroup + "/v1", "kind": "Gizmo", "metadata": object{"name": name(i)}, "spec": object{"want": fmt.Sprint(i)}}
		})
	})
	writing.Wait()
	if t.Failed() {
		t.FailNow()
	}

	// Wait for the controller's last status updates: the comparison needs a stable state.
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) { return managing.settled(ctx, api) }))
	want := map[string]map[string]string{}
	for _, path := range []string{mapsPath, gizmosPath, secretsPath, namespacesPath} {
		want[path] = state(t, ctx, api, path)
	}
	if got, least := len(want[mapsPath]), mapCount/survivors; got < least {
		t.Fatalf("%d ConfigMaps remain, want at least %d", got, least)
	}
	for who, path := range informing.paths {
		harness.Check(t, awaitState(ctx, who, informing.stores[who], want[path]))
	}
	for path, reconciler := range managing.reconcilers {
		harness.Check(t, awaitState(ctx, "reconciler of "+path, reconciler.last, want[path]))
	}
	for path, list := range managing.lists {
		harness.Check(t, awaitState(ctx, "manager's cache of "+path, list, want[path]))
	}
	informing.dynamic.expectAtMost(t, 1, "the dynamic informers", gizmosPath)
	informing.typed.expectAtMost(t, 1, "the typed informers", mapsPath, secretsPath, namespacesPath)
	informing.metadata.expectAtMost(t, 1, "the metadata informers", mapsPath, gizmosPath)
	managing.requests.expectAtMost(t, 1, "the manager", mapsPath, gizmosPath)
}

func namespace(i int) string { return fmt.Sprintf("churn-%d", i%inNamespace) }

func name(i int) string { return fmt.Sprintf("object-%05d", i) }

// state lists path and returns the resource versions by key.
func state(t *testing.T, ctx context.Context, api *harness.API, path string) map[string]string {
	t.Helper()
	list, err := api.List(ctx, path, "")
	harness.Check(t, err)
	objects := map[string]string{}
	for _, o := range list.Items {
		objects[o.Key()] = o.Metadata.ResourceVersion
	}
	return objects
}

// awaitState returns nil when current returns want.
func awaitState(ctx context.Context, who string, current func() map[string]string, want map[string]string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, time.Minute, fmt.Errorf("%s still differs from a fresh list", who))
	defer cancel()
	return harness.Poll(ctx, func(context.Context) (bool, error) {
		got := current()
		if maps.Equal(got, want) {
			return true, nil
		}
		for key, version := range want {
			if got[key] != version {
				return false, fmt.Errorf("%s has %d objects, want %d; %s is at %q, want %s", who, len(got), len(want), key, got[key], version)
			}
		}
		for key, version := range got {
			if _, ok := want[key]; !ok {
				return false, fmt.Errorf("%s has %d objects, want %d; it still has %s at %s", who, len(got), len(want), key, version)
			}
		}
		return false, nil
	})
}

// informing are informers of several kinds.
type informing struct {
	typed, dynamic, metadata requests
	// the path that each informer follows
	paths  map[string]string
	stores map[string]func() map[string]string // the content of its cache
}

// startInformers starts informers that last as long as the test and returns when all have synced.
func startInformers(t *testing.T, ctx context.Context) *informing {
	t.Helper()
	s := &informing{paths: map[string]string{}, stores: map[string]func() map[string]string{}}
	typed, err := kubernetes.NewForConfig(s.typed.config(cluster.Config))
	harness.Check(t, err)
	untyped, err := dynamic.NewForConfig(s.dynamic.config(cluster.Config))
	harness.Check(t, err)
	partial, err := metadata.NewForConfig(s.metadata.config(cluster.Config))
	harness.Check(t, err)

	factory := informers.NewSharedInformerFactory(typed, 0)
	dynamicFactory := dynamicinformer.NewDynamicSharedInformerFactory(untyped, 0)
	metadataFactory := metadatainformer.NewSharedInformerFactory(partial, 0)
	mapResource := corev1.SchemeGroupVersion.WithResource("configmaps")
	for who, informer := range map[string]struct {
		cache.SharedIndexInformer
		path string
	}{
		"the typed informer of ConfigMaps":    {factory.Core().V1().ConfigMaps().Informer(), mapsPath},
		"the typed informer of Secrets":       {factory.Core().V1().Secrets().Informer(), secretsPath},
		"the typed informer of namespaces":    {factory.Core().V1().Namespaces().Informer(), namespacesPath},
		"the dynamic informer of gizmos":      {dynamicFactory.ForResource(gizmoResource).Informer(), gizmosPath},
		"the metadata informer of gizmos":     {metadataFactory.ForResource(gizmoResource).Informer(), gizmosPath},
		"the metadata informer of ConfigMaps": {metadataFactory.ForResource(mapResource).Informer(), mapsPath},
	} {
		s.paths[who] = informer.path
		s.stores[who] = func() map[string]string { return versions(informer.GetStore().List()) }
	}
	stop := ctx.Done()
	factory.Start(stop)
	dynamicFactory.Start(stop)
	metadataFactory.Start(stop)
	for kind, synced := range factory.WaitForCacheSync(stop) {
		if !synced {
			t.Fatalf("the informer of %v has not synced: %v", kind, context.Cause(ctx))
		}
	}
	dynamicFactory.WaitForCacheSync(stop)
	metadataFactory.WaitForCacheSync(stop)
	return s
}

// versions returns the resource versions of objects by key.
func versions[T any](objects []T) map[string]string {
	versions := map[string]string{}
	for _, o := range objects {
		accessor, err := meta.Accessor(o)
		if err != nil {
			panic(err) // informers contain objects only
		}
		versions[cache.MetaObjectToName(accessor).String()] = accessor.GetResourceVersion()
	}
	return versions
}

// managing is a manager with two controllers.
type managing struct {
	requests    requests
	reconcilers map[string]*reconciler
	lists       map[string]func() map[string]string // the content of the manager's cache
}

// startManager starts a manager that lasts as long as the test and returns when its caches have
// synced.
func startManager(t *testing.T, ctx context.Context) *managing {
	t.Helper()
	m := &managing{reconcilers: map[string]*reconciler{}}
	manager, err := ctrl.NewManager(m.requests.config(cluster.Config), ctrl.Options{
		// gizmos too are read from the cache
		Client:                  client.Options{Cache: &client.CacheOptions{Unstructured: true}},
		Metrics:                 metricsserver.Options{BindAddress: "0"},
		LeaderElection:          true, // it reads and writes a lease periodically
		LeaderElectionID:        "churn",
		LeaderElectionNamespace: "default",
	})
	harness.Check(t, err)
	gizmo := &unstructured.Unstructured{}
	gizmo.SetGroupVersionKind(gizmoKind)
	for path, kind := range map[string]client.Object{mapsPath: &corev1.ConfigMap{}, gizmosPath: gizmo} {
		r := &reconciler{client: manager.GetClient(), kind: kind, versions: map[string]string{}}
		m.reconcilers[path] = r
		harness.Check(t, ctrl.NewControllerManagedBy(manager).For(kind).WithOptions(controller.Options{MaxConcurrentReconciles: 4}).Complete(r))
	}
	list := func(into client.ObjectList) map[string]string {
		if err := manager.GetClient().List(ctx, into); err != nil {
			return map[string]string{"error": err.Error()}
		}
		objects, err := meta.ExtractList(into)
		if err != nil {
			return map[string]string{"error": err.Error()}
		}
		return versions(objects)
	}
	m.lists = map[string]func() map[string]string{
		mapsPath: func() map[string]string { return list(&corev1.ConfigMapList{}) },
		gizmosPath: func() map[string]string {
			gizmos := &unstructured.UnstructuredList{}
			gizmos.SetGroupVersionKind(gizmoKind.GroupVersion().WithKind("GizmoList"))
			return list(gizmos)
		},
	}
	running := make(chan error, 1)
	managerCtx, stop := context.WithCancel(ctx)
	go func() { running <- manager.Start(managerCtx) }()
	t.Cleanup(func() {
		stop()
		if err := <-running; err != nil {
			t.Errorf("manager: %v", err)
		}
	})
	if !manager.GetCache().WaitForCacheSync(ctx) {
		t.Fatalf("the manager's caches have not synced: %v", context.Cause(ctx))
	}
	return m
}

// settled is a condition for harness.Poll: the controller has written the status of every gizmo.
func (m *managing) settled(ctx context.Context, api *harness.API) (bool, error) {
	list, err := api.List(ctx, gizmosPath, "")
	if err != nil {
		return false, err
	}
	r := m.reconcilers[gizmosPath]
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range list.Items {
		if !r.done[o.Key()+"@"+o.Metadata.ResourceVersion] {
			return false, fmt.Errorf("the status of %s at %s has not been written or read", o.Key(), o.Metadata.ResourceVersion)
		}
	}
	return true, nil
}

// reconciler records the last observed state of each object. A gizmo's status has to equal the
// value in its spec.
type reconciler struct {
	client client.Client
	kind   client.Object

	mu       sync.Mutex
	versions map[string]string // resource versions by key, without deleted objects
	done     map[string]bool   // gizmos, as key@version, that were seen with the right status
}

func (r *reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	o := r.kind.DeepCopyObject().(client.Object)
	err := r.client.Get(ctx, request.NamespacedName, o)
	if apierrors.IsNotFound(err) {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.versions, request.String())
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	r.mu.Lock()
	r.versions[request.String()] = o.GetResourceVersion()
	r.mu.Unlock()
	gizmo, ok := o.(*unstructured.Unstructured)
	if !ok {
		return ctrl.Result{}, nil
	}
	want, _, _ := unstructured.NestedString(gizmo.Object, "spec", "want")
	if seen, _, _ := unstructured.NestedString(gizmo.Object, "status", "seen"); seen == want {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.done == nil {
			r.done = map[string]bool{}
		}
		r.done[request.String()+"@"+o.GetResourceVersion()] = true
		return ctrl.Result{}, nil
	}
	gizmo = gizmo.DeepCopy()
	if err := unstructured.SetNestedField(gizmo.Object, want, "status", "seen"); err != nil {
		return ctrl.Result{}, err
	}
	err = r.client.Status().Update(ctx, gizmo)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return ctrl.Result{}, nil // a conflicting change queues this object again
	}
	return ctrl.Result{}, err
}

// last returns the last observed state of each object.
func (r *reconciler) last() map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.versions)
}
