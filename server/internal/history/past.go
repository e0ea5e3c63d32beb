package history

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
)

// resourcePath is the path of a request for a resource.
type resourcePath struct {
	list        string // the path of the list
	group       schema.GroupResource
	name        string
	subresource string
}

// parsePath returns the resource of a path, or false for other paths.
func parsePath(path string) (resourcePath, bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
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
	p.group.Resource = rest[0]
	p.list = "/" + strings.Join(parts[:prefix+1], "/")
	if len(rest) > 1 {
		p.name = rest[1]
	}
	p.subresource = strings.Join(rest[min(2, len(rest)):], "/")
	return p, true
}

// passed are the paths, besides those of resources, that the server of the present answers: discovery, schemas and versions.
func passed(path string) bool {
	for _, root := range []string{"/api", "/apis", "/openapi", "/version"} {
		if path == root || strings.HasPrefix(path, root+"/") {
			return true
		}
	}
	return path == "/healthz" || path == "/livez" || path == "/readyz"
}

func (s *pastServer) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if !s.authorized(req) {
		fail(w, apierrors.NewUnauthorized("the token is not that of the kubeconfig that the replay has written"))
		return
	}
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		fail(w, &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusMethodNotAllowed,
			Reason: metav1.StatusReasonMethodNotAllowed, Message: fmt.Sprintf("%s is refused: the past is read-only; write to %s", req.Method, s.host)}})
		return
	}
	p, ok := parsePath(req.URL.Path)
	if !ok {
		if !passed(req.URL.Path) {
			fail(w, unavailable("%s has no past", req.URL.Path))
			return
		}
		s.pass(w, req)
		return
	}
	accept := jsonForms(req.Header.Values("Accept"))
	query := req.URL.Query()
	switch {
	case p.group.Resource == "watch" || p.subresource != "" && p.subresource != "status":
		fail(w, unavailable("%s has no past: GET, LIST and WATCH of whole objects have", req.URL.Path))
	case accept == "":
		fail(w, &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusNotAcceptable,
			Reason: metav1.StatusReasonNotAcceptable, Message: "the past is served as application/json only"}})
	case query.Get("watch") != "" && query.Get("watch") != "false" && query.Get("watch") != "0":
		s.watch(w, req.Context(), p, query, accept)
	case p.name != "":
		s.get(w, req.Context(), p, query, accept)
	default:
		s.list(w, req.Context(), p, query, accept)
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

// pass answers with the server's answer.
func (s *pastServer) pass(w http.ResponseWriter, req *http.Request) {
	r := s.rest.Get().AbsPath(req.URL.Path).SetHeader("Accept", strings.Join(req.Header.Values("Accept"), ","))
	result := params(r, req.URL.Query()).Do(req.Context())
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
	w.Write(data) // an error is that of the client
}

func params(r *rest.Request, query url.Values) *rest.Request {
	for key, values := range query {
		for _, value := range values {
			r.Param(key, value)
		}
	}
	return r
}

// read lists a path at a revision. The parameters of the query about revisions are replaced.
func (s *pastServer) read(ctx context.Context, p resourcePath, query url.Values, accept string, revision int64) (media string, data []byte, err error) {
	r := s.rest.Get().AbsPath(p.list).SetHeader("Accept", accept)
	for key, values := range query {
		if !slices.Contains([]string{"resourceVersion", "resourceVersionMatch", "watch", "sendInitialEvents", "allowWatchBookmarks", "timeoutSeconds"}, key) {
			params(r, url.Values{key: values})
		}
	}
	if query.Get("continue") == "" {
		r.Param("resourceVersion", strconv.FormatInt(revision, 10)).Param("resourceVersionMatch", string(metav1.ResourceVersionMatchExact))
	}
	if p.name != "" {
		r.Param("fieldSelector", fields.OneTermEqualSelector("metadata.name", p.name).String())
	}
	result := r.Do(ctx)
	data, err = raw(result)
	result.ContentType(&media)
	return media, data, err
}

// revisionFor returns the revision at which a GET or a LIST is answered: that of the replayed time, or the requested one.
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

func (s *pastServer) list(w http.ResponseWriter, ctx context.Context, p resourcePath, query url.Values, accept string) {
	revision, err := s.revisionFor(query)
	if err == nil {
		var media string
		var data []byte
		if media, data, err = s.read(ctx, p, query, accept, revision); err == nil {
			answer(w, media, data)
			return
		}
	}
	fail(w, err)
}

func (s *pastServer) get(w http.ResponseWriter, ctx context.Context, p resourcePath, query url.Values, accept string) {
	revision, err := s.revisionFor(query)
	if err != nil {
		fail(w, err)
		return
	}
	accept = strings.ReplaceAll(accept, "as=PartialObjectMetadata;", "as=PartialObjectMetadataList;")
	media, data, err := s.read(ctx, p, query, accept, revision)
	if err != nil {
		fail(w, err)
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
