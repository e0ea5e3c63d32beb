package apiserver

import (
	"net/http"

	"k8s.io/apiserver/pkg/authentication/request/union"
	genericapiserver "k8s.io/apiserver/pkg/server"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
	"github.com/stratakube/strata/kube/status"
	"github.com/stratakube/strata/server/internal/console"
	"github.com/stratakube/strata/server/internal/version"
)

// mountStatus installs the status endpoint in the outermost server, behind authentication and
// authorization.
func mountStatus(server *aggregatorapiserver.APIAggregator, engine *kubestorage.Engine) {
	version := version.Get().Strata
	server.GenericAPIServer.Handler.NonGoRestfulMux.UnlistedHandle(status.Path, status.Handler(func() status.Status {
		s := engine.Status()
		s.Version = version
		s.Reads.Memory += readpath.Gets()
		return s
	}))
}

// attachSessions makes the outermost server accept sessions of the console. The handlers of config
// must be built by the final chain already, except for the outermost one.
func attachSessions(config *genericapiserver.Config, sessions *console.Sessions) {
	config.Authentication.Authenticator = union.New(sessions, config.Authentication.Authenticator)
	config.Authorization.Authorizer = console.ReadOnly(config.Authorization.Authorizer)
	build := config.BuildHandlerChainFunc
	config.BuildHandlerChainFunc = func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		return sessions.Outermost(build(apiHandler, c))
	}
}

// mountConsole installs the console in the outermost server, behind authentication and
// authorization. sessions may be nil.
func mountConsole(server *aggregatorapiserver.APIAggregator, sessions *console.Sessions) {
	mux, page := server.GenericAPIServer.Handler.NonGoRestfulMux, console.Handler()
	mux.UnlistedHandle(console.Path, page)
	mux.UnlistedHandlePrefix(console.Path+"/", page)
	if sessions != nil {
		mux.UnlistedHandle(console.LinkPath, sessions.LinkHandler())
	}
}
