package history

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
)

// resourcePath is the path of a request for a resource.
type resourcePath struct {
	list        string // the path of the list: its segments are DNS names
	group       schema.GroupResource
	name        string
	subresource string
}

// segments returns the decoded segments of the path of a request target, or false unless the path
// is clean: it begins with one slash, and has no empty segment, no segment "." or "..", and neither
// a backslash nor an encoded dot, slash, backslash, percent sign or control character. The target
// is the request line's, which http.Server does not clean. One slash at the end is removed: some
// clients end the paths of discovery with one, which slash reports.
func segments(target string) (parts []string, slash, ok bool) {
	path, _, _ := strings.Cut(target, "?")
	path, ok = strings.CutPrefix(path, "/") // otherwise it is an absolute URI, or *
	if !ok || path == "" {
		return nil, false, false
	}
	path, slash = strings.CutSuffix(path, "/")
	for raw := range strings.SplitSeq(path, "/") {
		part, err := url.PathUnescape(raw)
		switch {
		case err != nil, part == "", part == ".", part == "..", strings.ContainsFunc(part, unicode.IsControl), strings.ContainsAny(part, `/\%`),
			strings.Count(part, ".") != strings.Count(raw, "."):
			return nil, false, false
		}
		parts = append(parts, part)
	}
	return parts, slash, true
}

// parsePath returns the resource of the segments of a path, or false for other paths.
func parsePath(parts []string) (resourcePath, bool) {
	var p resourcePath
	var prefix int // the number of parts before the resource
	switch {
	case parts[0] == "api" && len(parts) > 2:
		prefix = 2
	case parts[0] == "apis" && len(parts) > 3:
		prefix, p.group.Group = 3, parts[1]
	default:
		return p, false
	}
	rest := parts[prefix:]
	if rest[0] == "namespaces" && len(rest) > 2 && rest[2] != "status" && rest[2] != "finalize" {
		prefix, rest = prefix+2, rest[2:]
	}
	if slices.ContainsFunc(parts[:prefix+1], isNoDNSName) {
		return p, false
	}
	p.group.Resource = rest[0]
	p.list = "/" + strings.Join(parts[:prefix+1], "/")
	if len(rest) > 1 {
		p.name = rest[1]
	}
	p.subresource = strings.Join(rest[min(2, len(rest)):], "/")
	return p, true
}

func isNoDNSName(part string) bool { return len(validation.IsDNS1123Subdomain(part)) > 0 }

// discovery reports whether the server of the present answers a path: discovery, schemas, the
// version and the state of the server.
func discovery(parts []string) bool {
	if slices.ContainsFunc(parts[1:], func(part string) bool {
		return isNoDNSName(part) && part != ".well-known" && part != "openid-configuration"
	}) {
		return false
	}
	switch parts[0] {
	case "api":
		return len(parts) <= 2
	case "apis":
		return len(parts) <= 3
	case "openapi":
		return len(parts) == 2 && parts[1] == "v2" || len(parts) >= 2 && len(parts) <= 5 && parts[1] == "v3"
	case "version", "healthz", "livez", "readyz":
		return len(parts) == 1
	}
	return false
}

// discoveryParams are the parameters of discovery, schemas and health checks. Others are not passed
// on, such as watch, whose answer would have no end.
var discoveryParams = []string{"exclude", "hash", "pretty", "timeout", "verbose"}

