package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Sample is one run of a workload on one engine: the inputs of the workload and its observations.
// Observe may be called concurrently; everything else is owned by the goroutine of Workload.Run.
type Sample struct {
	Surroundings
	Engine *target.Engine // nil where etcd alone is measured, or the workload starts engines itself

	// Body is a buffer for an answer. All samples share it, so that no sample includes its
	// allocation.
	Body *bytes.Buffer

	// Start starts another process of the engine that is measured, on the same etcd, with further
	// variables of the environment, as name=value, and returns when it is ready. The caller must
	// Stop it. It may be called concurrently.
	Start func(ctx context.Context, env ...string) (*target.Engine, error)

	strata   string           // the executable
	children []*process.Child // all that run
	mu       sync.Mutex       // guards observed.Latencies
	observed Observation
}

// Observation contains the measurements of one run of a workload.
type Observation struct {
	Latencies []time.Duration // one per operation

	Elapsed      time.Duration
	ServerCPU    time.Duration
	EtcdCPU      time.Duration
	EtcdRequests float64
	EtcdSent     float64 // bytes
	// of the server; the peak is that since the measured time of the sample before
	Before process.Memory
	Memory process.Memory // of the server; the peak is that of the measured time

	// PassedOn is the number of reads that Strata's byte read path passed on, by reason; nil if the
	// engine does not count them.
	PassedOn map[string]float64

	Figures []Figure
	Detail  string // one phrase about the measurement, such as the bytes of a list
	Broken  string // failure of the server's operation, where that is a result; "" if it succeeded
}

// Figure is a named quantity that a workload reports in addition to the common measures.
type Figure struct {
	Name  string
	Unit  Unit
	Value float64
}

// reading is the state of the measured processes at one time.
type reading struct {
	at           time.Time
	server, etcd time.Duration // CPU time
	usage        target.Usage  // of etcd
}

// read takes a reading. The CPU time of the server is the last figure before the operations, and
// the first after them: the others cost CPU time.
func (s *Sample) read(ctx context.Context, before bool) (r reading, err error) {
	figures := []func() error{
		func() (err error) { r.usage, err = s.Etcd.Usage(ctx); return err },
		func() (err error) { r.etcd, err = s.Etcd.CPU(); return err },
		func() (err error) { r.server, err = s.Engine.CPU(); return err },
	}
	if !before {
		r.at = time.Now()
		slices.Reverse(figures)
	}
	for _, figure := range figures {
		if err := figure(); err != nil {
			return r, err
		}
	}
	if before {
		r.at = time.Now()
	}
	return r, nil
}

// Measure runs the operations and measures time, the CPU time of server and etcd, the requests to
// etcd, and the peak of the server's memory. It first waits until the processes are quiet. It is
// called once, and each operation calls Observe.
func (s *Sample) Measure(ctx context.Context, operations func(ctx context.Context) error) error {
	if err := process.WaitQuiet(ctx, quieten.at(s.Scale), s.children...); err != nil {
		return err
	}
	o := &s.observed
	var err error
	if o.Before, err = s.Engine.Memory(); err != nil {
		return err
	}
	if err := s.Engine.ResetPeak(); err != nil {
		return err
	}
	before, err := s.read(ctx, true)
	if err != nil {
		return err
	}
	if err := operations(ctx); err != nil {
		return err
	}
	after, err := s.read(ctx, false)
	if err != nil {
		return err
	}
	if o.Memory, err = s.Engine.Memory(); err != nil {
		return err
	}
	o.Elapsed = after.at.Sub(before.at)
	o.ServerCPU, o.EtcdCPU = after.server-before.server, after.etcd-before.etcd
	o.EtcdRequests = after.usage.Requests - before.usage.Requests
	o.EtcdSent = after.usage.Sent - before.usage.Sent
	return nil
}

// rest waits until the processes are quiet, and then for a time.
func (s *Sample) rest(ctx context.Context, pause time.Duration) error {
	if err := process.WaitQuiet(ctx, quieten.at(s.Scale), s.children...); err != nil {
		return err
	}
	if !waitUntil(ctx, time.Now().Add(pause)) {
		return context.Cause(ctx)
	}
	return nil
}

// Observe records one operation with its latency.
func (s *Sample) Observe(latency time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observed.Latencies = append(s.observed.Latencies, latency)
}

// ops is the number of operations.
func (o *Observation) ops() int { return len(o.Latencies) }

// Report records a quantity.
func (s *Sample) Report(name string, unit Unit, value float64) {
	s.observed.Figures = append(s.observed.Figures, Figure{Name: name, Unit: unit, Value: value})
}

// Detail records a phrase that describes the measurement.
func (s *Sample) Detail(format string, args ...any) { s.observed.Detail = fmt.Sprintf(format, args...) }

// Broken records that the server aborted the operation.
func (s *Sample) Broken(format string, args ...any) { s.observed.Broken = fmt.Sprintf(format, args...) }

// passedOnReasons lists the reads passed on in all runs, for example "cbor 2, table 5"; "" means
// none.
func passedOnReasons(runs []Observation) string {
	total := map[string]float64{}
	for _, run := range runs {
		for reason, n := range run.PassedOn {
			total[reason] += n
		}
	}
	var reasons []string
	for _, reason := range slices.Sorted(maps.Keys(total)) {
		reasons = append(reasons, fmt.Sprintf("%s %.0f", reason, total[reason]))
	}
	return strings.Join(reasons, ", ")
}
