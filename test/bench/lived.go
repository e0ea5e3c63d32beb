package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"time"

	"github.com/stratakube/strata/test/bench/internal/target"
)

// lived is a sequence of workloads that one process of each engine answers, one after the other, as
// a server of a cluster does. Each engine has an etcd of its own with the same data, so an engine
// that follows writes does not disturb the measurement of another. Its fields are flags.
type lived struct {
	data   contents
	repeat int
}

func (l *lived) flags(fs *flag.FlagSet) {
	l.data = cluster
	fs.IntVar(&l.data.pods.published, "pods", l.data.pods.published, "pods, of 2.5 KB, in namespaces of 1,000, 20 on each node")
	fs.IntVar(&l.data.things.published, "things", l.data.things.published, "custom resources, of 2.5 KB")
	fs.IntVar(&l.data.configMaps.published, "configmaps", l.data.configMaps.published, "ConfigMaps, of 1 KB")
	fs.IntVar(&l.repeat, "repeat", 1, "how often the sequence is run")
}

// livedRows are the workloads of the sequence.
func livedRows() []Workload {
	return slices.DeleteFunc(slices.Clone(workloads), func(w Workload) bool { return !w.Lived })
}

// run runs the sequence: first the workloads on fresh processes.
func (l *lived) run(ctx context.Context, r *runner) error {
	data, rest := l.data.at(r.config.Scale), settled.at(r.config.Scale)
	var sequence []Workload
	for _, w := range r.config.Workloads {
		if !w.Fresh {
			sequence = append(sequence, w)
			continue
		}
		for _, spec := range r.config.Engines {
			if err := r.measureFresh(ctx, data, w, spec, 0); err != nil {
				return err
			}
		}
	}
	if len(sequence) == 0 {
		return nil
	}
	lives := map[string]*bench{}
	after := &livedMemory{result: Result{Name: "memory", Title: "the processes after the sequence", Notes: map[string]string{},
		Wanted: []Bound{toUpstream(fmt.Sprintf("resident %v later", rest), 0.35)}}, first: map[string]*target.Engine{}}
	for _, spec := range r.config.Engines {
		b, err := r.open(ctx, data, "etcd-"+spec.Label)
		if err != nil {
			return err
		}
		defer b.close()
		if after.first[spec.Label], err = b.engine(ctx, spec); err != nil {
			return err
		}
		lives[spec.Label] = b
	}
	defer func() { r.memory = append(r.memory, after.result) }()
	for round := range l.repeat {
		for _, w := range sequence {
			if err := r.measureLived(ctx, w, lives); err != nil {
				return err
			}
		}
		suffix := ""
		if l.repeat > 1 {
			suffix = fmt.Sprintf(", after sequence %d", round+1)
		}
		if err := after.note(ctx, lives, "at the end"+suffix); err != nil {
			return err
		}
		r.steps.step("rest")
		if !waitUntil(ctx, time.Now().Add(rest)) {
			return context.Cause(ctx)
		}
		r.steps.done("done")
		if err := after.note(ctx, lives, fmt.Sprintf("%v later%s", rest, suffix)); err != nil {
			return err
		}
	}
	return nil
}

// measureLived measures a workload on each living engine in turn.
func (r *runner) measureLived(ctx context.Context, w Workload, lives map[string]*bench) error {
	for _, b := range lives {
		if err := b.compact(ctx); err != nil {
			return err
		}
	}
	for run := range w.runs(r.config.Runs) {
		for _, spec := range r.config.Engines {
			b := lives[spec.Label]
			if w.Change != nil {
				if err := w.Change(ctx, b.surroundings()); err != nil {
					return err
				}
			}
			if err := b.measure(ctx, w, spec, run, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// livedMemory is the result with the state of the processes.
type livedMemory struct {
	result Result
	first  map[string]*target.Engine // the processes of the start
}

// note adds rows with the memory and the goroutines of the engines.
func (m *livedMemory) note(ctx context.Context, lives map[string]*bench, when string) error {
	rows := []Row{{Name: "resident " + when, Unit: Bytes}, {Name: "heap " + when, Unit: Bytes}, {Name: "goroutines " + when, Unit: Count}}
	for i := range rows {
		rows[i].Values = map[string]float64{}
	}
	for label, b := range lives {
		if len(b.engines) == 0 || b.engines[0] != m.first[label] || b.engines[0].Ended() != nil {
			m.result.Notes[label] = "had to be started again: its rows are not of one process"
			continue
		}
		memory, err := b.engines[0].Memory()
		if err != nil {
			return err
		}
		state, err := b.engines[0].State(ctx) // collects garbage: after the resident memory
		if err != nil {
			return errors.Join(err, b.engines[0].Ended())
		}
		for i, value := range []float64{float64(memory.Resident), float64(state.Heap), float64(state.Goroutines)} {
			rows[i].Values[label] = value
		}
	}
	m.result.Rows = append(m.result.Rows, rows...)
	return nil
}
