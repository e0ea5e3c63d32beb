package readpath

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/kube/kubestorage"
)

const (
	// DefaultProgressTimeout is how long a server that shuts down waits for etcd's progress,
	// unless it is told otherwise: a round trip is enough for a living etcd.
	DefaultProgressTimeout = 2 * time.Second
	// deliveryTimeout is how long clients may then take to accept what is due to them.
	// A guess, well above what those that read need.
	deliveryTimeout = 3 * time.Second
	// refusedSeconds is when a client that comes meanwhile is told to come back: it will find
	// another server, or wait for this one.
	refusedSeconds = 1
)

// DrainOnShutdown has the API server that c configures end its watches in order when it shuts
// down, those of the engine's storages as Engine.Drain says, which is told to wait for
// progress for as long as given. Call it before c is completed, after Server.Mount.
//
//	signal ─▶ /readyz fails ─▶ ShutdownDelayDuration, in which watches go on
//	       ─▶ watches are drained; watches and lists that come are refused with 429, unless
//	          the server does not listen any more
//	       ─▶ the server stops as it always does, which no watch holds up any more
//
// The server's own clients, which use c.LoopbackClientConfig, are served until the server stops
// them.
//
// Clients whose connections take no more bytes are cut off after deliveryTimeout, or
// after c.ShutdownWatchTerminationGracePeriod if there is one. That is what becomes of this
// option, and it is set to 0: upstream would end each watch as soon as the server takes no more
// requests, with events and a bookmark still due to it.
func DrainOnShutdown(c *genericapiserver.Config, engine *kubestorage.Engine, progress time.Duration) {
	d := &drainer{config: c, engine: engine, progress: progress, delivery: deliveryTimeout, watches: map[*openWatch]struct{}{}}
	if c.ShutdownWatchTerminationGracePeriod > 0 {
		d.delivery = c.ShutdownWatchTerminationGracePeriod
		c.ShutdownWatchTerminationGracePeriod = 0
	}
	build := c.BuildHandlerChainFunc
	c.BuildHandlerChainFunc = func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		handler := d.handler(build(apiHandler, c))
		if c.SecureServing != nil && c.SecureServing.Listener != nil {
			d.conns = trackConnections(c.SecureServing.Listener)
			c.SecureServing.Listener = d.conns
		}
		return handler
	}
	c.AddPostStartHookOrDie("strata-drain-on-shutdown", func(genericapiserver.PostStartHookContext) error {
		// The server is not gone before the watches are, nor are its storages.
		held := c.NonLongRunningRequestWaitGroup.Add(1) == nil
		go func() {
			if held {
				defer c.NonLongRunningRequestWaitGroup.Done()
			}
			<-c.ShutdownInitiatedNotify()
			time.Sleep(c.ShutdownDelayDuration) // as upstream does at this moment
			d.drain()
		}()
		return nil
	})
}

// drainer ends the watches of a server.
type drainer struct {
	config             *genericapiserver.Config
	engine             *kubestorage.Engine
	progress, delivery time.Duration
	conns              *trackedListener // nil if the server does not serve TLS

	begun atomic.Bool

	mu      sync.Mutex // leaf, but for what writes to a connection take
	watches map[*openWatch]struct{}
}

// openWatch is a watch that is being served, whoever serves it. Nothing touches its response
// after it was removed from drainer.watches.
type openWatch struct {
	w   http.ResponseWriter
	req *http.Request
}

// handler refuses watches and lists while watches are being ended, and knows the watches
// that are open.
func (d *drainer) handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		begun, watch := d.begun.Load(), mayBeWatch(req)
		switch {
		case (begun || watch) && d.isOwn(req):
			next.ServeHTTP(w, req.WithContext(kubestorage.WithoutDrain(req.Context())))
			return
		case begun && d.refuses(req):
			refuse(w)
			return
		case !watch:
			next.ServeHTTP(w, req)
			return
		}
		open := &openWatch{w, req}
		d.mu.Lock()
		d.watches[open] = struct{}{}
		d.mu.Unlock()
		defer func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			delete(d.watches, open)
		}()
		next.ServeHTTP(w, req)
	})
}

// isOwn reports whether the request is one of the server's own clients, which the server stops
// itself, after requests in flight are done. They are served until then: their reflectors log an
// error when they are stopped while they wait for an answer to a refused watch.
func (d *drainer) isOwn(req *http.Request) bool {
	own := d.config.LoopbackClientConfig
	if own == nil || own.BearerToken == "" {
		return false
	}
	token, ok := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
	return ok && subtle.ConstantTimeCompare([]byte(token), []byte(own.BearerToken)) == 1
}

// mayBeWatch reports whether the request looks like a watch.
func mayBeWatch(req *http.Request) bool {
	return req.Method == http.MethodGet && (strings.Contains(req.URL.RawQuery, "watch=") || strings.Contains(req.URL.Path, "/watch/"))
}

// refuses reports whether the request is a list or a watch.
func (d *drainer) refuses(req *http.Request) bool {
	if req.Method != http.MethodGet {
		return false
	}
	info, err := d.config.RequestInfoResolver.NewRequestInfo(req)
	return err == nil && info.IsResourceRequest && (info.Verb == "list" || info.Verb == "watch")
}

// refuse answers 429. Clients of Kubernetes try again without listing anew, which they would do
// after a 503 or a connection that breaks. The connection stays: net/http waits a minute for
// one that is opened in the moment in which the server stops, and those who come again at
// once, with all their watches, would open many.
func refuse(w http.ResponseWriter) {
	status := apierrors.NewTooManyRequests("the server is shutting down, please try again later", refusedSeconds).Status()
	status.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	header := w.Header()
	header.Set("Retry-After", strconv.Itoa(refusedSeconds))
	header.Set("Content-Type", "application/json")
	header.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusTooManyRequests)
	_ = json.NewEncoder(w).Encode(&status) // the client may be gone
}

// drain ends all watches, and returns when they have ended or were cut off.
func (d *drainer) drain() {
	d.begun.Store(true)
	began := time.Now()
	n := d.open()
	ctx, cancel := context.WithTimeout(context.Background(), d.progress+d.delivery)
	defer cancel()
	err := d.engine.Drain(ctx, d.progress)
	if err != nil {
		d.cutOff()
	}
	klog.InfoS("[graceful-termination] watches have ended", "watches", n, "took", time.Since(began).Round(time.Millisecond), "err", err)
}

func (d *drainer) open() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.watches)
}

// cutOff has the writes of all watches fail, and closes the connections of those that are still
// open after stallGrace: they take no more bytes, so a stream on them cannot even be reset.
func (d *drainer) cutOff() {
	d.mu.Lock()
	past := time.Unix(1, 0)
	for open := range d.watches {
		_ = http.NewResponseController(open.w).SetWriteDeadline(past) // not supported after an upgrade
	}
	d.mu.Unlock()
	time.Sleep(stallGrace)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conns == nil {
		return
	}
	for open := range d.watches {
		d.conns.close(open.req)
	}
}
