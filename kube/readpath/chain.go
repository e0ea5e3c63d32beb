package readpath

import (
	"net/http"
	"path"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
)

// chainOptions says how newChain mounts a handler of reads in an API server.
type chainOptions struct {
	// Full builds the chain of every request that is not a plain read: whatever
	// Config.BuildHandlerChainFunc was before. nil means upstream's default.
	Full func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler
	// Mount returns the handler of reads that stands in front of next. It is called
	// once per chain, so what it shares between requests lives outside of it.
	Mount func(next http.Handler) http.Handler
	// Serves reports whether that handler will answer a read, rather than next, as far as the request
	// tells; nil means that it will. It is called before anybody is authenticated, for each read, so it
	// must be cheap, must not wait and must not look at objects.
	Serves func(req *http.Request, info *request.RequestInfo) bool
	// Cost is what a read will send; nil leaves priority and fairness to upstream's
	// estimates.
	Cost costFunc
}

// Mount puts the server in front of the handlers of the API server that c configures, with
// the lean chain for reads (newChain). It wraps c.BuildHandlerChainFunc, and
// has to be called before c is completed.
func (s *Server) Mount(c *genericapiserver.Config) {
	full := c.BuildHandlerChainFunc
	c.BuildHandlerChainFunc = func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		if s.minRequestTimeout == 0 {
			s.minRequestTimeout = time.Duration(c.MinRequestTimeout) * time.Second
		}
		s.levels, s.conns = watchLevels(c), trackServed(c)
		return newChain(s.boundDecoded(apiHandler), c, chainOptions{Full: full, Mount: s.Handler, Serves: s.Serves, Cost: s.cost})
	}
}

// trackServed has the connections that c serves tracked; nil if it serves none.
func trackServed(c *genericapiserver.Config) *trackedListener {
	if c.SecureServing == nil || c.SecureServing.Listener == nil {
		return nil
	}
	conns := trackConnections(c.SecureServing.Listener)
	c.SecureServing.Listener = conns
	return conns
}

// chain is a handler with two ways to the handler of reads. It is safe for concurrent use.
type chain struct {
	full, lean http.Handler // lean is nil if every request takes the full chain

	requestInfo request.RequestInfoResolver
	longRunning request.LongRunningRequestCheck
	serves      func(*http.Request, *request.RequestInfo) bool // nil: all
	// requestTimeout is that of a request that is not longRunning.
	requestTimeout time.Duration
	leanWatches    bool
	shuttingDown   <-chan struct{} // closed when shutdown begins
	// complete: a request has passed the full chain after the mux was complete. It
	// is never reset.
	complete atomic.Bool
}

// newChain returns the handler of a whole API server: authentication,
// authorization, audit, priority and fairness and the other filters, then the mounted
// handler of reads, then apiHandler. It is called by
// Config.BuildHandlerChainFunc.
//
// A plain read (see leanRead) takes the lean chain, everything else the full one.
// Both end in a handler that Mount returned; they differ in what is between:
//
//	full   what Full builds: upstream's own chain
//	lean   the same filters that decide and record, in the same order, without the
//	       measurement of each filter, and with a write deadline on the calling goroutine
//	       where upstream moves each request to a goroutine of its own (leanFilters)
//
// The lean chain is used only for what the handler of reads serves, as far as chainOptions.Serves
// can tell, and when it decides nothing that the full chain would decide otherwise:
//
//   - not before a request has passed the full chain with the mux complete, which is then so
//     for good. Until then upstream marks requests so that an unknown path is answered
//     503, never 404;
//   - not once shutdown has begun: Retry-After, and which requests are still let in, are
//     upstream's to say. Reads under way are waited for, as in the full chain;
//   - not for watches, if --shutdown-watch-termination-grace-period wants them waited for;
//   - not if Full is a chain of another author (the proxy to peers of --peer-ca-file, for
//     example), whose decisions are not known here;
//   - not without priority and fairness: the limit of requests in flight counts inside a
//     chain, and two chains would admit twice as many.
//
// If c serves TLS, newChain replaces c.SecureServing.Listener by one that can close
// a single connection, for readers that stall so hard that nothing else reaches them
// (withWriteDeadline).
func newChain(apiHandler http.Handler, c *genericapiserver.Config, o chainOptions) *chain {
	build := o.Full
	if build == nil {
		build = genericapiserver.DefaultBuildHandlerChain
	}
	h := &chain{
		requestInfo:    c.RequestInfoResolver,
		longRunning:    c.LongRunningFunc,
		serves:         o.Serves,
		requestTimeout: c.RequestTimeout,
		leanWatches:    c.ShutdownWatchTerminationGracePeriod <= 0,
		shuttingDown:   c.ShutdownInitiatedNotify(),
	}
	h.full = build(h.noteComplete(o.Mount(apiHandler)), c)
	if builtByUpstream(build) && c.FlowControl != nil {
		h.lean = wrap(o.Mount(apiHandler), leanFilters(c, o.Cost, trackServed(c)))
	}
	return h
}

