package replica

import (
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"k8s.io/apiserver/pkg/server/options"
)

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
