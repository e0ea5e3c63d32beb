package apiserver

import (
	"fmt"

	apiextensionsfeatures "k8s.io/apiextensions-apiserver/pkg/features"
	genericapiserver "k8s.io/apiserver/pkg/server"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"

	"github.com/stratakube/strata/server/internal/openapi"
)

// serveDocuments serves the OpenAPI v3 documents of custom resources in place of upstream's
// controller of them, with the engine strata. It must be called after PrepareRun, which installs
// upstream's handlers, and before the hooks of the chain start.
func (a *Attachment) serveDocuments(chain *aggregatorapiserver.APIAggregator) error {
	if a.follow == nil {
		return nil
	}
	server, err := extensionsServer(chain)
	if err != nil {
		return err
	}
	builtIn := server.OpenAPIV3VersionedService
	if builtIn == nil { // the server has no documents
		return nil
	}
	// the hook start-apiextensions-controllers then starts no controller for it
	server.OpenAPIV3VersionedService = nil
	documents := openapi.NewDocuments(utilfeature.DefaultFeatureGate.Enabled(apiextensionsfeatures.CustomResourceFieldSelectors))
	if err := documents.Follow(a.follow.definitionInformer); err != nil {
		return err
	}
	return documents.Install(server.Handler.NonGoRestfulMux, builtIn)
}

// extensionsServer returns the server of definitions and custom resources, to which the server of
// the built-in API delegates.
func extensionsServer(chain *aggregatorapiserver.APIAggregator) (*genericapiserver.GenericAPIServer, error) {
	builtIn, err := builtInServer(chain)
	if err != nil {
		return nil, err
	}
	server, ok := builtIn.NextDelegate().(*genericapiserver.GenericAPIServer)
	if !ok {
		return nil, fmt.Errorf("the server of the built-in API delegates to a %T", builtIn.NextDelegate())
	}
	return server, nil
}
