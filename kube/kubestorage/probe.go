package kubestorage

import (
	"context"
	"runtime"
	"sync/atomic"

	"k8s.io/apiserver/pkg/storage"
)

// Probe finds out which storage answers a request: a GET, LIST or WATCH whose context
// carries it ends at the first storage of an engine that it reaches, which takes note
// of itself and reads nothing. It is for one request.
//
// The caller sends such a request through the handlers of an API server, on a
// goroutine of its own: what ends is this goroutine (runtime.Goexit). Upstream's
// routes count a request when its handler returns; that of a probe, which no client
// has sent, does not. Deferred functions run.
type Probe struct{ found atomic.Pointer[Found] }

// Found is what a request has reached.
type Found struct {
	// Store is nil if the storage does not answer from memory.
	Store *Store
	// Key is what it was asked for, in the form of storage.Interface.
	Key string
	// IndexFields and IndexLabels are those that the registry declares as indexed, for
	// LIST and WATCH (storage.SelectionPredicate).
	IndexFields, IndexLabels []string
}

type probeKey struct{}

// WithProbe returns a context for the request, and what will know what it has reached.
func WithProbe(ctx context.Context) (context.Context, *Probe) {
	p := &Probe{}
	return context.WithValue(ctx, probeKey{}, p), p
}

// Found returns what the request has reached: nothing if it was answered before it
// came to a storage.
func (p *Probe) Found() Found {
	if f := p.found.Load(); f != nil {
		return *f
	}
	return Found{}
}

// endProbe does not return if ctx is that of a probe. s is nil for a storage that
// reads etcd, pred for a GET.
func endProbe(ctx context.Context, s *Store, key string, pred *storage.SelectionPredicate) {
	p, ok := ctx.Value(probeKey{}).(*Probe)
	if !ok {
		return
	}
	f := &Found{Store: s, Key: key}
	if pred != nil {
		f.IndexFields, f.IndexLabels = pred.IndexFields, pred.IndexLabels
	}
	p.found.CompareAndSwap(nil, f)
	runtime.Goexit()
}

// Lifetime returns a context that ends when the storage is destroyed: at the server's
// end, or when a custom resource gets another storage because its definition changed.
func (s *Store) Lifetime() context.Context { return s.ctx }
