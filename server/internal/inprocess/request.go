package inprocess

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync"
	"time"
)

// hopHeaders are headers that HTTP/2 does not transmit.
var hopHeaders = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Transfer-Encoding", "Upgrade"}

// defaultUserAgent is that of Go's HTTP/2 client, for requests without one.
const defaultUserAgent = "Go-http-client/2.0"

// received returns the request that a server would receive for req. It shares nothing mutable with
// req, except for the body. Error: the URL cannot be sent.
func (t *Transport) received(ctx context.Context, req *http.Request, body *requestBody) (*http.Request, error) {
	uri := req.URL.RequestURI()
	u, err := url.ParseRequestURI(uri)
	if err != nil {
		return nil, fmt.Errorf("send %s %s: %w", req.Method, req.URL.Redacted(), err)
	}
	header := make(http.Header, len(req.Header)+1)
	for name, values := range req.Header {
		name = http.CanonicalHeaderKey(name)
		header[name] = append(header[name], values...)
	}
	for _, name := range hopHeaders {
		delete(header, name)
	}
	delete(header, "Host")
	delete(header, "Content-Length") // set below
	switch agents, ok := header["User-Agent"]; {
	case !ok:
		header["User-Agent"] = []string{defaultUserAgent}
	case len(agents) == 0 || agents[0] == "":
		delete(header, "User-Agent")
	}
	length := body.length
	if length > 0 || length == 0 && (req.Method == http.MethodPost || req.Method == http.MethodPut || req.Method == http.MethodPatch) {
		header["Content-Length"] = []string{strconv.FormatInt(length, 10)}
	}
	method, host := req.Method, req.Host
	if method == "" {
		method = http.MethodGet
	}
	if host == "" {
		host = req.URL.Host
	}
	state := t.tls
	r := &http.Request{
		Method: method, URL: u, RequestURI: uri, Host: host, Header: header,
		Proto: "HTTP/2.0", ProtoMajor: 2, ContentLength: length, Body: body,
		RemoteAddr: t.remote, TLS: &state,
	}
	return r.WithContext(ctx), nil
}

var (
	errBodyClosed = errors.New("the body of the request is closed")
	errBodyLong   = errors.New("the body of the request is longer than its Content-Length")
)

// requestBody is the body of a request as the handler reads it. It closes the client's body once,
// at the end of the handler at the latest. One goroutine may read while others close, so a pending
// read ends if Close of the client's body ends it, as that of a pipe does.
type requestBody struct {
	body   io.ReadCloser // nil: none
	length int64         // -1: unknown
	read   int64

	once     sync.Once
	mu       sync.Mutex // leaf
	err      error      // of later reads
	deadline *time.Timer
}

func newRequestBody(req *http.Request) *requestBody {
	b := &requestBody{body: req.Body, length: req.ContentLength}
	switch {
	case req.Body == nil || req.Body == http.NoBody:
		b.length = 0
	case req.ContentLength == 0:
		b.length = -1
	}
	return b
}

// Read implements io.Reader. A body that is longer or shorter than its declared length returns an
// error.
func (b *requestBody) Read(p []byte) (int, error) {
	if err := b.failure(); err != nil {
		return 0, err
	}
	if b.length == 0 {
		return 0, io.EOF
	}
	n, err := b.body.Read(p)
	if failed := b.failure(); failed != nil {
		return 0, failed
	}
	b.read += int64(n)
	if b.length >= 0 {
		if b.read > b.length {
			b.fail(errBodyLong)
			return 0, errBodyLong
		}
		if err == io.EOF && b.read < b.length {
			err = io.ErrUnexpectedEOF
		}
	}
	return n, err
}

// Close implements io.Closer. Later reads fail.
func (b *requestBody) Close() error {
	b.fail(errBodyClosed)
	return nil
}

func (b *requestBody) failure() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// fail closes the client's body; pending and later reads return err.
func (b *requestBody) fail(err error) {
	b.mu.Lock()
	if b.err == nil {
		b.err = err
	}
	b.mu.Unlock()
	b.once.Do(func() {
		if b.body != nil {
			_ = b.body.Close() // the body was read, or is not wanted
		}
	})
}

// expire makes pending and later reads fail at a time; the zero time removes the deadline.
func (b *requestBody) expire(at time.Time) {
	b.mu.Lock()
	if b.deadline != nil {
		b.deadline.Stop()
		b.deadline = nil
	}
	passed := !at.IsZero() && !at.After(time.Now())
	if !at.IsZero() && !passed {
		b.deadline = time.AfterFunc(time.Until(at), func() { b.fail(os.ErrDeadlineExceeded) })
	}
	b.mu.Unlock()
	if passed {
		b.fail(os.ErrDeadlineExceeded)
	}
}

// finish ends the use of the body by the handler.
func (b *requestBody) finish() {
	b.expire(time.Time{})
	b.fail(errBodyClosed)
}
