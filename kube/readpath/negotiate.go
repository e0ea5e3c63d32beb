package readpath

import (
	"net/http"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/munnerz/goautoneg"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/kube/internal/textform"
	"github.com/stratakube/strata/kube/kubestorage"
)

// negotiated is the result of negotiating an Accept header.
type negotiated struct {
	format
	reason reason // why to pass the request on; empty if format is valid
	// a list or an object as a Table of the version format.target
	table bool
	text  *textform.Form // made of format, which is JSON; nil: the response has the format itself
	// the gate ManagedFieldsOptOut excludes all media types of the request, which upstream's
	// handlers would answer
	refused bool
}

// negotiate selects the format of the response as upstream's handlers do. Results that depend only
// on the Accept header are cached per header, up to maxAccepts headers.
func (r *readRequest) negotiate() negotiated { return r.negotiateAs(true) }

// negotiateAs is negotiate; it caches the result of a new Accept header only if remember is set.
func (r *readRequest) negotiateAs(remember bool) negotiated {
	if asksForPretty(r.req) {
		return r.negotiateUncached()
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
		return n
	}
	n := r.negotiateUncached()
	if remember && len(r.req.Header["Accept"]) <= 1 {
		cache.store(accept, n)
	}
	return n
}

// asksForPretty reports whether the query or the user agent may request indented JSON.
func asksForPretty(req *http.Request) bool {
	agent := req.UserAgent()
	return strings.Contains(req.URL.RawQuery, "pretty") ||
		strings.HasPrefix(agent, "curl") || strings.HasPrefix(agent, "Wget") || strings.HasPrefix(agent, "Mozilla/5.0")
}

// negotiateUncached negotiates without the cache. Upstream's handlers of built-in resources are
// behind routes, which reject some requests with their own error text: for example media ranges
// other than */*, although the handlers support them.
func (r *readRequest) negotiateUncached() negotiated {
	accept := r.req.Header.Get("Accept")
	if strings.Contains(accept, dropParameter) && r.resource.Store.Enabled(kubestorage.ManagedFieldsOptOut) {
		return r.negotiateDrops(accept)
	}
	opts, info, err := negotiation.NegotiateOutputMediaType(r.req, r.resource.Serializer, r.scope)
	if err != nil {
		return negotiated{reason: reasonMediaType}
	}
	return r.negotiated(opts, info, false)
}

// dropParameter is the parameter of a media type that names what the response omits. Its only value
// is managedFieldsName (KEP-5958).
const dropParameter, managedFieldsName = "drop", "metadata.managedFields"

// negotiateDrops negotiates an Accept header of which a media type may have the parameter drop. The
// server has no media type with an unknown value of it.
func (r *readRequest) negotiateDrops(accept string) negotiated {
	for _, clause := range goautoneg.ParseAccept(accept) { // upstream's parser and order
		value := clause.Params[dropParameter]
		if value != "" && value != managedFieldsName {
			continue
		}
		one := clause.Type + "/" + clause.SubType
		for name, value := range clause.Params {
			one += ";" + name + "=" + value
		}
		if opts, info, err := negotiation.NegotiateOutputMediaType(r.accepting(one), r.resource.Serializer, r.scope); err == nil {
			return r.negotiated(opts, info, value != "")
		}
	}
	if !r.resource.Custom && !routed(r.req) {
		return negotiated{reason: reasonMediaType} // upstream's routes refuse it
	}
	return negotiated{refused: true}
}

// negotiated returns the format of a media type that upstream's negotiation chose.
func (r *readRequest) negotiated(opts negotiation.MediaTypeOptions, info runtime.SerializerInfo, noManagedFields bool) negotiated {
	if !r.resource.Custom && !routed(r.req) {
		return negotiated{reason: reasonMediaType}
	}
	f := format{media: media(info.MediaType), noManagedFields: noManagedFields}
	var text *textform.Form
	switch {
	case r.info.Verb == "watch": // is not indented
	case info.MediaType == textform.YAML.MediaType:
		f.media, text = mediaJSON, textform.YAML
	case info.PrettySerializer != nil && info.Serializer == info.PrettySerializer:
		text = textform.Indented
	}
	if f.media != mediaJSON && f.media != mediaProtobuf {
		return negotiated{reason: reasonMediaType}
	}
	isTable := false
	if target := opts.Convert; target != nil {
		f.target = target.GroupVersion()
		known := f.target == metav1.SchemeGroupVersion || f.target == metav1beta1.SchemeGroupVersion
		switch {
		case target.Kind == "Table" && known && f.media == mediaJSON && r.info.Verb != "watch" && r.resource.Table != nil:
			isTable = true
		case target.Kind == "Table":
			return negotiated{reason: reasonTable}
		case target.Kind != r.partialKind() || !known:
			return negotiated{reason: reasonMediaType} // upstream words the error
		}
	}
	return negotiated{format: f, table: isTable, text: text}
}

// accepting returns the request as content negotiation needs it, with an Accept header.
func (r *readRequest) accepting(accept string) *http.Request {
	// some user agents get indented JSON
	header := http.Header{"Accept": {accept}, "User-Agent": r.req.Header["User-Agent"]}
	return &http.Request{Method: r.req.Method, URL: r.req.URL, Header: header}
}

// refuseMediaTypes writes that the server has none of the requested media types, as upstream does.
func (r *readRequest) refuseMediaTypes() {
	supported, _ := negotiation.MediaTypesForSerializer(r.resource.Serializer)
	status := responsewriters.ErrorToAPIStatus(negotiation.NewNotAcceptableError(supported))
	responsewriters.WriteRawJSON(int(status.Code), status, r.w)
}

// acceptCache caches negotiation results by Accept header: of the first maxAccepts distinct headers
// that are not longer than maxAcceptLength. Clients send few distinct headers. Safe for concurrent
// use.
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

// partialKind is the PartialObjectMetadata kind that the request may name.
func (r *readRequest) partialKind() string {
	if r.info.Verb == "list" {
		return "PartialObjectMetadataList"
	}
	return "PartialObjectMetadata"
}

// negotiateGzip reports whether the response may be compressed, by upstream's rules: the first
// Accept-Encoding header names gzip, without parameters.
func negotiateGzip(req *http.Request) bool {
	return acceptsGzip(req) && utilfeature.DefaultFeatureGate.Enabled(features.APIResponseCompression)
}

// watchListCompression is a gate of Kubernetes 1.37 and later; older releases have no constant for
// it.
const watchListCompression featuregate.Feature = "WatchListCompression"

// knowsWatchListCompression reports whether this release of k8s.io/apiserver compresses watches.
var knowsWatchListCompression = sync.OnceValue(func() bool {
	_, known := utilfeature.DefaultMutableFeatureGate.GetAll()[watchListCompression]
	return known
})

// negotiateWatchGzip is negotiateGzip for a watch that begins with initial events and marks their
// end. Other watches are never compressed.
func negotiateWatchGzip(req *http.Request) bool {
	return acceptsGzip(req) && knowsWatchListCompression() && utilfeature.DefaultFeatureGate.Enabled(watchListCompression)
}

func acceptsGzip(req *http.Request) bool {
	accepted := req.Header.Get("Accept-Encoding")
	if accepted == "" {
		return false
	}
	for coding := range strings.SplitSeq(accepted, ",") {
		if strings.TrimSpace(coding) == "gzip" {
			return true
		}
	}
	return false
}
