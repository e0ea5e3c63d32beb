package readpath

import (
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// paceBytesPerSecond is the minimum read rate of a client per connection, of lists and initial events of
	// watches together, before compression. A guess: a slower client does not finish a list of 15 MB within
	// the request timeout.
	paceBytesPerSecond = 256 << 10
	// pacePatience is the time for which a client may be slower than that. A guess, well above the
	// needs of a live but busy client.
	pacePatience = 10 * time.Second
)

// pace measures how fast a client reads a response. The time that writes block is deducted from a credit
// of at most pacePatience, and written bytes add credit at a rate. When the credit is used up, slow is
// called once on a separate goroutine; slow may abort the pending write. The zero value is not usable.
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

// pacing counts the paced responses of each connection: they share its bandwidth and the client's
// processor. The zero value is ready to use. Safe for concurrent use.
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

// begin counts a response on the connection of req; the caller calls end on the result when the
// response is complete.
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

// write calls write with a timer that calls slow when the credit is used up.
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
		p.done = true // slow was called, or the client is gone
	}
	p.credit = min(pacePatience, p.credit-time.Since(began))
	return n, err
}

// pacedWriter is a response whose writes are measured.
type pacedWriter struct {
	http.ResponseWriter
	pace *pace
	// counts is set if each written byte counts as progress; otherwise the caller reports progress.
	counts bool
	// yield, if set, calls write, which may block on the client, after releasing the processor time reserved by the
	// handler.
	yield func(write func())
}

// pacedChunk is the number of bytes per write, so that progress is measured within a long write.
const pacedChunk = 256 << 10

// gzipRatio estimates the bytes of objects in one byte of gzip. Objects compress to between a fifth and a tenth; the larger ratio
// favours the client.
const gzipRatio = 10

// uncompressed estimates the size of the objects in the given number of written bytes.
func (w *pacedWriter) uncompressed(bytes int) int64 {
	if w.Header().Get("Content-Encoding") == "gzip" {
		return gzipRatio * int64(bytes)
	}
	return int64(bytes)
}

// Unwrap returns the wrapped ResponseWriter, for http.ResponseController.
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

// yielding calls f through yield, if that is set.
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
