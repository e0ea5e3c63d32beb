package readpath

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/audit"
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/httplog"
	"k8s.io/apiserver/pkg/server/routine"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/component-base/tracing"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/kube/internal/slowclient"
	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/mirror"
)

// watch answers a WATCH. If the request passed a filter that runs tasks (routine.Task), watch
// returns when the stream waits for events, and the task serves the rest, on a stack without the
// filters' frames.
func (r *readRequest) watch(opts metainternalversion.ListOptions, key string, o storage.ListOptions) reason {
	record := r.observe()
	s, err := r.openWatch(&opts, key, o)
	if err != nil {
		r.fail(err)
		record()
		return ""
	}
	task := routine.TaskFrom(r.req.Context())
	if task == nil {
		s.last(func() {
			s.begin()
			s.serve()
		})
		record()
		return ""
	}
	defer func() {
		if task.Func == nil { // begin panicked
			s.close()
		}
	}()
	s.longRunning(s.begin)
	task.Func = func() {
		s.last(s.serve)
		record()
	}
	return ""
}

// openWatch opens a watch. If it returns an error, nothing has been written.
func (r *readRequest) openWatch(opts *metainternalversion.ListOptions, key string, o storage.ListOptions) (*watchServer, error) {
	s := &watchServer{read: r, scope: endpointmetrics.CleanListScope(request.WithNamespace(r.req.Context(), r.info.Namespace), opts)}
	watchList := opts.SendInitialEvents != nil && *opts.SendInitialEvents && opts.AllowWatchBookmarks
	if watchList {
		s.initial = r.trace("WatchList")
	}
	flusher, ok := r.w.(http.Flusher)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("response writer does not support flushing: %T", r.w))
	}
	timeout := r.server.watchTimeout(opts)
	if logger := klog.V(3); logger.Enabled() {
		logger.InfoS("Starting watch", "path", r.req.URL.Path, "resourceVersion", opts.ResourceVersion, "labels", opts.LabelSelector,
			"fields", opts.FieldSelector, "sendInitialEvents", opts.SendInitialEvents, "timeout", timeout,
			"audit-ID", audit.GetAuditIDTruncated(r.req.Context()))
	}
	stream, err := r.resource.Store.OpenStreamFor(r.req.Context(), timeout, key, o)
	if err != nil {
		return nil, err
	}
	s.stream = stream
	ctx := stream.Context()
	s.cutoff = slowclient.NewCutoff(r.w, r.req, nil)
	if signals := request.ServerShutdownSignalFrom(ctx); signals != nil {
		s.shutdown = signals.ShuttingDown()
	}
	gvr := r.resource.GVR
	// Metrics look up the trace span for each event; in the context of a request that lookup is
	// deep.
	span := tracing.ContextWithSpan(context.Background(), tracing.SpanFromContext(ctx))
	s.out = watchWriter{
		delivered:    stream.Delivered,
		FrameEncoder: r.enc.framer(),
		w:            r.w,
		flusher:      flusher,
		gzip:         watchList && negotiateWatchGzip(r.req),
		count:        endpointmetrics.WatchEvents.WithContext(span).WithLabelValues(gvr.Group, gvr.Version, gvr.Resource),
		sizes:        endpointmetrics.WatchEventsSizes.WithContext(span).WithLabelValues(gvr.Group, gvr.Version, gvr.Resource),
	}
	if stream.Listing() {
		s.conn = r.server.pacing.Begin(r.req)
		s.out.pace(s.conn, func() {
			s.slow.Store(true)
			s.cutoff.CloseOn(r.server.conns)
			stream.EndSlow()
		})
	}
	return s, nil
}

// watchTimeout returns the maximum duration of a watch: the client's timeoutSeconds, else a random
// time, so that the clients of a restarted server do not all reconnect at the same time.
func (s *Server) watchTimeout(opts *metainternalversion.ListOptions) time.Duration {
	timeout := time.Duration(0)
	if opts.TimeoutSeconds != nil {
		timeout = time.Duration(*opts.TimeoutSeconds) * time.Second
	}
	if timeout == 0 && s.minRequestTimeout > 0 {
		timeout = time.Duration(float64(s.minRequestTimeout) * (1 + rand.Float64()))
	}
	return timeout
}

// watchServer is a Sink that writes frames to a response, on the goroutine of the request.
type watchServer struct {
	read     *readRequest
	stream   *watch.Stream
	conn     *slowclient.Conn // of the initial events; nil without them
	cutoff   *slowclient.Cutoff
	finish   func()          // of cutoff; nil before begin
	slow     atomic.Bool     // the client does not read its initial events
	shutdown <-chan struct{} // nil if shutdown is not signaled
	out      watchWriter
	spans    representation.Spans
	buf      []byte                  // for single items
	runs     []mirror.Run            // runs of a batch that are sent as frames
	frames   []representation.Frames // frames of runs

	// Spans until the initial events are sent; nil for watches without them.
	initial *tracing.Span
	writing *tracing.Span // of the response; nil unless the request is traced

	scope string // scope label of the watch-list latency metric
}

