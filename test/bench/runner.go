package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// runner takes all measurements. It is used by one goroutine.
type runner struct {
	config      Config
	credentials *target.Credentials
	// logs, credentials and the copy of etcd's data; removed at the end unless something failed
	runDir string
	steps  *steps

	observed map[string]map[string][]Observation // by workload and engine
	failed   map[string]map[string]error         // the same; the first failure
	memory   []Result                            // of the processes that answered a sequence
	body     bytes.Buffer                        // Sample.Body
}

// sampleTimeout bounds one run of a workload on one engine: the slowest serves a fleet of clients.
const sampleTimeout = 20 * time.Minute

// run measures all selected workloads on all engines.
func (r *runner) run(ctx context.Context) error {
	r.observed, r.failed = map[string]map[string][]Observation{}, map[string]map[string]error{}
	for _, w := range r.config.Workloads {
		r.observed[w.Name], r.failed[w.Name] = map[string][]Observation{}, map[string]error{}
	}
	if r.config.lived != nil {
		return r.config.lived.run(ctx, r)
	}
	// Workloads on the same data share an etcd.
	var specs []dataset.Spec
	bySpec := map[dataset.Spec][]Workload{}
	for _, w := range r.config.Workloads {
		spec := w.Dataset.at(r.config.Scale)
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

// summarize adds the results to the report, and returns a phrase for each failed measurement.
func (r *runner) summarize(report *Report) (failures []string) {
	for _, w := range r.config.Workloads {
		result := summarize(w, report.Engines, r.observed[w.Name], r.failed[w.Name])
		if len(result.Rows) > 0 || len(result.Notes) > 0 {
			report.Results = append(report.Results, result)
		}
		for engine := range r.failed[w.Name] {
			failures = append(failures, w.Name+" on "+engine)
		}
		for _, runs := range r.observed[w.Name] {
			if reasons := passedOnReasons(runs); reasons != "" && !w.PassesOn {
				failures = append(failures, fmt.Sprintf("%s: reads were passed on that the byte read path must answer (%s)", w.Name, reasons))
			}
		}
	}
	report.Results = append(report.Results, r.memory...)
	return failures
}

// open returns an etcd with the objects of spec, whose data and log have a name. The caller must
// close it.
func (r *runner) open(ctx context.Context, spec dataset.Spec, name string) (*bench, error) {
	dir := filepath.Join(r.runDir, name)
	if err := r.provideData(ctx, spec, dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	etcd, err := target.StartEtcd(ctx, r.config.Binary, dir, r.runDir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return &bench{runner: r, etcd: etcd, dir: dir, data: spec}, nil
}

// measureFresh measures a workload on an etcd and an engine of its own.
func (r *runner) measureFresh(ctx context.Context, data dataset.Spec, w Workload, spec target.EngineSpec, run int) error {
	b, err := r.open(ctx, data, "etcd-"+spec.Label)
	if err != nil {
		return err
	}
	defer b.close()
	return b.measure(ctx, w, spec, run, true)
}

// close stops the engines and the etcd.
func (b *bench) close() {
	b.stopAll()
	b.etcd.Stop()
	_ = os.RemoveAll(b.dir) // the next run removes it otherwise
}

// runOn measures workloads on an etcd with the objects of spec.
func (r *runner) runOn(ctx context.Context, spec dataset.Spec, workloads []Workload) error {
	b, err := r.open(ctx, spec, "etcd")
	if err != nil {
		return err
	}
	defer b.close()
	var together []Workload
	for _, w := range workloads {
		if !w.Alone {
			together = append(together, w)
		} else if err := b.runAlone(ctx, w); err != nil {
			return err
		}
	}
	for _, w := range together {
		if err := b.runInTurns(ctx, w); err != nil {
			return err
		}
	}
	return nil
}

// bench is an etcd with data and the engines that run on it.
type bench struct {
	*runner
	etcd      *target.Etcd
	dir       string // of its data
	data      dataset.Spec
	engines   []*target.Engine // running engines
	compacted int64            // the revision of the next compaction
	samples   int              // taken so far
	started   atomic.Int64     // engines that workloads started themselves
}

// compact drops the history from before the last call, as a server does at intervals.
func (b *bench) compact(ctx context.Context) error {
	if err := dataset.Compact(ctx, b.etcd.Client, max(1, b.compacted)); err != nil {
		return err
	}
	var err error
	b.compacted, err = dataset.Revision(ctx, b.etcd.Client)
	return err
}

// runAlone measures a workload that needs an engine of its own: each run of each engine is a fresh
// process. Writes of the previous one are still in etcd's history when an engine starts, as the
// last minutes are in the history of a cluster in use; earlier writes are compacted.
func (b *bench) runAlone(ctx context.Context, w Workload) error {
	for run := range w.runs(b.config.Runs) {
		for _, spec := range b.config.Engines {
			if w.Fresh {
				if err := b.measureFresh(ctx, b.data, w, spec, run); err != nil {
					return err
				}
				continue
			}
			if err := b.compact(ctx); err != nil {
				return err
			}
			if err := b.measure(ctx, w, spec, run, true); err != nil {
				return err
			}
			b.stopAll()
		}
	}
	return nil
}

// runInTurns measures one workload while all engines run.
func (b *bench) runInTurns(ctx context.Context, w Workload) error {
	for run := -1; run < w.runs(b.config.Runs); run++ {
		// run -1 is the warm-up, which is not counted
		// All must run before the first is measured: a start keeps the machine busy.
		if b.startAll(ctx, w); ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if w.Change != nil {
			if err := w.Change(ctx, b.surroundings()); err != nil {
				return err
			}
		}
		for _, spec := range b.config.Engines {
			if err := b.measure(ctx, w, spec, run, run >= 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// startAll starts the engines that do not run. A failed start is recorded as a failure of the
// engine.
func (b *bench) startAll(ctx context.Context, w Workload) {
	for _, spec := range b.config.Engines {
		if b.failed[w.Name][spec.Label] != nil {
			continue
		}
		if _, err := b.engine(ctx, spec); err != nil && ctx.Err() == nil {
			b.steps.step("%-14s %-10s start", w.Name, spec.Label)
			b.fail(w, spec, err)
		}
	}
}

// Kinds of engines, which are also their labels unless -engines sets others. The byte read path and
// its counters belong to strataEngine. upstreamEngine is kube-apiserver's cacher in the binary of
// Strata, stockEngine a kube-apiserver that Kubernetes' own source was built to.
const (
	strataEngine   = "strata"
	upstreamEngine = "upstream"
	stockEngine    = target.StockEngine
)

// surroundings returns the Surroundings of the next use of a workload.
func (b *bench) surroundings() *Surroundings {
	b.samples++
	return &Surroundings{
		Etcd:   b.etcd,
		Dir:    b.runDir,
		Data:   b.data,
		Scale:  b.config.Scale,
		Number: b.samples,
		Rand:   rand.New(rand.NewPCG(uint64(b.samples), 0)),
	}
}

// children are the running processes.
func (b *bench) children() []*process.Child {
	children := []*process.Child{b.etcd.Child}
	for _, e := range b.engines {
		children = append(children, e.Child)
	}
	return children
}

// measure takes one sample. A failure of the engine is recorded, and the engine is not measured by
// this workload again; an error means that the benchmark cannot continue.
func (b *bench) measure(ctx context.Context, w Workload, spec target.EngineSpec, run int, counts bool) error {
	if b.failed[w.Name][spec.Label] != nil {
		return nil
	}
	step := fmt.Sprintf("%-14s %-10s", w.Name, spec.Label)
	if counts {
		step += fmt.Sprintf(" %d/%d", run+1, w.runs(b.config.Runs))
	} else {
		step += " warm"
	}
	b.steps.step("%s", step)
	observed, err := b.sample(ctx, w, spec)
	if err == nil {
		b.steps.done("%s", outcome(observed))
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
	b.fail(w, spec, err)
	return nil
}

func (b *bench) fail(w Workload, spec target.EngineSpec, err error) {
	b.steps.done("FAILED: %v", err)
	b.failed[w.Name][spec.Label] = err
}

// sample runs a workload once on an engine, which it starts if necessary.
func (b *bench) sample(ctx context.Context, w Workload, spec target.EngineSpec) (Observation, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, sampleTimeout, fmt.Errorf("%s took longer than %v", w.Name, sampleTimeout))
	defer cancel()
	s := &Sample{Surroundings: *b.surroundings(), Body: &b.body, strata: b.config.Binary}
	s.Start = func(ctx context.Context, env ...string) (*target.Engine, error) { return b.startOwn(ctx, w, spec, env) }
	if w.Starts {
		err := w.Run(ctx, s)
		return s.observed, err
	}
	engine, err := b.engine(ctx, spec)
	if err != nil {
		return Observation{}, err
	}
	s.Engine, s.children = engine, b.children()
	before, err := engine.PassedOn(ctx)
	if err != nil {
		return Observation{}, err
	}
	if err := w.Run(ctx, s); err != nil {
		return Observation{}, errors.Join(err, engine.Ended())
	}
	if s.observed.PassedOn, err = engine.PassedOn(ctx); err != nil {
		return Observation{}, err
	}
	for reason, n := range before {
		if s.observed.PassedOn[reason] -= n; s.observed.PassedOn[reason] == 0 {
			delete(s.observed.PassedOn, reason)
		}
	}
	// Tests do not judge these: on a busy machine a GET goes to etcd when memory is 250 ms late.
	if b.config.Scale == tiny {
		delete(s.observed.PassedOn, "etcd")
	}
	return s.observed, nil
}

// engine returns the running engine of spec, and starts it if it does not run or has ended.
func (b *bench) engine(ctx context.Context, spec target.EngineSpec) (*target.Engine, error) {
	i := slices.IndexFunc(b.engines, func(e *target.Engine) bool { return e.Label == spec.Label })
	if i >= 0 {
		if b.engines[i].Ended() == nil {
			return b.engines[i], nil
		}
		b.engines = slices.Delete(b.engines, i, i+1)
	}
	e, err := target.StartEngine(ctx, spec, b.etcd, b.credentials, b.runDir)
	if err != nil {
		return nil, err
	}
	b.engines = append(b.engines, e)
	conn := e.Dial()
	defer conn.Close()
	if b.data.ConfigMaps > 0 && err == nil {
		// the server's own ConfigMap, which LISTs and checks count
		err = e.Poll(ctx, conn, "/api/v1/namespaces/kube-system/configmaps/kube-apiserver-legacy-service-account-token-tracking")
	}
	if b.data.Things > 0 && err == nil {
		// upstream loads custom resources at their first request, and refuses lists meanwhile
		err = e.Poll(ctx, conn, dataset.ThingsPath+"?fieldSelector=spec.color%3D"+dataset.Color(0))
	}
	return e, err
}

// startOwn starts an engine for a workload that starts its engines itself, with a log of its own.
// It may be called concurrently.
func (b *bench) startOwn(ctx context.Context, w Workload, spec target.EngineSpec, env []string) (*target.Engine, error) {
	spec.LogName = fmt.Sprintf("%s-%s-%d", spec.Label, w.Name, b.started.Add(1))
	spec.Env = env
	return target.StartEngine(ctx, spec, b.etcd, b.credentials, b.runDir)
}

func (b *bench) stopAll() {
	for _, e := range b.engines {
		e.Stop()
	}
	b.engines = nil
}

// outcome is the text of progress for a sample.
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
