package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/stratakube/strata/test/bench/internal/target"
	"github.com/stratakube/strata/test/bench/internal/wire"
)

var initialWorkloads = []Workload{
	{
		Name: "initial-protobuf", Title: "initial events of all, protobuf, one client", Op: "client", Dataset: configMaps,
		Run:    initialLoad{format: initialProtobuf}.run,
		Wanted: []Bound{toUpstream(latency, 1./5), absolute(peakAbove, 50e6)},
	},
}

var (
	initialProtobuf = format{"application/vnd.kubernetes.protobuf;stream=watch", wire.ReadInitialProtobufEvents}
)

// initialPath is a watch of all ConfigMaps that begins with all of them as initial events.
const initialPath = allConfigMaps + "?watch=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"

// initialLoad is clients that request all ConfigMaps as the initial events of a watch. An operation
// lasts until the bookmark behind them.
type initialLoad struct {
	format format
	crowd  bool // Sizes.Streams clients at once; otherwise one
	gzip   bool // compressed, one client
}

func (l initialLoad) run(ctx context.Context, s *Sample) error {
	want, err := stored("configmaps")(ctx, s)
	if err != nil {
		return err
	}
	if l.gzip {
		return l.runGzip(ctx, s, want)
	}
	clients := 1
	if l.crowd {
		clients = s.Sizes.Streams
	}
	return atOnce(ctx, s, clients, func(ctx context.Context, conn *target.Conn) error {
		ctx, endWatch := context.WithCancel(ctx)
		defer endWatch()
		response, err := conn.Do(ctx, target.Request{Path: initialPath, Accept: l.format.accept})
		if err != nil {
			return err
		}
		defer response.Body.Close()
		events, err := l.format.read(response.Body)
		if err == nil && events.Objects != want {
			err = fmt.Errorf("there are %d initial events, want %d", events.Objects, want)
		}
		return err
	})
}

// quiet is the time without data after which the compressed initial events count as complete, which
// is verified afterwards. An engine writes all the time, or waits for the compressor, which takes
// milliseconds.
const quiet = time.Second

// runGzip measures compressed initial events without decompressing them, which would measure the
// client. An operation lasts until the last byte of the bookmark.
func (l initialLoad) runGzip(ctx context.Context, s *Sample, want int) error {
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	var arrivals []arrival // of the last operation
	err := s.Measure(ctx, func(ctx context.Context) error {
		ctx, endWatch := context.WithCancel(ctx)
		defer endWatch()
		began := time.Now()
		response, err := conn.Do(ctx, target.Request{Path: initialPath, Accept: l.format.accept, Encoding: "gzip"})
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if encoding := response.Header.Get("Content-Encoding"); encoding != "gzip" {
			return fmt.Errorf("initial events are encoded as %q, want gzip", encoding)
		}
		s.Body.Reset()
		arrivals, err = readUntilQuiet(response.Body, s.Body)
		if err != nil {
			return err
		}
		s.Observe(arrivals[len(arrivals)-1].at.Sub(began))
		return nil
	})
	if err != nil {
		return err
	}
	s.Report(compressedSize, Bytes, float64(s.Body.Len()))
	compressed := bytes.NewReader(s.Body.Bytes())
	members, err := gzip.NewReader(compressed)
	if err != nil {
		return err
	}
	events, err := l.format.read(members)
	if err != nil {
		return err
	}
	if events.Objects != want {
		return fmt.Errorf("there are %d initial events, want %d", events.Objects, want)
	}
	s.Detail("%s objects, %s", grouped(events.Objects), Bytes.Format(float64(events.Bytes)))

	// Once more, up to the last object: a bytes.Reader gives the decompressor no more than it
	// needs.
	compressed.Reset(s.Body.Bytes())
	if err := members.Reset(compressed); err != nil {
		return err
	}
	if _, err := io.CopyN(io.Discard, members, events.Bytes-events.Bookmark); err != nil {
		return err
	}
	end := int(compressed.Size()) - compressed.Len()
	last := arrivals[slices.IndexFunc(arrivals, func(a arrival) bool { return a.through >= end })]
	s.Report(bookmarkDelay, Seconds, arrivals[len(arrivals)-1].at.Sub(last.at).Seconds())
	return nil
}

// bookmarkDelay is the time from the last byte of the last object to the last byte of the bookmark
// behind it.
const bookmarkDelay = "bookmark after the last object"

// arrival is the time at which the first bytes of a body, through of them, had arrived.
type arrival struct {
	through int
	at      time.Time
}

// readUntilQuiet reads into all until no data arrives for a while, and returns the arrivals, at
// least one. The body has to be closed, or its request ended, afterwards; all does not change after
// the return.
func readUntilQuiet(body io.Reader, all *bytes.Buffer) (arrivals []arrival, err error) {
	type chunk struct {
		data []byte
		at   time.Time
		err  error
	}
	const size = 256 << 10
	chunks, done := make(chan chunk), make(chan struct{})
	defer close(done)
	go func() {
		for buffers := [2][]byte{make([]byte, size), make([]byte, size)}; ; buffers[0], buffers[1] = buffers[1], buffers[0] {
			n, err := body.Read(buffers[0])
			select {
			case chunks <- chunk{buffers[0][:n], time.Now(), err}:
			case <-done:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	silence := time.NewTimer(time.Minute) // the first byte may take long
	defer silence.Stop()
	for {
		select {
		case c := <-chunks:
			all.Write(c.data)
			if len(c.data) > 0 {
				arrivals = append(arrivals, arrival{all.Len(), c.at})
			}
			if c.err != nil {
				return nil, fmt.Errorf("initial events broke off after %d bytes: %w", all.Len(), c.err)
			}
			silence.Reset(quiet)
		case <-silence.C:
			if len(arrivals) == 0 {
				return nil, errors.New("no initial events came")
			}
			return arrivals, nil
		}
	}
}
