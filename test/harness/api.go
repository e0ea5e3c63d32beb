package harness

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
)

// API speaks HTTP and JSON with a server directly, without a client library's defaults. It may be
// used concurrently.
type API struct {
	url    string
	client *http.Client
	env    *Env
}

// API returns a client for the administrator.
func (s *Server) API() *API { return s.APIFor(s.Config) }

// APIFor returns a client for the user of config.
func (s *Server) APIFor(config *rest.Config) *API {
	client, err := rest.HTTPClientFor(config)
	s.env.check(err)
	return &API{url: s.URL, client: client, env: s.env}
}

// Response is an answer that was read to the end.
type Response struct {
	Code   int
	Header http.Header
	Body   []byte
}

// Do sends a request. A body that is neither nil, string nor bytes is sent as JSON. An answer with
// any code is not an error.
func (a *API) Do(ctx context.Context, method, path, query string, body any) (*Response, error) {
	return a.DoAs(ctx, method, path, query, "", "", body)
}

// DoAs is Do with a Content-Type for the body and an Accept header; "" for JSON.
func (a *API) DoAs(ctx context.Context, method, path, query, contentType, accept string, body any) (*Response, error) {
	resp, err := a.send(ctx, method, path, query, contentType, accept, body)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("%s %s?%s: %w", method, path, query, err)
	}
	return &Response{Code: resp.StatusCode, Header: resp.Header, Body: data}, nil
}

func (a *API) send(ctx context.Context, method, path, query, contentType, accept string, body any) (*http.Response, error) {
	var reader io.Reader
	switch body := body.(type) {
	case nil:
	case string:
		reader = strings.NewReader(body)
	case []byte:
		reader = bytes.NewReader(body)
	default:
		data, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		reader = bytes.NewReader(data)
	}
	target := a.url + path
	if query != "" {
		target += "?" + query
	}
	req, err := http.NewRequestWithContext(ctx, method, target, reader)
	if err != nil {
		return nil, err
	}
	const jsonType = "application/json"
	req.Header.Set("Accept", cmp.Or(accept, jsonType))
	if reader != nil {
		req.Header.Set("Content-Type", cmp.Or(contentType, jsonType))
	}
	return a.client.Do(req)
}

// Status returns the body as a Status; its zero value if it is something else.
func (r *Response) Status() metav1.Status {
	var status metav1.Status
	if err := json.Unmarshal(r.Body, &status); err != nil || status.Kind != "Status" {
		return metav1.Status{}
	}
	return status
}

// Object returns the body as an object.
func (r *Response) Object() (*unstructured.Unstructured, error) {
	o := &unstructured.Unstructured{}
	if r.Code/100 != 2 {
		return nil, r.Err()
	}
	return o, json.Unmarshal(r.Body, &o.Object)
}

// List is a LIST response.
type List struct {
	Kind     string          `json:"kind"`
	Metadata metav1.ListMeta `json:"metadata"`
	Items    []Object        `json:"items"`
}

// Object has the common fields of any object.
type Object struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   metav1.ObjectMeta `json:"metadata"`
	Data       map[string]string `json:"data"`
}

// Key is namespace/name, or the name of an object without a namespace.
func (o Object) Key() string {
	if o.Metadata.Namespace == "" {
		return o.Metadata.Name
	}
	return o.Metadata.Namespace + "/" + o.Metadata.Name
}

// List returns the body as a list; an answer other than 200 is an error.
func (r *Response) List() (*List, error) {
	if r.Code != http.StatusOK {
		return nil, r.Err()
	}
	list := &List{}
	if err := json.Unmarshal(r.Body, list); err != nil {
		return nil, err
	}
	return list, nil
}

// Err returns an error that shows the response.
func (r *Response) Err() error { return fmt.Errorf("%d %s", r.Code, strings.TrimSpace(string(r.Body))) }

// refusals is how often a refused read, or a write that was not sent, is repeated.
const refusals = 3

// Read is a GET, also at a revision, with an Accept header; "" for JSON. As clients do, it repeats
// a refused read, a few times: on a machine that pauses for seconds, etcd does not confirm the
// present state in time.
func (a *API) Read(ctx context.Context, path, query, accept string) (*Response, error) {
	return a.readUnless(ctx, (*Response).Refused, path, query, accept)
}

// readUnless is a GET that is repeated, a few times, while the response is bad.
func (a *API) readUnless(ctx context.Context, bad func(*Response) bool, path, query, accept string) (*Response, error) {
	r, err := a.DoAs(ctx, http.MethodGet, path, query, "", accept, nil)
	for range refusals {
		if err != nil || !bad(r) {
			break
		}
		Pause(ctx, time.Second)
		r, err = a.DoAs(ctx, http.MethodGet, path, query, "", accept, nil)
	}
	return r, err
}

