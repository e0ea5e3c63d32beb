package slowclient

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	"k8s.io/apiserver/pkg/server/httplog"
)

// heldByServer is the number of response bytes that net/http always buffers before it writes to the
// connection (the buffer before chunking; HTTP/2 buffers 4 KB). Writing that many bytes cannot
// block a handler.
const heldByServer = 2048

// WithWriteDeadline ends a response at the deadline of the request's context, on the goroutine that
// serves it. The context of a watch has no deadline, so a watch is not affected.
//
//   - A response that has not begun by then is replaced by a 504. The handler is not abandoned: it
//     is expected to return when its context ends.
//   - A response that has begun is aborted: the pending write returns an error, later writes return
//     http.ErrHandlerTimeout, and the request is aborted when the handler has returned, so that the
//     client cannot mistake a partial response for a complete one (Cutoff).
//
// So a stalled reader holds its seat of priority and fairness no longer than the request timeout. A
// response that fits into net/http's buffer starts no timer, and a response that is in time leaves
// no deadline on the connection.
func WithWriteDeadline(handler http.Handler, conns *Listener) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx := req.Context()
		deadline, ok := ctx.Deadline()
		if !ok {
			handler.ServeHTTP(w, req)
			return
		}
		dw := &deadlineWriter{ResponseWriter: w, req: req, deadline: deadline, cutoff: Cutoff{w: w, req: req, conns: conns}}
		defer dw.finish() // if the handler panics
		handler.ServeHTTP(dw.interfaces(), req)
		if !dw.begun && ctx.Err() == context.DeadlineExceeded {
			dw.replace()
		}
		if dw.finish() {
			dw.recordTimeout()
			panic(http.ErrAbortHandler)
		}
	})
}

// deadlineWriter is the response of a request whose context has a deadline. Its methods are called
// by one goroutine at a time, as for any http.ResponseWriter; only the timer uses cutoff
// concurrently.
type deadlineWriter struct {
	http.ResponseWriter
	req      *http.Request // as received by the filter
	deadline time.Time

	begun    bool // the header was written
	replaced bool // with a 504
	size     int  // bytes written until the timer was started
	timer    *time.Timer
	cutoff   Cutoff // used by the timer
}

// interfaces returns w with the optional interfaces of the wrapped ResponseWriter, because filters
// and handlers test for them.
func (w *deadlineWriter) interfaces() http.ResponseWriter {
	return responsewriter.WrapForHTTP1Or2(w)
}

// Unwrap returns the wrapped ResponseWriter, for http.ResponseController.
func (w *deadlineWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *deadlineWriter) WriteHeader(code int) {
	if w.begun || code < http.StatusOK {
		w.ResponseWriter.WriteHeader(code)
		return
	}
	w.begun = true
	if code != http.StatusGatewayTimeout && w.req.Context().Err() == context.DeadlineExceeded {
		w.replace()
		return
	}
	w.ResponseWriter.WriteHeader(code)
}

func (w *deadlineWriter) Write(p []byte) (int, error) {
	if !w.begun {
		w.WriteHeader(http.StatusOK)
	}
	if w.replaced || w.expired() {
		return 0, http.ErrHandlerTimeout
	}
	if w.timer == nil {
		if w.size += len(p); w.size > heldByServer {
			w.startTimer()
		}
	}
	return w.ResponseWriter.Write(p)
}

// Flush implements http.Flusher.
func (w *deadlineWriter) Flush() {
	if !w.begun {
		w.WriteHeader(http.StatusOK)
	}
	if w.expired() {
		return
	}
	if !w.replaced {
		w.startTimer()
	}
	if flusher, ok := w.ResponseWriter.(http.Flusher); ok {
		flusher.Flush()
	}
}

// replace answers 504 in place of the handler's response.
func (w *deadlineWriter) replace() {
	w.replaced = true
	w.recordTimeout()
	header := w.Header()
	for _, name := range []string{"Content-Type", "Content-Encoding", "Content-Length", "Retry-After"} {
		header.Del(name)
	}
	w.ResponseWriter.WriteHeader(http.StatusGatewayTimeout)
	status := apierrors.NewTimeoutError("request did not complete within the allotted timeout", 0).ErrStatus
	_ = json.NewEncoder(w.ResponseWriter).Encode(&status) // the client may be gone
}

// recordTimeout counts the request as upstream counts one that its timeout filter ended, and keeps
// the stack of this goroutine out of the log.
func (w *deadlineWriter) recordTimeout() {
	httplog.SetStacktracePredicate(w.req.Context(), func(int) bool { return false })
	info, _ := request.RequestInfoFrom(w.req.Context())
	metrics.RecordRequestTermination(w.req, info, metrics.APIServerComponent, http.StatusGatewayTimeout)
}

func (w *deadlineWriter) startTimer() {
	if w.timer == nil {
		w.timer = time.AfterFunc(time.Until(w.deadline), func() { w.cutoff.Cut() })
	}
}

func (w *deadlineWriter) expired() bool { return w.timer != nil && w.cutoff.WasCut() }

// finish marks the handler as returned (or panicked), and reports whether its response was aborted.
func (w *deadlineWriter) finish() (expired bool) {
	if w.timer == nil {
		return false
	}
	w.timer.Stop()
	return w.cutoff.Finish()
}
