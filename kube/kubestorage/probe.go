package kubestorage

import (
	"context"
	"runtime"
	"sync/atomic"

	"k8s.io/apiserver/pkg/storage"
)

// Probe finds the storage that answers a request. A GET, LIST or WATCH whose context carries the
// probe ends at the first storage of an engine that it reaches; the storage records itself in the
// probe and reads no data. A probe is for one request.
//
// The caller sends such a request through the handlers of an API server, on a separate goroutine,
// because the storage ends that goroutine (runtime.Goexit). Upstream's routes count a request when
// its handler returns, so a probe, which is not a client's request, is not counted. Deferred
// functions run.
type Probe struct{ found atomic.Pointer[Found] }

// Found is the storage that a probe reached.
type Found struct {
	// Store is nil if the storage does not answer from memory.
	Store *Store
	// Key is the requested key, in the form of storage.Interface.
	Key string
	// IndexFields and IndexLabels are those that the registry declares as indexed, for LIST and
	// WATCH (storage.SelectionPredicate).
	IndexFields, IndexLabels []string
}

type probeKey struct{}

// WithProbe returns a context for the request, and the probe that receives the result.
func WithProbe(ctx context.Context) (context.Context, *Probe) {
	p := &Probe{}
	return context.WithValue(ctx, probeKey{}, p), p
}

// Found returns the storage that the request reached, or the zero value if the request was answered
// before it reached one.
func (p *Probe) Found() Found {
	if f := p.found.Load(); f != nil {
		return *f
	}
	return Found{}
}

// endProbe does not return if ctx is that of a probe. s is nil for a storage that reads from etcd,
// pred for a GET.
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

// Lifetime returns a context that ends when the storage is destroyed: at the server's end, or when
// a custom resource gets another storage because its definition changed.
func (s *Store) Lifetime() context.Context { return s.ctx }
