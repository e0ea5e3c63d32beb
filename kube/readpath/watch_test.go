package readpath

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/routine"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/testutil"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/kube/internal/slowclient"
)

// TestWatch_FramesAndHeaders_EqualUpstream compares the frames, byte by byte, and the headers.
func TestWatch_FramesAndHeaders_EqualUpstream(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	const expired = "resourceVersion=1"
	queries := map[string]bool{ // value: whether HTTP/2 is used
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
			if testrace.Few() {
				test.accept = test.accept[:2]
			}
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

// TestWatch_ErrorBeforeStart_EqualsUpstream: these errors are responses, not events.
func TestWatch_ErrorBeforeStart_EqualsUpstream(t *testing.T) {
	t.Parallel()
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

// TestWatch_Decorator_AppliesToEventsAndBookmarks: the decorator of a registry applies to events
// and bookmarks too.
func TestWatch_Decorator_AppliesToEventsAndBookmarks(t *testing.T) {
	t.Parallel()
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

// ends fails the test unless the watch ends without an error for its client.
func ends(t *testing.T, resp *http.Response) []byte {
	t.Helper()
	rest, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Errorf("the watch ends with %v", err)
	}
	return rest
}

// TestWatch_TimeoutOrShutdown_EndsWatch: a watch ends at the client's timeout, and with the
// storage, the server and the client, and leaks nothing.
func TestWatch_TimeoutOrShutdown_EndsWatch(t *testing.T) {
	t.Parallel()
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
			eventually(t, "the handler returns", func() bool { return w.serving.Load() == 0 })
			if took := time.Since(begin); name == "timeout" && took < time.Second {
				t.Errorf("it timed out after %s", took)
			}
		})
	}
}

type shutdownSignal chan struct{}

func (s shutdownSignal) ShuttingDown() <-chan struct{} { return s }

// TestWatchTimeout_Unset_IsSpread: timeouts lie between the minimum and twice the minimum, unless
// the client sets one.
func TestWatchTimeout_Unset_IsSpread(t *testing.T) {
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
		t.Errorf("timeout %s, want 7s", got)
	}
}

// TestWatch_InitialEventsSent_SignalsFlowControl: priority and fairness is notified when the
// initial events are sent, and a watch is left to the routine filter if there is one.
func TestWatch_InitialEventsSent_SignalsFlowControl(t *testing.T) {
	t.Parallel()
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
	eventually(t, "the handler returns while the watch is served", func() bool { return w.serving.Load() == 0 })
	w.put(t, w.object("b", nil))
	f.until(t, `"b"`)
}

// TestWatchMetrics_EventsAndSizes_EqualUpstream: events and their sizes are counted as upstream
// counts them.
func TestWatchMetrics_EventsAndSizes_EqualUpstream(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
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
			eventually(t, "the last event is counted", func() bool {
				n, err := testutil.GetCounterMetricValue(endpointmetrics.WatchEvents.WithLabelValues(gvr.Group, gvr.Version, gvr.Resource))
				counts[i] = n
				return err == nil && n == float64(len(frames))
			})
			h, err := testutil.GetHistogramVecFromGatherer(legacyregistry.DefaultGatherer, "apiserver_watch_events_sizes", nil)
			testcheck.NoError(t, err)
			sums[i] = fmt.Sprintf("%d events of about %.0f KB", h.GetAggregatedSampleCount(), h.GetAggregatedSampleSum()/1024)
		}
		if counts[0] != counts[1] || sums[0] != sums[1] {
			t.Errorf("%s: counted %v, %q; want %v, %q", accept, counts[1], sums[1], counts[0], sums[0])
		}
	}
}