func (s *pastServer) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if !s.authorized(req) {
		fail(w, apierrors.NewUnauthorized("the token is not that of the kubeconfig that the replay has written"))
		return
	}
	if req.Method != http.MethodGet {
		w.Header().Set("Allow", http.MethodGet)
		fail(w, &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusMethodNotAllowed,
			Reason: metav1.StatusReasonMethodNotAllowed, Message: fmt.Sprintf("%s is refused: the past is read-only; write to %s", req.Method, s.host)}})
		return
	}
	parts, slash, clean := segments(req.RequestURI)
	if clean && discovery(parts) {
		s.pass(w, req, "/"+strings.Join(parts, "/"))
		return
	}
	var p resourcePath
	isResource := false
	if clean && !slash {
		p, isResource = parsePath(parts)
	}
	if !isResource {
		fail(w, unavailable("%s has no past", req.URL.Path))
		return
	}
	accept := jsonForms(req.Header.Values("Accept"))
	query := req.URL.Query()
	switch {
	case p.group.Resource == "watch" || p.group.Resource == "proxy" || p.subresource != "" && p.subresource != "status":
		fail(w, unavailable("%s has no past: GET, LIST and WATCH of whole objects have", req.URL.Path))
	case accept == "":
		fail(w, &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusNotAcceptable,
			Reason: metav1.StatusReasonNotAcceptable, Message: "the past is served as application/json only"}})
	case query.Get("watch") != "" && query.Get("watch") != "false" && query.Get("watch") != "0":
		s.watch(w, req.Context(), p, query, accept)
	case p.name != "":
		accept = strings.ReplaceAll(accept, "as=PartialObjectMetadata;", "as=PartialObjectMetadataList;")
		fallthrough
	default:
		s.answer(w, req.Context(), p, query, accept)
	}
}

func unavailable(format string, args ...any) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusNotFound,
		Reason: metav1.StatusReasonNotFound, Message: fmt.Sprintf(format, args...)}}
}

// statusOf returns the status of an error.
func statusOf(err error) metav1.Status {
	status := metav1.Status{Status: metav1.StatusFailure, Code: http.StatusBadGateway, Reason: metav1.StatusReasonInternalError, Message: err.Error()}
	var api apierrors.APIStatus
	if errors.As(err, &api) {
		status = api.Status()
	}
	status.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	return status
}

// fail answers with an error.
func fail(w http.ResponseWriter, err error) {
	status := statusOf(err)
	data, _ := json.Marshal(status)
	w.Header().Set("Content-Type", jsonMedia)
	w.WriteHeader(int(status.Code))
	w.Write(append(data, '\n'))
}

// jsonForms returns the JSON forms of Accept headers, "" if there are none.
func jsonForms(headers []string) string {
	var forms []string
	for _, form := range strings.Split(strings.Join(headers, ","), ",") {
		media, _, err := mime.ParseMediaType(form)
		switch {
		case strings.TrimSpace(form) == "", err == nil && (media == "*/*" || media == "application/*"):
			forms = append(forms, jsonMedia)
		case err == nil && media == jsonMedia:
			forms = append(forms, strings.TrimSpace(form))
		}
	}
	return strings.Join(forms, ",")
}

// pass answers with the server's answer for a path of discovery.
func (s *pastServer) pass(w http.ResponseWriter, req *http.Request, path string) {
	r := s.rest.Get().AbsPath(path).SetHeader("Accept", strings.Join(req.Header.Values("Accept"), ","))
	query := req.URL.Query()
	maps.DeleteFunc(query, func(key string, _ []string) bool { return !slices.Contains(discoveryParams, key) })
	result := params(r, query).Do(req.Context())
	data, err := raw(result)
	if err != nil {
		fail(w, err)
		return
	}
	var media string
	result.ContentType(&media)
	answer(w, media, data)
}

func answer(w http.ResponseWriter, media string, data []byte) {
	w.Header().Set("Content-Type", media)
	w.WriteHeader(http.StatusOK)
	w.Write(data) //nolint:gosec // of a media type that no browser renders; an error is that of the client
}

func params(r *rest.Request, query url.Values) *rest.Request {
	for key, values := range query {
		for _, value := range values {
			r.Param(key, value)
		}
	}
	return r
}

// replacedParams are the parameters of a request that a list of the past replaces, and listParams
// those that a GET of one object ignores, as kube-apiserver does.
var (
	replacedParams = []string{"resourceVersion", "resourceVersionMatch", "watch", "sendInitialEvents", "allowWatchBookmarks", "timeoutSeconds"}
	listParams     = []string{"continue", "fieldSelector", "labelSelector", "limit", "shardSelector"}
)

// selector returns the field selector of the object that a path names.
func (p *resourcePath) selector() string {
	return fields.OneTermEqualSelector("metadata.name", p.name).String()
}

