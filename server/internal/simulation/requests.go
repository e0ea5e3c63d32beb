package simulation

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"

	"k8s.io/client-go/rest"
)

var errStopped = errors.New("the simulation has stopped")

// requests is the gate that all requests of the simulation pass. After stop has returned, none is
// in flight and none can follow, whichever goroutines are left.
type requests struct {
	ctx    context.Context // of all requests
	cancel context.CancelFunc

	mu struct { // leaf
		sync.Mutex
		stopped  bool
		inFlight sync.WaitGroup // Add is called with the mutex, while stopped is false
	}
}

// newRequests returns a gate that is open until ctx is cancelled or stop is called.
func newRequests(ctx context.Context) *requests {
	r := &requests{}
	r.ctx, r.cancel = context.WithCancel(ctx)
	return r
}

// through returns a copy of config whose requests pass the gate, without client-go's rate limit:
// the API server, in the same process, limits requests itself.
func (r *requests) through(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.QPS = -1
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &gated{r, next} })
	return config
}

// stop cancels all requests and returns when every one has ended. A second call has no effect.
func (r *requests) stop() {
	r.mu.Lock()
	r.mu.stopped = true
	r.mu.Unlock()
	r.cancel()
	r.mu.inFlight.Wait()
}

// enter reports whether a request may begin. If so, the caller has to call r.mu.inFlight.Done.
func (r *requests) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.stopped || r.ctx.Err() != nil {
		return false
	}
	r.mu.inFlight.Add(1)
	return true
}

// gated is a transport whose requests, with the bodies of their responses, end with the gate.
type gated struct {
	*requests
	next http.RoundTripper
}

func (g *gated) RoundTrip(request *http.Request) (*http.Response, error) {
	if !g.enter() {
		return nil, errStopped
	}
	defer g.mu.inFlight.Done()
	ctx, cancel := context.WithCancel(request.Context())
	unlink := context.AfterFunc(g.ctx, cancel)
	end := func() {
		unlink()
		cancel()
	}
	response, err := g.next.RoundTrip(request.WithContext(ctx))
	if err != nil {
		end()
		return nil, err
	}
	response.Body = &gatedBody{response.Body, end}
	return response, nil
}

// gatedBody is the body of a response, which ends with the gate.
type gatedBody struct {
	io.ReadCloser
	end func()
}

func (b *gatedBody) Close() error {
	b.end()
	return b.ReadCloser.Close()
}
