package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/transport"
)

// retryAfter is the Retry-After of requests that no primary could receive, in seconds: the interval
// of health checks.
const retryAfter = 1

// newProxy returns a handler that sends requests to the primaries with the user of their context,
// in the headers of an authenticating front proxy. Credentials and claims of the caller are not
// forwarded. Responses are flushed as they arrive; upgraded connections are joined.
func newProxy(to http.RoundTripper, claims *claims, codecs runtime.NegotiatedSerializer, withoutOrigin bool) http.Handler {
	return &httputil.ReverseProxy{
		Transport:     to,
		FlushInterval: -1,
		// errors are answered, or are those of clients that have left
		ErrorLog: log.New(io.Discard, "", 0),
		Rewrite: func(r *httputil.ProxyRequest) {
			// The scheme and the host are those of a primary, which the transport sets.
			r.Out.URL.Scheme, r.Out.URL.Host = "https", "primary"
			r.Out.Header["X-Forwarded-For"] = r.In.Header["X-Forwarded-For"]
			r.SetXForwarded()
			if withoutOrigin {
				r.Out.Header.Del("Origin")
			}
			setIdentity(r.Out, r.In, claims)
		},
		ModifyResponse: func(resp *http.Response) error {
			resp.Header.Del("Audit-Id") // the response has the same one already
			if resp.StatusCode >= http.StatusBadRequest {
				boundRefusal(resp.Request.Context())
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, req *http.Request, err error) { proxyError(w, req, err, codecs) },
	}
}

// setIdentity gives a request to a primary the user of the received request, and removes
// credentials and claims. Headers Impersonate-* remain: the primary decides on them.
func setIdentity(out, in *http.Request, claims *claims) {
	out.Header.Del("Authorization")
	out.Header.Del("Cookie")
	removeSocketToken(out.Header)
	claims.remove(out.Header)
	user, ok := request.UserFrom(in.Context())
	if !ok {
		// authentication is in front of every proxied request
		panic("a request without a user is about to be proxied")
	}
	if id, ok := audit.AuditIDFrom(in.Context()); ok {
		out.Header.Set("Audit-Id", string(id)) // one ID in the logs of both servers
	}
	transport.SetAuthProxyHeaders(out, user.GetName(), user.GetUID(), user.GetGroups(), user.GetExtra())
}

// proxyError answers a request that no primary has answered. 503 with Retry-After means that it was
// not sent, so that clients repeat it; 502 that a primary may have received it.
func proxyError(w http.ResponseWriter, req *http.Request, err error, codecs runtime.NegotiatedSerializer) {
	gv := groupVersionOf(req)
	switch {
	case errors.Is(req.Context().Err(), context.DeadlineExceeded):
		responsewriters.ErrorNegotiated(apierrors.NewTimeoutError("request did not complete within the allotted timeout", 0), codecs, gv, w, req)
		return
	case req.Context().Err() != nil:
		panic(http.ErrAbortHandler) // the client has left
	}
	var none *errNoPrimary
	var status *apierrors.StatusError
	if errors.As(err, &none) {
		status = apierrors.NewServiceUnavailable(fmt.Sprintf("no API server named by --primary is healthy, and the request was not sent (%s); "+
			"repeat the request when one is; reads from memory are served", none.reason))
		status.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: retryAfter}
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
	} else {
		status = apierrors.NewGenericServerResponse(http.StatusBadGateway, "", schema.GroupResource{}, "", "", 0, false)
		status.ErrStatus.Message = fmt.Sprintf("the connection to an API server named by --primary failed (%v); it may have received the request: "+
			"read the object before the request is repeated", err)
	}
	responsewriters.ErrorNegotiated(status, codecs, gv, w, req)
}
