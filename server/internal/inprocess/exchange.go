package inprocess

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
)

const (
	// window is the number of bytes of a response that wait for a client before writes block.
	// HTTP/2 lets 4 MB wait. A guess: far more than an event, and little memory when all informers
	// of a server read their first lists at once. Larger writes need no buffer.
	window = 64 << 10
	// eventBytes is the number of bytes up to which a response uses a small buffer. A guess: most
	// events fit.
	eventBytes = 4 << 10
)

var smallBuffers, largeBuffers = newBuffers(eventBytes), newBuffers(window)

// newBuffers returns a pool of empty buffers.
func newBuffers(size int) *sync.Pool {
	return &sync.Pool{New: func() any {
		b := make([]byte, 0, size)
		return &b
	}}
}

// exchange is the response to one request, from its handler to its client. It is the body that the
// client reads.
//
// Small writes are copied to a buffer, which an idle response does not have. A write that exceeds
// the window waits until the client has taken all of it from the writer's slice, so that a client
// that does not read delays its handler only.
type exchange struct {
	req    *http.Request // of the client
	body   *requestBody  // as the handler reads it
	tls    *tls.ConnectionState
	cancel context.CancelFunc // of the handler's context

	started chan struct{} // closed when response or err is set

	mu       sync.Mutex // leaf
	changed  sync.Cond
	response *http.Response
	buf      []byte
	pooled   *[]byte // buf has its array; nil if buf is nil
	read     int     // bytes of buf that the client has
	pending  []byte  // bytes of a blocked write that the client does not have
	err      error   // after all bytes; io.EOF at the end of a complete response
}

func newExchange(req *http.Request, body *requestBody, state *tls.ConnectionState, cancel context.CancelFunc) *exchange {
	x := &exchange{req: req, body: body, tls: state, cancel: cancel, started: make(chan struct{})}
	x.changed.L = &x.mu
	return x
}

// wait returns the response once its header is known, or the error that ended it before.
func (x *exchange) wait() (*http.Response, error) {
	<-x.started // closed by abort too, when the client's context ends
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.response == nil {
		return nil, x.err
	}
	return x.response, nil
}

// start delivers the header. It has no effect after an abort.
func (x *exchange) start(response *http.Response) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err != nil {
		return
	}
	x.response = response
	close(x.started)
}

// write delivers bytes of the body. It blocks while the client does not read.
// Error: the response has ended.
func (x *exchange) write(p []byte) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err != nil {
		return 0, x.err
	}
	if len(x.buf)-x.read+len(p) <= window {
		x.buffer(p)
		x.changed.Broadcast()
		return len(p), nil
	}
	x.pending = p
	x.changed.Broadcast()
	for len(x.pending) > 0 && x.err == nil {
		x.changed.Wait()
	}
	n := len(p) - len(x.pending)
	x.pending = nil
	if n < len(p) {
		return n, x.err
	}
	return n, nil
}

// buffer appends p, which fits into the window.
func (x *exchange) buffer(p []byte) {
	if x.read > 0 && len(x.buf)+len(p) > cap(x.buf) {
		x.buf = x.buf[:copy(x.buf, x.buf[x.read:])]
		x.read = 0
	}
	if n := len(x.buf) + len(p); n > cap(x.buf) {
		x.grow(n)
	}
	x.buf = append(x.buf, p...)
}

// grow moves the unread bytes to a buffer for n bytes.
func (x *exchange) grow(n int) {
	pool := largeBuffers
	if n <= eventBytes {
		pool = smallBuffers
	}
	larger := pool.Get().(*[]byte)
	buf := append((*larger)[:0], x.buf...)
	x.release()
	x.buf, x.pooled = buf, larger
}

// release returns the buffer to its pool. Its bytes are dropped.
func (x *exchange) release() {
	if x.pooled != nil {
		pool := largeBuffers
		if cap(x.buf) == eventBytes {
			pool = smallBuffers
		}
		pool.Put(x.pooled)
	}
	x.buf, x.pooled, x.read = nil, nil, 0
}

// finish marks the response as complete, or with another error than io.EOF as broken.
func (x *exchange) finish(err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err == nil {
		x.err = err
		x.changed.Broadcast()
	}
}

// abort ends a response that is not complete: the client gets err after the bytes that were
// delivered, the handler's context is cancelled, and its reads of the request's body fail. The
// error is set first, so a handler that returns for one of these reasons does not complete the
// response. abort closes the client's body, so the caller must hold no lock.
func (x *exchange) abort(err error) {
	if x.ends(err) {
		x.cancel()
		x.body.fail(err)
	}
}

// ends sets the error of a response that is not complete, and reports whether it was that.
func (x *exchange) ends(err error) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err != nil {
		return false
	}
	x.err = err
	if x.response == nil {
		close(x.started)
	}
	x.changed.Broadcast()
	return true
}

// Read implements io.Reader, for the client.
func (x *exchange) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for {
		n := copy(p, x.buf[x.read:])
		if x.read += n; n > 0 && x.read == len(x.buf) {
			x.release()
		}
		if taken := copy(p[n:], x.pending); taken > 0 {
			n += taken
			if x.pending = x.pending[taken:]; len(x.pending) == 0 {
				x.changed.Broadcast()
			}
		}
		if n > 0 {
			return n, nil
		}
		if x.err != nil {
			return 0, x.err
		}
		x.changed.Wait()
	}
}

// Close implements io.Closer, for the client: it ends a response that is not complete, and drops
// its bytes.
func (x *exchange) Close() error {
	x.abort(http.ErrBodyReadAfterClose)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.release()
	if x.err == io.EOF {
		x.err = http.ErrBodyReadAfterClose
	}
	return nil
}

// failure returns the error of later writes.
func (x *exchange) failure() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.err
}

// setTrailers copies trailers from the handler's header: the declared names, and those with
// http.TrailerPrefix.
func (x *exchange) setTrailers(declared []string, header http.Header) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.response == nil {
		return
	}
	set := func(name string, values []string) {
		if x.response.Trailer == nil {
			x.response.Trailer = http.Header{}
		}
		x.response.Trailer[name] = slices.Clone(values)
	}
	for _, name := range declared {
		if values, ok := header[name]; ok {
			set(name, values)
		}
	}
	for name, values := range header {
		if trailer, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			set(http.CanonicalHeaderKey(trailer), values)
		}
	}
}
