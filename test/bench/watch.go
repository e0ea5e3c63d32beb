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

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
	"github.com/stratakube/strata/test/bench/internal/wire"
)

var watchWorkloads = []Workload{
	{
		Name: "watch-lone", Title: "watcher alone, many events", Op: "event", Dataset: configMaps, Alone: true,
		Run: func(ctx context.Context, s *Sample) error {
			return watchLoad{watchers: 1, conns: 1, rate: s.Sizes.LoneRate}.run(ctx, s)
		},
	},
}

// streamWorkloads change so little that an engine that follows the changes does not disturb the
// other's measurement.
var streamWorkloads = []Workload{
	{
		Name: "watch-shared", Title: "watchers of one collection, few events", Op: "event", Dataset: configMaps,
		Run: func(ctx context.Context, s *Sample) error {
			return watchLoad{watchers: s.Sizes.Watchers, conns: 8, rate: s.Sizes.SharedRate}.run(ctx, s)
		},
		Wanted: []Bound{toLimit(cpuPerEvent, 1.15)},
	},
}

// nodeWorkloads are the watches of kubelets: each watches the pods of its node.
var nodeWorkloads = []Workload{
	{
		Name: "watch-nodes", Title: "watchers of the pods of one node each", Op: "event", Dataset: pods, Alone: true, Session: "nodes", Runs: 3, Tail: true,
		Run:    watchNodes(func(s *Sample) int { return min(s.Sizes.NodeWatchers, s.Data.Nodes) }),
		Wanted: []Bound{toUpstream(latencyP99, 1), toUpstream(cpuPerEvent, 0.6)},
	},
}

const cpuPerEvent = "server CPU per event"

// watchOf is the path of a watch after a revision; selector is "" or a query.
func watchOf(collection, selector string, bookmarks bool, after int64) string {
	path := fmt.Sprintf("%s?watch=1&resourceVersion=%d", collection, after)
	if bookmarks {
		path += "&allowWatchBookmarks=true"
	}
	if selector != "" {
		path += "&" + selector
	}
	return path
}

// watchLoad is a number of watchers of all ConfigMaps while objects change in etcd at a rate, for
// Sizes.WatchDuration. An operation is an event delivered to a watcher; its latency is the time
// from before the write until the watcher has read it.
type watchLoad struct {
	watchers int
	conns    int // connections that the watchers share
	rate     int // changes per second
}

// drainLimit is the time without an event after the last write until missing events count as lost.
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
	all := watchSet{n: l.watchers, after: revision, path: func(int) string { return watchOf(allConfigMaps, "", true, revision) }}
	streams, err := all.open(ctx, conns)
	if err != nil {
		return err
	}
	defer streams.close()

	written := 0
	write, writers := putObject(s), 32 // more than etcd needs to reach the requested rates
	if s.Engine.IsLimit() {
		// frames must come in the order of their revisions
		write, writers = sendFrame(conns[0], revision), 1
	}
	err = s.Measure(ctx, func(ctx context.Context) error {
		if written, err = changeObjects(ctx, s, l.rate, writers, write); err != nil {
			return err
		}
		return streams.drain(ctx, written*l.watchers, drainLimit)
	})
	if err != nil {
		return err
	}
	s.Detail("%s of them, %s changes in %v", grouped(l.watchers), grouped(written), s.Sizes.WatchDuration)
	return streams.report(s, written*l.watchers)
}

// watchNodes is a number of watchers, each of the pods of another node, while pods of these nodes
// change in etcd: each change is delivered to one of them.
func watchNodes(number func(*Sample) int) func(context.Context, *Sample) error {
	return func(ctx context.Context, s *Sample) error {
		watchers := number(s)
		return watchParts(ctx, s, parts{
			watchers: watchers,
			path: func(i int, revision int64) string {
				return watchOf("/api/v1/pods", "fieldSelector=spec.nodeName%3D"+dataset.NodeName(i, s.Data.Nodes), true, revision)
			},
			objects: watchers * (s.Data.Pods / s.Data.Nodes),
			change: func(i int) (string, []byte, error) {
				pod := dataset.Pod(i/watchers*s.Data.Nodes+i%watchers, s.Data.Nodes, s.Data.Namespaces)
				pod.Annotations[dataset.SentKey] = fmt.Sprint(time.Now().UnixNano())
				value, err := dataset.Encode(pod)
				return dataset.PodKey(pod.Namespace, pod.Name), value, err
			},
		})
	}
}

