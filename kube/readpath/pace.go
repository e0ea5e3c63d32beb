package readpath

import (
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// paceBytesPerSecond is the least that a client has to read on a connection, of lists and of the initial
	// events of watches together, before compression. A guess: a client that is slower than that does not end
	// a list of 15 MB within the request timeout.
	paceBytesPerSecond = 256 << 10
	// pacePatience is for how long a client may read less than that. A guess, well above what a client
	// needs that is alive and busy.
	pacePatience = 10 * time.Second
)

// pace measures how fast a client reads a response. The time for which writes wait counts against
// pacePatience, and the bytes that they have written earn it back at a rate. When it is used up, slow is
// called, once, on a goroutine of its own; it may end the write under way. The zero value is not ready.
// Its methods are called by one goroutine.
type pace struct {
	rate   float64 // bytes per second, of the connection
	conn   *pacedConn
	credit time.Duration
	earned int64 // bytes since the last write
	timer  *time.Timer
	slow   func()
	done   bool
}

func newPace(conn *pacedConn, bytesPerSecond float64, slow func()) *pace {
	return &pace{rate: bytesPerSecond, conn: conn, credit: pacePatience, slow: slow}
}

// pacing knows how many responses are paced on each connection: they share its bandwidth, and the client's
// processor. The zero value is ready. Safe for concurrent use.
type pacing struct {
	mu    sync.Mutex // leaf
	conns map[connKey]*pacedConn
}

// pacedConn is a connection with paced responses.
type pacedConn struct {
	of        *pacing
	key       connKey
	responses atomic.Int32 // changed with pacing.mu held
}

// begin counts a response on the connection of req, until end.
func (p *pacing) begin(req *http.Request) *pacedConn {
	key := connKey{remote: req.RemoteAddr}
	if local, ok := req.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		key.local = local.String()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.conns[key]
	if c == nil {
		c = &pacedConn{of: p, key: key}
		if p.conns == nil {
			p.conns = map[connKey]*pacedConn{}
		}
		p.conns[key] = c
	}
	c.responses.Add(1)
	return c
}

func (c *pacedConn) end() {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if c.responses.Add(-1) == 0 {
		delete(c.of.conns, c.key)
	}
}

// progress counts bytes, before compression, that are part of the next write.
func (p *pace) progress(bytes int64) { p.earned += bytes }

// write calls write, which has to end in time.
func (p *pace) write(write func() (int, error)) (int, error) {
	if p.done {
		return write()
	}
	began := time.Now()
	rate := p.rate / float64(max(p.conn.responses.Load(), 1))
	p.credit = max(p.credit+time.Duration(float64(p.earned)/rate*float64(time.Second)), time.Millisecond)
	p.earned = 0
	if p.timer == nil {
		p.timer = time.AfterFunc(p.credit, p.slow)
	} else {
		p.timer.Reset(p.credit)
	}
	n, err := write()
	if !p.timer.Stop() || err != nil {
		p.done = true // slow was called, or there is nobody to be waited for
	}
	p.credit = min(pacePatience, p.credit-time.Since(began))
	return n, err
}

// pacedWriter is a response whose writes are measured.
type pacedWriter struct {
	http.ResponseWriter
	pace *pace
	// counts: each byte that is written counts as one of progress; otherwise who writes says how many.
	counts bool
	// yield, if set, calls write, which waits for the client, without the processor time that the handler has reserved.
	yield func(write func())
}

// pacedChunk is how many bytes are written at once, so that progress shows within a long write.
const pacedChunk = 256 << 10

// gzipRatio estimates the bytes of objects in one byte of gzip. Objects compress to between a fifth and a tenth; the larger ratio
// favours the client.
const gzipRatio = 10

// uncompressed estimates the bytes of objects in so many bytes that are written.
func (w *pacedWriter) uncompressed(bytes int) int64 {
	if w.Header().Get("Content-Encoding") == "gzip" {
		return gzipRatio * int64(bytes)
	}
	return int64(bytes)
}

// Unwrap is for http.ResponseController.
func (w *pacedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Flush implements http.Flusher.
func (w *pacedWriter) Flush() {
	flusher, ok := w.ResponseWriter.(http.Flusher)
	if !ok {
		return
	}
	flush := func() {
		_, _ = w.pace.write(func() (int, error) {
			flusher.Flush()
			return 0, nil
		})
	}
	w.yielding(flush)
}

// yielding calls f by way of yield, if that is set.
func (w *pacedWriter) yielding(f func()) {
	if w.yield != nil {
		w.yield(f)
	} else {
		f()
	}
}

func (w *pacedWriter) Write(p []byte) (written int, err error) {
	w.yielding(func() { written, err = w.write(p) })
	return written, err
}

func (w *pacedWriter) write(p []byte) (written int, err error) {
	if !w.counts {
		return w.pace.write(func() (int, error) { return w.ResponseWriter.Write(p) })
	}
	for {
		chunk := p[written:min(len(p), written+pacedChunk)]
		w.pace.progress(w.uncompressed(len(chunk)))
		n, err := w.pace.write(func() (int, error) { return w.ResponseWriter.Write(chunk) })
		if written += n; err != nil || written == len(p) {
			return written, err
		}
	}
}
