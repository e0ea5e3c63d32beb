package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/stratakube/strata/server/bench/internal/dataset"
	"github.com/stratakube/strata/server/bench/internal/stats"
	"github.com/stratakube/strata/server/bench/internal/target"
)

// runner takes all measurements. It is used by one goroutine.
type runner struct {
	config      Config
	credentials *target.Credentials
	runDir      string // logs, credentials and the copy of etcd's data; removed at the end unless something failed
	progress    *progress

	observed map[string]map[string][]Observation // by workload and engine
	failed   map[string]map[string]error         // the same; the first failure
}

// sampleTimeout bounds one run of a workload on one engine: the slowest that is known takes half a minute.
const sampleTimeout = 5 * time.Minute

// run measures all selected workloads on all engines.
func (r *runner) run(ctx context.Context) error {
	r.observed, r.failed = map[string]map[string][]Observation{}, map[string]map[string]error{}
	for _, w := range r.config.Workloads {
		r.observed[w.Name], r.failed[w.Name] = map[string][]Observation{}, map[string]error{}
	}
	// Workloads on the same data share an etcd.
	var specs []dataset.Spec
	bySpec := map[dataset.Spec][]Workload{}
	for _, w := range r.config.Workloads {
		spec := w.Dataset(r.config.Sizes)
		if bySpec[spec] == nil {
			specs = append(specs, spec)
		}
		bySpec[spec] = append(bySpec[spec], w)
	}
	for _, spec := range specs {
		if err := r.runOn(ctx, spec, bySpec[spec]); err != nil {
			return err
		}
	}
	return nil
}

// runOn measures workloads on an etcd that holds what spec says.
func (r *runner) runOn(ctx context.Context, spec dataset.Spec, workloads []Workload) error {
	dataDir := filepath.Join(r.runDir, "etcd")
	defer os.RemoveAll(dataDir)
	if err := provideData(ctx, r.config, spec, dataDir, r.runDir, r.progress); err != nil {
		return err
	}
	etcd, err := target.StartEtcd(ctx, r.config.Binary, dataDir, r.runDir)
	if err != nil {
		return err
	}
	defer etcd.Stop()
	b := &bench{runner: r, etcd: etcd, data: spec}
	defer b.stopAll()

	var alone, together []Workload
	for _, w := range workloads {
		if w.Alone {
			alone = append(alone, w)
		} else {
			together = append(together, w)
		}
	}
	if err := b.runAlone(ctx, alone); err != nil {
		return err
	}
	return b.runTogether(ctx, together)
}

// bench is an etcd with data and the engines that run on it.
type bench struct {
	*runner
	etcd    *target.Etcd
	data    dataset.Spec
	engines []*target.Engine // that run
	samples int              // taken so far
}

// runAlone measures workloads that need an engine of their own: for each run and engine, a fresh process does all of them in order. What the
// session before wrote is still in etcd's history when an engine starts, as the last minutes are in the history of a cluster in use; what
// earlier ones wrote is compacted away.
func (b *bench) runAlone(ctx context.Context, workloads []Workload) error {
	if len(workloads) == 0 {
		return nil
	}
	before := int64(1) // the revision at which the last session began
	for run := range b.config.Runs {
		for _, spec := range b.config.Engines {
			if err := dataset.Compact(ctx, b.etcd.Client, before); err != nil {
				return err
			}
			var err error
			if before, err = dataset.Revision(ctx, b.etcd.Client); err != nil {
				return err
			}
			for _, w := range workloads {
				if err := b.measure(ctx, w, spec, run, true); err != nil {
					return err
				}
			}
			b.stopAll()
		}
	}
	if b.config.ProfileDir == "" {
		return nil
	}
	for _, spec := range b.config.Engines {
		for _, w := range workloads {
			if err := b.profile(ctx, w, spec); err != nil {
				return err
			}
		}
		b.stopAll()
	}
	return nil
}

// runTogether measures workloads while all engines run: for each workload and run, one engine after the other.
func (b *bench) runTogether(ctx context.Context, workloads []Workload) error {
	for _, w := range workloads {
		for run := -1; run < b.config.Runs; run++ { // run -1 warms up, and does not count
			for _, spec := range b.config.Engines {
				// All must run before the first is measured: a start keeps the machine busy.
				for _, each := range b.config.Engines {
					_, err := b.engine(ctx, each)
					if ctx.Err() != nil {
						return context.Cause(ctx)
					}
					if err != nil {
						b.fail(w, each, err)
					}
				}
				if err := b.measure(ctx, w, spec, run, run >= 0); err != nil {
					return err
				}
			}
		}
		if b.config.ProfileDir == "" {
			continue
		}
		for _, spec := range b.config.Engines {
			if err := b.profile(ctx, w, spec); err != nil {
				return err
			}
		}
	}
	b.stopAll()
	return nil
}

