package replica

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	aggregatoropenapi "k8s.io/kube-aggregator/pkg/generated/openapi"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

// hooks are all post-start hooks of kube-apiserver and of this program, with the decision for a
// replica: true for hooks that reads need, and that write nothing. A hook that is not in the table
// ends the start (checkHooks), so that a new release of Kubernetes cannot add a writer unnoticed.
var hooks = map[string]bool{
	// Informers, which list and watch.
	"generic-apiserver-start-informers": true, // of RBAC, priority and fairness, tokens
	"start-kube-aggregator-informers":   true, // of APIServices
	"start-apiextensions-informers":     true, // of definitions
	"crd-informer-synced":               true, // ends the 503 for unknown paths
	// routes API groups of APIServices to the chain; keeps its state in memory
	"apiservice-registration-controller": true,

	// Work in memory.
	// reads FlowSchemas; its writes of their status are answered with 404, see refuseOwnWrite
	"priority-and-fairness-config-consumer": true,
	"priority-and-fairness-filter":          true, // high-water marks
	// the same without priority and fairness
	"max-in-flight-filter":              true,
	"storage-object-count-tracker-hook": true,
	// waits until the storages are loaded
	"storage-readiness":                                 true,
	"strata-drain-on-shutdown":                          true,
	"aggregator-reload-proxy-client-cert":               true, // reads files
	"start-encryption-provider-config-automatic-reload": true, // reads files

	// Writers of objects that exist once for a cluster: the primaries make them.
	// Service and endpoints of the API servers
	"bootstrap-controller":                     false,
	"start-kubernetes-service-cidr-controller": false, // the default ServiceCIDR
	"start-service-ip-repair-controllers":      false, // allocations of Services
	"start-system-namespaces-controller":       false, // system namespaces
	"start-legacy-token-tracking-controller":   false, // a ConfigMap
	// a ConfigMap; client CAs are reloaded by the serving certificates' controller too
	"start-cluster-authentication-info-controller": false,
	"rbac/bootstrap-roles":                         false, // the bootstrap policy
	// the system's priority classes
	"scheduling/bootstrap-system-priority-classes": false,
	// the suggested FlowSchemas
	"priority-and-fairness-config-producer": false,
	// APIServices of built-in groups and definitions
	"kube-apiserver-autoregistration": false,
	// conditions of APIServices
	"apiservice-status-local-available-controller":  false,
	"apiservice-status-remote-available-controller": false,
	// conditions and finalizers of definitions; discovery, which is the primaries'
	"start-apiextensions-controllers":                             false,
	"start-kube-apiserver-coordinated-leader-election-controller": false, // leases

	// Writers of the identity of a server that writes.
	"start-kube-apiserver-identity-lease-controller":        false,
	"start-kube-apiserver-identity-lease-garbage-collector": false,
	"built-in-resources-storage-version-updater":            false,
	"peer-endpoint-reconciler-controller":                   false,
	// requests to peers: a replica has primaries in place of peers
	"mixed-version-proxy-handler": false,
	"local-discovery-cache-sync":  false,
	"peer-discovery-workers":      false,

	// Documents that the primaries answer, and admission, which a replica has not.
	"apiservice-discovery-controller":       false,
	"apiservice-openapi-controller":         false,
	"apiservice-openapiv3-controller":       false,
	"start-apiserver-admission-initializer": false,
}

// disableHooks disables the hooks of the chain that are not for replicas. It is called before the
// servers of the chain are made.
func disableHooks(config *app.Config) {
	for _, c := range genericConfigs(config) {
		disabled := maps.Clone(c.DisabledPostStartHooks)
		for name, runs := range hooks {
			if !runs {
				disabled.Insert(name)
			}
		}
		c.DisabledPostStartHooks = disabled
	}
}

// checkHooks returns an error if the server has a hook that no decision of hooks allows.
func checkHooks(server *genericapiserver.GenericAPIServer) error {
	var unknown []string
	for name := range server.PostStartHooks() {
		if !hooks[name] {
			unknown = append(unknown, name)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	slices.Sort(unknown)
	return fmt.Errorf("post-start hooks that a replica must not run, or that this version does not know: %s; use the version of Strata that was made for this version of Kubernetes",
		strings.Join(unknown, ", "))
}

// genericConfigs returns the configurations of the three servers of the chain.
func genericConfigs(config *app.Config) []*genericapiserver.Config {
	return []*genericapiserver.Config{
		config.KubeAPIs.ControlPlane.Generic,
		&config.ApiExtensions.GenericConfig.Config,
		&config.Aggregator.GenericConfig.Config,
	}
}

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
