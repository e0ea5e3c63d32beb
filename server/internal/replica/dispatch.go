package replica

import (
	"context"
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/server/internal/apiserver"
)

// dispatcher is the outermost handler of a replica.
//
//	own client (loopback)       reads: local; writes: refused
//	health, metrics, debugging  local
//	GET, LIST, WATCH of a stored resource, or of its subresources status and scale, without a change of protocol    local
//	discovery, OpenAPI, version local chain, then documents, which asks the primaries
//	everything else             proxied: authenticated here; authorized, admitted and audited by the primary
type dispatcher struct {
	resolver  request.RequestInfoResolver
	resources *apiserver.Resources
	codecs    runtime.NegotiatedSerializer
	ownToken  string // of the loopback client
	local     http.Handler
	proxied   http.Handler
}

// ServeHTTP implements http.Handler.
func (d *dispatcher) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	info, err := d.resolver.NewRequestInfo(req)
	switch {
	case err != nil:
		d.local.ServeHTTP(w, req) // reports the error
	case d.isOwn(req):
		if info.IsResourceRequest && !isRead(info.Verb) {
			d.refuseOwnWrite(w, req, info)
			return
		}
		d.local.ServeHTTP(w, req.WithContext(context.WithValue(req.Context(), ownKey{}, true)))
	case d.isLocal(req, info):
		d.local.ServeHTTP(w, req)
	default:
		d.proxied.ServeHTTP(w, req)
	}
}

// ownKey is the context key of requests of the loopback client.
type ownKey struct{}

func isOwnRequest(ctx context.Context) bool { return ctx.Value(ownKey{}) != nil }

// isOwn reports whether the request is from the server's own client. Its token is random and known
// to this process only.
func (d *dispatcher) isOwn(req *http.Request) bool {
	return d.ownToken != "" && req.Header.Get("Authorization") == "Bearer "+d.ownToken
}

func isRead(verb string) bool { return verb == "get" || verb == "list" || verb == "watch" }

// refuseOwnWrite answers a write of a part of this server, such as the status of a FlowSchema, with
// 404: a server that writes does the same work, and upstream's controllers ignore that code,
// because the object may just have been deleted.
func (d *dispatcher) refuseOwnWrite(w http.ResponseWriter, req *http.Request, info *request.RequestInfo) {
	refusedWrites.WithLabelValues(info.Resource).Inc()
	klog.V(4).InfoS("Refused a write of this replica", "verb", info.Verb, "path", info.Path, "userAgent", req.UserAgent())
	gr := schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}
	responsewriters.ErrorNegotiated(apierrors.NewNotFound(gr, info.Name), d.codecs, schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion}, w, req)
}

// isLocal reports whether the local chain answers the request.
func (d *dispatcher) isLocal(req *http.Request, info *request.RequestInfo) bool {
	if !info.IsResourceRequest {
		return isOwnPath(info.Path) || isDocument(req.Method, info.Path)
	}
	if !isRead(info.Verb) || req.Header.Get("Upgrade") != "" {
		return false
	}
	switch info.Subresource {
	case "", "status", "scale":
	default:
		return false
	}
	if info.APIGroup == "" && info.Resource == "componentstatuses" {
		return false // computed from the state of other servers
	}
	return d.resources.Stored(info)
}

// ownPaths are the paths that describe this process. They end at a slash or at the end of the path.
var ownPaths = []string{"/healthz", "/livez", "/readyz", "/metrics", "/debug", "/statusz", "/flagz"}

func isOwnPath(path string) bool {
	for _, own := range ownPaths {
		if rest, ok := strings.CutPrefix(path, own); ok && (rest == "" || rest[0] == '/') {
			return true
		}
	}
	return false
}

