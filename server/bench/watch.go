package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"

	"github.com/stratakube/strata/server/bench/internal/dataset"
	"github.com/stratakube/strata/server/bench/internal/target"
	"github.com/stratakube/strata/server/bench/internal/wire"
)

var watchWorkloads = []Workload{
	{
		Name: "watch-lone", Title: "watcher alone, many events", Op: "event", Dataset: configMaps, Alone: true,
		Run: func(ctx context.Context, s *Sample) error {
			return watchLoad{watchers: 1, conns: 1, rate: s.Sizes.LoneRate}.run(ctx, s)
		},
	},
}

// streamWorkloads change so little that an engine that follows the changes does not disturb the other's measurement.
var streamWorkloads = []Workload{
	{
		Name: "watch-shared", Title: "watchers of one collection, few events", Op: "event", Dataset: configMaps,
		Run: func(ctx context.Context, s *Sample) error {
			return watchLoad{watchers: s.Sizes.Watchers, conns: 8, rate: s.Sizes.SharedRate}.run(ctx, s)
		},
		Wanted: []Bound{toLimit("server CPU per event", 1.5)},
	},
}

// watchLoad is a number of watchers of all ConfigMaps while objects change in etcd at a rate, for Sizes.WatchDuration. An operation is an event
// delivered to a watcher; its latency is the time from before the write until the watcher has read it.
type watchLoad struct {
	watchers int
	conns    int // connections that the watchers share
	rate     int // changes per second
}

// drainLimit is how long nothing may arrive after the last write before what is missing counts as lost.
const drainLimit = 5 * time.Second

func (l watchLoad) run(ctx context.Context, s *Sample) error {
	revision, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return err
	}
	conns := s.Engine.DialAll(l.conns)
	defer target.CloseAll(conns)
	for _, conn := range conns {
		if err := conn.Open(ctx); err != nil {
			return err
		}
	}
	streams, err := openWatches(ctx, conns, l.watchers, revision)
	if err != nil {
		return err
	}
	defer streams.close()

	written := 0
	write, writers := putObject(s), 32 // more than etcd needs to reach the rates asked for
	if s.Engine.IsLimit() {
		write, writers = sendFrame(conns[0], revision), 1 // frames must come in the order of their revisions
	}
	err = s.Measure(ctx, func(ctx context.Context) error {
		if written, err = changeObjects(ctx, s, l.rate, writers, write); err != nil {
			return err
		}
		return streams.drain(ctx, written)
	})
	if err != nil {
		return err
	}
	return streams.report(s, written)
}

// putObject returns a function that puts a ConfigMap into etcd. It may be called concurrently.
func putObject(s *Sample) func(context.Context, *corev1.ConfigMap) error {
	return func(ctx context.Context, cm *corev1.ConfigMap) error {
		value, err := dataset.Encode(cm)
		if err != nil {
			return err
		}
		if _, err := s.Etcd.Client.Put(ctx, dataset.ConfigMapKey(cm.Name), string(value)); err != nil {
			return fmt.Errorf("change an object: %w", err)
		}
		return nil
	}
}

// sendFrame returns a function that makes the limit send what an engine sends when a ConfigMap has changed, with revisions that go on from
// the one given.
func sendFrame(conn *target.Conn, revision int64) func(context.Context, *corev1.ConfigMap) error {
	var body bytes.Buffer
	return func(ctx context.Context, cm *corev1.ConfigMap) error {
		revision++
		cm.ResourceVersion = fmt.Sprint(revision)
		object, err := json.Marshal(cm)
		if err != nil {
			return fmt.Errorf("encode a ConfigMap: %w", err)
		}
		return conn.Read(ctx, target.FrameRequest(fmt.Appendf(nil, `{"type":"MODIFIED","object":%s}`+"\n", object)), &body)
	}
}

// changeObjects lets so many writers write changed ConfigMaps at a rate for Sizes.WatchDuration and returns how many.
func changeObjects(ctx context.Context, s *Sample, perSecond, writers int, write func(context.Context, *corev1.ConfigMap) error) (int, error) {
	const variants = 1 << 20
	var written atomic.Int64
	deadline, cancel := context.WithTimeout(ctx, s.Sizes.WatchDuration)
	defer cancel()
	limiter := rate.NewLimiter(rate.Limit(perSecond), max(1, perSecond/100))
	group, _ := errgroup.WithContext(ctx)
	for range writers {
		random := rand.New(rand.NewPCG(s.Rand.Uint64(), s.Rand.Uint64()))
		group.Go(func() error {
			for limiter.Wait(deadline) == nil {
				index := random.IntN(s.Data.ConfigMaps)
				// Not cancelled at the deadline: a write that is under way must be counted, or the watcher would see more than was written.
				if err := write(ctx, dataset.StampedConfigMap(index, 1+random.IntN(variants), time.Now())); err != nil {
					return err
				}
				written.Add(1)
			}
			return nil
		})
	}
	err := group.Wait()
	return int(written.Load()), err
}

