package readpath

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/kube/internal/slowclient"
	"github.com/stratakube/strata/kube/listadmission"
)

const (
	// gzipThreshold is the minimum size in bytes of a compressed response, for a client that
	// accepts gzip; it is upstream's value.
	gzipThreshold = 128 << 10
	// writeAtOnce is the size of the write buffer; pieces of largePiece and more are written
	// without being copied.
	writeAtOnce = 64 << 10
	// largePiece is the minimum size of a piece that is not copied into the buffer.
	largePiece = 32 << 10
)

// clientGone is the panic value of breakOff when the client has disconnected.
type clientGone struct{}

// breakOff ends the writing of a response that cannot be completed because of err. If the client
// has disconnected, the handler returns normally and the request is recorded as served, as upstream
// does. Otherwise the connection or stream is aborted, so that the client cannot mistake a partial
// response for a complete one.
func breakOff(err error) {
	if errors.Is(err, http.ErrContentLength) || errors.Is(err, context.DeadlineExceeded) {
		panic(http.ErrAbortHandler)
	}
	panic(clientGone{})
}

// whileThere calls write, and returns normally if breakOff ended it because the client has
// disconnected.
func whileThere(write func()) {
	defer func() {
		if x := recover(); x != nil && x != (clientGone{}) {
			panic(x)
		}
	}()
	write()
}

// body writes a response. It buffers at most writeAtOnce bytes, in addition to the buffers of gzip,
// and the first gzipThreshold bytes of a response of unknown size. Writing ends when the client has
// disconnected (breakOff).
type body struct {
	req  *http.Request
	w    http.ResponseWriter
	gz   *gzipjoin.Writer // nil: not compressed
	buf  *[]byte
	size int64 // bytes still to be written, before compression
	// about: size is an estimate. begun are the first bytes until the header is sent: with the last
	// byte, or with more than gzipThreshold bytes. It is nil afterwards.
	about bool
	begun []byte

	// Set for an admitted list, whose client must read it in time.
	turn   *listadmission.Decoded // nil: encoding takes no turns
	paced  *slowclient.Pace
	share  *listadmission.Share
	cutoff *slowclient.Cutoff
}

// pace makes the body of a list release its admitted bytes as they are written. It ends the
// response if the client is slower, for too long, than the larger of slowclient.MinBytesPerSecond
// and half of the rate that would finish the list within the request timeout. The caller calls
// finish when the list is written.
func (b *body) pace(r *readRequest, p *preparedList) (finish func()) {
	rate := float64(slowclient.MinBytesPerSecond)
	if deadline, ok := r.req.Context().Deadline(); ok {
		rate = max(rate, float64(b.size)/2/max(time.Until(deadline).Seconds(), 1))
	}
	b.share, b.cutoff = p.share, slowclient.NewCutoff(r.w, r.req, r.server.conns)
	conn := r.server.pacing.Begin(r.req)
	b.paced = slowclient.NewPace(conn, rate, func() {
		if b.cutoff.Cut() {
			r.server.lists.Slow(p.level)
		}
	})
	return func() {
		b.cutoff.Finish()
		conn.End()
	}
}

// out writes to the client.
func (b *body) out(p []byte) error {
	write := func() (n int, err error) { return b.w.Write(p) }
	if b.turn != nil {
		write = func() (n int, err error) {
			b.turn.Yield(b.req.Context(), func() { n, err = b.w.Write(p) })
			return n, err
		}
	}
	if b.paced == nil {
		_, err := write()
		return err
	}
	_, err := b.paced.Write(write)
	if err != nil && b.cutoff.WasCut() {
		panic(http.ErrAbortHandler)
	}
	b.share.Shrink(b.size)
	return err
}

// wrote counts bytes, before compression, that were written to the body.
func (b *body) wrote(n int64) {
	b.size -= n
	if b.about {
		b.size = max(b.size, 0)
	}
	if b.paced != nil {
		b.paced.Earn(n)
	}
}

