package apiserver

import (
	"context"
	"fmt"
	"net"
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
// concurrently. The zero value is ready for use.
type Process struct {
	mu      sync.Mutex            // held from the parsing of flags until the handlers are built
	applied bool                  // guarded by mu
	schemas map[string]apiSchemas // by Colocated.API; guarded by mu
}

// Colocated makes a server one of several in a process. The methods of nil are those of the only
// server.
type Colocated struct {
	Process *Process // the same for all servers
	// API identifies the API that the flags enable. Servers with the same value have the same
	// flags, except for addresses, files and the prefix in etcd, and share what depends on the
	// others.
	API string
	// Listener accepts the connections of the server, which closes it.
	Listener net.Listener
	// Built is called once when the handlers are built.
	Built func()
	// Serve delays the start of the server, whose handlers are built meanwhile, until it is closed.
	Serve <-chan struct{}

	unlock func() // Process.mu, if it is locked
}

// apiSchemas are the OpenAPI documents of the built-in API. They depend on nothing but the flags,
// and are not changed: definitions of custom resources are in the documents of another server of
// the chain. Making them takes 0.15 s, and encoding them as long again.
type apiSchemas struct {
	v2 *handler.OpenAPIService
	v3 *handler3.OpenAPIService
}

// begin takes the turn of the server to parse flags and build handlers. end gives it back, unless
// built did.
func (c *Colocated) begin() (end func()) {
	if c == nil {
		return func() {}
	}
	c.Process.mu.Lock()
	c.unlock = sync.OnceFunc(c.Process.mu.Unlock)
	return c.unlock
}

// built ends the turn, and returns when the server may start. It reports false if ctx ends before.
func (c *Colocated) built(ctx context.Context) bool {
	if c == nil {
		return true
	}
	c.unlock()
	c.Built()
	select {
	case <-c.Serve:
		return true
	case <-ctx.Done():
		return false
	}
}

// first reports whether no server of the process has applied its settings yet. The lock is held.
func (c *Colocated) first() bool {
	if c == nil {
		return true
	}
	first := !c.Process.applied
	c.Process.applied = true
	return first
}

// omitSchemas makes the server of the built-in API make no schemas if another server with the same
// API has made them. The lock is held.
func (c *Colocated) omitSchemas(config *app.Config) {
	if c == nil || c.Process.schemas[c.API].v3 == nil {
		return
	}
	config.KubeAPIs.ControlPlane.Generic.SkipOpenAPIInstallation = true
}

// installSchemas serves the schemas that omitSchemas omitted. The lock is held.
func (c *Colocated) installSchemas(chain *aggregatorapiserver.APIAggregator) error {
	if c == nil || c.Process.schemas[c.API].v3 == nil {
		return nil
	}
	server, err := builtInServer(chain)
	if err != nil {
		return err
	}
	c.Process.schemas[c.API].v2.RegisterOpenAPIVersionedService("/openapi/v2", server.Handler.NonGoRestfulMux)
	return c.Process.schemas[c.API].v3.RegisterOpenAPIV3VersionedService("/openapi/v3", server.Handler.NonGoRestfulMux)
}

// keepSchemas keeps the schemas of the first server with an API. The server is prepared, and the
// lock is held.
func (c *Colocated) keepSchemas(chain *aggregatorapiserver.APIAggregator) error {
	if c == nil || c.Process.schemas[c.API].v3 != nil {
		return nil
	}
	server, err := builtInServer(chain)
	if err != nil {
		return err
	}
	if c.Process.schemas == nil {
		c.Process.schemas = map[string]apiSchemas{}
	}
	c.Process.schemas[c.API] = apiSchemas{v2: server.OpenAPIVersionedService, v3: server.OpenAPIV3VersionedService}
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
