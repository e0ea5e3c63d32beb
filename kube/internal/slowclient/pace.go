package slowclient

import (
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// MinBytesPerSecond is the minimum read rate of a client per connection, of lists and initial
	// events of watches together, before compression. A guess: a slower client does not finish a
	// list of 15 MB within the request timeout.
	MinBytesPerSecond = 256 << 10
	// patience is the time for which a client may be slower than that. A guess, well above the
	// needs of a live but busy client.
	patience = 10 * time.Second
)

// Pace measures how fast a client reads a response. The time that writes block is deducted from a
// credit of at most patience, and written bytes add credit at a rate. When the credit is used up,
// slow is called once on a separate goroutine; slow may abort the pending write. The zero value is
// not usable. Its methods are called by one goroutine.
type Pace struct {
	rate   float64 // bytes per second, of the connection
	conn   *Conn
	credit time.Duration
	earned int64 // bytes since the last write
	timer  *time.Timer
	slow   func()
	done   bool
}

// NewPace returns a Pace with full credit for a response on conn.
func NewPace(conn *Conn, bytesPerSecond float64, slow func()) *Pace {
	return &Pace{rate: bytesPerSecond, conn: conn, credit: patience, slow: slow}
}

// Connections counts the paced responses of each connection: they share its bandwidth and the
// client's processor. The zero value is ready to use. Safe for concurrent use.
type Connections struct {
	mu    sync.Mutex // leaf
	conns map[connKey]*Conn
}

// Conn is a connection with paced responses.
type Conn struct {
	of        *Connections
	key       connKey
	responses atomic.Int32 // changed with Connections.mu held
}

// Begin counts a response on the connection of req; the caller calls End on the result when the
// response is complete.
func (p *Connections) Begin(req *http.Request) *Conn {
	key := connKey{remote: req.RemoteAddr}
	if local, ok := req.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		key.local = local.String()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.conns[key]
	if c == nil {
		c = &Conn{of: p, key: key}
		if p.conns == nil {
			p.conns = map[connKey]*Conn{}
		}
		p.conns[key] = c
	}
	c.responses.Add(1)
	return c
}

// End ends one response on the connection.
func (c *Conn) End() {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if c.responses.Add(-1) == 0 {
		delete(c.of.conns, c.key)
	}
}

// Earn counts bytes, before compression, that are part of the next write.
func (p *Pace) Earn(bytes int64) { p.earned += bytes }

// Write calls write with a timer that calls slow when the credit is used up.
func (p *Pace) Write(write func() (int, error)) (int, error) {
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
	p.credit = min(patience, p.credit-time.Since(began))
	return n, err
}

// Writer is a response whose writes are measured.
type Writer struct {
	http.ResponseWriter
	// Pace measures the writes.
	Pace *Pace
	// Counts is set if each written byte counts as progress; otherwise the caller reports progress.
	Counts bool
	// Yield, if set, calls write, which may block on the client, after releasing the processor time
	// reserved by the handler.
	Yield func(write func())
}

// writeChunk is the number of bytes per write, so that progress is measured within a long write.
const writeChunk = 256 << 10

// gzipRatio estimates the bytes of objects in one byte of gzip. Objects compress to between a fifth
// and a tenth; the larger ratio favours the client.
const gzipRatio = 10

// uncompressed estimates the size of the objects in the given number of written bytes.
func (w *Writer) uncompressed(bytes int) int64 {
	if w.Header().Get("Content-Encoding") == "gzip" {
		return gzipRatio * int64(bytes)
	}
	return int64(bytes)
}

// Unwrap returns the wrapped ResponseWriter, for http.ResponseController.
func (w *Writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Flush implements http.Flusher.
func (w *Writer) Flush() {
	flusher, ok := w.ResponseWriter.(http.Flusher)
	if !ok {
		return
	}
	flush := func() {
		_, _ = w.Pace.Write(func() (int, error) {
			flusher.Flush()
			return 0, nil
		})
	}
	w.yielding(flush)
}

// yielding calls f through Yield, if that is set.
func (w *Writer) yielding(f func()) {
	if w.Yield != nil {
		w.Yield(f)
	} else {
		f()
	}
}

func (w *Writer) Write(p []byte) (written int, err error) {
	w.yielding(func() { written, err = w.write(p) })
	return written, err
}

func (w *Writer) write(p []byte) (written int, err error) {
	if !w.Counts {
		return w.Pace.Write(func() (int, error) { return w.ResponseWriter.Write(p) })
	}
	for {
		chunk := p[written:min(len(p), written+writeChunk)]
		w.Pace.Earn(w.uncompressed(len(chunk)))
		n, err := w.Pace.Write(func() (int, error) { return w.ResponseWriter.Write(chunk) })
		if written += n; err != nil || written == len(p) {
			return written, err
		}
	}
}