// longRunning calls part and counts the watch as a running request meanwhile.
func (s *watchServer) longRunning(part func()) {
	endpointmetrics.RecordLongRunning(s.read.req, s.read.info, endpointmetrics.APIServerComponent, part)
}

// close releases the resources of the watch.
func (s *watchServer) close() {
	if s.finish != nil {
		s.finish()
	}
	s.stream.Close()
	if s.conn != nil {
		s.conn.End()
	}
}

// begin writes the header, the initial events and the events so far.
func (s *watchServer) begin() {
	media := string(s.read.enc.media)
	if s.out.Protobuf() {
		media += ";stream=watch"
	}
	w := s.read.w
	w.Header().Set("Content-Type", media)
	w.Header().Set("Transfer-Encoding", "chunked")
	if s.out.gzip {
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Add("Vary", "Accept-Encoding")
	}
	if s.initial != nil && s.read.traced() {
		s.writing = s.read.traceWriting("WatchServer.HandleHTTP", media, s.read.streamEncoder())
		s.writing.AddEvent("About to start writing response")
	}
	w.WriteHeader(http.StatusOK)
	s.out.flusher.Flush()
	s.finish = s.cutoff.After(s.stream.Context(), stallTimeout)
	s.stream.DeliverPending(s.shutdown, s)
}

// last calls part, the last part of the watch.
func (s *watchServer) last(part func()) {
	defer s.close()
	s.longRunning(part)
}

// serve runs until the watch ends. Call it after begin.
func (s *watchServer) serve() {
	err := s.stream.Deliver(s.shutdown, s)
	if s.slow.Load() {
		_ = s.status(watch.SlowClient()) // the client may be gone
	} else if err != nil {
		if err := s.status(watch.ErrorStatus(err)); err != nil {
			klog.FromContext(s.read.req.Context()).Error(err, "Failed to send the error that ended the watch")
		}
	}
	_ = s.out.flush() // the client may be gone
}

// Runs implements watch.Sink.
func (s *watchServer) Runs(runs []mirror.Run) error {
	s.runs, s.frames = s.runs[:0], s.frames[:0]
	defer func() {
		clear(s.runs)
		clear(s.frames)
	}()
	if s.out.gzip {
		rep := s.read.enc.rep
		for _, run := range runs {
			if rep.WorthFrames(run) {
				s.runs = append(s.runs, run)
			}
		}
		var err error
		if s.frames, err = rep.DeflatedFrames(s.stream.Context(), s.frames, s.runs, s.out.Frame); err != nil {
			return watch.ErrEnded
		}
	}
	next := 0 // index into s.runs
	for _, run := range runs {
		if next < len(s.runs) && s.runs[next].Leaf == run.Leaf {
			frames := s.frames[next]
			if next++; frames.Len > 0 {
				if err := s.out.frames(frames); err != nil {
					return err
				}
				continue
			}
		}
		if err := s.run(run); err != nil {
			return err
		}
	}
	return nil
}

// run writes a run of the initial events. Missing items of a whole leaf are encoded together, so
// that they share a block, unless the leaf is large.
func (s *watchServer) run(run mirror.Run) error {
	entries := run.Items()
	if done, err := s.leaf(run, len(entries)); done || err != nil {
		return err
	}
	for _, e := range entries {
		if err := s.Added(e); err != nil {
			return err
		}
	}
	return nil
}

// leaf writes the n items of a whole leaf from the spans that contain them, if the start of each
// item is known: in protobuf, or if each item is a separate span.
func (s *watchServer) leaf(run mirror.Run, n int) (done bool, err error) {
	defer s.spans.Reset()
	if ok, err := s.read.enc.rep.AppendLeaf(s.stream.Context(), &s.spans, run, s.out.Protobuf()); !ok || err != nil {
		return false, nil // the error of one entry, returned again by Added
	}
	switch {
	case s.out.Protobuf():
		for _, span := range s.spans.All {
			for len(span) > 0 {
				end := representation.ItemLen(span)
				if err := s.out.item(apiwatch.Added, span[:end]); err != nil {
					return false, err
				}
				span = span[end:]
			}
		}
	case len(s.spans.All) == n:
		for _, item := range s.spans.All {
			if err := s.out.item(apiwatch.Added, item); err != nil {
				return false, err
			}
		}
	default:
		return false, nil
	}
	return true, nil
}

