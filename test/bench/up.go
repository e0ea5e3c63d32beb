package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/stratakube/strata/internal/process"
)

// upWorkloads start `strata up`, which has an etcd of its own; that of the benchmark is idle.
var upWorkloads = []Workload{{
	Name: "up", Title: "strata up with two simulated nodes", Op: "start", Dataset: fewConfigMaps,
	Alone: true, Session: "up", Starts: true,
	Run: measureUp,
	Wanted: []Bound{
		absolute("until the commands are printed, new data directory", 2.5), absolute("until controllers are ready, new data directory", 2.5),
		absolute("until nodes are ready, new data directory", 2.5),
	},
}}

// upLines are lines that strata up prints, by the measure of the time until then.
var upLines = map[string]string{
	"until the commands are printed": "Strata is up;",
	"until controllers are ready":    "controllers: ready",
	"until nodes are ready":          "nodes: ready",
}

// measureUp starts strata up on a new data directory, stops it, and starts it on the same directory. Times begin with the start of the process.
func measureUp(ctx context.Context, s *Sample) error {
	dir, err := os.MkdirTemp("", "strata-up-") // a short path: it has the socket of etcd
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s.Detail("2 nodes")
	for _, directory := range []string{"new data directory", "old data directory"} {
		times, cpu, err := s.up(ctx, dir)
		if err != nil {
			return err
		}
		for _, name := range []string{"until the commands are printed", "until controllers are ready", "until nodes are ready"} {
			s.Report(name+", "+directory, Seconds, times[name].Seconds())
		}
		s.Report("CPU until all are ready, "+directory, Seconds, cpu.Seconds())
	}
	return nil
}

// up starts strata up, and stops it when it has printed upLines. It returns the time until each of them, and the CPU time until the last.
func (s *Sample) up(ctx context.Context, dir string) (times map[string]time.Duration, cpu time.Duration, err error) {
	log := filepath.Join(dir, "up.log")
	began := time.Now()
	child, err := process.Start(process.Spec{
		Name: "strata up with " + s.spec.Label, Path: s.spec.Binary, Lines: true, Log: log,
		Args: slices.Concat([]string{"up", "--data-dir=" + filepath.Join(dir, "data"), "--secure-port=0", "--nodes=2", "--", "--engine=" + s.spec.Engine}, s.spec.Args),
		Env:  slices.Concat(os.Environ(), s.spec.Env),
	})
	if err != nil {
		return nil, 0, err
	}
	defer func() {
		if stopErr := child.Stop(syscall.SIGTERM, upGrace); err == nil && stopErr != nil {
			err = fmt.Errorf("stop strata up: %w", stopErr)
		}
	}()
	times = map[string]time.Duration{}
	var mu sync.Mutex // guards times and err
	var waiting sync.WaitGroup
	for name, line := range upLines {
		waiting.Go(func() {
			_, _, waitErr := child.WaitLine(ctx, 0, line)
			at := time.Since(began)
			mu.Lock()
			defer mu.Unlock()
			times[name] = at
			if waitErr != nil && err == nil {
				err = waitErr
			}
		})
	}
	waiting.Wait()
	if err != nil {
		return nil, 0, err
	}
	cpu, err = child.CPU()
	return times, cpu, err
}

// upGrace bounds the end of strata up, which takes a second or two.
const upGrace = 30 * time.Second
