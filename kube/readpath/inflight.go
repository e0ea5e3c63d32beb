package readpath

import (
	"context"
	"net/http"
	goruntime "runtime"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const (
	// inFlightPerProcessor is, unless Config says otherwise, how many bytes of lists are under
	// way at once for each processor: what one encodes and encrypts in a few seconds, a small
	// part of a request timeout. If more are begun at once than can be ended in time, none is.
	inFlightPerProcessor = 256 << 20
	// freeInFlightBytes is what a list may send without waiting for its turn.
	freeInFlightBytes = 1 << 20
	// inFlightWait is how long a list waits for its turn, after priority and fairness has let it
	// in, but no longer than half of the time that it has left.
	inFlightWait = 30 * time.Second
	// inFlightRetrySeconds is when a list that was refused may come again.
	inFlightRetrySeconds = 5
	// slowWrite is how long a write may be held up by a client until its list gives up its
	// share: it will take the server's time no faster than that.
	slowWrite = time.Second
)

// inFlight bounds the bytes of lists from memory that are being encoded and sent at the same time, by
// what is known of them beforehand. Those above it wait, first come, first served, so that a
// server of which more is asked than it can give ends some lists in time, and refuses
// others, where it would end none if it took turns with all. A client that does not read
// gives its share back. Safe for concurrent use.
type inFlight struct {
	limit int64
	room  *semaphore.Weighted
}

func newInFlight(limitBytes int64) *inFlight {
	if limitBytes <= 0 {
		limitBytes = inFlightPerProcessor * int64(goruntime.GOMAXPROCS(0))
	}
	inFlightLimit.Set(float64(limitBytes))
	return &inFlight{limit: limitBytes, room: semaphore.NewWeighted(limitBytes)}
}

// enter waits for room for a list of so many bytes. One list alone never takes more than half of
// it. Errors: 429 if there is none in time.
func (f *inFlight) enter(ctx context.Context, bytes int64) (*inFlightShare, error) {
	if f == nil || bytes <= freeInFlightBytes {
		return nil, nil
	}
	bytes = min(bytes, f.limit/2)
	if !f.room.TryAcquire(bytes) {
		wait := inFlightWait
		if deadline, ok := ctx.Deadline(); ok {
			wait = min(wait, time.Until(deadline)/2)
		}
		ctx, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		if f.room.Acquire(ctx, bytes) != nil {
			inFlightRefused.Inc()
			return nil, apierrors.NewTooManyRequests("as many bytes of lists are under way as the server can send in time", inFlightRetrySeconds)
		}
	}
	inFlightBytes.Add(float64(bytes))
	return &inFlightShare{inFlight: f, bytes: bytes}, nil
}

// inFlightShare is what one list holds; nil is one that holds nothing.
type inFlightShare struct {
	inFlight *inFlight
	bytes    int64
	once     sync.Once
	timer    *time.Timer
}

// leave gives the share back. It may be called again, and concurrently.
func (s *inFlightShare) leave() {
	if s != nil {
		s.once.Do(func() {
			s.inFlight.room.Release(s.bytes)
			inFlightBytes.Add(-float64(s.bytes))
		})
	}
}

// writer returns w as one whose writes give the share back when they are held up.
func (s *inFlightShare) writer(w http.ResponseWriter) http.ResponseWriter {
	if s == nil {
		return w
	}
	return &inFlightWriter{w, s}
}

type inFlightWriter struct {
	http.ResponseWriter
	share *inFlightShare
}

// Unwrap is for http.ResponseController.
func (w *inFlightWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *inFlightWriter) Write(p []byte) (int, error) {
	s := w.share
	if s.timer == nil {
		s.timer = time.AfterFunc(slowWrite, s.leave)
	} else {
		s.timer.Reset(slowWrite)
	}
	n, err := w.ResponseWriter.Write(p)
	s.timer.Stop()
	return n, err
}
