package readpath

import (
	"io"
	"net/http"
	"sync"
	"time"

	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/component-base/metrics"

	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/kube/internal/slowclient"
	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/mirror/driver"
)

const (
	// smallWrite is a buffer size that nearly always fits the events pending at one time. Many
	// watches write at the same time, so their buffers are smaller than writeAtOnce.
	smallWrite = 4 << 10
	// stallTimeout is the time that a client has to accept the last bytes of a watch that has
	// ended. A guess, well above the needs of a client that reads.
	stallTimeout = 5 * time.Second
)

var smallBuffers = sync.Pool{New: func() any {
	b := make([]byte, 0, smallWrite)
	return &b
}}

// watchWriter buffers frames and writes them together. It references a buffer only while frames are
// buffered. If a write fails, the client is gone, and the error is watch.ErrEnded.
//
// A compressed body has one gzip member per flush; the buffers of a member are released at its end.
type watchWriter struct {
	representation.FrameEncoder
	w       http.ResponseWriter
	flusher http.Flusher
	buf     *[]byte // of smallBuffers or writeBuffers; nil if no bytes are buffered
	written bool    // since the last flush

	gzip   bool
	member *gzipjoin.Writer // nil if none has begun since the last flush
	out    gatherWriter     // output of member

	// when the first event since the last flush arrived, 0 if none did
	oldest    int64
	ready     int64                      // when it was added
	delivered func(arrived, ready int64) // called with both after the write

	paced *slowclient.Pace // of the initial events; nil for later ones

	count  metrics.CounterMetric  // of events
	sizes  metrics.ObserverMetric // in bytes
	events int                    // not counted yet
}

// pace measures all writes from now on, and calls slow when the client reads them too slowly.
func (w *watchWriter) pace(conn *slowclient.Conn, slow func()) {
	w.paced = slowclient.NewPace(conn, slowclient.MinBytesPerSecond, slow)
	paced := &slowclient.Writer{ResponseWriter: w.w, Pace: w.paced}
	w.w, w.flusher = paced, paced
}

// unpace undoes pace.
func (w *watchWriter) unpace() {
	if paced, ok := w.w.(*slowclient.Writer); ok {
		w.paced, w.w, w.flusher = nil, paced.ResponseWriter, paced.ResponseWriter.(http.Flusher)
		w.out.w = w.w // for a gzip member that continues
	}
}

// item adds a frame of an object that is encoded as an item.
func (w *watchWriter) item(t apiwatch.EventType, item []byte) error {
	// The bytes around an item are fewer than this, except for extremely long kinds, for which the
	// buffer grows.
	const around = 256
	large := len(item) >= largePiece
	need := around
	if !large {
		need += len(item)
	}
	if err := w.room(need); err != nil {
		return err
	}
	buf, body, size := w.Begin(*w.buf, t, item)
	*w.buf = buf
	if large {
		// Written without a copy: the bytes are shared by all watches.
		if err := w.send(); err != nil {
			return err
		}
		if err := w.write(body); err != nil {
			return err
		}
	} else {
		*w.buf = append(*w.buf, body...)
	}
	*w.buf = w.End(*w.buf)
	w.record(size)
	return nil
}

// event adds the frame of an event.
func (w *watchWriter) event(e watchEvent) error {
	if e.frame == nil {
		return w.item(e.t, e.item)
	}
	if err := w.run(e.frame.Segment); err != nil {
		return err
	}
	w.record(e.frame.Size)
	return nil
}

// frames adds compressed frames.
func (w *watchWriter) frames(f representation.Frames) error {
	if err := w.run(f.Segment); err != nil {
		return err
	}
	for _, size := range f.Sizes {
		w.record(int(size))
	}
	return nil
}

// run adds compressed bytes.
func (w *watchWriter) run(run gzipjoin.Segment) error {
	if err := w.send(); err != nil {
		return err
	}
	w.written = true
	if err := w.begun().WriteRun(run); err != nil {
		return watch.ErrEnded
	}
	return nil
}

// begun returns the current gzip member, and begins one if there is none.
func (w *watchWriter) begun() *gzipjoin.Writer {
	if w.member == nil {
		w.out.w = w.w
		w.member = gzipjoin.NewWriter(&w.out)
	}
	return w.member
}

// write writes p, compressed if the body is.
func (w *watchWriter) write(p []byte) (err error) {
	w.written = true
	if w.gzip {
		_, err = w.begun().Write(p)
	} else {
		_, err = w.w.Write(p)
	}
	if err != nil {
		return watch.ErrEnded
	}
	return nil
}

