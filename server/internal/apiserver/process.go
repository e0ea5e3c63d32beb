package apiserver

import (
	"fmt"
	"sync"

	genericapiserver "k8s.io/apiserver/pkg/server"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

// Process makes several servers of one process possible. Feature gates and logging are global in
// the packages of Kubernetes: the first server applies its flags to the process, and flags of later
// ones have no effect on them. Flags are parsed, and handlers built, for one server at a time,
// because upstream's code for both changes global variables. Servers then start and serve
// concurrently. The zero value is ready for use; nil is for the only server of a process.
type Process struct {
	mu      sync.Mutex            // held from the parsing of flags until the handlers are built
	applied bool                  // guarded by mu
	schemas map[string]apiSchemas // by Options.API; guarded by mu
}

// apiSchemas are the OpenAPI documents of the built-in API. They depend on nothing but the flags,
// and are not changed: definitions of custom resources are in the documents of another server of
// the chain. Making them takes 0.15 s, and encoding them as long again.
type apiSchemas struct {
	v2 *handler.OpenAPIService
	v3 *handler3.OpenAPIService
}

func (p *Process) lock() {
	if p != nil {
		p.mu.Lock()
	}
}

func (p *Process) unlock() {
	if p != nil {
		p.mu.Unlock()
	}
}

// first reports whether no server of the process has applied its settings yet. The lock is held.
func (p *Process) first() bool {
	if p == nil {
		return true
	}
	first := !p.applied
	p.applied = true
	return first
}

// omitSchemas makes the server of the built-in API make no schemas if another server with the same
// API has made them. The lock is held.
func (p *Process) omitSchemas(api string, config *app.Config) {
	if p == nil || p.schemas[api].v3 == nil {
		return
	}
	config.KubeAPIs.ControlPlane.Generic.SkipOpenAPIInstallation = true
}

// installSchemas serves the schemas that omitSchemas omitted. The lock is held.
func (p *Process) installSchemas(api string, chain *aggregatorapiserver.APIAggregator) error {
	if p == nil || p.schemas[api].v3 == nil {
		return nil
	}
	server, err := builtInServer(chain)
	if err != nil {
		return err
	}
	p.schemas[api].v2.RegisterOpenAPIVersionedService("/openapi/v2", server.Handler.NonGoRestfulMux)
	return p.schemas[api].v3.RegisterOpenAPIV3VersionedService("/openapi/v3", server.Handler.NonGoRestfulMux)
}

// keepSchemas keeps the schemas of the first server with an API. The server is prepared, and the
// lock is held.
func (p *Process) keepSchemas(api string, chain *aggregatorapiserver.APIAggregator) error {
	if p == nil || p.schemas[api].v3 != nil {
		return nil
	}
	server, err := builtInServer(chain)
	if err != nil {
		return err
	}
	if p.schemas == nil {
		p.schemas = map[string]apiSchemas{}
	}
	p.schemas[api] = apiSchemas{v2: server.OpenAPIVersionedService, v3: server.OpenAPIV3VersionedService}
	return nil
}

// builtInServer returns the server of the built-in API, to which the aggregator delegates.
func builtInServer(chain *aggregatorapiserver.APIAggregator) (*genericapiserver.GenericAPIServer, error) {
	server, ok := chain.GenericAPIServer.NextDelegate().(*genericapiserver.GenericAPIServer)
	if !ok {
		return nil, fmt.Errorf("the aggregator delegates to a %T", chain.GenericAPIServer.NextDelegate())
	}
	return server, nil
}