// watches are open streams and what came out of them.
type watches struct {
	cancel    context.CancelFunc
	done      sync.WaitGroup
	delivered atomic.Int64
	ended     atomic.Int64
	streams   []*watchStream
}

// watchStream belongs to the goroutine that reads it until that has ended.
type watchStream struct {
	latencies    []time.Duration
	lastRevision int64
	err          error // why it ended; nil if the server ended it in order, errClosed if we did
}

// errWrongEvent: the server broke a guarantee of watches.
var errWrongEvent = errors.New("wrong event")

var errClosed = errors.New("closed by the benchmark")

// openWatches opens n watches of all ConfigMaps after a revision and returns when the server has accepted all of them.
func openWatches(ctx context.Context, conns []*target.Conn, n int, after int64) (*watches, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watches{cancel: func() { cancel(errClosed) }}
	path := fmt.Sprintf("/api/v1/configmaps?watch=1&allowWatchBookmarks=true&resourceVersion=%d", after)
	var opening errgroup.Group
	opening.SetLimit(50)
	var mu sync.Mutex // guards w.streams while watches are opened
	for i := range n {
		opening.Go(func() error {
			response, err := conns[i%len(conns)].Do(ctx, target.Request{Path: path})
			if err != nil {
				return err
			}
			stream := &watchStream{lastRevision: after}
			mu.Lock()
			w.streams = append(w.streams, stream)
			mu.Unlock()
			w.done.Go(func() {
				defer response.Body.Close()
				stream.err = wire.ReadJSONEvents(response.Body, dataset.SentKey, func(e wire.Event) error { return w.receive(stream, e) })
				if context.Cause(ctx) == errClosed {
					stream.err = errClosed
				}
				w.ended.Add(1)
			})
			return nil
		})
	}
	if err := opening.Wait(); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

// receive notes an event. Events other than those of changeObjects are verified and not counted: the server itself changes a ConfigMap now and
// then.
func (w *watches) receive(stream *watchStream, e wire.Event) error {
	received := time.Now()
	if e.Revision < stream.lastRevision || e.Revision == stream.lastRevision && e.Type != "BOOKMARK" {
		return fmt.Errorf("%w: %s at revision %d after revision %d", errWrongEvent, e.Type, e.Revision, stream.lastRevision)
	}
	stream.lastRevision = e.Revision
	if e.Type == "MODIFIED" && !e.Sent.IsZero() {
		stream.latencies = append(stream.latencies, received.Sub(e.Sent))
		w.delivered.Add(1)
	}
	return nil
}

// drain waits until every watcher has every event, every watch has ended, or nothing arrives any more.
func (w *watches) drain(ctx context.Context, written int) error {
	want := int64(written) * int64(len(w.streams))
	last, since := w.delivered.Load(), time.Now()
	for w.delivered.Load() < want && int(w.ended.Load()) < len(w.streams) {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(time.Millisecond):
		}
		if now := w.delivered.Load(); now != last {
			last, since = now, time.Now()
		} else if time.Since(since) > drainLimit {
			break
		}
	}
	return nil
}

// close ends the watches and returns when nobody reads them any more.
func (w *watches) close() {
	w.cancel()
	w.done.Wait()
}

// report closes the watches and reports what they delivered of so many changes.
func (w *watches) report(s *Sample, written int) error {
	w.close()
	broken := 0
	var why error
	for _, stream := range w.streams {
		if errors.Is(stream.err, errWrongEvent) {
			return stream.err
		}
		if len(stream.latencies) > written {
			return fmt.Errorf("%w: a watcher got %d events of %d changes", errWrongEvent, len(stream.latencies), written)
		}
		if stream.err != errClosed {
			broken++
			if why = stream.err; why == nil {
				why = errors.New("ended by the server")
			}
		}
		for _, latency := range stream.latencies {
			s.Observe(latency)
		}
	}
	delivered, want := s.observed.ops(), written*len(w.streams)
	switch {
	case broken > 0:
		s.Broken("%d of %d watches were ended after %s of %s events (%v)", broken, len(w.streams), grouped(delivered), grouped(want), why)
	case delivered < want:
		s.Broken("%s of %s events did not arrive", grouped(want-delivered), grouped(want))
	}
	s.Detail("%s of them, %s changes in %v", grouped(len(w.streams)), grouped(written), s.Sizes.WatchDuration)
	s.Report("events delivered", Percent, 100*float64(delivered)/float64(max(want, 1)))
	s.Report("server cores", Count, s.observed.ServerCPU.Seconds()/s.observed.Elapsed.Seconds())
	return nil
}
