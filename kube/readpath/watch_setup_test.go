package readpath

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/endpoints/handlers"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/kube/internal/upstream"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/listadmission"
)

// watched serves one resource over one storage in two ways: by the byte path, and by upstream's
// handlers for requests with the header Engine.
type watched struct {
	resource *boundResource
	engine   *kubestorage.Engine
	codec    runtime.Codec
	destroy  func()
	server   *httptest.Server
	minimum  time.Duration // MinRequestTimeout
	lists    *listadmission.Admission
	lister   http.HandlerFunc // upstream's handler of lists
	context  func(context.Context) context.Context
	serving  atomic.Int32
	locked   atomic.Bool // objects whose names begin with locked cannot be decrypted
}

// TransformFromStorage implements value.Transformer.
func (w *watched) TransformFromStorage(_ context.Context, data []byte, key value.Context) ([]byte, bool, error) {
	if w.locked.Load() && bytes.Contains(key.AuthenticatedData(), []byte("/locked")) {
		return nil, false, errors.New("the key service is down")
	}
	return data, false, nil
}

// TransformToStorage implements value.Transformer.
func (w *watched) TransformToStorage(_ context.Context, data []byte, _ value.Context) ([]byte, error) {
	return data, nil
}

// attrsOf returns the attributes of a namespaced object, as registries do.
func attrsOf(obj runtime.Object) (labels.Set, fields.Set, error) {
	return storage.DefaultNamespaceScopedAttr(obj)
}

// watchedPods serves pods, which are Go types.
func watchedPods(t testing.TB) *watched { return watchedPodsWith(t) }

func watchedPodsWith(t testing.TB, options ...func(*kubestorage.Options)) *watched {
	return newWatched(t, &boundResource{
		GVR:        examplev1.SchemeGroupVersion.WithResource("pods"),
		Kind:       examplev1.SchemeGroupVersion.WithKind("Pod"),
		Namespaced: true,
		Serializer: resolveCodecs,
	}, resolveCodecs.LegacyCodec(examplev1.SchemeGroupVersion), func() runtime.Object { return &example.Pod{} },
		func() runtime.Object { return &example.PodList{} }, options...)
}

// watchedWidgets serves widgets, which are a custom resource.
func watchedWidgets(t testing.TB) *watched {
	return watchedWidgetsWith(t, unstructured.UnstructuredJSONScheme)
}

func watchedWidgetsWith(t testing.TB, codec runtime.Codec) *watched {
	kind := schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"}
	serializer := newCustomSerializer()
	return newWatched(t, &boundResource{
		GVR:                 kind.GroupVersion().WithResource("widgets"),
		Kind:                kind,
		Namespaced:          true,
		Custom:              true,
		Serializer:          serializer,
		StandardSerializers: serializer.standard(),
	}, codec, func() runtime.Object {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(kind)
		return u
	}, func() runtime.Object {
		u := &unstructured.UnstructuredList{}
		u.SetGroupVersionKind(kind.GroupVersion().WithKind("WidgetList"))
		return u
	})
}

func newWatched(t testing.TB, res *boundResource, codec runtime.Codec, newFunc, newListFunc func() runtime.Object, options ...func(*kubestorage.Options)) *watched {
	t.Helper()
	// Disable replay, so that the engine has no history from before its start.
	noReplay := func(o *kubestorage.Options) { o.Replay.Revisions = -1 }
	etcd := newResolving(t, append([]func(*kubestorage.Options){noReplay}, options...)...)
	res.FieldLabel = func(label, value string) (string, string, error) { return label, value, nil }
	w := &watched{resource: res, engine: etcd.engine, codec: codec, minimum: time.Hour, lists: listadmission.New(0)}
	config := &storagebackend.ConfigForResource{
		Config: storagebackend.Config{
			Prefix:      "/registry",
			Codec:       codec,
			Transport:   storagebackend.TransportConfig{ServerList: []string{etcd.etcd}},
			Transformer: w,
		},
		GroupResource: res.GVR.GroupResource(),
	}
	open := func(engine *kubestorage.Engine) (*kubestorage.Store, func()) {
		s, destroy, err := upstream.Open(engine.Decorator(), config, "/"+res.GVR.Resource, newFunc, newListFunc, attrsOf, nil)
		testcheck.NoError(t, err)
		store := s.(*kubestorage.Store)
		eventually(t, "the storage is ready", func() bool { return store.ReadinessCheck() == nil })
		return store, destroy
	}
	// Write before the engine starts, so that etcd has revisions that the engine does not.
	before := kubestorage.New(kubestorage.Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	w.resource.Store, w.destroy = open(before)
	w.put(t, w.object("before", nil))
	w.delete(t, "before")
	w.destroy()
	before.Close()
	w.resource.Store, w.destroy = open(etcd.engine)
	t.Cleanup(w.destroy)

	w.server = httptest.NewUnstartedServer(w)
	w.server.EnableHTTP2 = true
	w.server.StartTLS()
	t.Cleanup(w.server.Close)
	return w
}

// patience bounds the waits of tests, far above the expected durations.
const patience = 2 * time.Minute

// eventually waits for a condition.
func eventually(t testing.TB, what string, reached func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !reached(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %s for: %s", patience, what)
		}
	}
}