// measure takes one sample. A failure of the engine is noted, and the engine is not measured by this workload again; an error means that the
// benchmark cannot go on.
func (b *bench) measure(ctx context.Context, w Workload, spec target.EngineSpec, run int, counts bool) error {
	if b.failed[w.Name][spec.Label] != nil {
		return nil
	}
	step := fmt.Sprintf("%-14s %-10s", w.Name, spec.Label)
	if counts {
		step += fmt.Sprintf(" %d/%d", run+1, b.config.Runs)
	} else {
		step += " warm"
	}
	b.progress.step("%s", step)
	observed, err := b.sample(ctx, w, spec)
	if err == nil {
		b.progress.done("%s", outcome(observed))
		if counts {
			b.observed[w.Name][spec.Label] = append(b.observed[w.Name][spec.Label], observed)
		}
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if ended := b.etcd.Ended(); ended != nil {
		return ended
	}
	b.progress.done("FAILED: %v", err)
	b.fail(w, spec, err)
	return nil
}

func (b *bench) fail(w Workload, spec target.EngineSpec, err error) {
	if b.failed[w.Name][spec.Label] == nil {
		b.failed[w.Name][spec.Label] = err
	}
}

// sample runs a workload once on an engine, which it starts if necessary.
func (b *bench) sample(ctx context.Context, w Workload, spec target.EngineSpec) (Observation, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, sampleTimeout, fmt.Errorf("%s took longer than %v", w.Name, sampleTimeout))
	defer cancel()
	engine, err := b.engine(ctx, spec)
	if err != nil {
		return Observation{}, err
	}
	b.samples++
	s := &Sample{
		Engine: engine,
		Etcd:   b.etcd,
		Data:   b.data,
		Sizes:  b.config.Sizes,
		Number: b.samples,
		Rand:   rand.New(rand.NewPCG(uint64(b.samples), 0)),
	}
	s.children = append(s.children, b.etcd.Child)
	for _, e := range b.engines {
		s.children = append(s.children, e.Child)
	}
	if err := w.Run(ctx, s); err != nil {
		return Observation{}, errors.Join(err, engine.Ended())
	}
	return s.observed, nil
}

// engine returns the running engine of spec, and starts it if it does not run or has ended.
func (b *bench) engine(ctx context.Context, spec target.EngineSpec) (*target.Engine, error) {
	for i, e := range b.engines {
		if e.Label != spec.Label {
			continue
		}
		if e.Ended() == nil {
			return e, nil
		}
		b.engines = append(b.engines[:i], b.engines[i+1:]...)
		break
	}
	firstGet := configMapsPath + "/" + dataset.ConfigMapName(0)
	if b.data.ConfigMaps == 0 {
		firstGet = "/api/v1/namespaces/" + dataset.PodNamespace(0, b.data.Namespaces) + "/pods/" + dataset.PodName(0)
	}
	e, err := target.StartEngine(ctx, spec, b.etcd, b.credentials, firstGet, b.runDir)
	if err != nil {
		return nil, err
	}
	b.engines = append(b.engines, e)
	return e, nil
}

func (b *bench) stopAll() {
	for _, e := range b.engines {
		e.Stop()
	}
	b.engines = nil
}

// outcome is what progress says about a sample.
func outcome(o Observation) string {
	switch {
	case o.Broken != "":
		return "BROKEN: " + o.Broken
	case len(o.Latencies) > 0:
		p := stats.Percentiles([][]time.Duration{o.Latencies}, 1, 0.5, 0.99)
		return fmt.Sprintf("p50 %s, p99 %s, server CPU %s each", Seconds.Format(p[0].Seconds()), Seconds.Format(p[1].Seconds()),
			Seconds.Format(o.ServerCPU.Seconds()/float64(o.ops())))
	case len(o.Figures) > 0:
		f := o.Figures[0]
		return f.Name + " " + f.Unit.Format(f.Value)
	}
	return "done"
}
