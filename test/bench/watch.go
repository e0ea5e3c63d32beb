package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
	"github.com/stratakube/strata/test/bench/internal/wire"
)

var tenSeconds = span{10 * time.Second, 100 * time.Millisecond}

// watchWorkloads that run alone write at a high rate, so an engine that follows the changes would
// disturb the other's measurement.
var watchWorkloads = []Workload{
	{
		Name: "watch-shared", Title: "watches of all ConfigMaps, few events", Op: "event", Dataset: cluster, Lived: true, Tail: true, Runs: 1,
		Run: watchLoad{watchers: size{1_000, 20}, rate: 20, during: tenSeconds, of: changedConfigMaps}.run, Wanted: eventTail,
	},
	{ // the watches of kubelets
		Name: "watch-nodes", Title: "watches of the pods of a node each", Op: "event", Dataset: cluster, Alone: true, Lived: true, Tail: true, Runs: 1,
		Run: watchLoad{watchers: size{2_000, 5}, rate: 500, during: tenSeconds, of: changedPods, byNode: true}.run, Wanted: eventTail,
	},
	{
		Name: "watch-lone", Title: "one watch of all pods, many events", Op: "event", Dataset: cluster, Alone: true, Lived: true, Tail: true, Runs: 1,
		Run: watchLoad{watchers: size{1, 1}, rate: 4_000, during: tenSeconds, of: changedPods}.run, Wanted: eventTail,
	},
}

var eventTail = []Bound{toUpstream(latencyP99, 1), toUpstream("latency p99.9", 1), toUpstream("server CPU per event", 1)}

// watchOf is the path of a watch with bookmarks after a revision; selector is "" or a query.
func watchOf(collection, selector string, after int64) string {
	path := fmt.Sprintf("%s?watch=1&allowWatchBookmarks=true&resourceVersion=%d", collection, after)
	if selector != "" {
		path += "&" + selector
	}
	return path
}

// changes are changed objects of a collection, with the time of the change under dataset.SentKey.
type changes struct {
	path   string
	number func(dataset.Spec) int // of objects
	change func(s *Sample, i int) (key string, object runtime.Object)
}

var (
	changedConfigMaps = changes{allConfigMaps, func(d dataset.Spec) int { return d.ConfigMaps }, func(s *Sample, i int) (string, runtime.Object) {
		cm := dataset.StampedConfigMap(i, s.Number, time.Now())
		return dataset.ConfigMapKey(cm.Name), cm
	}}
	changedPods = changes{allPods, func(d dataset.Spec) int { return d.Pods }, func(s *Sample, i int) (string, runtime.Object) {
		pod := s.Data.Pod(i)
		pod.Annotations[dataset.SentKey] = strconv.FormatInt(time.Now().UnixNano(), 10)
		return dataset.PodKey(pod.Namespace, pod.Name), pod
	}}
	changedThings = changes{dataset.ThingsPath, func(d dataset.Spec) int { return d.Things }, func(s *Sample, i int) (string, runtime.Object) {
		thing := dataset.Thing(i, s.Data.Namespaces)
		thing.SetAnnotations(map[string]string{dataset.SentKey: strconv.FormatInt(time.Now().UnixNano(), 10)})
		return dataset.ThingKey(i, s.Data.Namespaces), thing
	}}
)

// watchLoad is watchers while objects drawn at random change in etcd at a rate. An operation is an
// event delivered to a watcher; its latency is the time from before the write until the watcher has
// read it.
type watchLoad struct {
	watchers size // at most one for each node with byNode
	rate     int  // changes per second
	during   span
	of       changes
	// byNode divides the pods among the watchers: each watches those of one node, and each change
	// is delivered to one watcher. Otherwise all changes are delivered to all watchers.
	byNode bool
}

// drainLimit is the time without an event after the last write until missing events count as lost.
const drainLimit = 30 * time.Second

// watchesPerConn is how many watches share a connection: fewer than an engine allows.
const watchesPerConn = 200

func connsFor(watches int) int { return (watches + watchesPerConn - 1) / watchesPerConn }

func (l watchLoad) run(ctx context.Context, s *Sample) error {
	watchers, receivers := l.watchers.at(s.Scale), 1
	object := func(i int) int { return i }
	objects, selector := l.of.number(s.Data), func(int) string { return "" }
	if l.byNode {
		watchers = min(watchers, s.Data.Nodes)
		objects = watchers * (s.Data.Pods / s.Data.Nodes)
		object = func(i int) int { return i/watchers*s.Data.Nodes + i%watchers }
		selector = func(i int) string { return ofNode(i, s) }
	} else {
		receivers = watchers
	}
	revision, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return err
	}
	conns, err := s.Engine.DialAll(ctx, connsFor(watchers))
	if err != nil {
		return err
	}
	defer target.CloseAll(conns)
	streams, err := watchSet{n: watchers, after: revision, path: func(i int) string { return watchOf(l.of.path, selector(i), revision) }}.open(ctx, conns)
	if err != nil {
		return err
	}
	defer streams.close()

	write := put(s)
	drawn := s.Rand.Perm(objects)
	var written atomic.Int64
	during := l.during.at(s.Scale)
	err = s.Measure(ctx, func(ctx context.Context) error {
		err := perSecond(l.rate, during, writesAtOnce).run(ctx, func(ctx context.Context, i int) error {
			key, changed := l.of.change(s, object(drawn[i%objects]))
			written.Add(1)
			return write(ctx, key, changed)
		})
		if err != nil {
			return err
		}
		return streams.drain(ctx, int(written.Load())*receivers, drainLimit)
	})
	if err != nil {
		return err
	}
	s.Detail("%s of them, %s changes in %v", grouped(watchers), grouped(int(written.Load())), during)
	return streams.report(s, int(written.Load())*receivers)
}