// proxyChain is the chain of filters of requests that a primary answers. It authenticates and
// decides nothing else: authorization, admission, audit, fairness and timeouts are those of the
// primary, for the caller. A request that fails to authenticate is audited here, since no primary
// receives it. The number of requests in flight is bounded by that of both flags for it, and their
// time by the request timeout and by that of a client that does not take its refusal.
func proxyChain(to http.Handler, c *genericapiserver.Config) http.Handler {
	failed := genericapifilters.WithFailedAuthenticationAudit(genericapifilters.Unauthorized(c.Serializer), c.AuditBackend, c.AuditPolicyRuleEvaluator)
	to = withSendableIdentity(withDeadlines(to, c.RequestTimeout, c.LongRunningFunc), c.Serializer)
	bounded := withInFlightBound(to, c.MaxRequestsInFlight+c.MaxMutatingRequestsInFlight, c.LongRunningFunc, c.Serializer)
	handler := genericapifilters.WithAuthentication(bounded, c.Authentication.Authenticator, failed, c.Authentication.APIAudiences, c.Authentication.RequestHeaderConfig)
	handler = genericfilters.WithCORS(handler, c.CorsAllowedOriginList, nil, nil, nil, "true")
	handler = genericfilters.WithWaitGroup(handler, c.LongRunningFunc, c.NonLongRunningRequestWaitGroup)
	handler = genericfilters.WithHSTS(handler, c.HSTSDirectives)
	handler = genericfilters.WithHTTPLogging(handler)
	handler = genericapifilters.WithLatencyTrackers(handler)
	handler = genericapifilters.WithRequestInfo(handler, c.RequestInfoResolver)
	handler = genericapifilters.WithRequestReceivedTimestamp(handler)
	return withRecovery(genericapifilters.WithAuditInit(handler))
}

// strangersShare divides the requests in flight: one part is for requests without authentication,
// which cannot take the others. A guess.
const strangersShare = 10

// withInFlightBound answers 429 to requests above maxRequests in flight (0: no bound), except for
// long-running ones and for administrators, as kube-apiserver does. Requests without authentication
// have a bound of their own, long-running ones included. It must run behind authentication.
func withInFlightBound(next http.Handler, maxRequests int, longRunning request.LongRunningRequestCheck, codecs runtime.NegotiatedSerializer) http.Handler {
	if maxRequests <= 0 {
		return next
	}
	slots, strangers := make(chan struct{}, maxRequests), make(chan struct{}, max(1, maxRequests/strangersShare))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, _ := request.RequestInfoFrom(req.Context())
		var groups []string
		if u, ok := request.UserFrom(req.Context()); ok {
			groups = u.GetGroups()
		}
		take := slots
		if slices.Contains(groups, user.AllUnauthenticated) {
			take = strangers
		} else if info == nil || longRunning != nil && longRunning(req, info) {
			next.ServeHTTP(w, req)
			return
		}
		select {
		case take <- struct{}{}:
			defer func() { <-take }()
			next.ServeHTTP(w, req)
			return
		default:
		}
		if slices.Contains(groups, user.SystemPrivilegedGroup) {
			next.ServeHTTP(w, req)
			return
		}
		status := apierrors.NewTooManyRequests(fmt.Sprintf("this replica has %d requests of this kind to the API servers of --primary in flight, as many as "+
			"--max-requests-inflight and --max-mutating-requests-inflight permit, and the request was not sent; repeat it later", cap(take)), retryAfter)
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
		responsewriters.ErrorNegotiated(status, codecs, groupVersionOf(req), w, req)
	})
}

// groupVersionOf returns the version of the resource of a request, empty if there is none.
func groupVersionOf(req *http.Request) (gv schema.GroupVersion) {
	if info, ok := request.RequestInfoFrom(req.Context()); ok {
		gv = schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion}
	}
	return gv
}

// withRecovery answers 500 after a panic, except for the panic that ends a response whose primary
// has broken off.
func withRecovery(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		defer func() {
			switch p := recover(); p {
			case nil:
			case http.ErrAbortHandler:
				panic(p)
			default:
				klog.ErrorS(fmt.Errorf("%v", p), "Panic while a request was proxied", "method", req.Method, "path", req.URL.Path, "stack", string(debug.Stack()))
				http.Error(w, "This request caused the replica to panic. Look in its log for details.", http.StatusInternalServerError)
			}
		}()
		next.ServeHTTP(w, req)
	})
}
