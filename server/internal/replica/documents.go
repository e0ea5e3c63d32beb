package replica

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
)

const (
	// documentAge is the time for which a document is answered without asking a primary.
	documentAge = time.Second
	// documentTimeout bounds the request for a document.
	documentTimeout = 10 * time.Second
	// documentBytes bounds the cached documents, and maxDocument a single one. The OpenAPI document
	// of a large cluster has some MiB; clients request it in two or three forms.
	documentBytes = 32 << 20
	maxDocument   = documentBytes / 2
	// documentReads bounds the documents that are read at once. Further ones are passed on, which
	// holds none of them in memory.
	documentReads = 8
	// documentOverhead is added to the length of a document for its key and header.
	documentOverhead = 1 << 10
)

// isDocument reports whether the request is for discovery, an OpenAPI document or the version.
func isDocument(method, path string) bool {
	if method != http.MethodGet && method != http.MethodHead {
		return false
	}
	path = strings.TrimSuffix(path, "/")
	switch path {
	case "/api", "/apis", "/version", "/openapi/v2", "/openapi/v3":
		return true
	}
	rest, isAPI := strings.CutPrefix(path, "/api/")
	if isAPI {
		return !strings.Contains(rest, "/") // a version
	}
	if rest, isAPI = strings.CutPrefix(path, "/apis/"); isAPI {
		return strings.Count(rest, "/") <= 1 // a group, or a group and a version
	}
	return strings.HasPrefix(path, "/openapi/v3/")
}

// documents answers discovery, OpenAPI documents and the version as a primary does, from answers
// that are at most documentAge old. They are the same for all users that may request them, which is
// decided before. When no primary answers, the last answer is repeated. All methods may be called
// concurrently.
type documents struct {
	to      http.RoundTripper
	claims  *claims
	pass    http.Handler // answers by a primary without a cache
	flights singleflight.Group
	reads   chan struct{} // contains a value for each document that is read
	changes atomic.Int64  // of definitions and APIServices, each of which makes all documents stale

	mu     sync.Mutex // leaf
	bytes  int
	known  map[string]*list.Element // of *document
	recent *list.List               // most recently used first
}

// document is an answer of a primary. Except for at and changes, it is immutable.
type document struct {
	key    string
	header http.Header
	body   []byte

	at      time.Time // of the last confirmation; guarded by documents.mu
	changes int64     // the value of documents.changes before it; guarded by documents.mu
}

func newDocuments(to http.RoundTripper, claims *claims, codecs runtime.NegotiatedSerializer, withoutOrigin bool) *documents {
	return &documents{to: to, claims: claims, pass: newProxy(to, claims, codecs, withoutOrigin),
		reads: make(chan struct{}, documentReads), known: map[string]*list.Element{}, recent: list.New()}
}

// changed makes all documents stale.
func (d *documents) changed() { d.changes.Add(1) }

// handler returns a handler that answers documents, and passes every other request, and those of
// the replica itself, to next. It must run behind authentication and authorization.
func (d *documents) handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !isDocument(req.Method, req.URL.Path) || isOwnRequest(req.Context()) {
			next.ServeHTTP(w, req)
			return
		}
		d.serve(w, req)
	})
}

func (d *documents) serve(w http.ResponseWriter, req *http.Request) {
	uri, cacheable := documentURI(req.URL)
	if req.Header.Get("Range") != "" || !cacheable {
		d.passOn(w, req)
		return
	}
	key := keyOf(req, uri)
	if doc := d.load(key, true); doc != nil {
		documentRequests.WithLabelValues("cached").Inc()
		doc.write(w, req)
		return
	}
	result, err, _ := d.flights.Do(key, func() (any, error) { return d.refresh(req, uri, key) })
	if err != nil {
		d.passOn(w, req) // with the caller's own identity; reports the error
		return
	}
	result.(*document).write(w, req)
}

func (d *documents) passOn(w http.ResponseWriter, req *http.Request) {
	documentRequests.WithLabelValues("passed").Inc()
	d.pass.ServeHTTP(w, req)
}

// documentURI returns the path and the query with which a primary is asked for a document, and
// whether the answer can be cached. A document has one URI, so that a client cannot fill the cache
// with copies: the only parameter with a meaning is the hash of an OpenAPI v3 document, of which
// the primary serves one value; timeout, which clients of discovery send, is replaced by
// documentTimeout. Other requests are passed on.
func documentURI(u *url.URL) (uri string, cacheable bool) {
	if u.RawPath != "" {
		return "", false // another spelling of the path
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "", false
	}
	hash := ""
	for name, values := range query {
		switch {
		case name == "timeout":
		case name == "hash" && len(values) == 1 && strings.HasPrefix(u.Path, "/openapi/v3/"):
			hash = "?" + url.Values{name: values}.Encode()
		default:
			return "", false
		}
	}
	return u.EscapedPath() + hash, true
}

// keyOf returns the key of requests with the same answer.
func keyOf(req *http.Request, uri string) string {
	return strings.Join([]string{uri, strings.Join(req.Header["Accept"], ","), encodingOf(req), strconv.FormatBool(indents(req))}, "\n")
}

// indents reports whether a primary indents JSON in the answer. It decides by the User-Agent, which
// refresh passes on; a request with the parameter pretty is no document (see documentURI). The
// entity tag of discovery is the same for both forms.
func indents(req *http.Request) bool {
	agent := req.UserAgent()
	return strings.HasPrefix(agent, "curl") || strings.HasPrefix(agent, "Wget") || strings.HasPrefix(agent, "Mozilla/5.0")
}