// read lists a path at a revision, or continues a list. The parameters of the query about revisions
// are replaced. An answer of the server of the present that is of another revision is an error: an
// API that ignores revisions, or a continue token of a later one.
func (s *pastServer) read(ctx context.Context, p resourcePath, query url.Values, accept string, revision int64) (media string, data []byte, err error) {
	r := s.rest.Get().AbsPath(p.list).SetHeader("Accept", accept)
	for key, values := range query {
		if !slices.Contains(replacedParams, key) && (p.name == "" || !slices.Contains(listParams, key)) {
			params(r, url.Values{key: values})
		}
	}
	continued := p.name == "" && query.Get("continue") != ""
	if !continued {
		r.Param("resourceVersion", strconv.FormatInt(revision, 10)).Param("resourceVersionMatch", string(metav1.ResourceVersionMatchExact))
	}
	if p.name != "" {
		r.Param("fieldSelector", p.selector())
	}
	result := r.Do(ctx)
	if data, err = raw(result); err != nil {
		return "", nil, err
	}
	var head struct {
		Metadata metav1.ListMeta `json:"metadata"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return "", nil, fmt.Errorf("decode a list: %w", err)
	}
	answered, err := strconv.ParseInt(head.Metadata.ResourceVersion, 10, 64)
	if err != nil || answered != revision && !(continued && answered <= revision) {
		return "", nil, unavailable("%s has no past at revision %d: the server answered with resource version %q", p.list, revision, head.Metadata.ResourceVersion)
	}
	result.ContentType(&media)
	return media, data, nil
}

// revisionFor returns the revision at which a GET or a LIST is answered: that of the replayed time,
// or the requested one.
func (s *pastServer) revisionFor(query url.Values) (int64, error) {
	now := s.clock.revision()
	text := query.Get("resourceVersion")
	if text == "" || text == "0" {
		return now, nil
	}
	requested, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("resource version %q is no revision", text))
	}
	if requested > now {
		e := apierrors.NewTimeoutError(fmt.Sprintf("Too large resource version: %d, current: %d", requested, now), 1)
		e.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version"}}
		return 0, e
	}
	if query.Get("resourceVersionMatch") == string(metav1.ResourceVersionMatchExact) {
		return requested, nil
	}
	return now, nil
}

// answer answers a GET or a LIST. That of one object is read as a list of it.
func (s *pastServer) answer(w http.ResponseWriter, ctx context.Context, p resourcePath, query url.Values, accept string) {
	revision, err := s.revisionFor(query)
	if err != nil {
		fail(w, err)
		return
	}
	media, data, err := s.read(ctx, p, query, accept, revision)
	if err != nil {
		fail(w, err)
		return
	}
	if p.name == "" {
		answer(w, media, data)
		return
	}
	list, err := parseItems(data)
	switch {
	case err != nil:
		fail(w, err)
	case list.Kind == "Table" && len(list.Rows) > 0:
		answer(w, media, data)
	case len(list.Items) == 1:
		answer(w, jsonMedia, list.Items[0])
	default:
		fail(w, apierrors.NewNotFound(p.group, p.name))
	}
}

// items is a list, decoded as far as its objects, which have their kinds.
type items struct {
	metav1.TypeMeta
	Items []json.RawMessage `json:"items"`
	Rows  []json.RawMessage `json:"rows"` // of a table
}

func parseItems(data []byte) (*items, error) {
	list := &items{}
	if err := json.Unmarshal(data, list); err != nil {
		return nil, fmt.Errorf("decode a list: %w", err)
	}
	for i, item := range list.Items {
		object := map[string]json.RawMessage{}
		if err := json.Unmarshal(item, &object); err != nil {
			return nil, fmt.Errorf("decode an object of a list: %w", err)
		}
		if object["kind"] == nil {
			object["kind"], _ = json.Marshal(strings.TrimSuffix(list.Kind, "List"))
			object["apiVersion"], _ = json.Marshal(list.APIVersion)
		}
		var err error
		if list.Items[i], err = json.Marshal(object); err != nil {
			return nil, err
		}
	}
	return list, nil
}
