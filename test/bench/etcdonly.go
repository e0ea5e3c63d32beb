package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/test/bench/internal/stats"
)

// Names of measures that have bounds.
const (
	progressCPU      = "etcd CPU, with / without"
	progressWriteP99 = "write p99, with / without"
)

// etcdWorkloads measure etcd while no engine runs.
var etcdWorkloads = []Workload{{
	Name: "etcd-progress", Title: "etcd alone: 10 progress requests/s, 1,000 writes/s, one watcher", Dataset: configMaps,
	Alone: true, Session: "etcd", Runs: 3, EtcdOnly: true,
	Run:    measureProgress,
	Wanted: []Bound{absolute(progressCPU, 1.03), absolute(progressWriteP99, 1.03)},
}}

// progressInterval is the time between two progress requests: that of a mirror while a reader waits.
const progressInterval = 100 * time.Millisecond

// measureProgress compares etcd with and without progress requests, while objects change and the feed of a mirror watches all of
// them. Phases of the two kinds alternate, Sizes.Pairs pairs of them, and the order changes from pair to pair, so that drift affects
// both. It reports medians over the phases, medians of the ratios of the pairs, and the spread of these.
func measureProgress(ctx context.Context, s *Sample) error {
	feed, err := startFeed(ctx, s.Etcd.Endpoint)
	if err != nil {
		return err
	}
	defer feed.stop()
	var without, with []progressPhase
	if _, err := feed.phase(ctx, s, false); err != nil { // warms up
		return err
	}
	for pair := range s.Sizes.Pairs {
		for _, ask := range []bool{pair%2 == 1, pair%2 == 0} {
			phase, err := feed.phase(ctx, s, ask)
			if err != nil {
				return err
			}
			if ask {
				with = append(with, phase)
			} else {
				without = append(without, phase)
			}
		}
	}
	cores := func(p progressPhase) float64 { return p.cores }
	p99 := func(p progressPhase) float64 { return p.writeP99.Seconds() }
	rate := func(p progressPhase) float64 { return p.rate }
	s.Detail("%d pairs of phases of %v", s.Sizes.Pairs, s.Sizes.Beside)
	s.Report("etcd cores, no progress requests", Count, medianOf(without, cores))
	s.Report("etcd cores, 10 progress requests/s", Count, medianOf(with, cores))
	ratios := ratiosOf(with, without, cores)
	s.Report(progressCPU, Count, stats.Median(ratios))
	s.Report("  of the pairs, least", Count, slices.Min(ratios))
	s.Report("  of the pairs, most", Count, slices.Max(ratios))
	s.Report("write p99, no progress requests", Seconds, medianOf(without, p99))
	s.Report("write p99, 10 progress requests/s", Seconds, medianOf(with, p99))
	ratios = ratiosOf(with, without, p99)
	s.Report(progressWriteP99, Count, stats.Median(ratios))
	s.Report("  of the pairs' write p99, least", Count, slices.Min(ratios))
	s.Report("  of the pairs' write p99, most", Count, slices.Max(ratios))
	s.Report("writes per second", PerSecond, min(medianOf(without, rate), medianOf(with, rate)))
	return nil
}

func medianOf(phases []progressPhase, of func(progressPhase) float64) float64 {
	values := make([]float64, len(phases))
	for i, phase := range phases {
		values[i] = of(phase)
	}
	return stats.Median(values)
}

// ratiosOf divides the measurements of phases of one kind by those of their neighbours of the other kind.
func ratiosOf(with, without []progressPhase, of func(progressPhase) float64) []float64 {
	ratios := make([]float64, len(with))
	for i := range ratios {
		ratios[i] = of(with[i]) / of(without[i])
	}
	return ratios
}

// progressPhase contains the measurements of a phase.
type progressPhase struct {
	cores    float64 // of etcd
	writeP99 time.Duration
	rate     float64 // writes per second
}

// feed watches an etcd as a mirror does, with a client of its own as a server has.
type feed struct {
	client   *clientv3.Client
	source   *etcdsource.Source
	progress atomic.Int64 // batches without changes
	cancel   context.CancelFunc
	done     chan struct{} // closed when the watch has ended; err is set before
	err      error
}

// startFeed begins to watch all keys. The caller must stop it.
func startFeed(ctx context.Context, endpoint string) (*feed, error) {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop()})
	if err != nil {
		return nil, fmt.Errorf("connect to etcd: %w", err)
	}
	f := &feed{client: client, source: etcdsource.New(client, "bench", "/registry/health"), done: make(chan struct{})}
	now, err := f.source.ReadRevision(ctx)
	if err != nil {
		client.Close()
		return nil, fmt.Errorf("read etcd's revision: %w", err)
	}
	ctx, f.cancel = context.WithCancel(ctx)
	go func() {
		defer close(f.done)
		f.err = f.source.Watch(ctx, "/registry/", now, func(b driver.Batch) error {
			if len(b.Changes) == 0 {
				f.progress.Add(1)
			}
			return nil
		})
	}()
	return f, nil
}

// stop ends the feed and returns when its goroutines have ended.
func (f *feed) stop() {
	f.cancel()
	<-f.done
	f.client.Close() // the only error is that of the watch that was just ended
}

// phase writes for Sizes.Beside, with progress requests if ask is true.
func (f *feed) phase(ctx context.Context, s *Sample, ask bool) (progressPhase, error) {
	elsewhere, err := configMapWrites(s)
	if err != nil {
		return progressPhase{}, err
	}
	var mu sync.Mutex // guards took
	var took []time.Duration
	progress := f.progress.Load()
	cores, err := coresOf(func() error {
		all, ctx := errgroup.WithContext(ctx)
		all.Go(func() error {
			return perSecond(manyWrites, s.Sizes.Beside, writesAtOnce).run(ctx, func(ctx context.Context, i int) error {
				began := time.Now()
				if err := elsewhere.put(ctx, i); err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				took = append(took, time.Since(began))
				return nil
			})
		})
		if ask {
			all.Go(func() error {
				return pace{interval: progressInterval, duration: s.Sizes.Beside, atOnce: 1}.run(ctx, func(ctx context.Context, _ int) error {
					return f.source.RequestProgress(ctx)
				})
			})
		}
		return all.Wait()
	}, s.Etcd.Child)
	if err != nil {
		return progressPhase{}, err
	}
	select {
	case <-f.done:
		return progressPhase{}, fmt.Errorf("the watch ended: %w", f.err)
	default:
	}
	if ask && f.progress.Load() == progress {
		return progressPhase{}, errors.New("etcd answered no progress request")
	}
	if !ask && f.progress.Load() > progress+1 { // one may have been on its way
		return progressPhase{}, errors.New("etcd sent a progress notification that was not requested")
	}
	slices.Sort(took)
	return progressPhase{cores: cores[0], writeP99: stats.Percentile(took, 0.99), rate: float64(len(took)) / s.Sizes.Beside.Seconds()}, nil
}
