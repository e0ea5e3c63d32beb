package replica

import (
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	aggregatoropenapi "k8s.io/kube-aggregator/pkg/generated/openapi"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

// omitDocuments makes the chain build no OpenAPI documents, which the primaries answer, and no
// schemas of built-in resources, which server-side apply needs. Upstream requires a configuration
// for the latter: this one covers no path. The aggregator builds a document of its own group
// regardless; it gets the definitions of that group only.
func omitDocuments(config *app.Config) {
	for _, c := range genericConfigs(config) {
		c.SkipOpenAPIInstallation = true
		c.OpenAPIConfig = nil
		c.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(noDefinitions, openapinamer.NewDefinitionNamer())
		c.OpenAPIV3Config.IgnorePrefixes = []string{"/api", "/apis"}
	}
	aggregator := genericapiserver.DefaultOpenAPIV3Config(aggregatoropenapi.GetOpenAPIDefinitions, openapinamer.NewDefinitionNamer(aggregatorscheme.Scheme))
	config.Aggregator.GenericConfig.OpenAPIV3Config = aggregator
}

// noDefinitions are the definitions of no kind.
func noDefinitions(common.ReferenceCallback) map[string]common.OpenAPIDefinition { return nil }
