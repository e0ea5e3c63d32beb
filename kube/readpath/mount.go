package readpath

import (
	"net/http"
	"time"

	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/stratakube/strata/kube/internal/handlerchain"
	"github.com/stratakube/strata/kube/internal/slowclient"
)

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
