package inprocess

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// heldBytes is the number of bytes that net/http holds back until a flush or the end of the
// handler, so that a short response has a Content-Length.
const heldBytes = 4 << 10

var heldBuffers = newBuffers(heldBytes)

var (
	errWroteMore = errors.New("the handler wrote more than its declared Content-Length")
	errReturned  = errors.New("the handler of the request has returned")
)

// writer is the http.ResponseWriter of a handler. It behaves as that of net/http's HTTP/2 server,
// with the same optional interfaces, and has the same methods for http.ResponseController.
// Deadlines may be set by any goroutine, the other methods are called by one at a time.
type writer struct {
	exchange *exchange
	req      *http.Request // of the handler

	header   http.Header
	snapshot http.Header // of header, at WriteHeader
	status   int         // 0 before WriteHeader
	trailers []string    // declared names
	declared int64       // Content-Length; -1: none
	sent     bool        // the header is delivered
	held     *[]byte

	wrote     int64 // bytes of all writes, those that were refused too
	delivered int64 // bytes that the client may read

	mu       sync.Mutex // leaf
	ended    bool       // the handler has returned
	deadline *time.Timer
	closed   chan bool // of CloseNotify
}

// Header implements http.ResponseWriter.
func (w *writer) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter. Informational responses are not delivered.
func (w *writer) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("invalid WriteHeader code %v", status))
	}
	if w.status != 0 || status < http.StatusOK {
		return
	}
	w.status, w.snapshot = status, w.header.Clone()
	if text := w.snapshot.Get("Content-Length"); text != "" {
		length, err := strconv.ParseUint(text, 10, 63)
		if err != nil {
			w.snapshot.Del("Content-Length")
		} else {
			w.declared = int64(length)
		}
	}
}

// bodyAllowed reports whether a response of the status has a body.
func bodyAllowed(status int) bool {
	return status >= http.StatusOK && status != http.StatusNoContent && status != http.StatusNotModified
}

// Write implements http.ResponseWriter. It blocks while the client does not read. A response that
// is longer than its declared length breaks off as over HTTP/2: Write refuses bytes beyond it once
// the header is delivered, and the client reads an error after that length.
func (w *writer) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if !bodyAllowed(w.status) {
		return 0, http.ErrBodyNotAllowed
	}
	w.wrote += int64(len(p))
	if w.sent && w.declared > 0 && w.wrote > w.declared {
		return 0, errWroteMore
	}
	written := 0
	for {
		held := 0
		if w.held != nil {
			held = len(*w.held)
		}
		rest := p[written:]
		if len(rest) <= heldBytes-held {
			if w.held == nil && len(rest) > 0 {
				w.held = heldBuffers.Get().(*[]byte)
			}
			if len(rest) > 0 {
				*w.held = append(*w.held, rest...)
			}
			return len(p), nil
		}
		if held == 0 {
			n, err := w.deliver(rest, false)
			return written + n, err
		}
		n := heldBytes - held
		*w.held = append(*w.held, rest[:n]...)
		if err := w.flush(false); err != nil {
			return written, err
		}
		written += n
	}
}

// WriteString implements io.StringWriter.
func (w *writer) WriteString(s string) (int, error) { return w.Write([]byte(s)) }

// Flush implements http.Flusher.
func (w *writer) Flush() { _ = w.FlushError() } // the next write returns the error

// FlushError is Flush for http.ResponseController. Error: the response has ended.
func (w *writer) FlushError() error {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	return w.flush(false)
}

// flush delivers the header and the bytes that are held back.
func (w *writer) flush(last bool) error {
	var held []byte
	if w.held != nil {
		held = *w.held
	}
	_, err := w.deliver(held, last)
	if w.held != nil {
		*w.held = (*w.held)[:0]
		heldBuffers.Put(w.held)
		w.held = nil
	}
	return err
}

// deliver delivers the header, if it was not, and p. After the last call the header has the length
// of a response that fits into one call.
func (w *writer) deliver(p []byte, last bool) (int, error) {
	head := w.req.Method == http.MethodHead
	if !w.sent {
		w.sent = true
		w.exchange.start(w.response(p, last, head))
	}
	if head || len(p) == 0 {
		return len(p), w.exchange.failure()
	}
	excess := w.declared >= 0 && w.delivered+int64(len(p)) > w.declared
	if excess {
		p = p[:w.declared-w.delivered]
	}
	n, err := w.exchange.write(p)
	w.delivered += int64(n)
	if excess && err == nil {
		err = errWroteMore
		w.exchange.abort(err)
	}
	return n, err
}