// parts describes watchers that divide objects among them: each change is delivered to one.
type parts struct {
	watchers int
	// of watcher number i, which begins after the revision
	path    func(i int, revision int64) string
	objects int
	change  func(i int) (key string, value []byte, err error) // of object number i
}

// watchParts measures these watchers while objects drawn at random change at Sizes.NodeRate for
// Sizes.NodeDuration.
func watchParts(ctx context.Context, s *Sample, p parts) error {
	if p.watchers == 0 || p.objects == 0 {
		return errors.New("too few objects for one watcher")
	}
	revision, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return err
	}
	conns := s.Engine.DialAll(connsFor(p.watchers))
	defer target.CloseAll(conns)
	streams, err := watchSet{n: p.watchers, after: revision, path: func(i int) string { return p.path(i, revision) }}.open(ctx, conns)
	if err != nil {
		return err
	}
	defer streams.close()
	changed := s.Rand.Perm(p.objects)
	var written atomic.Int64
	err = s.Measure(ctx, func(ctx context.Context) error {
		err := perSecond(s.Sizes.NodeRate, s.Sizes.NodeDuration, writesAtOnce).run(ctx, func(ctx context.Context, i int) error {
			key, value, err := p.change(changed[i%len(changed)])
			if err != nil {
				return err
			}
			written.Add(1)
			if _, err := s.Etcd.Client.Put(ctx, key, string(value)); err != nil {
				return fmt.Errorf("change an object: %w", err)
			}
			return nil
		})
		if err != nil {
			return err
		}
		return streams.drain(ctx, int(written.Load()), drainLimit)
	})
	if err != nil {
		return err
	}
	s.Detail("%s of them, %s changes in %v", grouped(p.watchers), grouped(int(written.Load())), s.Sizes.NodeDuration)
	return streams.report(s, int(written.Load()))
}

// watchesPerConn is how many watches share a connection where there are thousands: fewer than an
// engine allows.
const watchesPerConn = 200

func connsFor(watches int) int { return (watches + watchesPerConn - 1) / watchesPerConn }

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

// sendFrame returns a function that makes the limit send the event of a changed ConfigMap, with
// revisions that continue from the one given.
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

// changeObjects runs the given number of writers, which write changed ConfigMaps at a rate for
// Sizes.WatchDuration, and returns the number of writes.
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
				// Not cancelled at the deadline: a write in flight must be counted, or the watcher
				// would receive more than was written.
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

// watches are open streams and their events.
type watches struct {
	cancel    context.CancelFunc
	done      sync.WaitGroup
	delivered atomic.Int64
	ended     atomic.Int64
	streams   []*watchStream
	txns      bool // as in watchSet
}

// watchStream is owned by the goroutine that reads it until that has ended.
type watchStream struct {
	latencies    []time.Duration
	lastRevision int64
	bookmark     int64 // revision of the last one
	bookmarks    int
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
	txns  bool               // several objects change in one revision
}

// open opens the watches over the connections in turn, and returns when the server has accepted all
// of them.
func (set watchSet) open(ctx context.Context, conns []*target.Conn) (*watches, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watches{cancel: func() { cancel(errClosed) }, streams: make([]*watchStream, set.n), txns: set.txns}
	var opening errgroup.Group
	opening.SetLimit(50)
	for i := range set.n {
		opening.Go(func() error {
			response, err := conns[i%len(conns)].Do(ctx, target.Request{Path: set.path(i)})
			if err != nil {
				return err
			}
			stream := &watchStream{lastRevision: set.after}
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

// receive records an event. Events other than those of changeObjects are verified and not counted:
// the server itself changes a ConfigMap occasionally.
func (w *watches) receive(stream *watchStream, e wire.Event) error {
	received := time.Now()
	bookmark := e.Type == "BOOKMARK"
	if e.Revision < stream.lastRevision || e.Revision == stream.lastRevision && !bookmark && (!w.txns || e.Revision == stream.bookmark) {
		return fmt.Errorf("%w: %s at revision %d after revision %d", errWrongEvent, e.Type, e.Revision, stream.lastRevision)
	}
	stream.lastRevision = e.Revision
	if bookmark {
		stream.bookmark = e.Revision
		stream.bookmarks++
	}
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
	s.Report("server cores", Count, s.observed.ServerCPU.Seconds()/s.observed.Elapsed.Seconds())
	return nil
}
