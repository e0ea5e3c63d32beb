package readpath

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/endpoints/handlers"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/warning"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/listadmission"
)

// reason says why a request was passed on; it is a label of a metric.
type reason string

const (
	// reasonTable: kubectl get asks for tables, which upstream's code makes from decoded
	// objects that are kept.
	reasonTable reason = "table"
	// reasonPretty: indented JSON, for people: ?pretty=true, curl, browsers.
	reasonPretty reason = "pretty"
	// reasonMediaType: YAML, CBOR, or a form that only upstream knows.
	reasonMediaType reason = "media_type"
	// reasonResource: memory does not hold the resource, or it is not served here.
	reasonResource reason = "resource"
	// reasonPath: subresources, websockets, paths in an unusual form.
	reasonPath reason = "path"
	// reasonAudit: the audit policy wants the response object.
	reasonAudit reason = "audit"
	// reasonOptions: options that only upstream knows.
	reasonOptions reason = "options"
	// reasonEtcd: memory does not answer this read, etcd does: a revision older than
	// memory, or a key that is needed before memory has caught up.
	reasonEtcd reason = "etcd"
)

// Config configures a Server.
type Config struct {
	// Resolver finds what serves a request.
	Resolver *Resolver
	// MinRequestTimeout is the shortest time after which a watch without a timeout of
	// its own ends; each lasts up to twice as long, at random. 0 means that of the API
	// server that the server is mounted in (Mount); without one, the watch ends at once.
	MinRequestTimeout time.Duration
	// Lists bounds the bytes of lists that are under way at the same time: of those that are answered here,
	// and, with Mount, of those that are passed on. nil means listadmission.New(0).
	Lists *listadmission.Admission
}

// Server answers reads from memory. Safe for concurrent use.
type Server struct {
	resolver          *Resolver
	minRequestTimeout time.Duration
	lists             *listadmission.Admission
	levels            *levels          // see Mount; nil without it, and without priority and fairness
	conns             *trackedListener // see Mount; nil without it
	pacing            pacing
}

// New returns a server of reads.
func New(c Config) *Server {
	registerMetrics()
	s := &Server{resolver: c.Resolver, minRequestTimeout: c.MinRequestTimeout, lists: c.Lists}
	if s.lists == nil {
		s.lists = listadmission.New(0)
	}
	return s
}

// Handler returns a handler that answers GET, LIST and WATCH from memory and passes
// everything else to next. It stands behind the filters of an API server: what it
// serves is what the RequestInfo says that was authorized. The path is looked at only to
// see that it is that of the RequestInfo, in its plain form.
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
				req = req.WithContext(kubestorage.HasWaited(req.Context()))
			}
			next.ServeHTTP(w, req)
		}
	})
}

// Serves reports whether a GET, LIST or WATCH will be answered here, as far as its path and headers tell:
// the resource was read before, and the form is one that is made here. What only the read itself
// shows, such as a revision that is older than memory, may still be passed on.
func (s *Server) Serves(req *http.Request, info *request.RequestInfo) bool {
	if !canonical(req, info) {
		return false
	}
	resource := s.resolver.known(info)
	if resource == nil {
		return false
	}
	// Nothing is remembered of a header before its sender is known.
	_, why := (&read{server: s, resource: resource, info: info, scope: resource.scope(), req: req}).negotiateAs(false)
	return why == ""
}

// read is one request that is about to be answered.
type read struct {
	server   *Server
	resource *Resource
	info     *request.RequestInfo
	enc      *encoding
	scope    *handlers.RequestScope
	w        http.ResponseWriter
	req      *http.Request
}

// serve answers the request, or returns why it has to be passed on; then nothing has
// been written.
func (s *Server) serve(w http.ResponseWriter, req *http.Request, info *request.RequestInfo, next http.Handler) reason {
	if info.Subresource != "" || !canonical(req, info) {
		return reasonPath
	}
	if _, ok := req.Header["Upgrade"]; ok {
		return reasonPath // a watch over a websocket
	}
	resource, why := s.resolver.Resolve(info, next)
	if resource == nil {
		return why
	}
	if info.Verb != "watch" && auditsResponse(req.Context()) {
		return reasonAudit
	}
	r := &read{server: s, resource: resource, info: info, scope: resource.scope(), w: w, req: req}
	f, why := r.negotiate()
	if why != "" {
		return why
	}
	var err error
	if r.enc, err = resource.encodings.get(resource, f); err != nil {
		return reasonMediaType
	}
	switch info.Verb {
	case "get":
		return r.get()
	default:
		return r.listOrWatch()
	}
}

// canonical reports whether the path is exactly the one that the RequestInfo was read
// from: nothing is decided twice.
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

// auditsResponse reports whether the audit event of the request is to contain the
// response object.
func auditsResponse(ctx context.Context) bool {
	ac := audit.AuditContextFrom(ctx)
	return ac != nil && ac.Enabled() && !ac.GetEventLevel().Less(auditinternal.LevelRequestResponse)
}

// negotiated is what becomes of an Accept header.
type negotiated struct {
	format
	why reason // to pass on
}

// negotiate decides on the form of the response as upstream's handlers do. What depends
// on the Accept header alone is decided once for each header, while there are not too many.
func (r *read) negotiate() (format, reason) { return r.negotiateAs(true) }

