package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/textproto"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/options"
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

// standardClaims is the prefix of the headers in which front proxies name a user by convention, and
// in which a replica does.
const standardClaims = "x-remote-"

// claims are the headers in which a front proxy names a user: those of --requestheader-*, and
// always those with the prefix X-Remote-. A primary trusts them from the replica, so the replica
// removes those of clients. Immutable.
type claims struct {
	names    []string // lower case
	prefixes []string // lower case
}

func newClaims(o *options.RequestHeaderAuthenticationOptions) *claims {
	c := &claims{prefixes: []string{standardClaims}}
	if o == nil {
		return c
	}
	for _, name := range slices.Concat(o.UsernameHeaders, o.UIDHeaders, o.GroupHeaders) {
		c.names = append(c.names, strings.ToLower(strings.TrimSpace(name)))
	}
	for _, prefix := range o.ExtraHeaderPrefixes {
		c.prefixes = append(c.prefixes, strings.ToLower(strings.TrimSpace(prefix)))
	}
	return c
}

// unsetClaimFlags returns the flags of claims that are not set. The API servers may have other
// values than the standard ones there.
func unsetClaimFlags(o *options.RequestHeaderAuthenticationOptions) (flags []string) {
	for _, f := range []struct {
		name  string
		value []string
	}{
		{"--requestheader-username-headers", o.UsernameHeaders},
		{"--requestheader-group-headers", o.GroupHeaders},
		{"--requestheader-uid-headers", o.UIDHeaders},
		{"--requestheader-extra-headers-prefix", o.ExtraHeaderPrefixes},
	} {
		if len(f.value) == 0 {
			flags = append(flags, f.name)
		}
	}
	return flags
}

// remove removes the claims of a client.
func (c *claims) remove(header http.Header) {
	for key := range header {
		name := strings.ToLower(key)
		if slices.Contains(c.names, name) || slices.ContainsFunc(c.prefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			// as it is written: names of HTTP/1.1 may differ from their canonical form
			delete(header, key)
		}
	}
}

// socketToken is the prefix of the subprotocol of a WebSocket that has a bearer token.
const socketToken = "base64url.bearer.authorization.k8s.io." //nolint:gosec // not a token

// removeSocketToken removes bearer tokens from the subprotocols of a WebSocket. The authenticator
// does so only if the token authenticated the request, and not for a client with a certificate too.
func removeSocketToken(header http.Header) {
	const name = "Sec-Websocket-Protocol"
	values := header[textproto.CanonicalMIMEHeaderKey(name)]
	if !slices.ContainsFunc(values, func(value string) bool { return strings.Contains(value, socketToken) }) {
		return
	}
	var left []string
	for _, value := range values {
		for protocol := range strings.SplitSeq(value, ",") {
			if protocol = strings.TrimSpace(protocol); !strings.HasPrefix(protocol, socketToken) {
				left = append(left, protocol)
			}
		}
	}
	if header.Del(name); len(left) > 0 {
		header.Set(name, strings.Join(left, ", "))
	}
}
