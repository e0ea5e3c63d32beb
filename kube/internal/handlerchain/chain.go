package handlerchain

import (
	"context"
	"net/http"
	"path"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/stratakube/strata/kube/internal/slowclient"
)

// Options configures how New mounts a read handler in an API server.
type Options struct {
	// Full builds the chain for every request that is not a plain read: the previous value of
	// Config.BuildHandlerChainFunc. nil means upstream's default.
	Full func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler
	// Mount returns the read handler that wraps next. It is called once per chain, so state shared
	// between requests must live outside of it.
	Mount func(next http.Handler) http.Handler
	// Serves reports whether the read handler, rather than next, will answer a read, as far as the
	// request shows; nil means that it answers all. It is called for each read, before
	// authentication, so it must be cheap, must not block and must not inspect objects.
	Serves func(req *http.Request, info *request.RequestInfo) bool
	// Cost estimates the response size of a read; nil leaves priority and fairness to upstream's
	// estimates.
	Cost CostFunc
}

// Chain is an http.Handler with two paths to the read handler. It is safe for concurrent use.
type Chain struct {
	full, fast http.Handler // fast is nil if every request takes the full chain

	requestInfo request.RequestInfoResolver
	longRunning request.LongRunningRequestCheck
	serves      func(*http.Request, *request.RequestInfo) bool // nil: all
	// requestTimeout applies to requests that are not longRunning.
	requestTimeout time.Duration
	fastWatches    bool
	shuttingDown   <-chan struct{} // closed when shutdown begins
	// complete is set when a request has passed the full chain after the mux was complete. It is
	// never reset.
	complete atomic.Bool
}

// New returns the complete handler of an API server: authentication, authorization, audit,
// priority and fairness and the other filters, then the mounted read handler, then apiHandler. It
// is called by Config.BuildHandlerChainFunc.
//
// A plain read (see fastRead) takes the fast chain, everything else the full one. Both end in a
// handler that Mount returned; they differ in the filters in between:
//
//	full   the chain built by Full: upstream's own
//	fast   the same deciding and recording filters, in the same order, without the
//	       measurement of each filter, and with a write deadline on the calling goroutine;
//	       upstream moves each request to a separate goroutine (fastFilters)
//
// The fast chain is used only for requests that the read handler serves, according to
// Options.Serves, and only when its decisions are the same as those of the full chain:
//
//   - not before a request has passed the full chain with the mux complete; completeness is
//     permanent. Until then upstream marks requests so that an unknown path is answered with 503,
//     never 404;
//   - not after shutdown has begun: upstream decides on Retry-After and on the requests still
//     admitted. In-flight reads are waited for, as in the full chain;
//   - not for watches if --shutdown-watch-termination-grace-period is set, because upstream then
//     waits for them;
//   - not if Full is not one of upstream's default chains (for example the proxy to peers of
//     --peer-ca-file), because its decisions are unknown here;
//   - not without priority and fairness: the max-in-flight limit is counted per chain, and two
//     chains would admit twice as many requests.
//
// If c serves TLS, New replaces c.SecureServing.Listener by one that can close a single connection.
// This is needed for stalled readers to which not even a stream reset can be sent
// (slowclient.WithWriteDeadline).
func New(apiHandler http.Handler, c *genericapiserver.Config, o Options) *Chain {
	build := o.Full
	if build == nil {
		build = genericapiserver.DefaultBuildHandlerChain
	}
	h := &Chain{
		requestInfo:    c.RequestInfoResolver,
		longRunning:    c.LongRunningFunc,
		serves:         o.Serves,
		requestTimeout: c.RequestTimeout,
		fastWatches:    c.ShutdownWatchTerminationGracePeriod <= 0,
		shuttingDown:   c.ShutdownInitiatedNotify(),
	}
	c.RequestInfoResolver = parsedOnce{h.requestInfo}
	h.full = build(h.noteComplete(o.Mount(apiHandler)), c)
	c.RequestInfoResolver = h.requestInfo
	if builtByUpstream(build) && c.FlowControl != nil {
		h.fast = wrap(o.Mount(withoutTask(apiHandler)), fastFilters(c, o.Cost, slowclient.TrackServed(c)))
	}
	return h
}

// builtByUpstream reports whether build is one of upstream's own chains, whose filters
// fastFilters replicates. The storage version precondition passes every read.
func builtByUpstream(build func(http.Handler, *genericapiserver.Config) http.Handler) bool {
	switch reflect.ValueOf(build).Pointer() {
	case reflect.ValueOf(genericapiserver.DefaultBuildHandlerChain).Pointer(),
		reflect.ValueOf(genericapiserver.BuildHandlerChainWithStorageVersionPrecondition).Pointer():
		return true
	}
	return false
}