// Refused reports whether the server asks the client to send the request again later.
func (r *Response) Refused() bool {
	return r.Code == http.StatusTooManyRequests && r.Header.Get("Retry-After") != ""
}

// NotSent reports whether no server has acted on the request: a replica has no healthy primary, or
// a server is starting.
func (r *Response) NotSent() bool {
	return r.Code == http.StatusServiceUnavailable && r.Header.Get("Retry-After") != ""
}

// late reports whether a read was refused because memory was late: it is Refused, or memory did not
// reach the client's revision in time (504).
func (r *Response) late() bool {
	return r.Refused() || r.Code == http.StatusGatewayTimeout && r.Header.Get("Retry-After") != ""
}

// List lists path, as Read does. It repeats a list that waits for a revision in vain, too.
func (a *API) List(ctx context.Context, path, query string) (*List, error) {
	r, err := a.readUnless(ctx, (*Response).late, path, query, "")
	if err != nil {
		return nil, err
	}
	list, err := r.List()
	if err != nil {
		return nil, fmt.Errorf("list %s?%s: %w", path, query, err)
	}
	return list, nil
}

// Names returns the keys of the items in their order.
func (l *List) Names() []string {
	names := make([]string, 0, len(l.Items))
	for _, o := range l.Items {
		names = append(names, o.Metadata.Name)
	}
	return names
}

// ListAll walks path in chunks of limit items and returns the items, and the list metadata of each
// chunk.
func (a *API) ListAll(ctx context.Context, path, query string, limit int) (items []Object, chunks []metav1.ListMeta, err error) {
	token := ""
	for {
		values, err := url.ParseQuery(query)
		if err != nil {
			return nil, nil, err
		}
		values.Set("limit", fmt.Sprint(limit))
		if token != "" {
			values.Set("continue", token)
			values.Del("resourceVersion")
			values.Del("resourceVersionMatch")
		}
		list, err := a.List(ctx, path, values.Encode())
		if err != nil {
			return nil, nil, err
		}
		items = append(items, list.Items...)
		chunks = append(chunks, list.Metadata)
		if token = list.Metadata.Continue; token == "" {
			return items, chunks, nil
		}
	}
}

// Create posts an object and returns it as it was stored.
func (a *API) Create(ctx context.Context, path string, object any) (Object, error) {
	return a.write(ctx, http.MethodPost, path, "", object)
}

// Ensure creates an object that a test needs, and repeats a request that fails on the way or at the
// server: etcd may be electing another leader. A failed request may still be applied, so an object
// that exists is no error.
func (a *API) Ensure(ctx context.Context, path string, object any) error {
	var refused error
	err := Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := a.Do(ctx, http.MethodPost, path, "", object)
		switch {
		case err != nil:
			return false, err
		case r.Code == http.StatusTooManyRequests, r.Code >= http.StatusInternalServerError:
			return false, r.Err()
		case r.Code != http.StatusCreated && r.Code != http.StatusConflict:
			refused = fmt.Errorf("POST %s: %w", path, r.Err())
		}
		return true, nil
	})
	return cmp.Or(err, refused)
}

// Update puts an object.
func (a *API) Update(ctx context.Context, path string, object any) (Object, error) {
	return a.write(ctx, http.MethodPut, path, "", object)
}

// Patch applies a JSON merge patch.
func (a *API) Patch(ctx context.Context, path, patch string) (Object, error) {
	return a.write(ctx, http.MethodPatch, path, "application/merge-patch+json", patch)
}

// Delete deletes path.
func (a *API) Delete(ctx context.Context, path string) error {
	r, err := a.sendWrite(ctx, http.MethodDelete, path, "", nil)
	if err != nil {
		return err
	}
	if r.Code/100 != 2 {
		return fmt.Errorf("delete %s: %w", path, r.Err())
	}
	return nil
}

func (a *API) write(ctx context.Context, method, path, contentType string, body any) (Object, error) {
	r, err := a.sendWrite(ctx, method, path, contentType, body)
	if err != nil {
		return Object{}, err
	}
	if r.Code/100 != 2 {
		return Object{}, fmt.Errorf("%s %s: %w", method, path, r.Err())
	}
	var o Object
	return o, json.Unmarshal(r.Body, &o)
}

// sendWrite sends a write, again, a few times, if it was not sent to a server, as clients do.
func (a *API) sendWrite(ctx context.Context, method, path, contentType string, body any) (*Response, error) {
	r, err := a.DoAs(ctx, method, path, "", contentType, "", body)
	for range refusals {
		if err != nil || !r.NotSent() {
			break
		}
		Pause(ctx, time.Second)
		r, err = a.DoAs(ctx, method, path, "", contentType, "", body)
	}
	return r, err
}