var writeBuffers = sync.Pool{New: func() any {
	b := make([]byte, 0, writeAtOnce)
	return &b
}}

// newBody sends the header of a response of size bytes.
func newBody(r *readRequest, size int64) *body {
	b := &body{req: r.req, w: r.w, buf: writeBuffers.Get().(*[]byte), size: size}
	b.w.Header().Set("Content-Type", r.contentType())
	b.header(size)
	return b
}

// newBodyAbout returns the body of a response of about size bytes.
func newBodyAbout(r *readRequest, size int64) *body {
	b := &body{req: r.req, w: r.w, buf: writeBuffers.Get().(*[]byte), size: size, about: true, begun: []byte{}}
	b.w.Header().Set("Content-Type", r.contentType())
	return b
}

// header sends the header of a response of size bytes, or of more than gzipThreshold bytes if size
// is negative.
func (b *body) header(size int64) {
	h := b.w.Header()
	switch {
	case (size < 0 || size > gzipThreshold) && negotiateGzip(b.req):
		h.Set("Content-Encoding", "gzip")
		h.Add("Vary", "Accept-Encoding")
		b.gz = gzipjoin.NewWriter(sink{b})
	case size >= 0:
		h.Set("Content-Length", strconv.FormatInt(size, 10))
	}
	b.w.WriteHeader(http.StatusOK)
}

// begin sends the header, as header does, and what was written before.
func (b *body) begin(size int64) {
	begun := b.begun
	b.begun = nil
	b.header(size)
	b.write(begun)
}

// sink is the io.Writer below a body's gzip writer.
type sink struct{ b *body }

func (s sink) Write(p []byte) (int, error) {
	s.b.send(p)
	return len(p), nil
}

// write adds bytes to the body.
func (b *body) write(p []byte) {
	if b.begun != nil {
		if b.begun = append(b.begun, p...); len(b.begun) > gzipThreshold {
			b.begin(-1)
		}
		return
	}
	b.wrote(int64(len(p)))
	if b.gz != nil {
		if _, err := b.gz.Write(p); err != nil {
			panic(http.ErrAbortHandler)
		}
		return
	}
	b.send(p)
}

// writeRun adds an already compressed run to a compressed body.
func (b *body) writeRun(run gzipjoin.Segment) {
	b.wrote(run.Len)
	if err := b.gz.WriteRun(run); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// send writes or buffers p.
func (b *body) send(p []byte) {
	if len(*b.buf)+len(p) <= writeAtOnce && len(p) < largePiece {
		*b.buf = append(*b.buf, p...)
		return
	}
	b.flush()
	if len(p) < largePiece {
		*b.buf = append(*b.buf, p...)
		return
	}
	if err := b.out(p); err != nil {
		breakOff(err)
	}
}

func (b *body) flush() {
	if len(*b.buf) == 0 {
		return
	}
	buf := b.buf
	// Write on a reset HTTP/2 stream returns while the connection may still reference the buffer:
	// after an error, the buffer must not be reused.
	b.buf = nil
	if err := b.out(*buf); err != nil {
		breakOff(err)
	}
	*buf = (*buf)[:0]
	b.buf = buf
}

// close ends the body. A body that differs from its announced size is aborted, so that no client
// mistakes it for a complete one.
func (b *body) close() {
	if b.begun != nil {
		b.begin(int64(len(b.begun)))
	}
	if b.size != 0 && !b.about {
		panic(http.ErrAbortHandler)
	}
	if b.gz != nil {
		if err := b.gz.Close(); err != nil {
			panic(http.ErrAbortHandler)
		}
	}
	b.flush()
}

// free returns the body's buffer to the pool, unless a write of it has failed.
func (b *body) free() {
	if b.buf == nil {
		return
	}
	*b.buf = (*b.buf)[:0]
	writeBuffers.Put(b.buf)
	b.buf = nil
}