// put returns a function that puts an object into etcd. It may be called concurrently.
func put(s *Sample) func(context.Context, string, runtime.Object) error {
	return func(ctx context.Context, key string, object runtime.Object) error {
		value, err := dataset.Encode(object)
		if err != nil {
			return err
		}
		if _, err := s.Etcd.Client.Put(ctx, key, string(value)); err != nil {
			return fmt.Errorf("change %s: %w", key, err)
		}
		return nil
	}
}

// watches are open streams and their events.
type watches struct {
	cancel    context.CancelFunc
	done      sync.WaitGroup
	delivered atomic.Int64
	ended     atomic.Int64
	streams   []*countedWatch
}

// countedWatch is owned by the goroutine that reads it until that has ended.
type countedWatch struct {
	latencies    []time.Duration
	lastRevision int64
	err          error // why it ended; nil if the server ended it in order, errClosed if we did
}

// errWrongEvent: the server broke a guarantee of watches.
var errWrongEvent = errors.New("wrong event")

var errClosed = errors.New("closed by the benchmark")

// watchSet describes the watches to open.
type watchSet struct {
	n     int                // how many watches
	after int64              // the revision that all of them begin after
	path  func(i int) string // of watch number i
}

// open opens the watches over the connections in turn, and returns when the server has accepted all
// of them.
func (set watchSet) open(ctx context.Context, conns []*target.Conn) (*watches, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watches{cancel: func() { cancel(errClosed) }, streams: make([]*countedWatch, set.n)}
	var opening errgroup.Group
	opening.SetLimit(50)
	for i := range set.n {
		opening.Go(func() error {
			response, err := conns[i%len(conns)].Do(ctx, target.Request{Path: set.path(i)})
			if err != nil {
				return err
			}
			stream := &countedWatch{lastRevision: set.after}
			w.streams[i] = stream
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

// receive records an event. Events other than those of changes are verified and not counted:
// the server itself changes a ConfigMap occasionally.
func (w *watches) receive(stream *countedWatch, e wire.Event) error {
	received := time.Now()
	bookmark := e.Type == "BOOKMARK"
	if e.Revision < stream.lastRevision || e.Revision == stream.lastRevision && !bookmark {
		return fmt.Errorf("%w: %s at revision %d after revision %d", errWrongEvent, e.Type, e.Revision, stream.lastRevision)
	}
	stream.lastRevision = e.Revision
	if e.Type == "MODIFIED" && !e.Sent.IsZero() {
		stream.latencies = append(stream.latencies, received.Sub(e.Sent))
		w.delivered.Add(1)
	}
	return nil
}

// drain waits until want events have arrived in total, every watch has ended, or no event has
// arrived for patience.
func (w *watches) drain(ctx context.Context, want int, patience time.Duration) error {
	last, since := w.delivered.Load(), time.Now()
	for w.delivered.Load() < int64(want) && int(w.ended.Load()) < len(w.streams) {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(time.Millisecond):
		}
		if now := w.delivered.Load(); now != last {
			last, since = now, time.Now()
		} else if time.Since(since) > patience {
			break
		}
	}
	return nil
}

// close ends the watches and returns when no goroutine reads them any more.
func (w *watches) close() {
	w.cancel()
	w.done.Wait()
}

// report closes the watches and reports how many of want events they delivered.
func (w *watches) report(s *Sample, want int) error {
	w.close()
	broken := 0
	var why error
	for _, stream := range w.streams {
		if errors.Is(stream.err, errWrongEvent) {
			return stream.err
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
	delivered := s.observed.ops()
	if delivered > want {
		return fmt.Errorf("%w: %d events were delivered, there are %d", errWrongEvent, delivered, want)
	}
	switch {
	case broken > 0:
		s.Broken("%d of %d watches were ended after %s of %s events (%v)", broken, len(w.streams), grouped(delivered), grouped(want), why)
	case delivered < want:
		s.Broken("%s of %s events did not arrive", grouped(want-delivered), grouped(want))
	}
	s.Report("events delivered", Percent, 100*float64(delivered)/float64(max(want, 1)))
	return nil
}
