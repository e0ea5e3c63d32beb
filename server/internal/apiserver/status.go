package apiserver

import (
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
	"github.com/stratakube/strata/kube/status"
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