// Get gets path.
func (a *API) Get(ctx context.Context, path, query string) (Object, error) {
	r, err := a.Do(ctx, http.MethodGet, path, query, nil)
	if err != nil {
		return Object{}, err
	}
	if r.Code != http.StatusOK {
		return Object{}, fmt.Errorf("get %s?%s: %w", path, query, r.Err())
	}
	var o Object
	return o, json.Unmarshal(r.Body, &o)
}

// Event is one event of a watch. An ERROR has the status, all others the object.
type Event struct {
	Type   string
	Object Object
	Status metav1.Status
}

// Watch is an accepted watch.
type Watch struct {
	what   string
	cancel context.CancelFunc
	events chan Event
	err    error // why events was closed; set before

	observed func(Event) // may be nil; see Env.ObserveWatches
}

// ErrEnded: the server has ended a watch without an error.
var ErrEnded = errors.New("watch ended")

// Watch starts a watch; it ends with ctx at the latest. If the server does not answer with 200, the
// watch is nil, and the response has the error.
func (a *API) Watch(ctx context.Context, path, query string) (*Watch, *Response, error) {
	return a.WatchAs(ctx, path, query, "")
}

// StartWatch starts a watch that lasts as long as the test, and ends the test if it is refused. As
// clients do, it repeats a watch that the server cannot begin yet, because etcd does not confirm
// the present state in time, or because history is being restored.
func StartWatch(t testing.TB, ctx context.Context, a *API, path, query string) *Watch {
	t.Helper()
	w, refused, err := a.Watch(ctx, path, query)
	for err == nil && refused != nil && refused.late() && ctx.Err() == nil {
		Pause(ctx, time.Second)
		w, refused, err = a.Watch(ctx, path, query)
	}
	Check(t, err)
	if refused != nil {
		t.Fatalf("watch %s?%s: %v", path, query, refused.Err())
	}
	t.Cleanup(w.Close)
	return w
}

// WatchAs is Watch with an Accept header, which must select a JSON encoding.
func (a *API) WatchAs(ctx context.Context, path, query, accept string) (*Watch, *Response, error) {
	ctx, cancel := context.WithCancel(ctx)
	resp, err := a.send(ctx, http.MethodGet, path, strings.TrimSuffix("watch=true&"+query, "&"), "", accept, nil)
	if err != nil {
		cancel()
		return nil, nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer cancel()
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return nil, &Response{Code: resp.StatusCode, Header: resp.Header, Body: body}, err
	}
	w := &Watch{what: path + "?" + query, cancel: cancel, events: make(chan Event)}
	if observe := a.env.watchObserver(); observe != nil && accept == "" {
		w.observed = observe(a.url, path, query)
	}
	go w.read(ctx, resp.Body)
	return w, nil, nil
}

func (w *Watch) read(ctx context.Context, body io.ReadCloser) {
	defer close(w.events)
	defer body.Close()
	decoder := json.NewDecoder(body)
	for {
		var frame struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		if err := decoder.Decode(&frame); err != nil {
			w.err = err
			if errors.Is(err, io.EOF) {
				w.err = ErrEnded
			}
			return
		}
		e := Event{Type: frame.Type}
		target := any(&e.Object)
		if frame.Type == "ERROR" {
			target = &e.Status
		}
		if err := json.Unmarshal(frame.Object, target); err != nil {
			w.err = err
			return
		}
		if w.observed != nil {
			w.observed(e)
		}
		select {
		case w.events <- e:
		case <-ctx.Done():
			w.err = context.Cause(ctx)
			return
		}
	}
}

// Next returns the next event. Once the watch has ended, the error wraps ErrEnded or the failure.
func (w *Watch) Next(ctx context.Context) (Event, error) {
	select {
	case e, ok := <-w.events:
		if !ok {
			return Event{}, fmt.Errorf("watch %s: %w", w.what, w.err)
		}
		return e, nil
	case <-ctx.Done():
		return Event{}, fmt.Errorf("watch %s: no event: %w", w.what, context.Cause(ctx))
	}
}

// Close ends the watch.
func (w *Watch) Close() {
	w.cancel()
	for range w.events { // until the reader has ended
	}
}

// AwaitList returns a list as soon as the server answers one.
func AwaitList(t testing.TB, ctx context.Context, api *API, path string) (list *List) {
	t.Helper()
	Check(t, Poll(ctx, func(ctx context.Context) (bool, error) {
		var err error
		list, err = api.List(ctx, path, "")
		return err == nil, err
	}))
	return list
}