// TestWatch_UnreadableObject_DelaysOnlyItsWatches: events are delivered in order, so only the
// watchers of the object wait, for a limited time; initial events end with the error.
func TestWatch_UnreadableObject_DelaysOnlyItsWatches(t *testing.T) {
	w := watchedPods(t)
	all := readFrames(w.open(t, "", "resourceVersion=0", jsonType, true))
	other := readFrames(w.open(t, "", "resourceVersion=0&fieldSelector=metadata.name%3Dother", jsonType, true))
	w.locked.Store(true)
	w.put(t, w.object("first", nil))
	w.put(t, w.object("locked", nil))
	w.put(t, w.object("other", nil))
	other.until(t, `"other"`)
	all.until(t, `"first"`) // is not delayed by later events
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

// TestWatch_SlowReader_GetsRetainedEvents: a slow reader gets all events that are still retained
// when it reads.
func TestWatch_SlowReader_GetsRetainedEvents(t *testing.T) {
	w := watchedPods(t)
	// Without initial events, for which a client has limited time.
	resp := w.open(t, "", "resourceVersion="+w.catchUp(t), jsonType, true)
	annotations := map[string]string{"filler": strings.Repeat("x", 100<<10)}
	n := testrace.Count(200, 120) // 20 or 12 MB, more than connections buffer
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

// TestWatch_StalledReader_DoesNotKeepEndedWatch: a stalled reader cannot keep a watch open that has
// ended.
func TestWatch_StalledReader_DoesNotKeepEndedWatch(t *testing.T) {
	begun := make(chan struct{})
	returned := make(chan error, 1)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		ctx, cancel := context.WithCancel(req.Context())
		cut := slowclient.NewCutoff(rw, req, nil)
		defer cut.After(ctx, 10*time.Millisecond)()
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
	testcheck.NoError(t, err)
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

// TestWatchWriter_Idle_HoldsNoBuffer: an idle watch references no buffer, not even after a large
// write.
func TestWatchWriter_Idle_HoldsNoBuffer(t *testing.T) {
	var got bytes.Buffer
	sink := &countingSink{Buffer: &got, header: http.Header{}}
	w := &watchWriter{w: sink, flusher: sink, count: nopMetric{}, sizes: nopMetric{}}
	var want bytes.Buffer
	for i, size := range []int{2, 100, smallWrite - 300, smallWrite, 10, writeAtOnce / 2, largePiece - 1, largePiece, 3 * writeAtOnce, 5, 40_000} {
		item := append(append([]byte(`{"n":"`), bytes.Repeat([]byte{'a' + byte(i)}, size)...), `"},`...)
		testcheck.NoError(t, w.item(watch.Added, item))
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

// countingSink is a ResponseWriter that counts its writes.
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

// TestFrames_EqualUpstream compares frames with those of upstream's encoders and framers
// for the same events, for object sizes around the varint boundaries.
func TestFrames_EqualUpstream(t *testing.T) {
	t.Parallel()
	for _, proto := range []bool{false, true} {
		accept, media := jsonType, mediaJSON
		if proto {
			accept, media = protobufType, mediaProtobuf
		}
		gv := examplev1.SchemeGroupVersion
		info, _ := runtime.SerializerInfoForMediaType(resolveCodecs.SupportedMediaTypes(), accept)
		res := &boundResource{Kind: gv.WithKind("Pod"), Serializer: resolveCodecs}
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
			testcheck.NoError(t, err)
			var object bytes.Buffer
			testcheck.NoError(t, enc.encoder.Encode(pod, &object))
			for _, typ := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted, watch.Bookmark, watch.Error} {
				var want, frame bytes.Buffer
				if err := stream.Encode(&metav1.WatchEvent{Type: string(typ), Object: runtime.RawExtension{Raw: object.Bytes()}}, &frame); err != nil {
					t.Fatal(err)
				}
				n, err := info.StreamSerializer.Framer.NewFrameWriter(&want).Write(frame.Bytes())
				testcheck.NoError(t, err)
				got, body, size := framer.Begin(nil, typ, item)
				got = framer.End(append(got, body...))
				if !bytes.Equal(got, want.Bytes()) || size != n {
					t.Errorf("an item of %d bytes, %s, %s: %.200q (%d), want %.200q (%d)", len(item), typ, accept, got, size, want.Bytes(), n)
				}
				got, size = framer.Whole(nil, typ, object.Bytes())
				if !bytes.Equal(got, want.Bytes()) || size != n {
					t.Errorf("an object of %d bytes, %s, %s: %.200q (%d), want %.200q (%d)", object.Len(), typ, accept, got, size, want.Bytes(), n)
				}
			}
		}
	}
}

// TestWatch_SameFormat_EncodesEventOnce: an event is decoded and encoded once for all watches of
// one format, with or without a selector.
func TestWatch_SameFormat_EncodesEventOnce(t *testing.T) {
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

// TestWatchMetrics_Delivery_IsMeasuredPerWrite: delivery is measured from the arrival of an event
// until after its write, once per write; events older than the watch count, initial events do not.
func TestWatchMetrics_Delivery_IsMeasuredPerWrite(t *testing.T) {
	w := watchedPods(t)
	count := func() uint64 {
		h, err := testutil.GetHistogramVecFromGatherer(legacyregistry.DefaultGatherer, "strata_watch_delivery_seconds",
			map[string]string{"resource": w.resource.GVR.Resource, "group": w.resource.GVR.Group})
		if err != nil {
			return 0 // no observation
		}
		return h.GetAggregatedSampleCount()
	}
	before := count()
	w.put(t, w.object("initial", nil))
	w.catchUp(t) // a watch from resourceVersion=0 begins at the published revision
	f := readFrames(w.open(t, "", "resourceVersion=0", jsonType, true))
	f.until(t, `"initial"`)
	if n := count(); n != before {
		t.Errorf("initial events were measured %d times", n-before)
	}
	w.put(t, w.object("later", nil))
	f.until(t, `"later"`)
	eventually(t, "the write is measured", func() bool { return count() == before+1 })
}
