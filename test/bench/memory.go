package main

import (
	"context"
	"fmt"
	"time"

	"github.com/stratakube/strata/internal/process"
)

const (
	residentAtRest = "resident at rest"
	residentAfter  = "resident a minute after all"
	peakOfAll      = "peak memory of all"
)

// memoryWanted are the bounds of a process that answers all workloads, with the sizes as
// documented. Under load it may take a share of the free memory.
var memoryWanted = []Bound{absolute(residentAtRest, 0.8e9), absolute(residentAfter, 1.3e9), toUpstream(peakOfAll, 1)}

// memoryUse is the memory of the processes that answer all workloads together.
type memoryUse struct {
	rows []Row
	pids map[string]int // of the engines at rest
}

// memoryAtRest waits until the running engines are at rest, and starts with their memory at that
// time.
func (b *bench) memoryAtRest(ctx context.Context) (*memoryUse, error) {
	// The Go runtime gives memory back in the background.
	if err := b.rest(ctx, b.config.Sizes.Rest); err != nil {
		return nil, err
	}
	m := &memoryUse{pids: map[string]int{}}
	for _, e := range b.engines {
		m.pids[e.Label] = e.PID()
	}
	return m, m.note(b, residentAtRest)
}

// rest waits until the running engines are quiet, and then for some time.
func (b *bench) rest(ctx context.Context, pause time.Duration) error {
	b.progress.step("rest")
	if err := process.WaitQuiet(ctx, b.config.Sizes.Quieten, b.children()...); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(pause):
	}
	b.progress.done("done")
	return nil
}

// note adds the current memory of the engines. The limit has only recorded answers, so its memory
// is not meaningful.
func (m *memoryUse) note(b *bench, name string) error {
	row := Row{Name: name, Unit: Bytes, Values: map[string]float64{}}
	for _, e := range b.engines {
		if e.IsLimit() || e.Variant != "" {
			continue
		}
		memory, err := e.Memory()
		if err != nil {
			return err
		}
		row.Values[e.Label] = float64(memory.Resident)
		b.peaks[e.Label] = max(b.peaks[e.Label], memory.Peak)
	}
	m.rows = append(m.rows, row)
	return nil
}

// result returns the rows of the table.
func (m *memoryUse) result(b *bench) Result {
	peak := Row{Name: peakOfAll, Unit: Bytes, Values: map[string]float64{}}
	result := Result{
		Name: "memory", Title: "memory of the process that answered all of these but what needs a fresh one", Notes: map[string]string{},
	}
	for _, e := range b.engines {
		if e.IsLimit() || e.Variant != "" {
			continue
		}
		peak.Values[e.Label] = float64(b.peaks[e.Label])
		if e.PID() != m.pids[e.Label] {
			result.Notes[e.Label] = "had to be started again: the rows above are not of one process"
		}
	}
	result.Rows = append(m.rows, peak)
	result.Detail = fmt.Sprintf("%s ConfigMaps, %s pods", grouped(b.data.ConfigMaps), grouped(b.data.Pods))
	if b.data.ConfigMaps > 0 {
		result.Wanted = memoryWanted
	}
	return result
}
