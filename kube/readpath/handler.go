package readpath

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/endpoints/handlers"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/warning"

	"github.com/stratakube/strata/kube/internal/handlerchain"
	"github.com/stratakube/strata/kube/internal/slowclient"
	"github.com/stratakube/strata/kube/internal/textform"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/listadmission"
	"github.com/stratakube/strata/kube/revisiontimes"
)

// reason is the cause for passing a request on; it is a metric label.
type reason string

const (
	// reasonTable: a watch of tables, and tables whose convertor is not known here.
	reasonTable reason = "table"
	// reasonMediaType: CBOR, or another format that only upstream supports.
	reasonMediaType reason = "media_type"
	// reasonResource: the resource is not cached, or this server does not serve it.
	reasonResource reason = "resource"
	// reasonPath: subresources, websockets, paths in an unusual form.
	reasonPath reason = "path"
	// reasonAudit: the audit policy requires the response object.
	reasonAudit reason = "audit"
	// reasonOptions: options that only upstream supports.
	reasonOptions reason = "options"
	// reasonEtcd: etcd has to answer this read: its revision is older than the cache, or its key is
	// needed before the cache has caught up.
	reasonEtcd reason = "etcd"
)

// Options configure a Server.
type Options struct {
	// Resolver finds the resource that serves a request.
	Resolver *Resolver
	// MinRequestTimeout is the minimum duration of a watch that requests no timeout; the actual
	// duration is random, up to twice as long. 0 means the value of the API server that mounts the
	// server (Mount); without Mount, the watch ends immediately.
	MinRequestTimeout time.Duration
	// Lists bounds the bytes of concurrent lists: of lists answered here and, with Mount, of lists
	// passed on. nil means listadmission.New(0).
	Lists *listadmission.Admission
}

// Server answers reads from the cache. Safe for concurrent use.
type Server struct {
	resolver          *Resolver
	minRequestTimeout time.Duration
	lists             *listadmission.Admission
	// see Mount; nil without it, and without priority and fairness
	levels *handlerchain.Levels
	conns  *slowclient.Listener // see Mount; nil without it
	pacing slowclient.Connections
}

// New returns a Server with the options, and registers the package's metrics.
func New(c Options) *Server {
	registerMetrics()
	s := &Server{resolver: c.Resolver, minRequestTimeout: c.MinRequestTimeout, lists: c.Lists}
	if s.lists == nil {
		s.lists = listadmission.New(0)
	}
	return s
}

// Handler returns a handler that answers GET, LIST and WATCH from the cache and passes everything
// else to next. It must run after the filters of an API server: it serves the request described by
// the authorized RequestInfo, and only checks that the path is the canonical path of that
// RequestInfo.
func (s *Server) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		if !ok || !info.IsResourceRequest || req.Method != http.MethodGet {
			next.ServeHTTP(w, req)
			return
		}
		switch info.Verb {
		case "get", "list", "watch":
		default:
			next.ServeHTTP(w, req)
			return
		}
		if why := s.serve(w, req, info, next); why != "" {
			passed.WithLabelValues(string(why)).Inc()
			if why == reasonEtcd {
				req = req.WithContext(kubestorage.SkipCacheWait(req.Context()))
			}
			next.ServeHTTP(w, req)
		}
	})
}

// Serves reports whether a GET, LIST or WATCH will be answered here, according to its path and
// headers: the resource was read before, and the format is supported. The read itself may still be
// passed on, for example because its revision is older than the cache.
func (s *Server) Serves(req *http.Request, info *request.RequestInfo) bool {
	if !canonical(req, info) {
		return false
	}
	resource := s.resolver.known(info)
	if resource == nil {
		return false
	}
	r := &readRequest{server: s, resource: resource, info: info, scope: resource.scope(), req: req}
	// The result is not cached: the client is not authenticated yet.
	n := r.negotiateAs(false)
	return n.reason == "" && !n.refused
}

// readRequest is one read request and the state needed to answer it.
type readRequest struct {
	server   *Server
	resource *boundResource
	info     *request.RequestInfo
	enc      *encoding // of objects
	table    *table    // nil: the response is not a table
	// text is made of the JSON of the response; nil: the response is not made of another form
	text  *textform.Form
	scope *handlers.RequestScope
	w     http.ResponseWriter
	req   *http.Request
}

// serve answers the request, or returns the reason to pass it on; in that case nothing has been
// written.
func (s *Server) serve(w http.ResponseWriter, req *http.Request, info *request.RequestInfo, next http.Handler) reason {
	if info.Subresource != "" || !canonical(req, info) {
		return reasonPath
	}
	if _, ok := req.Header["Upgrade"]; ok {
		return reasonPath // a watch over a websocket
	}
	resource, why := s.resolver.resolve(info, next)
	if resource == nil {
		return why
	}
	r := &readRequest{server: s, resource: resource, info: info, scope: resource.scope(), w: w, req: req}
	if info.Verb == "list" && revisiontimes.Requested(req) {
		r.revisionTimes()
		return ""
	}
	if info.Verb != "watch" && auditsResponse(req.Context()) {
		return reasonAudit
	}
	n := r.negotiate()
	switch {
	case n.refused:
		r.refuseMediaTypes()
		return ""
	case n.reason != "":
		return n.reason
	}
	return r.answer(n)
}