// encodingOf returns the Accept-Encoding of the request to a primary: gzip by the rule of its
// discovery, that a client names it without parameters, such as q=0.
func encodingOf(req *http.Request) string {
	for coding := range strings.SplitSeq(strings.Join(req.Header["Accept-Encoding"], ","), ",") {
		if strings.TrimSpace(coding) == "gzip" {
			return "gzip"
		}
	}
	return "identity"
}

// load returns a document, nil if it is not known or, with current, if it has to be confirmed.
func (d *documents) load(key string, current bool) *document {
	d.mu.Lock()
	defer d.mu.Unlock()
	element := d.known[key]
	if element == nil {
		return nil
	}
	doc := element.Value.(*document)
	if current && (doc.changes != d.changes.Load() || time.Since(doc.at) > documentAge) {
		return nil
	}
	d.recent.MoveToFront(element)
	return doc
}

// errReads means that documentReads documents are being read.
var errReads = errors.New("too many documents are read at once")

// errNotADocument means that a primary answered a document with another code than 200.
var errNotADocument = errors.New("not a document")

// refresh requests the document as the user of req, and stores it. If no primary answers, it
// returns the last document, if there is one.
func (d *documents) refresh(req *http.Request, uri, key string) (*document, error) {
	known, changes := d.load(key, false), d.changes.Load()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(req.Context()), documentTimeout)
	defer cancel()
	out, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://primary"+uri, nil)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"Accept", "User-Agent"} {
		out.Header[name] = req.Header[name]
	}
	out.Header.Set("Accept-Encoding", encodingOf(req))
	if known != nil && known.header.Get("Etag") != "" {
		out.Header.Set("If-None-Match", known.header.Get("Etag"))
	}
	if u, ok := request.UserFrom(req.Context()); ok {
		if err := checkSendable(u); err != nil {
			return nil, err
		}
	}
	setIdentity(out, req, d.claims)
	resp, err := d.to.RoundTrip(out)
	if err == nil {
		defer resp.Body.Close()
		switch {
		case resp.StatusCode == http.StatusNotModified && known != nil:
			documentRequests.WithLabelValues("unchanged").Inc()
			d.store(known, changes)
			return known, nil
		case resp.StatusCode == http.StatusOK:
			select {
			case d.reads <- struct{}{}:
				defer func() { <-d.reads }()
			default:
				return nil, errReads
			}
			var doc *document
			if doc, err = readDocument(resp, key); err == nil {
				documentRequests.WithLabelValues("fetched").Inc()
				d.store(doc, changes)
				return doc, nil
			}
		case resp.StatusCode < http.StatusInternalServerError:
			return nil, errNotADocument
		default:
			err = fmt.Errorf("%w: %s", errNotADocument, resp.Status)
		}
	}
	if known == nil {
		return nil, err
	}
	documentRequests.WithLabelValues("stale").Inc()
	return known, nil
}

// documentHeaders are the headers that describe a document, not its transfer.
var documentHeaders = []string{"Cache-Control", "Content-Encoding", "Content-Type", "Etag", "Last-Modified", "Vary", "X-Varied-Accept"}

func readDocument(resp *http.Response, key string) (*document, error) {
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxDocument+1))
	if err != nil {
		return nil, err
	}
	if len(body) > maxDocument {
		return nil, errNotADocument
	}
	doc := &document{key: key, header: http.Header{}, body: slices.Clip(body)}
	for _, name := range documentHeaders {
		if values := resp.Header[name]; values != nil {
			doc.header[name] = values
		}
	}
	return doc, nil
}

// store adds a document, or confirms it, and evicts others beyond documentBytes, the least recently
// used first.
func (d *documents) store(doc *document, changes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	doc.at, doc.changes = time.Now(), changes
	if old := d.known[doc.key]; old != nil {
		d.dropLocked(old)
	}
	d.known[doc.key] = d.recent.PushFront(doc)
	d.bytes += doc.size()
	for d.bytes > documentBytes {
		d.dropLocked(d.recent.Back())
	}
}

// dropLocked removes a document. The caller holds mu.
func (d *documents) dropLocked(element *list.Element) {
	doc := d.recent.Remove(element).(*document)
	delete(d.known, doc.key)
	d.bytes -= doc.size()
}

func (doc *document) size() int { return len(doc.body) + len(doc.key) + documentOverhead }

// write answers the request with the document, or with 304 if the client has it.
func (doc *document) write(w http.ResponseWriter, req *http.Request) {
	header := w.Header()
	for name, values := range doc.header {
		header[name] = values
	}
	if etag := doc.header.Get("Etag"); etag != "" && matches(req.Header["If-None-Match"], etag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	header.Set("Content-Length", strconv.Itoa(len(doc.body)))
	w.WriteHeader(http.StatusOK)
	if req.Method != http.MethodHead {
		_, _ = w.Write(doc.body) // the client may have left
	}
}

// matches reports whether an If-None-Match has the entity tag.
func matches(headers []string, etag string) bool {
	for _, header := range headers {
		for given := range strings.SplitSeq(header, ",") {
			given = strings.TrimSpace(given)
			if given == "*" || strings.TrimPrefix(given, "W/") == strings.TrimPrefix(etag, "W/") {
				return true
			}
		}
	}
	return false
}
