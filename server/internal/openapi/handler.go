package openapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/munnerz/goautoneg"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"
	"k8s.io/kube-openapi/pkg/handler3"
)

// mediaTypes are the media types of documents in the order of preference, each with the media type
// of the response.
var mediaTypes = []struct {
	subType, response string
	form              form
}{
	{"json", "application/json", formJSON},
	{"com.github.proto-openapi.spec.v3.v1.0+protobuf", "application/com.github.proto-openapi.spec.v3.v1.0+protobuf", formProtobuf},
	{"com.github.proto-openapi.spec.v3@v1.0+protobuf", "application/com.github.proto-openapi.spec.v3.v1.0+protobuf", formProtobuf},
}

// immutableFor is how long a client may reuse a document whose address contains its entity tag.
const immutableFor = 365 * 24 * time.Hour

// handler answers requests as the handler of handler3.OpenAPIService does.
type handler struct {
	documents *Documents
	builtIn   *handler3.OpenAPIService
	// builtInPaths is the list of documents of builtIn.
	builtInPaths map[string]handler3.OpenAPIV3DiscoveryGroupVersion
}

func newHandler(d *Documents, builtIn *handler3.OpenAPIService) (*handler, error) {
	req, err := http.NewRequest(http.MethodGet, root, nil)
	if err != nil {
		return nil, err
	}
	response := &memoryResponse{header: http.Header{}, code: http.StatusOK}
	builtIn.HandleDiscovery(response, req)
	var list handler3.OpenAPIV3Discovery
	if response.code != http.StatusOK {
		return nil, fmt.Errorf("list of the OpenAPI documents of built-in resources: status %d", response.code)
	}
	if err := json.Unmarshal(response.body.Bytes(), &list); err != nil {
		return nil, fmt.Errorf("list of the OpenAPI documents of built-in resources: %w", err)
	}
	return &handler{documents: d, builtIn: builtIn, builtInPaths: list.Paths}, nil
}

// serveList answers a request for the list of documents.
func (h *handler) serveList(w http.ResponseWriter, req *http.Request) {
	list, err := h.documents.list(h.builtInPaths)
	if err != nil {
		internalError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	serve(w, req, list)
}

// serveDocument answers a request for a document.
func (h *handler) serveDocument(w http.ResponseWriter, req *http.Request) {
	gv, ok := parsePath(req.URL.Path)
	if !ok {
		h.builtIn.HandleGroupVersion(w, req)
		return
	}
	document, definitions := h.documents.find(gv)
	if document == nil {
		h.builtIn.HandleGroupVersion(w, req)
		return
	}
	w.Header().Set("Vary", "Accept")
	form, mediaType, ok := negotiate(req.Header.Get("Accept"))
	if !ok {
		w.WriteHeader(http.StatusNotAcceptable)
		return
	}
	w.Header().Set("Content-Type", mediaType)
	if hash := req.URL.Query().Get("hash"); hash != "" {
		if hash != document.etag {
			w.Header().Set("Etag", strconv.Quote(document.etag))
			http.Redirect(w, req, location(pathOf(gv), document.etag), http.StatusMovedPermanently) //nolint:gosec // a path of this server
			return
		}
		w.Header().Set("Cache-Control", "public, immutable")
		w.Header().Set("Expires", time.Now().Add(immutableFor).UTC().Format(http.TimeFormat))
	}
	if req.Header.Get("If-None-Match") == strconv.Quote(document.etag) {
		// without building the document
		serve(w, req, content{etag: document.etag, modified: document.modified})
		return
	}
	content, err := document.content(form, gv, definitions, h.documents.options)
	if err != nil {
		internalError(w, err)
		return
	}
	serve(w, req, content)
}

// parsePath returns the group version of the path of a document.
func parsePath(path string) (schema.GroupVersion, bool) {
	parts := strings.Split(strings.TrimPrefix(path, root+"/"), "/")
	if len(parts) != 3 || parts[0] != "apis" {
		return schema.GroupVersion{}, false
	}
	return schema.GroupVersion{Group: parts[1], Version: parts[2]}, true
}

// negotiate returns the form and the media type that an Accept header prefers.
func negotiate(accept string) (form, string, bool) {
	if accept == "" {
		accept = "*/*"
	}
	for _, clause := range goautoneg.ParseAccept(accept) {
		if clause.Type != "application" && clause.Type != "*" {
			continue
		}
		for _, m := range mediaTypes {
			if clause.SubType == m.subType || clause.SubType == "*" {
				return m.form, m.response, true
			}
		}
	}
	return 0, "", false
}

// serve writes a response, or that the client has the current one.
func serve(w http.ResponseWriter, req *http.Request, c content) {
	w.Header().Set("Etag", strconv.Quote(c.etag))
	http.ServeContent(w, req, "", c.modified, bytes.NewReader(c.data))
}

func internalError(w http.ResponseWriter, err error) {
	klog.ErrorS(err, "Cannot serve an OpenAPI document")
	for _, name := range []string{"Cache-Control", "Expires"} { // of the document
		w.Header().Del(name)
	}
	http.Error(w, err.Error(), http.StatusInternalServerError)
}

// memoryResponse is a response in memory.
type memoryResponse struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

func (r *memoryResponse) Header() http.Header         { return r.header }
func (r *memoryResponse) WriteHeader(code int)        { r.code = code }
func (r *memoryResponse) Write(b []byte) (int, error) { return r.body.Write(b) }