// builtByUpstream reports whether build is one of upstream's own chains, whose filters
// leanFilters knows. What the storage version precondition adds lets every read pass.
func builtByUpstream(build func(http.Handler, *genericapiserver.Config) http.Handler) bool {
	switch reflect.ValueOf(build).Pointer() {
	case reflect.ValueOf(genericapiserver.DefaultBuildHandlerChain).Pointer(),
		reflect.ValueOf(genericapiserver.BuildHandlerChainWithStorageVersionPrecondition).Pointer():
		return true
	}
	return false
}

// noteComplete wraps the innermost handler of the full chain: it learns there that the mux
// is complete.
func (h *chain) noteComplete(inner http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !h.complete.Load() && genericapifilters.NoMuxAndDiscoveryIncompleteKey(req.Context()) {
			h.complete.Store(true)
		}
		inner.ServeHTTP(w, req)
	})
}

func (h *chain) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	received := time.Now()
	h.boundRequestBody(w, req)
	info := h.leanRead(req)
	if info == nil {
		h.full.ServeHTTP(w, req)
		return
	}
	if req.ProtoMajor == 2 && info.Verb != "watch" {
		growStack()
	}
	ctx := request.WithReceivedTimestamp(request.WithRequestInfo(req.Context(), info), received)
	h.lean.ServeHTTP(w, req.WithContext(ctx))
}

// growStack makes room on the stack for the filters. HTTP/2 serves each request on a new
// goroutine, whose small stack would double several times on the way down, and be
// copied each time with all that is on it by then.
//
//go:noinline
func growStack() {
	var room [12 << 10]byte
	use(&room)
}

//go:noinline
func use(*[12 << 10]byte) {}

// leanRead returns the RequestInfo of a request that takes the lean chain, and nil for
// one that does not: only GET, list and watch of a resource as they are sent by clients, in
// a path that can be read in one way only. It says nothing about whether the
// resource exists, or who may read it.
func (h *chain) leanRead(req *http.Request) *request.RequestInfo {
	if h.lean == nil || req.Method != http.MethodGet || !h.complete.Load() {
		return nil
	}
	select {
	case <-h.shuttingDown:
		return nil
	default:
	}
	if req.URL.RawPath != "" || path.Clean(req.URL.Path) != req.URL.Path {
		return nil
	}
	if _, ok := req.Header["Upgrade"]; ok { // a watch over a websocket
		return nil
	}
	info, err := h.requestInfo.NewRequestInfo(req)
	if err != nil || !info.IsResourceRequest || info.Subresource != "" || verbInPath(info) {
		return nil
	}
	switch info.Verb {
	case "get", "list":
	case "watch":
		if !h.leanWatches {
			return nil
		}
	default:
		return nil
	}
	if h.serves != nil && !h.serves(req, info) {
		return nil
	}
	return info
}

// verbInPath reports whether the path names its verb, as /api/v1/watch/pods does.
// info is that of a canonical path.
func verbInPath(info *request.RequestInfo) bool {
	rest := info.Path[len("/")+len(info.APIPrefix)+len("/"):]
	if info.APIGroup != "" {
		rest = rest[len(info.APIGroup)+len("/"):]
	}
	rest = rest[len(info.APIVersion)+len("/"):]
	return strings.HasPrefix(rest, "watch/") || strings.HasPrefix(rest, "proxy/")
}
