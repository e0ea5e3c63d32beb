package kubestorage_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
)

// simPassed is the key of a bool in a context: the read path has passed the request on.
type simPassed struct{}

// newSimReadPath returns the byte read path of a server. What it passes on ends at once.
func newSimReadPath(engine *kubestorage.Engine, store *kubestorage.Store) http.Handler {
	resolver := readpath.NewResolver(readpath.ResolverOptions{Engine: engine, BuiltIn: []readpath.Kinds{{Scheme: simScheme, Serializer: simCodecs}}})
	reads := readpath.New(readpath.Options{Resolver: resolver, MinRequestTimeout: time.Hour})
	return reads.Handler(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		ctx := req.Context()
		if passed, ok := ctx.Value(simPassed{}).(*bool); ok {
			*passed = true
			return
		}
		// A probe, which ends at the storage.
		info, _ := request.RequestInfoFrom(ctx)
		key, pred := simSelector{Namespace: info.Namespace}.key(), simSelector{}.predicate()
		switch info.Verb {
		case "get":
			_ = store.Get(ctx, key+"/"+info.Name, storage.GetOptions{}, &example.Pod{})
		case "list":
			_ = store.GetList(ctx, key, storage.ListOptions{Predicate: pred, Recursive: true}, &example.PodList{})
		case "watch":
			_, _ = store.Watch(ctx, key, storage.ListOptions{Predicate: pred, Recursive: true})
		}
	}))
}

// query returns the query of a read with the options.
func simQuery(selector simSelector, opts storage.ListOptions) url.Values {
	q := url.Values{}
	set := func(name, value string) {
		if value != "" && value != "0" || name == "resourceVersion" && value == "0" {
			q.Set(name, value)
		}
	}
	set("resourceVersion", opts.ResourceVersion)
	set("resourceVersionMatch", string(opts.ResourceVersionMatch))
	set("limit", strconv.FormatInt(opts.Predicate.Limit, 10))
	set("continue", opts.Predicate.Continue)
	set("labelSelector", opts.Predicate.Label.String())
	set("fieldSelector", fields.SelectorFromSet(selector.fields()).String())
	if opts.SendInitialEvents != nil {
		set("sendInitialEvents", strconv.FormatBool(*opts.SendInitialEvents))
	}
	if opts.Predicate.AllowWatchBookmarks {
		set("allowWatchBookmarks", "true")
	}
	return q
}

// simRequest returns a request of the verb, and whether it was passed on, once it is answered.
func simRequest(ctx context.Context, verb, namespace, name string, q url.Values) (*http.Request, *bool) {
	gv := examplev1.SchemeGroupVersion
	info := &request.RequestInfo{IsResourceRequest: true, Verb: verb, APIPrefix: "apis", APIGroup: gv.Group, APIVersion: gv.Version,
		Namespace: namespace, Resource: "pods", Name: name, Parts: []string{"pods"}}
	info.Path = "/apis/" + gv.String()
	if namespace != "" {
		info.Path += "/namespaces/" + namespace
	}
	info.Path += "/pods"
	if name != "" {
		info.Parts = append(info.Parts, name)
		info.Path += "/" + name
	}
	if verb == "watch" {
		q.Set("watch", "true")
	}
	passed := new(bool)
	ctx = request.WithRequestInfo(context.WithValue(ctx, simPassed{}, passed), info)
	return httptest.NewRequest(http.MethodGet, info.Path+"?"+q.Encode(), nil).WithContext(ctx), passed
}

// simDecode decodes a response into out, an internal type.
func simDecode(code int, body []byte, out runtime.Object) error {
	if code != http.StatusOK {
		status := &metav1.Status{}
		if err := json.Unmarshal(body, status); err != nil {
			return fmt.Errorf("status %d: %q: %w", code, body, err)
		}
		return apierrors.FromObject(status)
	}
	return runtime.DecodeInto(simCodec, body, out)
}

// simRead answers a GET or LIST with the read path. It returns false if that passes it on.
func simRead(ctx context.Context, reads http.Handler, verb, namespace, name string, q url.Values, protobuf bool, out runtime.Object) (bool, error) {
	req, passed := simRequest(ctx, verb, namespace, name, q)
	if protobuf {
		req.Header.Set("Accept", "application/vnd.kubernetes.protobuf")
	}
	w := httptest.NewRecorder()
	if aborted := serveOrAbort(reads, w, req); aborted {
		return true, cmp.Or(ctx.Err(), errAborted)
	}
	if *passed {
		return false, nil
	}
	if w.Code != http.StatusOK && protobuf {
		status := &metav1.Status{}
		if err := runtime.DecodeInto(simCodecs.UniversalDeserializer(), w.Body.Bytes(), status); err != nil {
			return true, err
		}
		return true, apierrors.FromObject(status)
	}
	return true, simDecode(w.Code, w.Body.Bytes(), out)
}

// errAborted is a response that was broken off, which no fault of the simulation excuses.
var errAborted = errors.New("the response was aborted")

// serveOrAbort serves a request, and reports whether the response was broken off.
func serveOrAbort(reads http.Handler, w http.ResponseWriter, req *http.Request) (aborted bool) {
	defer func() {
		if p := recover(); p == http.ErrAbortHandler {
			aborted = true
		} else if p != nil {
			panic(p)
		}
	}()
	reads.ServeHTTP(w, req)
	return false
}

// simResponse is the response of a watch that is read while it is written.
type simResponse struct {
	*io.PipeWriter
	header http.Header
	code   int
}

func (w *simResponse) Header() http.Header      { return w.header }
func (w *simResponse) Flush()                   {}
func (w *simResponse) CloseNotify() <-chan bool { return nil } // upstream's wrapper demands it

func (w *simResponse) WriteHeader(code int) {
	if w.code == 0 {
		w.code = code
	}
}

// simWatchHTTP sends the events of a watch by the read path until it ends. It returns false if that
// passes the watch on.
func simWatchHTTP(ctx context.Context, reads http.Handler, namespace string, q url.Values, events chan<- watch.Event) bool {
	req, passed := simRequest(ctx, "watch", namespace, "", q)
	out, in := io.Pipe()
	w := &simResponse{PipeWriter: in, header: http.Header{}}
	stop := context.AfterFunc(ctx, func() { out.CloseWithError(io.EOF) })
	go func() {
		reads.ServeHTTP(w, req)
		in.Close()
	}()
	defer out.CloseWithError(io.EOF) // stop may come before the function has run
	defer stop()
	frames := json.NewDecoder(out)
	for {
		var raw json.RawMessage
		if err := frames.Decode(&raw); err != nil {
			return !*passed
		}
		var frame struct {
			Type   watch.EventType
			Object json.RawMessage
		}
		err := json.Unmarshal(raw, &frame)
		e := watch.Event{Type: frame.Type}
		switch {
		case err != nil || frame.Type == "": // the status of a refusal
			status := &metav1.Status{}
			_ = json.NewDecoder(bytes.NewReader(raw)).Decode(status)
			e = watch.Event{Type: watch.Error, Object: status}
		case frame.Type == watch.Error:
			status := &metav1.Status{}
			_ = json.Unmarshal(frame.Object, status)
			e.Object = status
		default:
			pod := &example.Pod{}
			if err := runtime.DecodeInto(simCodec, frame.Object, pod); err != nil {
				e = watch.Event{Type: watch.Error, Object: &metav1.Status{Message: err.Error()}}
			} else {
				e.Object = pod
			}
		}
		select {
		case events <- e:
		case <-ctx.Done():
			return true
		}
	}
}