// endMember ends the gzip member, if one was begun.
func (w *watchWriter) endMember() error {
	if w.member == nil {
		return nil
	}
	err := w.member.Close()
	w.member = nil
	if err == nil {
		err = w.out.flush()
	}
	if err != nil {
		return watch.ErrEnded
	}
	return nil
}

// object adds a frame of an object that is already encoded.
func (w *watchWriter) object(t apiwatch.EventType, object []byte) error {
	if err := w.room(len(object)); err != nil {
		return err
	}
	buf, size := w.Whole(*w.buf, t, object)
	*w.buf = buf
	w.record(size)
	return nil
}

func (w *watchWriter) record(size int) {
	w.events++
	if w.paced != nil {
		w.paced.Earn(int64(size))
	}
	w.sizes.Observe(float64(size))
}

// arrived records the time at which an added event arrived from etcd; 0 if it did not come from
// etcd.
func (w *watchWriter) arrived(at int64) {
	if w.oldest == 0 && at != 0 {
		w.oldest, w.ready = at, driver.Now()
	}
}

// room provides a buffer with room for n bytes. For n of at least largePiece it may provide less.
func (w *watchWriter) room(n int) error {
	if w.buf == nil {
		if n <= smallWrite {
			w.buf = smallBuffers.Get().(*[]byte)
		} else {
			w.buf = writeBuffers.Get().(*[]byte)
		}
	}
	if len(*w.buf)+n <= cap(*w.buf) {
		return nil
	}
	if cap(*w.buf) < writeAtOnce {
		small := w.buf
		w.buf = writeBuffers.Get().(*[]byte)
		*w.buf = append(*w.buf, *small...)
		free(small)
		if len(*w.buf)+n <= cap(*w.buf) {
			return nil
		}
	}
	if n < largePiece {
		return w.send()
	}
	return nil
}

// free returns a buffer to its pool, unless it has grown.
func free(buf *[]byte) {
	*buf = (*buf)[:0]
	switch cap(*buf) {
	case smallWrite:
		smallBuffers.Put(buf)
	case writeAtOnce:
		writeBuffers.Put(buf)
	}
}

// send writes the buffered bytes. It keeps the buffer unless the write fails.
func (w *watchWriter) send() error {
	if w.events > 0 {
		w.count.Add(float64(w.events))
		w.events = 0
	}
	if w.buf == nil || len(*w.buf) == 0 {
		return nil
	}
	err := w.write(*w.buf)
	*w.buf = (*w.buf)[:0]
	if err != nil {
		w.buf = nil // not to be used again: see body.flush
	}
	return err
}

// flush writes the buffered bytes, flushes them to the client, and releases the buffer.
func (w *watchWriter) flush() error {
	err := w.send()
	if w.buf != nil {
		free(w.buf)
		w.buf = nil
	}
	if err == nil {
		err = w.endMember()
	}
	if err == nil && w.written {
		w.written = false
		w.flusher.Flush()
	}
	if w.oldest != 0 {
		if err == nil {
			w.delivered(w.oldest, w.ready)
		}
		w.oldest = 0
	}
	return err
}

// gatherWriter buffers small pieces and writes them together. It references a buffer only while
// bytes are buffered.
type gatherWriter struct {
	w   io.Writer
	buf *[]byte // of smallBuffers or writeBuffers; nil if no bytes are buffered
}

// Write writes or buffers p.
func (g *gatherWriter) Write(p []byte) (int, error) {
	held := 0
	if g.buf != nil {
		held = len(*g.buf)
	}
	if len(p) >= largePiece || held+len(p) > writeAtOnce {
		if err := g.flush(); err != nil {
			return 0, err
		}
		if len(p) >= largePiece {
			return g.w.Write(p)
		}
	}
	switch {
	case g.buf == nil && len(p) <= smallWrite:
		g.buf = smallBuffers.Get().(*[]byte)
	case g.buf == nil:
		g.buf = writeBuffers.Get().(*[]byte)
	case len(*g.buf)+len(p) > cap(*g.buf):
		small := g.buf
		g.buf = writeBuffers.Get().(*[]byte)
		*g.buf = append(*g.buf, *small...)
		free(small)
	}
	*g.buf = append(*g.buf, p...)
	return len(p), nil
}

// flush writes the buffered bytes and releases the buffer.
func (g *gatherWriter) flush() error {
	if g.buf == nil {
		return nil
	}
	buf := g.buf
	g.buf = nil
	if _, err := g.w.Write(*buf); err != nil {
		return err // the buffer is not to be used again: see body.flush
	}
	free(buf)
	return nil
}