// noteComplete wraps the innermost handler of the full chain and records there that the mux is
// complete.
func (h *Chain) noteComplete(inner http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !h.complete.Load() && genericapifilters.NoMuxAndDiscoveryIncompleteKey(req.Context()) {
			h.complete.Store(true)
		}
		inner.ServeHTTP(w, req)
	})
}

func (h *Chain) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	received := time.Now()
	h.boundRequestBody(w, req)
	info, fast := h.fastRead(req)
	if !fast {
		if info != nil && time.Since(received) < slowParse {
			req = req.WithContext(context.WithValue(req.Context(), parsedKey{}, info))
		}
		h.full.ServeHTTP(w, req)
		return
	}
	if req.ProtoMajor == 2 && info.Verb != "watch" {
		growStack()
	}
	ctx := request.WithReceivedTimestamp(request.WithRequestInfo(req.Context(), info), received)
	h.fast.ServeHTTP(w, req.WithContext(ctx))
}

// growStack grows the goroutine's stack once, to the size that the filters need. HTTP/2 serves each
// request on a new goroutine, whose small stack would otherwise double, and be copied, several
// times on the way down.
//
//go:noinline
func growStack() {
	var room [12 << 10]byte
	use(&room)
}

//go:noinline
func use(*[12 << 10]byte) {}

// fastRead reports whether the request takes the fast chain. Only a get, list or watch of a
// resource with an unambiguous path takes it. fastRead does not check that the resource exists or
// that the user is authorized to read it. info is the RequestInfo of a fast read; of other requests
// it is nil if it was not needed, or could not be made.
func (h *Chain) fastRead(req *http.Request) (info *request.RequestInfo, fast bool) {
	if h.fast == nil || req.Method != http.MethodGet || !h.complete.Load() {
		return nil, false
	}
	select {
	case <-h.shuttingDown:
		return nil, false
	default:
	}
	if req.URL.RawPath != "" || path.Clean(req.URL.Path) != req.URL.Path {
		return nil, false
	}
	if _, ok := req.Header["Upgrade"]; ok { // a watch over a websocket
		return nil, false
	}
	info, err := h.requestInfo.NewRequestInfo(req)
	if err != nil {
		return nil, false
	}
	if !info.IsResourceRequest || info.Subresource != "" || verbInPath(info) {
		return info, false
	}
	switch info.Verb {
	case "get", "list":
	case "watch":
		if !h.fastWatches {
			return info, false
		}
	default:
		return info, false
	}
	return info, h.serves == nil || h.serves(req, info)
}

// slowParse is the time above which the full chain parses a request again: only the time within
// that chain is a part of the latency in the request's audit event.
const slowParse = 250 * time.Millisecond

// parsedKey is the key of the RequestInfo of a request that fastRead has parsed.
type parsedKey struct{}

// parsedOnce returns the RequestInfo that fastRead has made, so that the full chain neither parses
// a request again nor logs an invalid selector a second time, unless the parse was slow.
type parsedOnce struct{ request.RequestInfoResolver }

func (r parsedOnce) NewRequestInfo(req *http.Request) (*request.RequestInfo, error) {
	if info, ok := req.Context().Value(parsedKey{}).(*request.RequestInfo); ok {
		return info, nil
	}
	return r.RequestInfoResolver.NewRequestInfo(req)
}

// verbInPath reports whether the path contains its verb, as /api/v1/watch/pods does. info must be
// the RequestInfo of a canonical path.
func verbInPath(info *request.RequestInfo) bool {
	rest := info.Path[len("/")+len(info.APIPrefix)+len("/"):]
	if info.APIGroup != "" {
		rest = rest[len(info.APIGroup)+len("/"):]
	}
	rest = rest[len(info.APIVersion)+len("/"):]
	return strings.HasPrefix(rest, "watch/") || strings.HasPrefix(rest, "proxy/")
}

// bodyGrace is added to the request timeout for the read deadline of the body: by then the request
// was answered.
const bodyGrace = time.Second

// boundRequestBody makes reads of a request's body over HTTP/1.1 fail once the request has timed
// out. Upstream answers such a request with 504, but net/http does not send the answer while the
// abandoned handler reads the body: a client that sends a byte from time to time would keep its
// connection, two goroutines and a seat of priority and fairness indefinitely. An HTTP/2 stream is
// reset instead. A long-running request has no deadline, and gets none here, because sending a
// proxied body may take hours.
func (h *Chain) boundRequestBody(w http.ResponseWriter, req *http.Request) {
	if req.ProtoMajor != 1 || req.Body == nil || req.Body == http.NoBody || h.requestTimeout <= 0 {
		return
	}
	info, err := h.requestInfo.NewRequestInfo(req)
	if err == nil && h.longRunning != nil && h.longRunning(req, info) && !bodyless(info) {
		return
	}
	// An error means that the connection has no deadlines, as in tests.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(h.requestTimeout + bodyGrace))
}

// bodyless reports whether the request ignores its body, even if it is long-running.
func bodyless(info *request.RequestInfo) bool { return info.Verb == "watch" }
