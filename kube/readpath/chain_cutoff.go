package readpath

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// stallGrace is how long a stream may take to learn that it was reset, before its
// connection is closed. A guess, well above what a living connection needs.
const stallGrace = time.Second

// cutoff ends a response whose client does not read it. The write under way and later ones fail: an HTTP/2
// stream is reset, an HTTP/1.1 connection is closed. If the client no longer reads from an HTTP/2
// connection at all, the reset cannot be sent either, and after stallGrace the connection is closed,
// whichever streams it has; conns finds it (nil: it is left open).
//
// cut may be called by any goroutine. Nothing touches the response after finish.
type cutoff struct {
	w     http.ResponseWriter
	req   *http.Request
	conns *trackedListener

	mu       sync.Mutex // held while the writes are made to fail; guards the fields below
	finished bool       // the handler has returned
	isCut    bool
	stalled  *time.Timer
}

// cut ends the response, and reports whether it did: it does nothing a second time, or after finish.
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

// failWrites has the write under way and later ones fail.
func failWrites(w http.ResponseWriter) {
	// net/http panics when the request has ended. Upstream's timeout filter ends a request while its handler
	// still runs.
	defer func() { _ = recover() }()
	_ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0)) // not supported by recorders in tests
}

// closing has cut close the connection too, if that is not reached otherwise; see cutoff.
func (c *cutoff) closing(conns *trackedListener) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns = conns
}

// closeConnection is for a stream that could not even be reset: its connection takes no
// more bytes, for whichever stream.
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

// finish says that the handler has returned or panicked, and reports whether its response was cut.
func (c *cutoff) finish() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finished = true
	if c.stalled != nil {
		c.stalled.Stop()
	}
	return c.isCut
}

// after cuts the response when the time given has passed since the end of ctx: a client that does not
// read cannot keep a watch that has ended. finish has to be called before the handler returns.
func (c *cutoff) after(ctx context.Context, timeout time.Duration) (finish func()) {
	var timer atomic.Pointer[time.Timer]
	stop := context.AfterFunc(ctx, func() { timer.Store(time.AfterFunc(timeout, func() { c.cut() })) })
	return func() {
		c.finish() // what the timer does after this has no effect
		stop()
		if t := timer.Load(); t != nil {
			t.Stop()
		}
	}
}
