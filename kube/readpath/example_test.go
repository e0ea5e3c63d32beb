package readpath_test

import (
	"k8s.io/apimachinery/pkg/runtime"
	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
)

// Answer reads with the cached bytes of the engine, in front of the handlers of an API server. kube/examples/apiserver is a whole
// server.
func ExampleServer_Mount() {
	var (
		config genericapiserver.RecommendedConfig // with the options of the server and of its etcd applied
		scheme *runtime.Scheme                    // of the API group
		group  genericapiserver.APIGroupInfo
	)
	engine := kubestorage.New(kubestorage.Options{})
	defer engine.Close()
	config.RESTOptionsGetter = engine.RESTOptionsGetter(config.RESTOptionsGetter)

	readpath.New(readpath.Config{
		Resolver: readpath.NewResolver(readpath.ResolverConfig{
			Engine:  engine,
			BuiltIn: []readpath.Kinds{{Scheme: scheme, Serializer: group.NegotiatedSerializer}},
		}),
	}).Mount(&config.Config)
	// On shutdown, watches receive the events that are due and a last bookmark before they end.
	readpath.DrainOnShutdown(&config.Config, engine, readpath.DefaultProgressTimeout)
}
