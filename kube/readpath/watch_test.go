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
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/server/routine"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/value"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/testutil"

	"github.com/stratakube/strata/kube/kubestorage"
)

// watched serves one resource twice over one storage: by the byte path, and, for requests
// with the header Engine, by upstream's handlers.
type watched struct {
	resource *Resource
	engine   *kubestorage.Engine
	codec    runtime.Codec
	destroy  func()
	server   *httptest.Server
	minimum  time.Duration // MinRequestTimeout
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

// namespaced attributes as registries have them.
func attrsOf(obj runtime.Object) (labels.Set, fields.Set, error) {
	return storage.DefaultNamespaceScopedAttr(obj)
}

// watchedPods serves pods, which are Go types.
func watchedPods(t testing.TB) *watched { return watchedPodsWith(t) }

func watchedPodsWith(t testing.TB, options ...func(*kubestorage.Options)) *watched {
	return newWatched(t, &Resource{
		GVR:        examplev1.SchemeGroupVersion.WithResource("pods"),
		Kind:       examplev1.SchemeGroupVersion.WithKind("Pod"),
		Namespaced: true,
		Serializer: resolveCodecs,
	}, resolveCodecs.LegacyCodec(examplev1.SchemeGroupVersion), func() runtime.Object { return &example.Pod{} },
		func() runtime.Object { return &example.PodList{} }, options...)
}

// watchedWidgets serves widgets, which are a custom resource.
func watchedWidgets(t testing.TB) *watched {
	kind := schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"}
	serializer := newCustomSerializer()
	return newWatched(t, &Resource{
		GVR:                 kind.GroupVersion().WithResource("widgets"),
		Kind:                kind,
		Namespaced:          true,
		Custom:              true,
		Serializer:          serializer,
		StandardSerializers: serializer.standard(),
	}, unstructured.UnstructuredJSONScheme, func() runtime.Object {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(kind)
		return u
	}, func() runtime.Object {
		u := &unstructured.UnstructuredList{}
		u.SetGroupVersionKind(kind.GroupVersion().WithKind("WidgetList"))
		return u
	})
}

func newWatched(t testing.TB, res *Resource, codec runtime.Codec, newFunc, newListFunc func() runtime.Object, options ...func(*kubestorage.Options)) *watched {
	t.Helper()
	// There is to be a past that the engine does not have.
	forgetful := func(o *kubestorage.Options) { o.Replay.Revisions = -1 }
	etcd := newResolving(t, append([]func(*kubestorage.Options){forgetful}, options...)...)
	res.FieldLabel = func(label, value string) (string, string, error) { return label, value, nil }
	w := &watched{resource: res, engine: etcd.engine, codec: codec, minimum: time.Hour}
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
		s, destroy, err := engine.Decorator()(config, "/"+res.GVR.Resource, nil, newFunc, newListFunc, attrsOf, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		store := s.(*kubestorage.Store)
		eventually2(t, "the storage is ready", func() bool { return store.ReadinessCheck() == nil })
		return store, destroy
	}
	// Something happens before the engine begins, so that there is a past that it does
	// not have.
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

// eventually2 waits for a condition.
func eventually2(t testing.TB, what string, reached func() bool) {
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
	if err != nil {
		t.Fatal(err)
	}
	err = w.resource.Store.GuaranteedUpdate(context.Background(), w.key(m.GetName()), w.resource.Store.NewFunc(), true, nil,
		storage.SimpleUpdate(func(runtime.Object) (runtime.Object, error) { return obj.DeepCopyObject(), nil }), nil)
	if err != nil {
		t.Fatal(err)
	}
}

func (w *watched) delete(t testing.TB, name string) {
	t.Helper()
	err := w.resource.Store.Delete(context.Background(), w.key(name), w.resource.Store.NewFunc(), nil,
		storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// catchUp returns when memory has all that was written.
func (w *watched) catchUp(t testing.TB) string {
	t.Helper()
	list := &unstructured.UnstructuredList{}
	var obj runtime.Object = list
	if !w.resource.Custom {
		obj = &example.PodList{}
	}
	if err := w.resource.Store.GetList(context.Background(), "/"+w.resource.GVR.Resource+"/",
		storage.ListOptions{Predicate: storage.Everything, Recursive: true}, obj); err != nil {
		t.Fatal(err)
	}
	acc, err := meta.ListAccessor(obj)
	if err != nil {
		t.Fatal(err)
	}
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
	if req.Header.Get("Engine") != "" {
		w.upstream()(rw, req)
		return
	}
	r := &read{server: &Server{minRequestTimeout: w.minimum}, resource: w.resource, info: info, scope: w.resource.scope(), w: rw, req: req}
	f, why := r.negotiate()
	if why == "" {
		r.enc, err = w.resource.encodings.get(w.resource, f)
	}
	if err != nil || why != "" {
		http.Error(rw, fmt.Sprint(why, err), http.StatusNotImplemented)
		return
	}
	r.listOrWatch()
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

// registryWatch watches as a registry does.
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

// open begins a watch in ns.
func (w *watched) open(t testing.TB, engine, query, accept string, http2 bool) *http.Response {
	t.Helper()
	gvr := w.resource.GVR
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		fmt.Sprintf("%s/apis/%s/%s/namespaces/ns/%s?watch=1&%s", w.server.URL, gvr.Group, gvr.Version, gvr.Resource, query), nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", accept)
	req.Header.Set("Engine", engine)
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: http2}
	t.Cleanup(transport.CloseIdleConnections)
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

const (
	jsonType     = "application/json"
	protobufType = "application/vnd.kubernetes.protobuf"
	metadataV1   = ";as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	metadataBeta = ";as=PartialObjectMetadata;g=meta.k8s.io;v=v1beta1"
)

// frameReader splits a watch.
type frameReader struct {
	r        *bufio.Reader
	protobuf bool
}

func readFrames(resp *http.Response) *frameReader {
	return &frameReader{bufio.NewReader(resp.Body), strings.HasPrefix(resp.Header.Get("Content-Type"), protobufType)}
}

// next returns the next frame with its framing.
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

// story writes everything that a watch can be told of, and then the object last.
func (w *watched) story(t testing.TB) {
	odd := map[string]string{"app": "yes", "<html> & co": "\u2028 \"quoted\" \\ ünïcödé \x01 </script>", "empty": ""}
	huge := map[string]string{"huge": strings.Repeat("<0123456789abcdef>", 50_000)}
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

// TestWatchesAreAsUpstreamSendsThem compares the frames, byte by byte, and the headers.
func TestWatchesAreAsUpstreamSendsThem(t *testing.T) {
	const expired = "resourceVersion=1"
	queries := map[string]bool{ // and whether the watch is served with HTTP/2
		"resourceVersion=0": true,
		watchListQuery:      true,
		watchListQuery + "&labelSelector=app%3Dyes": false,
		"":                                   false,
		"fieldSelector=metadata.name%3Dlast": true,
		expired:                              true, // 410
	}
	for _, test := range []struct {
		name    string
		watched func(testing.TB) *watched
		accept  []string
	}{
		{"typed", watchedPods, []string{jsonType, protobufType, jsonType + metadataV1, jsonType + metadataBeta,
			protobufType + metadataV1, protobufType + metadataBeta}},
		{"custom", watchedWidgets, []string{jsonType, jsonType + metadataV1, jsonType + metadataBeta,
			protobufType + metadataV1, protobufType + metadataBeta}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := test.watched(t)
			for i := range 300 { // a few leaves
				w.put(t, w.object(fmt.Sprintf("at-%03d", i), map[string]string{"i": fmt.Sprint(i)}))
			}
			w.put(t, w.labelled("at-first", map[string]string{"<": strings.Repeat("x", 2*largePiece)}))
			for _, accept := range test.accept {
				t.Run(accept, func(t *testing.T) {
					w.catchUp(t)
					type pair struct{ theirs, ours *http.Response }
					watches := map[string]pair{}
					for query, http2 := range queries {
						watches[query] = pair{w.open(t, "upstream", query, accept, http2), w.open(t, "", query, accept, http2)}
					}
					w.story(t)
					for query, watch := range watches {
						t.Run(query, func(t *testing.T) {
							if (watch.ours.ProtoMajor == 2) != queries[query] {
								t.Errorf("the watch is served with %s", watch.ours.Proto)
							}
							sameHeaders(t, watch.ours, watch.theirs)
							if want := strings.Contains(query, "sendInitialEvents") && knowsWatchListCompression(); watch.ours.Uncompressed != want {
								t.Errorf("the body is compressed: %v, want %v", watch.ours.Uncompressed, want)
							}
							end := `"last"`
							switch {
							case query == expired:
								end = "Expired"
							case strings.HasPrefix(accept, protobufType):
								end = "last"
							}
							want, got := readFrames(watch.theirs).until(t, end), readFrames(watch.ours).until(t, end)
							sameFrames(t, got, want)
							if len(want) < 2 && !strings.Contains(query, "metadata.name") && query != expired {
								t.Errorf("only %d frames were compared", len(want))
							}
						})
					}
					w.delete(t, "last")
				})
			}
		})
	}
}

// sameHeaders compares the status and the headers of a response with those of upstream.
func sameHeaders(t *testing.T, got, want *http.Response) {
	t.Helper()
	describe := func(r *http.Response) string {
		h := r.Header.Clone()
		h.Del("Date")
		return fmt.Sprint(r.StatusCode, h, r.TransferEncoding, " compressed: ", r.Uncompressed)
	}
	if g, w := describe(got), describe(want); g != w {
		t.Errorf("got %s, want %s", g, w)
	}
}

// sameFrames fails the test at the first frame that differs from upstream's.
func sameFrames(t *testing.T, got, want [][]byte) {
	t.Helper()
	for i := range max(len(want), len(got)) {
		var a, b []byte
		if i < len(want) {
			a = want[i]
		}
		if i < len(got) {
			b = got[i]
		}
		if !bytes.Equal(a, b) {
			t.Fatalf("frame %d of %d:\n got %.300q\nwant %.300q", i, len(want), b, a)
		}
	}
}

// TestErrorsBeforeAWatchBeginsAreAsUpstreams: they are responses, not events.
func TestErrorsBeforeAWatchBeginsAreAsUpstreams(t *testing.T) {
	w := watchedPods(t)
	for _, query := range []string{"resourceVersion=x", "sendInitialEvents=true", "labelSelector=%3D%3D"} {
		theirs := w.open(t, "upstream", query, jsonType, true)
		ours := w.open(t, "", query, jsonType, true)
		want, _ := io.ReadAll(theirs.Body)
		got, _ := io.ReadAll(ours.Body)
		if theirs.StatusCode != ours.StatusCode || !bytes.Equal(want, got) || ours.StatusCode < 400 {
			t.Errorf("%s:\n got %d %s\nwant %d %s", query, ours.StatusCode, got, theirs.StatusCode, want)
		}
	}
}

// TestDecoratedWatches: what a registry changes when it reads, it changes in events and
// bookmarks too.
func TestDecoratedWatches(t *testing.T) {
	w := watchedPods(t)
	w.resource.Decorate = func(obj runtime.Object) {
		obj.(*example.Pod).Annotations = map[string]string{"decorated": obj.(*example.Pod).Name}
	}
	w.put(t, w.object("a", nil))
	f := readFrames(w.open(t, "", "sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan", jsonType, true))
	for _, want := range []string{`"ADDED"`, `"BOOKMARK"`} {
		if frame, err := f.next(); err != nil || !bytes.Contains(frame, []byte(want)) || !bytes.Contains(frame, []byte(`"decorated"`)) {
			t.Errorf("got %s, %v, want %s, decorated", frame, err, want)
		}
	}
	w.put(t, w.labelled("a", nil))
	w.delete(t, "a")
	for _, want := range []string{`"MODIFIED"`, `"DELETED"`} {
		if frame, err := f.next(); err != nil || !bytes.Contains(frame, []byte(want)) || !bytes.Contains(frame, []byte(`"decorated":"a"`)) {
			t.Errorf("got %s, %v, want %s, decorated", frame, err, want)
		}
	}
}

// ends fails unless the watch ends, without an error for its client.
func ends(t *testing.T, resp *http.Response) []byte {
	t.Helper()
	rest, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Errorf("the watch ends with %v", err)
	}
	return rest
}

// TestWatchesEndInTime: when the client has asked for, and with the storage, the
// server and the client. Nothing of them is left.
func TestWatchesEndInTime(t *testing.T) {
	shutdown := make(chan struct{})
	for name, end := range map[string]func(w *watched, resp *http.Response){
		"timeout":  func(*watched, *http.Response) {},
		"storage":  func(w *watched, _ *http.Response) { go w.destroy() },
		"shutdown": func(*watched, *http.Response) { close(shutdown) },
		"client":   func(_ *watched, resp *http.Response) { resp.Body.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			w := watchedPods(t)
			query := "resourceVersion=0"
			switch name {
			case "timeout":
				query += "&timeoutSeconds=1"
			case "shutdown":
				w.context = func(ctx context.Context) context.Context {
					return request.WithServerShutdownSignal(ctx, shutdownSignal(shutdown))
				}
			}
			begin := time.Now()
			resp := w.open(t, "", query, jsonType, true)
			end(w, resp)
			if name != "client" {
				if rest := ends(t, resp); len(rest) > 0 {
					t.Errorf("the watch ends with %s", rest)
				}
			}
			eventually2(t, "the handler returns", func() bool { return w.serving.Load() == 0 })
			if took := time.Since(begin); name == "timeout" && took < time.Second {
				t.Errorf("it timed out after %s", took)
			}
		})
	}
}

type shutdownSignal chan struct{}

func (s shutdownSignal) ShuttingDown() <-chan struct{} { return s }

// TestTimeoutsAreSpread between the minimum and twice that, unless the client has asked for one.
func TestTimeoutsAreSpread(t *testing.T) {
	s := &Server{minRequestTimeout: time.Hour}
	var seen []time.Duration
	for range 100 {
		seen = append(seen, s.watchTimeout(&metainternalversion.ListOptions{}))
	}
	if least, most := slices.Min(seen), slices.Max(seen); least < time.Hour || most > 2*time.Hour || most-least < 30*time.Minute {
		t.Errorf("timeouts are between %s and %s", least, most)
	}
	seconds := int64(7)
	if got := s.watchTimeout(&metainternalversion.ListOptions{TimeoutSeconds: &seconds}); got != 7*time.Second {
		t.Errorf("asked for 7 s, got %s", got)
	}
}

// TestPriorityAndFairnessIsTold when the initial events are out, and the task of a watch is
// left to whoever wants to run it.
func TestPriorityAndFairnessIsTold(t *testing.T) {
	w := watchedPods(t)
	w.put(t, w.object("a", nil))
	signal := utilflowcontrol.NewInitializationSignal()
	w.context = func(ctx context.Context) context.Context {
		return utilflowcontrol.WithInitializationSignal(ctx, signal)
	}
	w.server.Config.Handler = routine.WithRoutine(w, func(*http.Request, *request.RequestInfo) bool { return true })
	f := readFrames(w.open(t, "", "resourceVersion=0", jsonType, true))
	f.until(t, `"a"`)
	signal.Wait()
	if n := w.serving.Load(); n != 0 {
		t.Errorf("the handler is still there while the watch is served")
	}
	w.put(t, w.object("b", nil))
	f.until(t, `"b"`)
}

// TestWatchMetrics: events and their sizes are counted as upstream counts them.
func TestWatchMetrics(t *testing.T) {
	endpointmetrics.Register()
	for _, accept := range []string{jsonType, protobufType} {
		var counts [2]float64
		var sums [2]string
		for i, engine := range []string{"upstream", ""} {
			w := watchedPods(t)
			endpointmetrics.WatchEvents.Reset()
			endpointmetrics.WatchEventsSizes.Reset()
			f := readFrames(w.open(t, engine, "resourceVersion=0", accept, true))
			w.story(t)
			frames := f.until(t, "last")
			gvr := w.resource.GVR
			eventually2(t, "the last event is counted", func() bool {
				n, err := testutil.GetCounterMetricValue(endpointmetrics.WatchEvents.WithLabelValues(gvr.Group, gvr.Version, gvr.Resource))
				counts[i] = n
				return err == nil && n == float64(len(frames))
			})
			h, err := testutil.GetHistogramVecFromGatherer(legacyregistry.DefaultGatherer, "apiserver_watch_events_sizes", nil)
			if err != nil {
				t.Fatal(err)
			}
			sums[i] = fmt.Sprintf("%d events of about %.0f KB", h.GetAggregatedSampleCount(), h.GetAggregatedSampleSum()/1024)
		}
		if counts[0] != counts[1] || sums[0] != sums[1] {
			t.Errorf("%s: counted %v, %q; want %v, %q", accept, counts[1], sums[1], counts[0], sums[0])
		}
	}
}

// TestAnObjectThatCannotBeReadHoldsUpItsWatchersOnly: events come in order, so its
// watchers wait, for some time; initial events end with the error.
func TestAnObjectThatCannotBeReadHoldsUpItsWatchersOnly(t *testing.T) {
	w := watchedPods(t)
	all := readFrames(w.open(t, "", "resourceVersion=0", jsonType, true))
	other := readFrames(w.open(t, "", "resourceVersion=0&fieldSelector=metadata.name%3Dother", jsonType, true))
	w.locked.Store(true)
	w.put(t, w.object("first", nil))
	w.put(t, w.object("locked", nil))
	w.put(t, w.object("other", nil))
	other.until(t, `"other"`)
	all.until(t, `"first"`) // is not kept back by what comes after it
	theirs := readFrames(w.open(t, "upstream", "resourceVersion=0", jsonType, true)).until(t, "key service")
	ours := readFrames(w.open(t, "", "resourceVersion=0", jsonType, true)).until(t, "key service")
	if len(ours) != 2 || len(theirs) != 2 || !bytes.Equal(ours[1], theirs[1]) || !bytes.Contains(ours[0], []byte(`"first"`)) {
		t.Errorf("initial events are\n%s, want\n%s", ours, theirs)
	}
	w.locked.Store(false)
	frames := all.until(t, `"other"`)
	if len(frames) != 2 || !bytes.Contains(frames[0], []byte(`"locked"`)) {
		t.Errorf("got %s, want the object that could not be read, then the other", frames)
	}
}

// TestASlowReaderOfTheBytePath gets everything that it is still in time for.
func TestASlowReaderOfTheBytePath(t *testing.T) {
	w := watchedPods(t)
	resp := w.open(t, "", "resourceVersion=0", jsonType, true)
	annotations := map[string]string{"filler": strings.Repeat("x", 100<<10)}
	const n = 200 // 20 MB, more than connections buffer
	for i := range n {
		w.put(t, w.object(fmt.Sprintf("pod-%03d", i), annotations))
	}
	frames := readFrames(resp).until(t, fmt.Sprintf("pod-%03d", n-1))
	if len(frames) != n {
		t.Errorf("got %d events, want %d", len(frames), n)
	}
	for i, frame := range frames {
		if !bytes.Contains(frame, fmt.Appendf(nil, `"pod-%03d"`, i)) {
			t.Fatalf("event %d is %.100s", i, frame)
		}
	}
}

// TestAStalledReaderCannotKeepAWatch that has ended.
func TestAStalledReaderCannotKeepAWatch(t *testing.T) {
	begun := make(chan struct{})
	returned := make(chan error, 1)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		ctx, cancel := context.WithCancel(req.Context())
		cut := &cutoff{w: rw, req: req}
		defer cut.after(ctx, 10*time.Millisecond)()
		rw.WriteHeader(http.StatusOK)
		rw.(http.Flusher).Flush()
		close(begun)
		cancel()
		var err error
		for err == nil {
			_, err = rw.Write(make([]byte, 1<<20))
		}
		returned <- err
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	client := server.Client()
	resp, err := client.Get(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	<-begun
	select {
	case err := <-returned:
		if err == nil {
			t.Error("the write did not fail")
		}
	case <-time.After(patience):
		t.Fatalf("the handler still writes after %s", patience)
	}
}

// TestAnIdleWatchHoldsNoBuffer, and one that has just written a lot neither.
func TestAnIdleWatchHoldsNoBuffer(t *testing.T) {
	var got bytes.Buffer
	sink := &countingSink{Buffer: &got, header: http.Header{}}
	w := &watchWriter{w: sink, flusher: sink, count: nopMetric{}, sizes: nopMetric{}}
	var want bytes.Buffer
	for i, size := range []int{2, 100, smallWrite - 300, smallWrite, 10, writeAtOnce / 2, largePiece - 1, largePiece, 3 * writeAtOnce, 5, 40_000} {
		item := append(append([]byte(`{"n":"`), bytes.Repeat([]byte{'a' + byte(i)}, size)...), `"},`...)
		if err := w.item(watch.Added, item); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&want, `{"type":"ADDED","object":%s}`+"\n", item[:len(item)-1])
		if i%4 == 3 {
			if err := w.flush(); err != nil || w.buf != nil || !bytes.Equal(got.Bytes(), want.Bytes()) {
				t.Fatalf("after %d items: %v, buffer %v, %d bytes, want %d", i+1, err, w.buf != nil, got.Len(), want.Len())
			}
		}
	}
	if err := w.flush(); err != nil || !bytes.Equal(got.Bytes(), want.Bytes()) {
		t.Fatalf("%v, %d bytes, want %d", err, got.Len(), want.Len())
	}
	if sink.flushes != 3 {
		t.Errorf("flushed %d times, want 3", sink.flushes)
	}
	sink.writes, sink.flushes = 0, 0
	for range 3 {
		_ = w.item(watch.Modified, []byte(`{},`))
	}
	_ = w.flush()
	_ = w.flush()
	if sink.writes != 1 || sink.flushes != 1 {
		t.Errorf("three events at once took %d writes and %d flushes, want one of each", sink.writes, sink.flushes)
	}
}

// countingSink is a ResponseWriter.
type countingSink struct {
	*bytes.Buffer
	header          http.Header
	writes, flushes int
}

func (s *countingSink) Header() http.Header { return s.header }
func (s *countingSink) WriteHeader(int)     {}
func (s *countingSink) Flush()              { s.flushes++ }
func (s *countingSink) Write(p []byte) (int, error) {
	s.writes++
	return s.Buffer.Write(p)
}

type nopMetric struct{}

func (nopMetric) Inc()            {}
func (nopMetric) Add(float64)     {}
func (nopMetric) Observe(float64) {}

// TestFramesAreAsUpstreamFramesThem compares frames with those that upstream's encoders and
// framers make of the same events, for objects of all sizes around those of varints.
func TestFramesAreAsUpstreamFramesThem(t *testing.T) {
	for _, proto := range []bool{false, true} {
		accept, media := jsonType, mediaJSON
		if proto {
			accept, media = protobufType, mediaProtobuf
		}
		gv := examplev1.SchemeGroupVersion
		info, _ := runtime.SerializerInfoForMediaType(resolveCodecs.SupportedMediaTypes(), accept)
		res := &Resource{Kind: gv.WithKind("Pod"), Serializer: resolveCodecs}
		enc := &encoding{resource: res, format: format{media: media}, encoder: resolveCodecs.EncoderForVersion(info.Serializer, gv)}
		if !proto {
			enc.head = []byte(`{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1",`)
		}
		framer := enc.framer()
		stream := resolveCodecs.EncoderForVersion(info.StreamSerializer.Serializer, gv)
		for _, size := range []int{0, 1, 20, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 100, 127, 128, 129, 1 << 13, 16_200, 16_250,
			16_300, 16_383, 16_384, 1<<21 - 100, 1 << 21} {
			pod := &example.Pod{}
			if size > 0 {
				pod.Name = strings.Repeat("n", size)
			}
			item, err := enc.appendItem(nil, pod.DeepCopy())
			if err != nil {
				t.Fatal(err)
			}
			var object bytes.Buffer
			if err := enc.encoder.Encode(pod, &object); err != nil {
				t.Fatal(err)
			}
			for _, typ := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted, watch.Bookmark, watch.Error} {
				var want, frame bytes.Buffer
				if err := stream.Encode(&metav1.WatchEvent{Type: string(typ), Object: runtime.RawExtension{Raw: object.Bytes()}}, &frame); err != nil {
					t.Fatal(err)
				}
				n, err := info.StreamSerializer.Framer.NewFrameWriter(&want).Write(frame.Bytes())
				if err != nil {
					t.Fatal(err)
				}
				got, body, size := framer.begin(nil, typ, item)
				got = framer.end(append(got, body...))
				if !bytes.Equal(got, want.Bytes()) || size != n {
					t.Errorf("an item of %d bytes, %s, %s: %.200q (%d), want %.200q (%d)", len(item), typ, accept, got, size, want.Bytes(), n)
				}
				got, size = framer.whole(nil, typ, object.Bytes())
				if !bytes.Equal(got, want.Bytes()) || size != n {
					t.Errorf("an object of %d bytes, %s, %s: %.200q (%d), want %.200q (%d)", object.Len(), typ, accept, got, size, want.Bytes(), n)
				}
			}
		}
	}
}

// TestWatchersShareWhatIsMade: an event is decoded and encoded once for all watches of
// one form, selecting or not.
func TestWatchersShareWhatIsMade(t *testing.T) {
	w := watchedPods(t)
	var encoded atomic.Int32
	w.resource.Decorate = func(runtime.Object) { encoded.Add(1) } // called once per encoding
	const each = 20
	var frames []*frameReader
	for i := range 3 * each {
		query := "resourceVersion=0"
		if i%3 == 1 {
			query += "&labelSelector=app%3Dyes"
		}
		if i%3 == 2 {
			query += "&labelSelector=app%3Dno"
		}
		frames = append(frames, readFrames(w.open(t, "", query, jsonType, true)))
	}
	w.put(t, w.labelled("a", nil))
	w.put(t, w.labelled("a", map[string]string{"n": "2"}))
	w.delete(t, "a")
	var wg sync.WaitGroup
	for i, f := range frames {
		if i%3 < 2 {
			wg.Go(func() { f.until(t, `"DELETED"`) })
		}
	}
	wg.Wait()
	if n := encoded.Load(); n != 3 {
		t.Errorf("3 events were encoded %d times for %d watches", n, len(frames))
	}
}

// TestDeliveryIsMeasured from the arrival of an event to after it was written, once for each
// write; events that are older than the watch count, initial ones do not.
func TestDeliveryIsMeasured(t *testing.T) {
	w := watchedPods(t)
	count := func() uint64 {
		h, err := testutil.GetHistogramVecFromGatherer(legacyregistry.DefaultGatherer, "strata_watch_delivery_seconds",
			map[string]string{"resource": w.resource.GVR.Resource, "group": w.resource.GVR.Group})
		if err != nil {
			return 0 // nothing was observed
		}
		return h.GetAggregatedSampleCount()
	}
	before := count()
	w.put(t, w.object("initial", nil))
	f := readFrames(w.open(t, "", "resourceVersion=0", jsonType, true))
	f.until(t, `"initial"`)
	if n := count(); n != before {
		t.Errorf("initial events were measured %d times", n-before)
	}
	w.put(t, w.object("later", nil))
	f.until(t, `"later"`)
	eventually2(t, "the write is measured", func() bool { return count() == before+1 })
}
