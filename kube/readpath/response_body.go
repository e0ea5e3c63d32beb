package readpath

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/kube/listadmission"
)

const (
	// gzipThreshold is the size in bytes from which on a response is compressed for a
	// client that accepts that, as upstream has it.
	gzipThreshold = 128 << 10
	// writeAtOnce is how many bytes are gathered before they are written; larger pieces
	// are written as they are, without being copied.
	writeAtOnce = 64 << 10
	// largePiece is what counts as larger.
	largePiece = 32 << 10
)

// clientGone is what breakOff panics with when nobody is there any more to be told anything.
type clientGone struct{}

// breakOff ends the writing of a response that err keeps from being completed. If the client
// has gone, the handler returns as after any response, and the request is recorded as one, as
// upstream has it; if not, the connection or stream is aborted, so that nobody takes what was
// sent for all.
func breakOff(err error) {
	if errors.Is(err, http.ErrContentLength) || errors.Is(err, context.DeadlineExceeded) {
		panic(http.ErrAbortHandler)
	}
	panic(clientGone{})
}

// whileThere calls write, which breakOff may end.
func whileThere(write func()) {
	defer func() {
		if x := recover(); x != nil && x != (clientGone{}) {
			panic(x)
		}
	}()
	write()
}

// body writes a response of known size. It holds at most writeAtOnce bytes beside what
// gzip holds. A client that has gone ends the writing (breakOff).
type body struct {
	w    http.ResponseWriter
	gz   *gzipjoin.Writer // nil: not compressed
	buf  *[]byte
	size int64 // bytes that are still to be written, before compression

	// Of a list that was admitted: its client has to read it in time.
	paced  *pace
	share  *listadmission.Share
	cutoff *cutoff
}

// pace has the body of a list give back what it was admitted with as its bytes leave, and end when its
// client reads less than paceBytesPerSecond, or half of what would end the list within the request
// timeout, for too long. finish is called when the list is written.
func (b *body) pace(r *read, p *page) (finish func()) {
	rate := float64(paceBytesPerSecond)
	if deadline, ok := r.req.Context().Deadline(); ok {
		rate = max(rate, float64(b.size)/2/max(time.Until(deadline).Seconds(), 1))
	}
	b.share, b.cutoff = p.share, &cutoff{w: r.w, req: r.req, conns: r.server.conns}
	conn := r.server.pacing.begin(r.req)
	b.paced = newPace(conn, rate, func() {
		if b.cutoff.cut() {
			r.server.lists.Slow(p.level)
		}
	})
	return func() {
		b.cutoff.finish()
		conn.end()
	}
}

// out writes to the client.
func (b *body) out(p []byte) error {
	if b.paced == nil {
		_, err := b.w.Write(p)
		return err
	}
	_, err := b.paced.write(func() (int, error) { return b.w.Write(p) })
	if err != nil && b.cutoff.wasCut() {
		panic(http.ErrAbortHandler)
	}
	b.share.Shrink(b.size)
	return err
}

// wrote counts bytes, before compression, that were written to the body.
func (b *body) wrote(n int64) {
	b.size -= n
	if b.paced != nil {
		b.paced.progress(n)
	}
}

var writeBuffers = sync.Pool{New: func() any {
	b := make([]byte, 0, writeAtOnce)
	return &b
}}

// newBody sends the header of a response of size bytes.
func newBody(r *read, size int64) *body {
	b := &body{w: r.w, buf: writeBuffers.Get().(*[]byte), size: size}
	h := r.w.Header()
	h.Set("Content-Type", string(r.enc.media))
	if size > gzipThreshold && negotiateGzip(r.req) {
		h.Set("Content-Encoding", "gzip")
		h.Add("Vary", "Accept-Encoding")
		b.gz = gzipjoin.NewWriter(sink{b})
	} else {
		h.Set("Content-Length", strconv.FormatInt(size, 10))
	}
	r.w.WriteHeader(http.StatusOK)
	return b
}

// sink is where a body's gzip writer writes to.
type sink struct{ b *body }

func (s sink) Write(p []byte) (int, error) {
	s.b.send(p)
	return len(p), nil
}

// write adds bytes to the body.
func (b *body) write(p []byte) {
	b.wrote(int64(len(p)))
	if b.gz != nil {
		if _, err := b.gz.Write(p); err != nil {
			panic(http.ErrAbortHandler)
		}
		return
	}
	b.send(p)
}

// writeRun adds bytes to a compressed body that are compressed already.
func (b *body) writeRun(run gzipjoin.Run) {
	b.wrote(run.Len)
	if err := b.gz.WriteRun(run); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// send writes p, or gathers it.
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
	// An HTTP/2 stream that was reset returns before the connection has let go of
	// what was to be written: nobody else may get this buffer then.
	b.buf = nil
	if err := b.out(*buf); err != nil {
		breakOff(err)
	}
	*buf = (*buf)[:0]
	b.buf = buf
}

// close ends the body. A body that is not of the size that was announced is aborted, so
// that no client takes it for whole.
func (b *body) close() {
	if b.size != 0 {
		panic(http.ErrAbortHandler)
	}
	if b.gz != nil {
		if err := b.gz.Close(); err != nil {
			panic(http.ErrAbortHandler)
		}
	}
	b.flush()
}

// free gives the body's buffer back, unless a write of it has failed.
func (b *body) free() {
	if b.buf == nil {
		return
	}
	*b.buf = (*b.buf)[:0]
	writeBuffers.Put(b.buf)
	b.buf = nil
}
