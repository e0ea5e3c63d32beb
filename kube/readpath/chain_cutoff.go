package readpath

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// stallGrace is the time between the reset of a stream and the closing of its connection if the
// handler has not returned by then. A guess, well above the time that a live connection needs.
const stallGrace = time.Second

// cutoff ends a response whose client does not read it. The pending write and later writes fail: an HTTP/2
// stream is reset, an HTTP/1.1 connection is closed. If the client reads nothing from an HTTP/2
// connection, the reset cannot be sent either; after stallGrace the connection is then closed with all its
// streams. conns finds the connection; if conns is nil, the connection stays open.
//
// cut may be called by any goroutine. The response is not used after finish.
type cutoff struct {
	w     http.ResponseWriter
	req   *http.Request
	conns *trackedListener

	mu       sync.Mutex // held while the write deadline is set; guards the fields below
	finished bool       // the handler has returned
	isCut    bool
	stalled  *time.Timer
}

// cut ends the response and returns true. It does nothing and returns false if the response was
// already cut or finish was called.
func (c *cutoff) cut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.finished || c.isCut {
		return false
	}
	c.isCut = true
	failWrites(c.w)
	if c.conns != nil && c.req.ProtoMajor == 2 {
		c.stalled = time.AfterFunc(stallGrace, c.closeConnection)
	}
	return true
}

// failWrites makes the pending write and later writes fail.
func failWrites(w http.ResponseWriter) {
	// net/http panics when the request has ended. Upstream's timeout filter ends a request while its handler
	// still runs.
	defer func() { _ = recover() }()
	_ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0)) // not supported by recorders in tests
}

// closing sets conns, so that cut also closes the connection if the stream cannot be reset; see cutoff.
func (c *cutoff) closing(conns *trackedListener) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns = conns
}

// closeConnection closes the connection of a stream that could not be reset: the client accepts no
// bytes for any stream of it.
func (c *cutoff) closeConnection() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.finished {
		c.conns.close(c.req)
	}
}

// wasCut reports whether the response was ended.
func (c *cutoff) wasCut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isCut
}

// finish marks the handler as returned (or panicked), and reports whether its response was cut.
func (c *cutoff) finish() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finished = true
	if c.stalled != nil {
		c.stalled.Stop()
	}
	return c.isCut
}

// after cuts the response once timeout has passed after the end of ctx, so that a client that does
// not read cannot keep a watch open that has ended. finish must be called before the handler returns.
func (c *cutoff) after(ctx context.Context, timeout time.Duration) (finish func()) {
	var timer atomic.Pointer[time.Timer]
	stop := context.AfterFunc(ctx, func() { timer.Store(time.AfterFunc(timeout, func() { c.cut() })) })
	return func() {
		c.finish() // after this, cut has no effect
		stop()
		if t := timer.Load(); t != nil {
			t.Stop()
		}
	}
}
