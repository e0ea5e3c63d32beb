package readpath

import (
	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/stratakube/strata/kube/kubestorage"
)

// Attach puts an API server on a new engine: c.RESTOptionsGetter returns storages of the engine,
// reads of the kinds are answered with its bytes (Server.Mount), and on shutdown watches end in
// order (DrainOnShutdown). It is called once, when c is configured, and before c is completed and
// before a storage is created. The caller closes the engine when the server has stopped.
//
// A server that needs other settings of the read path, or whose storages come from several getters,
// calls the functions itself.
func Attach(c *genericapiserver.Config, options kubestorage.Options, kinds ...Kinds) *kubestorage.Engine {
	engine := kubestorage.New(options)
	c.RESTOptionsGetter = engine.RESTOptionsGetter(c.RESTOptionsGetter)
	New(Config{Resolver: NewResolver(ResolverConfig{Engine: engine, BuiltIn: kinds})}).Mount(c)
	DrainOnShutdown(c, engine, DefaultProgressTimeout)
	return engine
}