// response returns the client's response with the headers that net/http adds.
func (w *writer) response(first []byte, last, head bool) *http.Response {
	h := w.snapshot
	length := w.declared
	if length < 0 && last && bodyAllowed(w.status) && (len(first) > 0 || !head) {
		length = int64(len(first))
		h.Set("Content-Length", strconv.Itoa(len(first)))
	}
	_, typed := h["Content-Type"]
	if !typed && h.Get("Content-Encoding") == "" && bodyAllowed(w.status) && len(first) > 0 {
		h.Set("Content-Type", http.DetectContentType(first))
	}
	if _, dated := h["Date"]; !dated {
		h.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	}
	trailer := w.declareTrailers(h)
	for name, values := range h {
		if strings.HasPrefix(name, http.TrailerPrefix) || len(values) == 0 {
			delete(h, name)
		}
	}
	for _, name := range hopHeaders {
		delete(h, name)
	}
	state := *w.exchange.tls
	r := &http.Response{
		Status: strconv.Itoa(w.status) + " " + http.StatusText(w.status), StatusCode: w.status,
		Proto: "HTTP/2.0", ProtoMajor: 2, Header: h, ContentLength: length, Trailer: trailer,
		Request: w.exchange.req, TLS: &state, Body: w.exchange,
	}
	if empty := last && len(first) == 0 && w.declared <= 0; head || empty && trailer == nil {
		r.Body = http.NoBody
		if empty && !head {
			r.ContentLength = 0
		}
	}
	return r
}

// declareTrailers moves the names of header Trailer to the map of the response's trailers.
func (w *writer) declareTrailers(h http.Header) (trailer http.Header) {
	for _, value := range h["Trailer"] {
		for name := range strings.SplitSeq(value, ",") {
			if name = http.CanonicalHeaderKey(strings.TrimSpace(name)); name != "" && !slices.Contains(w.trailers, name) {
				w.trailers = append(w.trailers, name)
			}
		}
	}
	delete(h, "Trailer")
	for _, name := range w.trailers {
		delete(h, name)
		if trailer == nil {
			trailer = http.Header{}
		}
		trailer[name] = nil
	}
	return trailer
}

// finish completes the response of a handler that has returned.
func (w *writer) finish() {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if err := w.flush(true); err != nil {
		return // the client is gone
	}
	w.exchange.setTrailers(w.trailers, w.header)
	err := io.EOF
	if w.declared > w.delivered && bodyAllowed(w.status) && w.req.Method != http.MethodHead {
		err = io.ErrUnexpectedEOF
	}
	w.exchange.finish(err)
}

// end releases what the handler used, and makes later calls fail.
func (w *writer) end() {
	w.mu.Lock()
	w.ended = true
	if w.deadline != nil {
		w.deadline.Stop()
	}
	w.mu.Unlock()
	w.exchange.body.finish()
}

// SetReadDeadline is for http.ResponseController: reads of the request's body fail afterwards.
func (w *writer) SetReadDeadline(at time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return errReturned
	}
	w.exchange.body.expire(at)
	return nil
}

// SetWriteDeadline is for http.ResponseController: the response is aborted at that time. The zero
// time removes the deadline.
func (w *writer) SetWriteDeadline(at time.Time) error {
	left := time.Until(at)
	if err := w.expire(at, left); err != nil {
		return err
	}
	if !at.IsZero() && left <= 0 {
		w.exchange.abort(errAborted)
	}
	return nil
}

// expire replaces the timer of the deadline, which is left away.
func (w *writer) expire(at time.Time, left time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return errReturned
	}
	if w.deadline != nil {
		w.deadline.Stop()
		w.deadline = nil
	}
	if !at.IsZero() && left > 0 {
		w.deadline = time.AfterFunc(left, func() { w.exchange.abort(errAborted) })
	}
	return nil
}

// EnableFullDuplex is for http.ResponseController: a handler may read and write at the same time.
func (w *writer) EnableFullDuplex() error { return nil }

// CloseNotify implements http.CloseNotifier, which upstream's wrappers of responses test for.
func (w *writer) CloseNotify() <-chan bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed == nil {
		closed := make(chan bool, 1)
		w.closed = closed
		go func() {
			<-w.req.Context().Done()
			closed <- true
		}()
	}
	return w.closed
}
