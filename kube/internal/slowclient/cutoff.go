package slowclient

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// StallGrace is the time between the reset of a stream and the closing of its connection if the
// handler has not returned by then. A guess, well above the time that a live connection needs.
const StallGrace = time.Second

// Cutoff ends a response whose client does not read it. The pending write and later writes fail: an
// HTTP/2 stream is reset, an HTTP/1.1 connection is closed. If the client reads nothing from an
// HTTP/2 connection, the reset cannot be sent either; after StallGrace the connection is then
// closed with all its streams. conns finds the connection; if conns is nil, the connection stays
// open.
//
// Cut may be called by any goroutine. The response is not used after Finish.
type Cutoff struct {
	w     http.ResponseWriter
	req   *http.Request
	conns *Listener

	mu       sync.Mutex // held while the write deadline is set; guards the fields below
	finished bool       // the handler has returned
	isCut    bool
	stalled  *time.Timer
}

// NewCutoff returns a Cutoff of the response w to req.
func NewCutoff(w http.ResponseWriter, req *http.Request, conns *Listener) *Cutoff {
	return &Cutoff{w: w, req: req, conns: conns}
}

// Cut ends the response and returns true. It does nothing and returns false if the response was
// already cut or Finish was called.
func (c *Cutoff) Cut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.finished || c.isCut {
		return false
	}
	c.isCut = true
	FailWrites(c.w)
	if c.conns != nil && c.req.ProtoMajor == 2 {
		c.stalled = time.AfterFunc(StallGrace, c.closeConnection)
	}
	return true
}

// FailWrites makes the pending write and later writes fail.
func FailWrites(w http.ResponseWriter) {
	// net/http panics when the request has ended. Upstream's timeout filter ends a request while
	// its handler still runs.
	defer func() { _ = recover() }()
	// not supported by recorders in tests
	_ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0))
}

// CloseOn sets conns, so that Cut also closes the connection if the stream cannot be reset; see
// Cutoff.
func (c *Cutoff) CloseOn(conns *Listener) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns = conns
}

// closeConnection closes the connection of a stream that could not be reset: the client accepts no
// bytes for any stream of it.
func (c *Cutoff) closeConnection() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.finished {
		c.conns.CloseConnection(c.req)
	}
}

// WasCut reports whether the response was ended.
func (c *Cutoff) WasCut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isCut
}

// Finish marks the handler as returned (or panicked), and reports whether its response was cut.
func (c *Cutoff) Finish() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finished = true
	if c.stalled != nil {
		c.stalled.Stop()
	}
	return c.isCut
}

// After cuts the response once timeout has passed after the end of ctx, so that a client that does
// not read cannot keep a watch open that has ended. finish must be called before the handler
// returns.
func (c *Cutoff) After(ctx context.Context, timeout time.Duration) (finish func()) {
	var timer atomic.Pointer[time.Timer]
	stop := context.AfterFunc(ctx, func() { timer.Store(time.AfterFunc(timeout, func() { c.Cut() })) })
	return func() {
		c.Finish() // after this, cut has no effect
		stop()
		if t := timer.Load(); t != nil {
			t.Stop()
		}
	}
}
