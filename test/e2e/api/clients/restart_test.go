package clients

import (
	"context"
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"

	"github.com/stratakube/strata/test/harness"
)

// TestInformers_ServerRestart_ReceiveEveryWrite restarts an API server while another one writes to
// the same etcd. Informers of the first receive all these writes, and relist at most once: a server
// that has just started need not have earlier history. The informers of the server itself run
// without a connection, before and after the restart.
func TestInformers_ServerRestart_ReceiveEveryWrite(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	var own ownInformers
	watched, writer := env.StartAPIServer(etcd, own.flags(env)...), env.StartAPIServer(etcd)
	for _, s := range []*harness.Server{watched, writer} {
		harness.Check(t, s.Await(ctx, "/readyz"))
	}
	api := writer.API()
	createGizmos(t, ctx, api)
	const count = 200
	write := func(from, to int) {
		t.Helper()
		harness.Check(t, harness.InParallel(ctx, to-from, func(ctx context.Context, i int) error {
			i += from
			if _, err := api.Create(ctx, "/api/v1/namespaces/default/configmaps", object{"metadata": object{"name": name(i)}}); err != nil {
				return err
			}
			_, err := api.Create(ctx, "/apis/"+gizmoGroup+"/v1/namespaces/default/gizmos", object{
				"apiVersion": gizmoGroup + "/v1", "kind": "Gizmo", "metadata": object{"name": name(i)}})
			if err != nil || i%2 == 0 {
				return err
			}
			return api.Delete(ctx, "/api/v1/namespaces/default/configmaps/"+name(i))
		}))
	}
	write(0, count)

	var typedRequests, dynamicRequests requests
	typed, err := kubernetes.NewForConfig(typedRequests.config(watched.Config))
	harness.Check(t, err)
	untyped, err := dynamic.NewForConfig(dynamicRequests.config(watched.Config))
	harness.Check(t, err)
	factory := informers.NewSharedInformerFactory(typed, 0)
	dynamicFactory := dynamicinformer.NewDynamicSharedInformerFactory(untyped, 0)
	maps := factory.Core().V1().ConfigMaps().Informer()
	gizmos := dynamicFactory.ForResource(gizmoResource).Informer()
	factory.Start(ctx.Done())
	dynamicFactory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	dynamicFactory.WaitForCacheSync(ctx.Done())
	compare := func() {
		t.Helper()
		for path, stored := range map[string]func() map[string]string{
			mapsPath:   func() map[string]string { return versions(maps.GetStore().List()) },
			gizmosPath: func() map[string]string { return versions(gizmos.GetStore().List()) },
		} {
			harness.Check(t, awaitState(ctx, "informer of "+path, stored, state(t, ctx, api, path)))
		}
	}
	compare()
	write(count, count+20) // client-go relists after a watch of less than a second without events
	compare()

	own.stop(t, ctx, watched)
	write(count+20, 2*count)
	watched.Restart()
	write(2*count, 2*count+20)
	compare()

	typedRequests.expectAtMost(t, 2, "the typed informer", mapsPath)
	dynamicRequests.expectAtMost(t, 2, "the dynamic informer", gizmosPath)
	own.stop(t, ctx, watched)
}

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
	return harness.Poll(ctx, func(context.Context) (bool, error) {
		got := current()
		for key, version := range want {
			if got[key] != version {
				return false, fmt.Errorf("%s has %d objects, want %d; %s is at %q, want %s", who, len(got), len(want), key, got[key], version)
			}
		}
		if len(got) != len(want) {
			return false, fmt.Errorf("%s has %d objects, want %d", who, len(got), len(want))
		}
		return true, nil
	})
}

// versions returns the resource versions of objects by key.
func versions(objects []any) map[string]string {
	versions := map[string]string{}
	for _, o := range objects {
		accessor, err := meta.Accessor(o)
		if err != nil {
			panic(err) // informers contain objects only
		}
		versions[accessor.GetNamespace()+"/"+accessor.GetName()] = accessor.GetResourceVersion()
	}
	return versions
}