// object returns an object of the resource with the annotations.
func (w *watched) object(name string, annotations map[string]string) runtime.Object {
	m := metav1.ObjectMeta{Namespace: "ns", Name: name, Annotations: annotations}
	if !w.resource.Custom {
		return &example.Pod{ObjectMeta: m}
	}
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"size": int64(1), "odd<&>": []any{nil, 1.5, ""}}}}
	u.SetGroupVersionKind(w.resource.Kind)
	u.SetNamespace("ns")
	u.SetName(name)
	u.SetAnnotations(annotations)
	return u
}

func (w *watched) key(name string) string { return "/" + w.resource.GVR.Resource + "/ns/" + name }

// put creates the object, or replaces it.
func (w *watched) put(t testing.TB, obj runtime.Object) {
	t.Helper()
	m, err := meta.Accessor(obj)
	testcheck.NoError(t, err)
	err = w.resource.Store.GuaranteedUpdate(context.Background(), w.key(m.GetName()), w.resource.Store.Kind().NewFunc(), true, nil,
		storage.SimpleUpdate(func(runtime.Object) (runtime.Object, error) { return obj.DeepCopyObject(), nil }), nil)
	testcheck.NoError(t, err)
}

func (w *watched) delete(t testing.TB, name string) {
	t.Helper()
	err := w.resource.Store.Delete(context.Background(), w.key(name), w.resource.Store.Kind().NewFunc(), nil,
		storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
	testcheck.NoError(t, err)
}

// catchUp waits until the cache has all writes, and returns their resource version.
func (w *watched) catchUp(t testing.TB) string {
	t.Helper()
	list := &unstructured.UnstructuredList{}
	var obj runtime.Object = list
	if !w.resource.Custom {
		obj = &example.PodList{}
	}
	eventually(t, "a consistent list", func() bool {
		err := w.resource.Store.GetList(context.Background(), "/"+w.resource.GVR.Resource+"/",
			storage.ListOptions{Predicate: storage.Everything, Recursive: true}, obj)
		if err != nil && !apierrors.IsTooManyRequests(err) { // 429: the machine is full
			t.Fatal(err)
		}
		return err == nil
	})
	acc, err := meta.ListAccessor(obj)
	testcheck.NoError(t, err)
	return acc.GetResourceVersion()
}

// ServeHTTP implements http.Handler.
func (w *watched) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	w.serving.Add(1)
	defer w.serving.Add(-1)
	factory := &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}
	info, err := factory.NewRequestInfo(req)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	ctx := request.WithReceivedTimestamp(request.WithRequestInfo(req.Context(), info), time.Now())
	if w.context != nil {
		ctx = w.context(ctx)
	}
	req = req.WithContext(ctx)
	switch {
	case req.Header.Get("Engine") == "":
	case info.Verb == "list":
		w.lister(rw, req)
		return
	default:
		w.upstream()(rw, req)
		return
	}
	r := &readRequest{server: &Server{minRequestTimeout: w.minimum, lists: w.lists}, resource: w.resource, info: info, scope: w.resource.scope(), w: rw, req: req}
	n := r.negotiate()
	why := n.reason
	if why == "" {
		why = r.answer(n)
	}
	if why != "" {
		http.Error(rw, string(why), http.StatusNotImplemented)
	}
}

// upstream returns upstream's handler of the resource.
func (w *watched) upstream() http.HandlerFunc {
	scope := *w.resource.scope()
	scope.Namer = handlers.ContextBasedNaming{Namer: meta.NewAccessor()}
	scope.Convertor = anyField{}
	return handlers.ListResource(nil, registryWatch{w}, &scope, false, w.minimum)
}

type anyField struct{ runtime.ObjectConvertor }

func (anyField) ConvertFieldLabel(_ schema.GroupVersionKind, label, value string) (string, string, error) {
	return label, value, nil
}

// registryWatch implements the watch of a registry.
type registryWatch struct{ w *watched }

var _ rest.Watcher = registryWatch{}

