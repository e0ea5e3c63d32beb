package readpath

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/stratakube/strata/kube/kubestorage"
)

// probeTimeout bounds a probe. Upstream's handler may have to build the storages of a
// custom resource first, which takes milliseconds.
const probeTimeout = 10 * time.Second

// probeName is the object name and the namespace in a probe.
const probeName = "strata-probe"

func (t route) gvr() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: t.group, Version: t.version, Resource: t.resource}
}

// requestInfo returns the RequestInfo of a probe for the route, with probeName as name and
// namespace where the route has them.
func (t route) requestInfo() *request.RequestInfo {
	info := &request.RequestInfo{
		IsResourceRequest: true,
		Verb:              t.verb,
		APIPrefix:         "apis",
		APIGroup:          t.group,
		APIVersion:        t.version,
		Resource:          t.resource,
		Parts:             []string{t.resource},
	}
	if t.group == "" {
		info.APIPrefix = "api"
	}
	info.Path = "/" + info.APIPrefix
	if t.group != "" {
		info.Path += "/" + t.group
	}
	info.Path += "/" + t.version
	if t.namespaced {
		info.Namespace = probeName
		info.Path += "/namespaces/" + probeName
	}
	info.Path += "/" + t.resource
	if t.verb == "get" {
		info.Name = probeName
		info.Parts = append(info.Parts, probeName)
		info.Path += "/" + probeName
		if t.resource == "namespaces" && t.group == "" {
			info.Namespace = probeName
		}
	}
	return info
}

// key returns the storage key of a probe, for a storage whose keys are prefix[/namespace][/name].
func (t route) key(prefix string) string {
	if t.namespaced {
		prefix += "/" + probeName
	}
	if t.verb == "get" {
		prefix += "/" + probeName
	}
	return prefix
}

// probe sends a probe request through next and returns the storage that it reached. The probe does
// not share the context of the triggering request: no audit event, warning, latency or metric is
// recorded a second time. It has no user, so no other server is called on behalf of a user.
func probe(t route, next http.Handler) kubestorage.Found {
	probes.Inc()
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	info := t.requestInfo()
	ctx, p := kubestorage.WithProbe(request.WithRequestInfo(ctx, info))
	u := &url.URL{Path: info.Path}
	if t.verb == "watch" {
		u.RawQuery = "watch=true"
	}
	req := (&http.Request{
		Method:     http.MethodGet,
		URL:        u,
		RequestURI: u.RequestURI(),
		Proto:      "HTTP/1.1",
		ProtoMajor: 1,
		ProtoMinor: 1,
		Header:     http.Header{"Accept": {"application/json"}, "User-Agent": {probeName}},
		Body:       http.NoBody,
		RemoteAddr: "127.0.0.1:0",
	}).WithContext(ctx)
	ended := make(chan struct{})
	var panicked any
	go func() { // ended by the storage
		defer close(ended)
		defer func() { panicked = recover() }()
		next.ServeHTTP(&discardWriter{header: http.Header{}}, req)
	}()
	<-ended
	if panicked != nil {
		panic(panicked) // recovered by the filters of the request
	}
	return p.Found()
}

// discardWriter is a ResponseWriter that discards the response.
type discardWriter struct{ header http.Header }

func (n *discardWriter) Header() http.Header         { return n.header }
func (n *discardWriter) Write(p []byte) (int, error) { return len(p), nil }
func (n *discardWriter) WriteHeader(int)             {}
