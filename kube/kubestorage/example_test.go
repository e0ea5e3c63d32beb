package kubestorage_test

import (
	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/stratakube/strata/kube/kubestorage"
)

// Serve every resource of an API server from memory: the engine wraps the getter by which the registries make their storages.
// Writes, and reads that memory cannot answer, go to etcd as before.
func ExampleEngine_RESTOptionsGetter() {
	var config genericapiserver.RecommendedConfig // with the options of the server and of its etcd applied

	engine := kubestorage.New(kubestorage.Options{})
	defer engine.Close()
	config.RESTOptionsGetter = engine.RESTOptionsGetter(config.RESTOptionsGetter)
}
