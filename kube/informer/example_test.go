//go:build !apiserver_v0_38

package informer_test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/apis/example/install"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/kube/informer"
	"github.com/stratakube/strata/kube/kubestorage"
)

// An admission plugin, or another part of an API server on the engine, reads the server's own
// objects through an informer that makes no request and holds no second copy.
func ExampleNew() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	config, scheme, stop := newServerConfig() // of an API server with the resource pods, on an etcd
	defer stop()
	engine := kubestorage.New(kubestorage.Options{})
	defer engine.Close()
	config.RESTOptionsGetter = engine.RESTOptionsGetter(config.RESTOptionsGetter)

	// Readers get objects of the version v1, as from the API.
	toV1 := func(obj runtime.Object) (runtime.Object, error) {
		return scheme.ConvertToVersion(obj, examplev1.SchemeGroupVersion)
	}
	pods := informer.New(&examplev1.Pod{}, engine.Objects(example.Resource("pods"), toV1, false), 0, cache.Indexers{
		cache.NamespaceIndex: cache.MetaNamespaceIndexFunc,
		"node":               func(obj any) ([]string, error) { return []string{obj.(*examplev1.Pod).Spec.NodeName}, nil },
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		pods.RunWithContext(ctx) // waits until the storage of the resource is open
	}()
	defer func() { cancel(); <-done }()
	added := make(chan string, 1)
	_, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { added <- obj.(*examplev1.Pod).Name },
	})
	must(err)

	// The registry opens the storage, and a client creates a pod.
	store, destroy := newPodStorage(config)
	defer destroy()
	<-pods.HasSyncedChecker().Done()
	pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: example.PodSpec{NodeName: "node1"}}
	must(store.Create(ctx, "/pods/default/web", pod, nil, 0))

	fmt.Println("handler:", <-added)
	// The store is at least as new as the event. Its objects are shared: do not write to them.
	onNode, err := pods.GetIndexer().ByIndex("node", "node1")
	must(err)
	fmt.Println("on node1:", onNode[0].(*examplev1.Pod).Name)
	must(cache.ListAllByNamespace(pods.GetIndexer(), "default", labels.Everything(), func(obj any) {
		fmt.Println("in default:", obj.(*examplev1.Pod).Name)
	}))
	// Output:
	// handler: web
	// on node1: web
	// in default: web
}

// newServerConfig starts an etcd and returns the configuration of an API server on it.
func newServerConfig() (config *genericapiserver.RecommendedConfig, scheme *runtime.Scheme, stop func()) {
	dir, err := os.MkdirTemp("", "strata-example-")
	must(err)
	socket := filepath.Join(dir, "client.sock")
	etcd := embed.NewConfig()
	etcd.Dir, etcd.UnsafeNoFsync = filepath.Join(dir, "data"), true
	etcd.ListenPeerUrls = nil
	etcd.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	// there are no peers
	etcd.AdvertiseClientUrls = []url.URL{{Scheme: "unix", Host: "localhost:0"}}
	etcd.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	server, err := embed.StartEtcd(etcd)
	must(err)
	<-server.Server.ReadyNotify()

	scheme = runtime.NewScheme()
	install.Install(scheme)
	codecs := serializer.NewCodecFactory(scheme)
	options := genericoptions.NewEtcdOptions(storagebackend.NewDefaultConfig("/registry", codecs.LegacyCodec(examplev1.SchemeGroupVersion)))
	options.StorageConfig.Transport.ServerList = []string{"unix://" + socket}
	config = genericapiserver.NewRecommendedConfig(codecs)
	must(options.ApplyTo(&config.Config))
	return config, scheme, func() {
		server.Close()
		_ = os.RemoveAll(dir)
	}
}

// newPodStorage does what a registry does with the getter.
func newPodStorage(config *genericapiserver.RecommendedConfig) (storage.Interface, func()) {
	opts, err := config.RESTOptionsGetter.GetRESTOptions(example.Resource("pods"), &example.Pod{})
	must(err)
	pods, destroy, err := opts.Decorator(opts.StorageConfig, "/pods", nil,
		func() runtime.Object { return &example.Pod{} }, func() runtime.Object { return &example.PodList{} },
		storage.DefaultNamespaceScopedAttr, nil, nil)
	must(err)
	return pods, destroy
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
