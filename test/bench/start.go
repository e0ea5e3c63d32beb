package main

import (
	"context"
	"time"

	"github.com/stratakube/strata/internal/process"
)

// untilReadyz is a measure that has a bound.
const untilReadyz = "until /readyz"

var startWorkloads = []Workload{{
	Name:    "start",
	Title:   "restart on a filled etcd, then rest",
	Dataset: configMaps,
	Alone:   true,
	Run:     measureStart,
	Wanted:  []Bound{toUpstream(untilReadyz, 0.35)},
}}

// measureStart reports the start of the engine, which the runner started a moment ago after it had
// stopped its predecessor on the same etcd, and its memory at rest: when all is loaded and before
// the first LIST.
func measureStart(ctx context.Context, s *Sample) error {
	if err := process.WaitQuiet(ctx, s.Sizes.Quieten, s.children...); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(s.Sizes.Rest): // the Go runtime gives memory back in the background
	}
	cpu, err := s.Engine.CPU()
	if err != nil {
		return err
	}
	memory, err := s.Engine.Memory()
	if err != nil {
		return err
	}
	s.Report(untilReadyz, Seconds, s.Engine.Startup.Ready.Seconds())
	s.Report("until the first GET", Seconds, s.Engine.Startup.FirstGet.Seconds())
	s.Report("server CPU until then", Seconds, s.Engine.Startup.CPU.Seconds())
	s.Report("server CPU until at rest", Seconds, cpu.Seconds())
	s.Report("resident at rest", Bytes, float64(memory.Resident))
	s.Report("peak memory of the start", Bytes, float64(memory.Peak))
	return nil
}