func (r registryWatch) Watch(ctx context.Context, opts *metainternalversion.ListOptions) (watch.Interface, error) {
	pred := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything(), GetAttrs: attrsOf, AllowWatchBookmarks: opts.AllowWatchBookmarks}
	if opts.LabelSelector != nil {
		pred.Label = opts.LabelSelector
	}
	if opts.FieldSelector != nil {
		pred.Field = opts.FieldSelector
	}
	o := storage.ListOptions{ResourceVersion: opts.ResourceVersion, Predicate: pred, Recursive: true, SendInitialEvents: opts.SendInitialEvents}
	ns, _ := request.NamespaceFrom(ctx)
	key := "/" + r.w.resource.GVR.Resource + "/" + ns
	if name, ok := pred.MatchesSingle(); ok {
		key, o.Recursive = r.w.key(name), false
	}
	return r.w.resource.Store.Watch(ctx, key, o)
}

// open starts a watch in ns.
func (w *watched) open(t testing.TB, engine, query, accept string, http2 bool) *http.Response {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: http2}
	return w.send(t, transport, engine, query, accept, "")
}

// send starts a watch in ns over a transport of its own, with an Accept-Encoding unless that is
// empty.
func (w *watched) send(t testing.TB, transport *http.Transport, engine, query, accept, encoding string) *http.Response {
	t.Helper()
	gvr := w.resource.GVR
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		fmt.Sprintf("%s/apis/%s/%s/namespaces/ns/%s?watch=1&%s", w.server.URL, gvr.Group, gvr.Version, gvr.Resource, query), nil)
	testcheck.NoError(t, err)
	req.Header.Set("Accept", accept)
	req.Header.Set("Engine", engine)
	if encoding != "" {
		req.Header.Set("Accept-Encoding", encoding)
	}
	t.Cleanup(transport.CloseIdleConnections)
	resp, err := transport.RoundTrip(req)
	// Again while memory is late.
	for err == nil && resp.StatusCode == http.StatusTooManyRequests && ctx.Err() == nil {
		resp.Body.Close()
		resp, err = transport.RoundTrip(req)
	}
	testcheck.NoError(t, err)
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

const (
	jsonType     = "application/json"
	protobufType = "application/vnd.kubernetes.protobuf"
	metadataV1   = ";as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	metadataBeta = ";as=PartialObjectMetadata;g=meta.k8s.io;v=v1beta1"
)

// frameReader splits a watch response into frames.
type frameReader struct {
	r        *bufio.Reader
	protobuf bool
}

func readFrames(resp *http.Response) *frameReader {
	return &frameReader{bufio.NewReader(resp.Body), strings.HasPrefix(resp.Header.Get("Content-Type"), protobufType)}
}

// next returns the next frame, including its framing.
func (f *frameReader) next() ([]byte, error) {
	if !f.protobuf {
		return f.r.ReadBytes('\n')
	}
	length, err := f.r.Peek(4)
	if err != nil {
		return nil, err
	}
	frame := make([]byte, 4+binary.BigEndian.Uint32(length))
	_, err = io.ReadFull(f.r, frame)
	return frame, err
}

// until returns all frames up to the first one that contains text.
func (f *frameReader) until(t testing.TB, text string) [][]byte {
	t.Helper()
	var frames [][]byte
	for {
		frame, err := f.next()
		if err != nil {
			t.Fatalf("after %d frames: %v", len(frames), err)
		}
		if frames = append(frames, frame); bytes.Contains(frame, []byte(text)) {
			return frames
		}
	}
}

// story makes writes that produce every type of watch event, and finally writes the object last.
func (w *watched) story(t testing.TB) {
	odd := map[string]string{"app": "yes", "<html> & co": "\u2028 \"quoted\" \\ ünïcödé \x01 </script>", "empty": ""}
	size := 50_000
	if testrace.Few() {
		size = 10_000 // still above every limit of the writers
	}
	huge := map[string]string{"huge": strings.Repeat("<0123456789abcdef>", size)}
	w.put(t, w.object("plain", nil))
	w.put(t, w.object("0.odd-name-9", odd))
	w.put(t, w.labelled("plain", nil))
	w.put(t, w.labelled("plain", odd))
	w.put(t, w.object("huge", huge))
	w.put(t, w.object("plain", odd))
	w.put(t, w.labelled("huge", huge))
	w.delete(t, "huge")
	w.delete(t, "plain")
	w.put(t, w.labelled("last", nil))
}

// labelled returns an object that the selector app=yes selects.
func (w *watched) labelled(name string, annotations map[string]string) runtime.Object {
	obj := w.object(name, annotations)
	m, _ := meta.Accessor(obj)
	m.SetLabels(map[string]string{"app": "yes", "<&>": ""})
	return obj
}