// Added implements watch.Sink.
func (s *watchServer) Added(e *mirror.Entry) error {
	item, err := s.read.enc.rep.ItemIn(s.stream.Context(), e, &s.buf)
	if err != nil {
		return err
	}
	return s.out.item(apiwatch.Added, item)
}

// Listed implements watch.Sink: later events are not paced.
func (s *watchServer) Listed() { s.out.unpace() }

// watchEvent is the encoded form of an event.
type watchEvent struct {
	t     apiwatch.EventType
	item  []byte
	frame *representation.Frame // set instead of item if the watch is compressed
}

// Event implements watch.Sink.
func (s *watchServer) Event(t apiwatch.EventType, ev *mirror.Event) (err error) {
	e, rep, ctx := watchEvent{t: t}, s.read.enc.rep, s.stream.EventContext()
	switch {
	case s.out.gzip:
		e.frame, err = rep.DeflatedEvent(ctx, ev, t, s.out.Frame)
	case t == apiwatch.Deleted:
		e.item, err = rep.ItemBefore(ctx, ev)
	default:
		e.item, err = rep.ItemAfter(ctx, ev)
	}
	if err != nil {
		return err
	}
	err = s.out.event(e)
	s.out.arrived(ev.Arrived)
	return err
}

// Flush implements watch.Sink.
func (s *watchServer) Flush() error { return s.out.flush() }

// Refresh implements watch.Sink. It replaces the encoding if the decryption keys of the
// resource have changed, so that a running watch sends no item that was decrypted with removed
// keys.
func (s *watchServer) Refresh() (err error) {
	if r := s.read; !r.enc.rep.Fresh() {
		r.enc, err = r.resource.encodings.get(r.resource, r.enc.format)
	}
	return err
}

// encodedBookmark is an encoded bookmark. It is immutable.
type encodedBookmark struct {
	rev              mirror.Revision
	initialEventsEnd bool
	object           []byte
}

// Bookmark implements watch.Sink. The last bookmark is cached: many watches send theirs at
// the same revision, when there are no events and when the server shuts down.
func (s *watchServer) Bookmark(b watch.Bookmark) error {
	last := s.read.enc.lastBookmark.Load()
	if last == nil || last.rev != b.Revision || last.initialEventsEnd != b.InitialEventsEnd {
		obj, err := s.stream.BookmarkObject(b)
		if err != nil {
			return err
		}
		if decorate := s.read.resource.Decorate; decorate != nil {
			decorate(obj)
		}
		last = &encodedBookmark{rev: b.Revision, initialEventsEnd: b.InitialEventsEnd}
		if last.object, err = s.encode(obj); err != nil {
			return err
		}
		s.read.enc.lastBookmark.Store(last)
	}
	if err := s.out.object(apiwatch.Bookmark, last.object); err != nil {
		return err
	}
	if !b.InitialEventsEnd {
		return nil
	}
	if err := s.out.flush(); err != nil {
		return err
	}
	s.initialEventsSent()
	return nil
}

// initialEventsSent records the latency of the initial events and ends their spans.
func (s *watchServer) initialEventsSent() {
	req := s.read.req
	if received, ok := request.ReceivedTimestampFrom(req.Context()); ok {
		latency := time.Since(received)
		endpointmetrics.RecordWatchListLatency(req.Context(), s.read.resource.GVR, s.scope, latency)
		klog.V(3).InfoS("WatchList initial events sent", "path", req.URL.Path, "auditID", audit.GetAuditIDTruncated(req.Context()), "initLatency", latency)
		httplog.AddKeyValue(req.Context(), "watchlist_init_latency", latency)
	}
	if s.initial != nil {
		if s.writing != nil {
			s.writing.AddEvent("Writing initial events done")
			s.writing.End(slowSerialize)
		}
		s.initial.End(slowRead)
		s.initial, s.writing = nil, nil
	}
}

// status writes an ERROR event.
func (s *watchServer) status(status *metav1.Status) error {
	object, err := s.encode(status)
	if err != nil {
		return err
	}
	return s.out.object(apiwatch.Error, object)
}

// encode encodes a bookmark's object or a Status as upstream's handlers do: the object as
// PartialObjectMetadata if the client requested that. The result is not framed.
func (s *watchServer) encode(obj runtime.Object) ([]byte, error) {
	enc := s.read.enc
	if _, status := obj.(*metav1.Status); !status && !enc.target.Empty() {
		m, err := meta.Accessor(obj)
		if err != nil {
			return nil, err
		}
		partial := meta.AsPartialObjectMetadata(m)
		partial.SetGroupVersionKind(enc.target.WithKind("PartialObjectMetadata"))
		obj = partial
	}
	var buf bytes.Buffer
	if err := enc.encoder.Encode(obj, &buf); err != nil {
		return nil, fmt.Errorf("encode %T: %w", obj, err)
	}
	return buf.Bytes(), nil
}
