package main

import (
	"context"
	"fmt"
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
	{
		Name: "watch-idle-bookmarks", Title: "idle watches, without bookmarks and with", Op: "watch", Dataset: fewConfigMaps,
		Alone: true, Session: "idle bookmarks", Runs: 1,
		Run:    measureBookmarks,
		Wanted: []Bound{absolute(bookmarkCores, 0.01)},
	},
	resumeWorkload,
	restoreLargeWorkload,
}

// rest waits until the processes are quiet, and then for Sizes.Rest: the Go runtime returns memory in the background.
func (s *Sample) rest(ctx context.Context) error {
	if err := process.WaitQuiet(ctx, s.Sizes.Quieten, s.children...); err != nil {
		return err
	}
	if !waitUntil(ctx, time.Now().Add(s.Sizes.Rest)) {
		return context.Cause(ctx)
	}
	return nil
}

// steady is the share by which resident memory changes in Sizes.Rest after the Go runtime has returned free memory; restsAtMost bounds
// the wait for that.
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

// measureIdleMemory opens Sizes.IdleObjects watches with bookmarks, each of one object by its name, and compares the server's memory before,
// meanwhile and afterwards.
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
	if err == nil {
		err = s.KeepHeap(ctx)
	}
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

// measureBookmarks compares the CPU time of a server with Sizes.IdleWatchers idle watches that requested bookmarks with that of
// one whose watches did not: for half of Sizes.Idle without, for Sizes.Idle with, and for half of it without.
func measureBookmarks(ctx context.Context, s *Sample) error {
	n := s.Sizes.IdleWatchers
	var cores, etcd [2]float64 // without bookmarks and with
	bookmarks := 0
	phase := func(ctx context.Context, with bool, duration time.Duration) error {
		revision, err := dataset.Revision(ctx, s.Etcd.Client)
		if err != nil {
			return err
		}
		conns := s.Engine.DialAll(connsFor(n))
		defer target.CloseAll(conns)
		idle := watchSet{n: n, after: revision, path: func(int) string { return watchOf(configMapsPath, "", with, revision) }}
		w, err := idle.open(ctx, conns)
		if err != nil {
			return err
		}
		defer w.close()
		if _, err := s.Engine.State(ctx); err != nil { // the garbage of opening them is no part of idling
			return err
		}
		if err := s.rest(ctx); err != nil {
			return err
		}
		used, err := coresOf(func() error {
			if !waitUntil(ctx, time.Now().Add(duration)) {
				return context.Cause(ctx)
			}
			return nil
		}, s.Engine.Child, s.Etcd.Child)
		if err != nil {
			return err
		}
		if ended := w.ended.Load(); ended > 0 {
			return fmt.Errorf("%d of %d idle watches were ended", ended, n)
		}
		w.close()
		kind := 0
		if with {
			kind = 1
		}
		share := duration.Seconds() / s.Sizes.Idle.Seconds()
		cores[kind] += share * used[0]
		etcd[kind] += share * used[1]
		for _, stream := range w.streams {
			bookmarks += stream.bookmarks
		}
		return nil
	}
	err := s.Measure(ctx, func(ctx context.Context) error {
		if err := phase(ctx, false, s.Sizes.Idle/2); err != nil {
			return err
		}
		if err := phase(ctx, true, s.Sizes.Idle); err != nil {
			return err
		}
		return phase(ctx, false, s.Sizes.Idle/2)
	})
	if err != nil {
		return err
	}
	s.Detail("%s of them, %v of each kind", grouped(n), s.Sizes.Idle)
	s.Report("server cores without bookmarks", Count, cores[0])
	s.Report("server cores with bookmarks", Count, cores[1])
	s.Report(bookmarkCores, Count, cores[1]-cores[0])
	s.Report("etcd cores without bookmarks", Count, etcd[0])
	s.Report("etcd cores with bookmarks", Count, etcd[1])
	s.Report("bookmarks per watch", Count, float64(bookmarks)/float64(n))
	return nil
}
