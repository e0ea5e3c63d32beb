//go:build !apiserver_v0_38

package kubestorage_test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/apis/example/install"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/registry/generic"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/kube/kubestorage"
)

// Serve every resource of an API server from memory: the engine wraps the getter by which the
// registries make their storages. Writes, and reads that memory cannot answer, go to etcd as
// before.
func ExampleEngine_RESTOptionsGetter() {
	config, stop := newServerConfig() // with the options of an etcd applied
	defer stop()

	engine := kubestorage.New(kubestorage.Options{})
	defer engine.Close()
	config.RESTOptionsGetter = engine.RESTOptionsGetter(config.RESTOptionsGetter)

	// The registry of each resource makes its storage from the getter, which needs no change.
	pods, destroy := newPodStorage(config.RESTOptionsGetter)
	defer destroy()
	_, onEngine := pods.(*kubestorage.Store)
	fmt.Println("storage of the engine:", onEngine)

	ctx := context.Background()
	pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
	must(pods.Create(ctx, "/pods/default/web", pod, nil, 0))
	list := &example.PodList{}
	must(pods.GetList(ctx, "/pods/", storage.ListOptions{Recursive: true, Predicate: storage.Everything}, list))
	fmt.Println("pods:", len(list.Items), list.Items[0].Name)
	// Output:
	// storage of the engine: true
	// pods: 1 web
}

// newServerConfig starts an etcd and returns the configuration of an API server on it.
func newServerConfig() (config *genericapiserver.RecommendedConfig, stop func()) {
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

	scheme := runtime.NewScheme()
	install.Install(scheme)
	codecs := serializer.NewCodecFactory(scheme)
	options := genericoptions.NewEtcdOptions(storagebackend.NewDefaultConfig("/registry", codecs.LegacyCodec(examplev1.SchemeGroupVersion)))
	options.StorageConfig.Transport.ServerList = []string{"unix://" + socket}
	config = genericapiserver.NewRecommendedConfig(codecs)
	must(options.ApplyTo(&config.Config))
	return config, func() {
		server.Close()
		_ = os.RemoveAll(dir)
	}
}

// newPodStorage does what a registry does with the getter.
func newPodStorage(getter generic.RESTOptionsGetter) (storage.Interface, func()) {
	opts, err := getter.GetRESTOptions(example.Resource("pods"), &example.Pod{})
	must(err)
	pods, destroy, err := opts.Decorator(opts.StorageConfig, "/pods",
		func(obj runtime.Object) (string, error) {
			pod := obj.(*example.Pod)
			return "/pods/" + pod.Namespace + "/" + pod.Name, nil
		},
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
