package samebytes

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// stream is the answer to a WATCH: like any other answer, except that its body is a sequence of
// frames.
type stream struct {
	response
	frames [][]byte
}

// openStream is a watch that has been accepted or refused.
type openStream struct {
	resp  *http.Response
	until func(frame []byte) bool
}

// watch starts a watch. It is read up to the first frame for which until returns true, or to its
// end.
func (e *engine) watch(ctx context.Context, r request, until func([]byte) bool) (*openStream, error) {
	resp, err := e.begin(ctx, r)
	for range 4 { // as patient
		if err != nil || resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") == "" {
			break
		}
		resp.Body.Close()
		harness.Pause(ctx, time.Second)
		resp, err = e.begin(ctx, r)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", e.name, err)
	}
	return &openStream{resp, until}, nil
}

// read reads the frames, ends the watch and returns the stream.
func (o *openStream) read() *stream {
	defer o.resp.Body.Close()
	s := &stream{response: response{proto: o.resp.Proto, code: o.resp.StatusCode, header: o.resp.Header}}
	if s.code != http.StatusOK {
		s.body, s.err = io.ReadAll(o.resp.Body)
		return s
	}
	body := io.Reader(o.resp.Body)
	if s.header.Get("Content-Encoding") == "gzip" {
		// One member per flush, none if no data was sent.
		if body, s.err = gzip.NewReader(o.resp.Body); s.err != nil {
			if errors.Is(s.err, io.EOF) {
				s.err = nil
			}
			return s
		}
	}
	next := wholeBody(body)
	switch mediaType := s.header.Get("Content-Type"); {
	case strings.HasPrefix(mediaType, protobufType):
		next = delimitedFrames(body)
	case strings.HasPrefix(mediaType, jsonType):
		next = jsonFrames(body)
	}
	for {
		frame, err := next()
		if len(frame) > 0 {
			s.frames = append(s.frames, frame)
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				s.err = err
			}
			return s
		}
		if o.until(frame) {
			return s
		}
	}
}

// jsonFrames splits a body after each JSON value: bytes in front of a value are part of its frame.
func jsonFrames(body io.Reader) func() ([]byte, error) {
	var seen bytes.Buffer
	decoder := json.NewDecoder(io.TeeReader(body, &seen))
	at := int64(0)
	return func() ([]byte, error) {
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return nil, err
		}
		from := at
		at = decoder.InputOffset()
		return bytes.Clone(seen.Bytes()[from:at]), nil
	}
}

// delimitedFrames splits a body into length-prefixed messages; the length is part of the frame.
func delimitedFrames(body io.Reader) func() ([]byte, error) {
	reader := bufio.NewReader(body)
	return func() ([]byte, error) {
		frame := make([]byte, 4)
		if _, err := io.ReadFull(reader, frame); err != nil {
			return nil, err
		}
		message := make([]byte, binary.BigEndian.Uint32(frame))
		_, err := io.ReadFull(reader, message)
		return append(frame, message...), err
	}
}

// wholeBody does not split a body.
func wholeBody(body io.Reader) func() ([]byte, error) {
	return func() ([]byte, error) {
		data, err := io.ReadAll(body)
		if err == nil {
			err = io.EOF
		}
		return data, err
	}
}

// endOfInitialEvents reports whether a frame is the bookmark after the initial events, in any media
// type.
func endOfInitialEvents(frame []byte) bool {
	return bytes.Contains(frame, []byte("k8s.io/initial-events-end"))
}

// untilEnd reads a watch to its end.
func untilEnd([]byte) bool { return false }

// nthFrame returns a condition that is true for the n-th frame other than bookmarks.
func nthFrame(n int) func([]byte) bool {
	return func(frame []byte) bool {
		if !isBookmark(frame) {
			n--
		}
		return n <= 0
	}
}

// containing returns a condition that is true for a frame that contains the text.
func containing(text string) func([]byte) bool {
	return func(frame []byte) bool { return bytes.Contains(frame, []byte(text)) }
}

// isBookmark reports whether a frame is a periodic bookmark.
func isBookmark(frame []byte) bool {
	head := frame[:min(len(frame), 40)]
	return bytes.Contains(head, []byte("BOOKMARK")) && !endOfInitialEvents(frame)
}

// events returns the number of frames other than bookmarks.
func (s *stream) events() (n int) {
	for _, f := range s.frames {
		if !isBookmark(f) {
			n++
		}
	}
	return n
}

// deadlineExceeded reports whether the server ended the watch because its duration was too short
// for the initial events.
func (s *stream) deadlineExceeded() bool {
	return slices.ContainsFunc(s.frames, func(f []byte) bool {
		return bytes.Contains(f, []byte("context deadline exceeded"))
	})
}

// initialEventsEnd returns the bookmark after the initial events, nil if there is none.
func (s *stream) initialEventsEnd() []byte {
	if i := slices.IndexFunc(s.frames, endOfInitialEvents); i >= 0 {
		return s.frames[i]
	}
	return nil
}

// sameStreams fails the test unless two streams are equal. Bookmarks are not compared: see
// byDesign.
func sameStreams(t *testing.T, r request, got, want *stream) {
	t.Helper()
	for _, s := range []*stream{got, want} {
		s.frames = slices.DeleteFunc(s.frames, isBookmark)
	}
	applyDesign(r, &got.response, &want.response)
	for _, d := range differences(&got.response, &want.response) {
		t.Errorf("%s: %s", r, d)
	}
	for i := range max(len(got.frames), len(want.frames)) {
		switch {
		case i >= len(got.frames):
			t.Errorf("%s: upstream sends a frame %d more: %s", r, i, excerpt(want.frames[i], 0))
			return
		case i >= len(want.frames):
			t.Errorf("%s: upstream does not send frame %d: %s", r, i, excerpt(got.frames[i], 0))
			return
		}
		g, w := response{code: http.StatusOK, header: http.Header{}, body: got.frames[i]}, response{code: http.StatusOK, header: http.Header{}, body: want.frames[i]}
		applyDesign(r, &g, &w)
		if d := differingBytes(g.body, w.body); d != "" {
			t.Errorf("%s: frame %d of %d (upstream %d): %s", r, i, len(got.frames), len(want.frames), d)
			return
		}
	}
}

// sameWatch watches on both servers and fails the test unless the streams are equal. The bookmark
// after the initial events has the current revision, so a pair of watches counts only if etcd's
// revision was the same before and after it: servers occasionally write by themselves.
func (w *world) sameWatch(t *testing.T, ctx context.Context, r request, until func() func([]byte) bool) {
	t.Helper()
	for {
		before, err := w.revision(ctx)
		harness.Check(t, err)
		streams, err := w.watchBoth(ctx, r, until)
		if err != nil {
			t.Errorf("%s: %v", r, err)
			return
		}
		after, err := w.revision(ctx)
		harness.Check(t, err)
		if before == after {
			sameStreams(t, r, streams[0], streams[1])
			return
		}
		t.Logf("%s: again, etcd went from revision %d to %d", r, before, after)
	}
}

// watchBoth watches on both servers.
func (w *world) watchBoth(ctx context.Context, r request, until func() func([]byte) bool) (streams [2]*stream, err error) {
	errs := make(chan error)
	for i, e := range w.engines {
		go func() {
			o, err := e.watch(ctx, r, until())
			if err == nil {
				streams[i] = o.read()
			}
			errs <- err
		}()
	}
	for range w.engines {
		err = errors.Join(err, <-errs)
	}
	return streams, err
}