// answer answers the request in the form that was negotiated, or returns the reason to pass it on.
func (r *readRequest) answer(n negotiated) reason {
	if n.table {
		var ok bool
		if r.table, ok = r.tableOf(n.target); !ok {
			return reasonTable
		}
		n.format = r.table.items(n.noManagedFields)
	}
	r.text = n.text
	var err error
	if r.enc, err = r.resource.encodings.get(r.resource, n.format); err != nil {
		return reasonMediaType
	}
	if r.info.Verb == "get" {
		return r.get()
	}
	return r.listOrWatch()
}

// canonical reports whether the path is exactly the canonical path of the RequestInfo, so that path
// and RequestInfo cannot be interpreted differently.
func canonical(req *http.Request, info *request.RequestInfo) bool {
	if req.URL.RawPath != "" {
		return false
	}
	path, ok := strings.CutPrefix(req.URL.Path, "/"+info.APIPrefix)
	cut := func(segment string) {
		if ok {
			if path, ok = strings.CutPrefix(path, "/"); ok {
				path, ok = strings.CutPrefix(path, segment)
			}
		}
	}
	if info.APIGroup != "" {
		cut(info.APIGroup)
	}
	cut(info.APIVersion)
	if info.Namespace != "" && !(info.Resource == "namespaces" && info.APIGroup == "") {
		cut("namespaces")
		cut(info.Namespace)
	}
	cut(info.Resource)
	if info.Verb == "get" {
		cut(info.Name)
	}
	return ok && path == ""
}

// contentType returns the media type of the response.
func (r *readRequest) contentType() string {
	if r.text != nil {
		return r.text.MediaType
	}
	return string(r.enc.media)
}

// auditsResponse reports whether the audit event of the request must contain the response object.
func auditsResponse(ctx context.Context) bool {
	ac := audit.AuditContextFrom(ctx)
	return ac != nil && ac.Enabled() && !ac.GetEventLevel().Less(auditinternal.LevelRequestResponse)
}

// routed reports whether upstream's routes pass the request to the handlers of a built-in resource:
// the client accepts everything or names a media type exactly. The routes read the first Accept
// header only.
func routed(req *http.Request) bool {
	accept := req.Header.Get("Accept")
	if accept == "" {
		return true
	}
	for accepted := range strings.SplitSeq(accept, ",") {
		accepted, _, _ = strings.Cut(accepted, ";")
		switch strings.Trim(accepted, " ") {
		case "*/*", string(mediaJSON), string(mediaProtobuf), textform.YAML.MediaType:
			return true
		}
	}
	return false
}

// instrument calls serve and records the request, as upstream's routes do.
func (r *readRequest) instrument(serve func()) {
	record := r.observe()
	serve()
	record()
}

// observe counts the request and measures its response from now on. record records the end of the
// request.
func (r *readRequest) observe() (record func()) {
	answered.WithLabelValues(r.info.Verb).Inc()
	if d := r.resource.Deprecation; d != nil {
		warning.AddWarning(r.req.Context(), "", d.Warning)
	}
	deprecated, removedRelease := r.resource.Deprecation.labels()
	received, ok := request.ReceivedTimestampFrom(r.req.Context())
	if !ok {
		received = time.Now()
	}
	req, response := r.req, &endpointmetrics.ResponseWriterDelegator{ResponseWriter: r.w}
	r.w = responsewriter.WrapForHTTP1Or2(response)
	return func() {
		verb, scope := r.metricsLabels()
		endpointmetrics.MonitorRequest(req, verb, r.resource.GVR.Group, r.resource.GVR.Version, r.resource.GVR.Resource, "",
			scope, endpointmetrics.APIServerComponent, deprecated, removedRelease,
			response.Status(), response.ContentLength(), time.Since(received))
	}
}

// metricsLabels returns the verb and scope labels of request metrics: those of the route for
// built-in resources, those of the request for custom resources.
func (r *readRequest) metricsLabels() (verb, scope string) {
	switch {
	case r.resource.Custom:
		return strings.ToUpper(r.info.Verb), endpointmetrics.CleanScope(r.info)
	case r.info.Verb == "get":
		return "GET", "resource"
	case r.resource.Namespaced && r.info.Namespace != "":
		return "LIST", "namespace"
	}
	return "LIST", "cluster"
}

// fail writes err as the response. A request that has ended gets the 504 of upstream's timeout
// filter.
func (r *readRequest) fail(err error) {
	if ended := r.req.Context().Err(); ended != nil && errors.Is(err, ended) {
		err = apierrors.NewTimeoutError("request did not complete within the allotted timeout", 0)
	}
	if unwritable := (textError{}); errors.As(err, &unwritable) {
		r.failText(unwritable.error)
		return
	}
	responsewriters.ErrorNegotiated(err, r.resource.Serializer, r.resource.Kind.GroupVersion(), r.w, r.req)
}

// groupResource returns the resource name used in errors.
func (r *readRequest) groupResource() schema.GroupResource { return r.resource.GVR.GroupResource() }

// scope returns the RequestScope that content negotiation needs.
func (r *boundResource) scope() *handlers.RequestScope {
	if scope := r.requestScope.Load(); scope != nil {
		return scope
	}
	scope := &handlers.RequestScope{
		Serializer:          r.Serializer,
		StandardSerializers: r.StandardSerializers,
		TableConvertor:      rest.NewDefaultTableConvertor(r.GVR.GroupResource()),
		Resource:            r.GVR,
		Kind:                r.Kind,
		MetaGroupVersion:    metav1.SchemeGroupVersion,
	}
	r.requestScope.Store(scope)
	return scope
}

// passOnError reports whether err means that upstream's handlers must answer.
func passOnError(err error) bool { return errors.Is(err, kubestorage.ErrReadEtcd) }
