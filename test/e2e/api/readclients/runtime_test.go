package readclients

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/stratakube/strata/test/harness"
)

var gizmoKind = schema.GroupVersionKind{Group: gizmoGroup, Version: "v1", Kind: "Gizmo"}

// useControllerRuntime runs a manager with two controllers: one writes the status of custom
// resources and a ConfigMap for each, the other reconciles the ConfigMaps, with a metadata-only
// cache.
func useControllerRuntime(t *testing.T, ctx context.Context) {
	namespace := newClusterNamespace(t, ctx)
	manager, err := ctrl.NewManager(cluster.Config, ctrl.Options{
		Client:  client.Options{Cache: &client.CacheOptions{Unstructured: true}},
		Cache:   cache.Options{DefaultNamespaces: map[string]cache.Config{namespace: {}}},
		Metrics: metricsserver.Options{BindAddress: "0"},
	})
	harness.Check(t, err)
	maker := &gizmoReconciler{client: manager.GetClient()}
	harness.Check(t, ctrl.NewControllerManagedBy(manager).Named("gizmos").For(newGizmo()).Owns(&corev1.ConfigMap{}, builder.OnlyMetadata).Complete(maker))
	seen := &mapReconciler{client: manager.GetClient(), seen: map[string]string{}}
	harness.Check(t, ctrl.NewControllerManagedBy(manager).Named("maps").For(&corev1.ConfigMap{}).WithOptions(controller.Options{MaxConcurrentReconciles: 2}).Complete(seen))

	running := make(chan error, 1)
	managerCtx, stop := context.WithCancel(ctx)
	go func() { running <- manager.Start(managerCtx) }()
	defer func() {
		stop()
		if err := <-running; err != nil {
			t.Errorf("manager: %v", err)
		}
	}()
	if !manager.GetCache().WaitForCacheSync(ctx) {
		t.Fatalf("the caches have not synced: %v", context.Cause(ctx))
	}

	const count = 20
	for i := range count {
		o := newGizmo()
		o.SetName(fmt.Sprintf("gizmo-%d", i))
		o.SetNamespace(namespace)
		harness.Check(t, unstructured.SetNestedField(o.Object, fmt.Sprint(i), "spec", "want"))
		harness.Check(t, manager.GetClient().Create(ctx, o))
	}
	reader := manager.GetAPIReader() // reads from the server, not from the cache
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(gizmoKind.GroupVersion().WithKind("GizmoList"))
		if err := reader.List(ctx, list, client.InNamespace(namespace), client.Limit(2*count)); err != nil {
			return false, err
		}
		done := 0
		for _, o := range list.Items {
			want, _, _ := unstructured.NestedString(o.Object, "spec", "want")
			if got, _, _ := unstructured.NestedString(o.Object, "status", "seen"); got == want && seen.has(namespace+"/"+o.GetName(), want) {
				done++
			}
		}
		return done == count, fmt.Errorf("%d of %d custom resources have the right status and a reconciled ConfigMap", done, count)
	}))
	partial := &metav1.PartialObjectMetadata{}
	partial.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
	harness.Check(t, reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "gizmo-0"}, partial))
	err = reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "missing"}, &corev1.ConfigMap{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("get a missing object: %v, want NotFound", err)
	}
	// A deletion on the server removes the object from the cache.
	harness.Check(t, cluster.API().Delete(ctx, maps(namespace)+"/gizmo-0"))
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := cluster.API().Do(ctx, http.MethodGet, maps(namespace)+"/gizmo-0", "", nil)
		// its owner's controller has created it again
		return err == nil && r.Code == http.StatusOK, err
	}))
}

func newGizmo() *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(gizmoKind)
	return o
}

// gizmoReconciler creates a ConfigMap for each custom resource and records it in the status.
type gizmoReconciler struct{ client client.Client }

func (r *gizmoReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	o := newGizmo()
	if err := r.client.Get(ctx, request.NamespacedName, o); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	want, _, _ := unstructured.NestedString(o.Object, "spec", "want")
	owner := *metav1.NewControllerRef(o, gizmoKind)
	made := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: o.GetName(), Namespace: o.GetNamespace(), OwnerReferences: []metav1.OwnerReference{owner}},
		Data:       map[string]string{"want": want},
	}
	if err := r.client.Create(ctx, made); err != nil && !apierrors.IsAlreadyExists(err) {
		return ctrl.Result{}, err
	}
	if seen, _, _ := unstructured.NestedString(o.Object, "status", "seen"); seen == want {
		return ctrl.Result{}, nil
	}
	o = o.DeepCopy()
	if err := unstructured.SetNestedField(o.Object, want, "status", "seen"); err != nil {
		return ctrl.Result{}, err
	}
	err := r.client.Status().Update(ctx, o)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return ctrl.Result{}, nil // a conflicting change queues this object again
	}
	return ctrl.Result{}, err
}

// mapReconciler records the content of each ConfigMap.
type mapReconciler struct {
	client client.Client

	mu   sync.Mutex
	seen map[string]string
}

func (r *mapReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	o := &corev1.ConfigMap{}
	if err := r.client.Get(ctx, request.NamespacedName, o); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen[request.String()] = o.Data["want"]
	return ctrl.Result{}, nil
}

func (r *mapReconciler) has(key, want string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	got, ok := r.seen[key]
	return ok && got == want
}