// negotiateAs is negotiate, which remembers what becomes of a new Accept header if told to.
func (r *read) negotiateAs(remember bool) (format, reason) {
	if asksForPretty(r.req) {
		n := r.negotiateAnew()
		return n.format, n.why
	}
	accept := r.req.Header.Get("Accept")
	var cache *acceptCache
	switch r.info.Verb {
	case "get":
		cache = &r.resource.accepted.get
	case "list":
		cache = &r.resource.accepted.list
	default:
		cache = &r.resource.accepted.watch
	}
	if n, ok := cache.load(accept); ok {
		return n.format, n.why
	}
	n := r.negotiateAnew()
	if remember && len(r.req.Header["Accept"]) <= 1 {
		cache.store(accept, n)
	}
	return n.format, n.why
}

// asksForPretty reports whether something beside the Accept header may ask for indented
// JSON.
func asksForPretty(req *http.Request) bool {
	agent := req.UserAgent()
	return strings.Contains(req.URL.RawQuery, "pretty") ||
		strings.HasPrefix(agent, "curl") || strings.HasPrefix(agent, "Wget") || strings.HasPrefix(agent, "Mozilla/5.0")
}

// negotiateAnew negotiates. In front of upstream's handlers of built-in resources stand
// routes, which refuse in words of their own what they do not know, such as ranges of media
// types other than all, which the handlers do know.
func (r *read) negotiateAnew() negotiated {
	opts, info, err := negotiation.NegotiateOutputMediaType(r.req, r.resource.Serializer, r.scope)
	if err != nil || !r.resource.Custom && !routed(r.req) {
		return negotiated{why: reasonMediaType}
	}
	f := format{media: media(info.MediaType)}
	if f.media != mediaJSON && f.media != mediaProtobuf {
		return negotiated{why: reasonMediaType}
	}
	if target := opts.Convert; target != nil {
		switch {
		case target.Kind == "Table":
			return negotiated{why: reasonTable}
		case target.Kind != r.partialKind():
			return negotiated{why: reasonMediaType} // upstream words the error
		}
		f.target = target.GroupVersion()
		if f.target != metav1.SchemeGroupVersion && f.target != metav1beta1.SchemeGroupVersion {
			return negotiated{why: reasonMediaType}
		}
	}
	// Watches are not indented.
	if info.PrettySerializer != nil && info.Serializer == info.PrettySerializer && r.info.Verb != "watch" {
		return negotiated{why: reasonPretty}
	}
	return negotiated{format: f}
}

// routed reports whether upstream's routes let the request pass to the handlers of a built-in
// resource: the client accepts everything, or names a media type exactly. They look at the
// first header only.
func routed(req *http.Request) bool {
	accept := req.Header.Get("Accept")
	if accept == "" {
		return true
	}
	for accepted := range strings.SplitSeq(accept, ",") {
		accepted, _, _ = strings.Cut(accepted, ";")
		switch strings.Trim(accepted, " ") {
		case "*/*", string(mediaJSON), string(mediaProtobuf):
			return true
		}
	}
	return false
}

// acceptCache remembers what becomes of Accept headers: of the first ones that are seen,
// of moderate length. Clients send few different ones. Safe for concurrent use.
type acceptCache struct {
	known sync.Map // of negotiated, by header
	n     atomic.Int32
}

const (
	maxAccepts      = 64
	maxAcceptLength = 512
)

func (c *acceptCache) load(accept string) (negotiated, bool) {
	n, ok := c.known.Load(accept)
	if !ok {
		return negotiated{}, false
	}
	return n.(negotiated), true
}

func (c *acceptCache) store(accept string, n negotiated) {
	if len(accept) > maxAcceptLength || c.n.Load() >= maxAccepts {
		return
	}
	if _, known := c.known.LoadOrStore(accept, n); !known {
		c.n.Add(1)
	}
}

// partialKind is the kind of metadata that the request may ask for.
func (r *read) partialKind() string {
	if r.info.Verb == "list" {
		return "PartialObjectMetadataList"
	}
	return "PartialObjectMetadata"
}

// instrument records the request while serve answers it, as upstream's routes do.
func (r *read) instrument(serve func()) {
	answered.WithLabelValues(r.info.Verb).Inc()
	for _, text := range r.resource.Warnings {
		warning.AddWarning(r.req.Context(), "", text)
	}
	verb, scope := r.metricsLabels()
	endpointmetrics.InstrumentHandlerFunc(verb, r.resource.GVR.Group, r.resource.GVR.Version, r.resource.GVR.Resource, "",
		scope, endpointmetrics.APIServerComponent, r.resource.Deprecated, r.resource.RemovedRelease,
		func(w http.ResponseWriter, _ *http.Request) {
			r.w = w
			serve()
		})(r.w, r.req)
}

// metricsLabels are the verb and scope labels of request metrics: those of the route for
// built-in resources, those of the request for custom ones.
func (r *read) metricsLabels() (verb, scope string) {
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

// fail answers with an error.
func (r *read) fail(err error) {
	responsewriters.ErrorNegotiated(err, r.resource.Serializer, r.resource.Kind.GroupVersion(), r.w, r.req)
}

// groupResource is how errors name the resource.
func (r *read) groupResource() schema.GroupResource { return r.resource.GVR.GroupResource() }

// scope returns what negotiation asks about the resource.
func (r *Resource) scope() *handlers.RequestScope {
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

// passOnError reports whether the error means that upstream's handlers are to answer.
func passOnError(err error) bool { return errors.Is(err, kubestorage.ErrReadEtcd) }
