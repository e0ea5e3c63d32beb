package kubestorage

import (
	"context"
	"net/http"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// Probe finds out which storage answers a request: a GET, LIST or WATCH whose context
// carries it ends at the first storage of an engine that it reaches, which takes note
// of itself and reads nothing. The caller sends such a request through the handlers
// of an API server and throws the answer away. It is for one request.
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

// errProbed is what a storage answers a probe. Request metrics count it as a 404,
// which neither error rates (5xx and 429) nor latency objectives take for a failure
// of the server, and which a GET for a name that does not exist has anyway.
var errProbed = &apierrors.StatusError{ErrStatus: metav1.Status{
	Status:  metav1.StatusFailure,
	Code:    http.StatusNotFound,
	Reason:  metav1.StatusReasonNotFound,
	Message: "the storage has been found",
}}

// answerProbe returns an error if ctx is that of a probe, which has then been answered.
// s is nil for a storage that reads etcd, pred for a GET.
func answerProbe(ctx context.Context, s *Store, key string, pred *storage.SelectionPredicate) error {
	p, ok := ctx.Value(probeKey{}).(*Probe)
	if !ok {
		return nil
	}
	f := &Found{Store: s, Key: key}
	if pred != nil {
		f.IndexFields, f.IndexLabels = pred.IndexFields, pred.IndexLabels
	}
	p.found.CompareAndSwap(nil, f)
	return errProbed
}

// direct is a storage that reads etcd: it keeps probes from doing that.
type direct struct{ storage.Interface }

func (d direct) Get(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	if err := answerProbe(ctx, nil, key, nil); err != nil {
		return err
	}
	return d.Interface.Get(ctx, key, opts, out)
}

func (d direct) GetList(ctx context.Context, key string, opts storage.ListOptions, out runtime.Object) error {
	if err := answerProbe(ctx, nil, key, nil); err != nil {
		return err
	}
	return d.Interface.GetList(ctx, key, opts, out)
}

func (d direct) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	if err := answerProbe(ctx, nil, key, nil); err != nil {
		return nil, err
	}
	return d.Interface.Watch(ctx, key, opts)
}

// Lifetime returns a context that ends when the storage is destroyed: at the server's
// end, or when a custom resource gets another storage because its definition changed.
func (s *Store) Lifetime() context.Context { return s.ctx }
