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

	"github.com/stratakube/strata/kube/internal/slowclient"
	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/kube/kubestorage"
)

const (
	// DefaultProgressTimeout is the default time that a server waits for etcd's progress during
	// shutdown; a live etcd needs one round trip.
	DefaultProgressTimeout = 2 * time.Second
	// deliveryTimeout is the time that clients then have to accept their remaining events. A guess,
	// well above the needs of a client that reads.
	deliveryTimeout = 3 * time.Second
	// refusedSeconds is the Retry-After of requests refused during shutdown: the client will reach
	// another server, or wait for this one.
	refusedSeconds = 1
)

// DrainOnShutdown makes the API server that c configures end its watches in order when it shuts
// down. Watches of the engine's storages are ended by Engine.Drain, which waits for etcd's progress
// for at most the duration progress. Call it after Server.Mount and before c is completed.
//
//	signal ─▶ /readyz fails ─▶ ShutdownDelayDuration, in which watches continue; in its second half, when balancers
//	          send new connections to other servers, each response asks its client to reconnect
//	       ─▶ watches are drained; new watches and lists are refused with 429, unless
//	          the server no longer listens
//	       ─▶ the server stops as usual; no watch delays it
//
// The server's own clients, which use c.LoopbackClientConfig, are served until the server stops
// them.
//
// Clients whose connections accept no more bytes are cut off after deliveryTimeout, or after
// c.ShutdownWatchTerminationGracePeriod if it is set. That option is used only for this and then
// set to 0: upstream would end each watch as soon as the server accepts no more requests, before
// its remaining events and bookmark are sent.
func DrainOnShutdown(c *genericapiserver.Config, engine *kubestorage.Engine, progress time.Duration) {
	d := &drainer{config: c, engine: engine, progress: progress, delivery: deliveryTimeout, watches: map[*openWatch]struct{}{}}
	if c.ShutdownWatchTerminationGracePeriod > 0 {
		d.delivery = c.ShutdownWatchTerminationGracePeriod
		c.ShutdownWatchTerminationGracePeriod = 0
	}
	build := c.BuildHandlerChainFunc
	c.BuildHandlerChainFunc = func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		handler := d.handler(build(apiHandler, c))
		d.conns = slowclient.TrackServed(c)
		return handler
	}
	c.AddPostStartHookOrDie("strata-drain-on-shutdown", func(genericapiserver.PostStartHookContext) error {
		// The wait group keeps the server and its storages running until the watches have ended.
		held := c.NonLongRunningRequestWaitGroup.Add(1) == nil
		go func() {
			if held {
				defer c.NonLongRunningRequestWaitGroup.Done()
			}
			<-c.ShutdownInitiatedNotify()
			// upstream sleeps at the same time
			time.Sleep(c.ShutdownDelayDuration / 2)
			d.leaving.Store(true)
			time.Sleep(c.ShutdownDelayDuration - c.ShutdownDelayDuration/2)
			d.leaving.Store(false)
			d.drain()
		}()
		return nil
	})
}

// drainer ends the watches of a server at shutdown.
type drainer struct {
	config             *genericapiserver.Config
	engine             *kubestorage.Engine
	progress, delivery time.Duration
	conns              *slowclient.Listener // nil if the server does not serve TLS

	leaving atomic.Bool // clients are asked to reconnect
	begun   atomic.Bool

	mu      sync.Mutex // leaf, except for locks taken by writes to a connection
	watches map[*openWatch]struct{}
}

// openWatch is a running watch, served here or by upstream's handlers. Its response is not used
// after its removal from drainer.watches.
type openWatch struct {
	w   http.ResponseWriter
	req *http.Request
}

// handler registers open watches, and refuses watches and lists once draining has begun.
func (d *drainer) handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if d.leaving.Load() {
			d.askToReconnect(w, req)
		}
		begun, isWatch := d.begun.Load(), mayBeWatch(req)
		switch {
		case (begun || isWatch) && d.isOwn(req):
			next.ServeHTTP(w, req.WithContext(watch.WithoutDrain(req.Context())))
			return
		case begun && d.refuses(req):
			refuse(w)
			return
		case !isWatch:
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

// askToReconnect makes the client of a request open another connection for later ones. Requests in
// progress on an HTTP/2 connection, such as watches, continue: the response sends a GOAWAY frame.
// The server's own clients have no other server.
func (d *drainer) askToReconnect(w http.ResponseWriter, req *http.Request) {
	if req.Header.Get("Upgrade") == "" && !d.isOwn(req) {
		w.Header().Set("Connection", "close")
	}
}

// isOwn reports whether the request is one of the server's own clients, which the server stops
// itself, after requests in flight are done. They are served until then: a reflector that is
// stopped while it retries a refused watch logs an error.
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

// refuse answers with 429. Kubernetes clients retry after a 429 without relisting; after a 503 or a
// broken connection they would relist. The connection is not closed: net/http waits a minute for a
// connection that is opened while the server stops, and clients that reconnect at once with all
// their watches would open many.
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

// cutOff makes the writes of all watches fail, and closes the connections of watches that are still
// open after slowclient.StallGrace: such a connection accepts no more bytes, so not even a stream
// on it can be reset.
func (d *drainer) cutOff() {
	d.mu.Lock()
	for open := range d.watches {
		slowclient.FailWrites(open.w) // without effect after an upgrade
	}
	d.mu.Unlock()
	time.Sleep(slowclient.StallGrace)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conns == nil {
		return
	}
	for open := range d.watches {
		d.conns.CloseConnection(open.req)
	}
}
