package main

import (
	"context"
	"math"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Names of measures that have bounds.
const (
	residentPerWatch = "resident per watch"
	bookmarkCores    = "server cores more with bookmarks"
)

// fewWorkloads measure watches on few objects.
var fewWorkloads = []Workload{
	{
		Name: "watch-idle-memory", Title: "idle watches of one object each", Op: "watch", Dataset: fewConfigMaps,
		Alone: true, Session: "idle memory", Runs: 3,
		Run:    measureIdleMemory,
		Wanted: []Bound{absolute(residentPerWatch, 25e3)},
	},
	resumeWorkload,
}

// rest waits until the processes are quiet, and then for Sizes.Rest: the Go runtime returns memory
// in the background.
func (s *Sample) rest(ctx context.Context) error {
	if err := process.WaitQuiet(ctx, s.Sizes.Quieten, s.children...); err != nil {
		return err
	}
	if !waitUntil(ctx, time.Now().Add(s.Sizes.Rest)) {
		return context.Cause(ctx)
	}
	return nil
}

// steady is the share by which resident memory changes in Sizes.Rest after the Go runtime has
// returned free memory; restsAtMost bounds the wait for that.
const steady, restsAtMost = 0.005, 6

// holds is the memory of an engine after a garbage collection and a rest.
type holds struct {
	target.State
	resident uint64
}

func (s *Sample) holds(ctx context.Context) (holds, error) {
	if _, err := s.Engine.State(ctx); err != nil { // collects garbage
		return holds{}, err
	}
	memory, err := s.Engine.Memory()
	for range restsAtMost {
		before := memory.Resident
		if err == nil {
			err = s.rest(ctx)
		}
		if err == nil {
			memory, err = s.Engine.Memory()
		}
		if err != nil {
			return holds{}, err
		}
		if math.Abs(float64(memory.Resident)-float64(before)) < steady*float64(before) {
			break
		}
	}
	state, err := s.Engine.State(ctx)
	return holds{state, memory.Resident}, err
}

// perWatch is the growth of a quantity per watch after n watches were opened.
func perWatch(after, before uint64, n int) float64 {
	return (float64(after) - float64(before)) / float64(n)
}

// measureIdleMemory opens Sizes.IdleObjects watches with bookmarks, each of one object by its name,
// and compares the server's memory before, meanwhile and afterwards.
func measureIdleMemory(ctx context.Context, s *Sample) error {
	revision, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return err
	}
	n := s.Sizes.IdleObjects
	conns := s.Engine.DialAll(connsFor(n))
	defer target.CloseAll(conns)
	idle := watchSet{n: n, after: revision, path: func(i int) string {
		return watchOf(configMapsPath, "fieldSelector=metadata.name%3D"+dataset.ConfigMapName(i%s.Data.ConfigMaps), true, revision)
	}}
	// Allocations for the first watch of a process and for the connections are not counted.
	for _, conn := range conns {
		first, err := watchSet{n: 1, after: revision, path: idle.path}.open(ctx, []*target.Conn{conn})
		if err != nil {
			return err
		}
		first.close()
	}
	before, err := s.holds(ctx)
	if err != nil {
		return err
	}
	var open holds
	var w *watches
	err = s.Measure(ctx, func(ctx context.Context) error {
		if w, err = idle.open(ctx, conns); err != nil {
			return err
		}
		open, err = s.holds(ctx)
		return err
	})
	if w != nil {
		defer w.close()
	}
	if err != nil {
		return err
	}
	if ended := w.ended.Load(); ended > 0 {
		s.Broken("%d of %d watches were ended", ended, n)
	}
	w.close()
	after, err := s.holds(ctx)
	if err != nil {
		return err
	}
	s.Detail("%s of them over %d connections", grouped(n), len(conns))
	s.Report(residentPerWatch, Bytes, perWatch(open.resident, before.resident, n))
	s.Report("heap per watch", Bytes, perWatch(open.Heap, before.Heap, n))
	s.Report("stacks per watch", Bytes, perWatch(open.Stacks, before.Stacks, n))
	s.Report("goroutines per watch", Count, float64(open.Goroutines-before.Goroutines)/float64(n))
	s.Report("server CPU to open each", Seconds, s.observed.ServerCPU.Seconds()/float64(n))
	s.Report("resident before", Bytes, float64(before.resident))
	s.Report("resident meanwhile", Bytes, float64(open.resident))
	s.Report("resident after they are closed", Bytes, float64(after.resident))
	s.Report("heap that stays, per watch", Bytes, max(0, perWatch(after.Heap, before.Heap, n)))
	s.Report("goroutines that stay", Count, max(0, float64(after.Goroutines-before.Goroutines)))
	return nil
}
