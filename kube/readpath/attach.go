package readpath

import (
	"net/http"
	"time"

	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/stratakube/strata/kube/internal/handlerchain"
	"github.com/stratakube/strata/kube/internal/slowclient"
	"github.com/stratakube/strata/kube/kubestorage"
)

// Attach puts an API server on a new engine: c.RESTOptionsGetter returns storages of the engine,
// reads of the kinds are answered with its bytes (Server.Mount), and on shutdown watches end in
// order (DrainOnShutdown). It is called once, when c is configured, and before c is completed and
// before a storage is created. The caller closes the engine when the server has stopped.
//
// A server that needs other settings of the read path, that offers the gate ByteReadPath, or whose
// storages come from several getters, calls the functions itself.
func Attach(c *genericapiserver.Config, options kubestorage.Options, kinds ...Kinds) *kubestorage.Engine {
	engine := kubestorage.New(options)
	c.RESTOptionsGetter = engine.RESTOptionsGetter(c.RESTOptionsGetter)
	New(Options{Resolver: NewResolver(ResolverOptions{Engine: engine, BuiltIn: kinds})}).Mount(c)
	DrainOnShutdown(c, engine, DefaultProgressTimeout)
	return engine
}

// Mount installs s in front of the handlers of the API server that c configures, with the fast
// chain for reads (handlerchain.New). It wraps c.BuildHandlerChainFunc and must be called before c
// is completed.
func (s *Server) Mount(c *genericapiserver.Config) {
	full := c.BuildHandlerChainFunc
	c.BuildHandlerChainFunc = func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		if s.minRequestTimeout == 0 {
			s.minRequestTimeout = time.Duration(c.MinRequestTimeout) * time.Second
		}
		s.levels, s.conns = handlerchain.WatchLevels(c), slowclient.TrackServed(c)
		return handlerchain.New(s.boundDecoded(apiHandler), c, handlerchain.Options{Full: full, Mount: s.Handler, Serves: s.Serves, Cost: s.cost})
	}
}
