package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Names of measures that have bounds.
const (
	stalledRise   = "resident more, at most"
	stalledEach   = "heap and stacks more for each client"
	stalledBeside = "healthy watcher's p99, beside them / alone"
)

// stalledWorkloads are clients that request much and read nothing.
var stalledWorkloads = []Workload{{
	Name: "watch-stalled", Title: "clients that ask for initial events of all and do not read", Op: "event", Dataset: configMaps,
	Alone: true, Session: "stalled", Runs: 1,
	Run:    measureStalled,
	Wanted: []Bound{absolute(stalledRise, 200e6), toUpstream(stalledEach, 1./100)},
}}

// stalledMemory is the resident memory at which an engine is killed, before the machine has no memory left.
const stalledMemory = 8 << 30

// measureStalled reports the server's memory for clients that do not read, half of them over HTTP/1.1 and half over HTTP/2, the latency of
// events to a watcher beside them, and the memory that remains after the clients. An engine that buffers all unread bytes has
// Sizes.StalledDear clients, the others Sizes.Stalled.
func measureStalled(ctx context.Context, s *Sample) error {
	limited, unlimit := context.WithCancel(ctx)
	defer unlimit()
	go s.Engine.LimitMemory(limited, stalledMemory)
	n := s.Sizes.Stalled
	if s.Engine.Engine == upstreamEngine || s.Engine.IsStock() {
		n = s.Sizes.StalledDear
	}
	// One-time allocations are not counted for a client.
	if _, err := s.watcherBeside(ctx); err != nil {
		return err
	}
	if err := s.stall(ctx, 2, func() error { return nil }); err != nil {
		return err
	}
	before, err := s.holds(ctx)
	if err != nil {
		return err
	}
	alone, err := s.watcherBeside(ctx)
	if err != nil {
		return err
	}
	var stalled holds
	var peak process.Memory
	var beside []time.Duration
	err = s.Measure(ctx, func(ctx context.Context) error {
		return s.stall(ctx, n, func() (err error) {
			// Events make upstream end watches that do not read, so their memory is measured before the first event.
			if stalled, err = s.holds(ctx); err != nil {
				return err
			}
			if err := s.KeepHeap(ctx); err != nil {
				return err
			}
			if beside, err = s.watcherBeside(ctx); err != nil {
				return err
			}
			peak, err = s.Engine.Memory()
			return err
		})
	})
	if err != nil {
		return err
	}
	after, err := s.holds(ctx)
	if err != nil {
		return err
	}
	for _, latency := range beside {
		s.Observe(latency)
	}
	slices.Sort(alone)
	slices.Sort(beside)
	aloneP99, besideP99 := stats.Percentile(alone, 0.99).Seconds(), stats.Percentile(beside, 0.99).Seconds()
	more := func(now uint64) float64 { return max(0, float64(now)-float64(before.resident)) }
	s.Detail("upstream %d of them, others %s; events of a healthy watcher beside them", s.Sizes.StalledDear, grouped(s.Sizes.Stalled))
	s.Report("clients", Count, float64(n))
	s.Report("resident before", Bytes, float64(before.resident))
	s.Report(stalledRise, Bytes, more(peak.Peak))
	s.Report("resident more once it has settled", Bytes, more(stalled.resident))
	s.Report(stalledEach, Bytes, max(0, perWatch(stalled.Heap+stalled.Stacks, before.Heap+before.Stacks, n)))
	s.Report("  of this stacks", Bytes, max(0, perWatch(stalled.Stacks, before.Stacks, n)))
	s.Report("resident more after they are gone", Bytes, more(after.resident))
	s.Report("heap more after they are gone", Bytes, max(0, float64(after.Heap)-float64(before.Heap)))
	s.Report("goroutines that stay", Count, max(0, float64(after.Goroutines-before.Goroutines)))
	s.Report("healthy watcher's p99, alone", Seconds, aloneP99)
	s.Report("healthy watcher's p99, beside them", Seconds, besideP99)
	s.Report(stalledBeside, Count, besideP99/aloneP99)
	return nil
}

// stall opens n watches with all ConfigMaps as initial events, of which the clients read only the first byte, while a function runs.
func (s *Sample) stall(ctx context.Context, n int, meanwhile func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	const atOnce = 50
	conns := make([]*target.Conn, n)
	bodies := make([]io.Closer, n)
	defer func() {
		cancel()
		for i, conn := range conns {
			if bodies[i] != nil {
				bodies[i].Close() // a connection whose stream has not ended would not close
			}
			conn.Close()
		}
	}()
	var asking errgroup.Group
	asking.SetLimit(atOnce)
	for i := range conns {
		conns[i] = s.Engine.DialNarrow(i%2 == 0)
		asking.Go(func() error {
			response, err := conns[i].Do(ctx, target.Request{Path: initialPath})
			if err != nil {
				return err
			}
			bodies[i] = response.Body
			if _, err := io.ReadFull(response.Body, make([]byte, 1)); err != nil {
				return fmt.Errorf("the first event: %w", err)
			}
			return nil
		})
	}
	if err := asking.Wait(); err != nil {
		return err
	}
	return meanwhile()
}

// watcherBeside watches all ConfigMaps while few of them change, and returns the latency of each event.
func (s *Sample) watcherBeside(ctx context.Context) ([]time.Duration, error) {
	revision, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return nil, err
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	one := watchSet{n: 1, after: revision, path: func(int) string { return watchOf(allConfigMaps, "", true, revision) }}
	w, err := one.open(ctx, []*target.Conn{conn})
	if err != nil {
		return nil, err
	}
	defer w.close()
	const writers = 8
	written, err := changeObjects(ctx, s, besideRate, writers, putObject(s))
	if err != nil {
		return nil, err
	}
	if err := w.drain(ctx, written, drainLimit); err != nil {
		return nil, err
	}
	w.close()
	if got := len(w.streams[0].latencies); got != written {
		return nil, fmt.Errorf("%w: the healthy watcher got %d events of %d (%v)", errWrongEvent, got, written, w.streams[0].err)
	}
	return w.streams[0].latencies, nil
}

// besideRate is the number of changes per second for the watcher beside stalled clients: enough for a p99 of its own.
const besideRate = 100
