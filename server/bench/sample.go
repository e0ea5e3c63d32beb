package main

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/server/bench/internal/target"
)

// Sample is one run of a workload on one engine: what the workload works with, and where it leaves what it saw. Observe may be called
// concurrently; all else belongs to the goroutine of Workload.Run.
type Sample struct {
	Surroundings
	Engine *target.Engine // nil where etcd alone is measured, or the workload starts engines itself

	// Thorough asks for verifications that take longer than what is verified. The first sample of an engine is thorough.
	Thorough bool

	// Body is a buffer for an answer. It is the same for all samples, so that none pays for its memory.
	Body *bytes.Buffer

	start    func(ctx context.Context, args ...string) (*target.Engine, error)
	children []*process.Child // all that run
	profile  *cpuProfile      // nil unless the measured time is profiled
	mu       sync.Mutex       // guards observed.Latencies
	observed Observation
}

// Observation is what one run of a workload saw.
type Observation struct {
	Latencies []time.Duration // one per operation

	Elapsed      time.Duration
	ServerCPU    time.Duration
	EtcdCPU      time.Duration
	EtcdRequests target.Requests
	EtcdSent     float64        // bytes
	ObjectReads  float64        // of ConfigMaps from etcd, as the server counts them
	Before       process.Memory // of the server; the peak is that since the measured time of the sample before
	Memory       process.Memory // of the server; the peak is that of the measured time

	// PassedOn is how many reads Strata's byte read path left to others, by reason; nil if the engine does not count them.
	PassedOn map[string]float64

	Limit   bool // this is of the limit, which asks nothing of etcd
	Figures []Figure
	Detail  string // one phrase about what was measured, such as the bytes of a list
	Broken  string // how the server failed to do what the workload asks, where that is a result; "" if it did
}

// Figure is a named quantity that a workload reports beside what is measured for all.
type Figure struct {
	Name  string
	Unit  Unit
	Value float64
}

// measuredResource is what most workloads are about.
const measuredResource = "configmaps"

// Measure does the operations and measures meanwhile: time, the CPU time of server and etcd, the requests that etcd got, and the peak of the
// server's memory. It first waits until the processes are quiet. It is called once, and each operation calls Observe.
func (s *Sample) Measure(ctx context.Context, operations func(ctx context.Context) error) error {
	if err := process.WaitQuiet(ctx, s.Sizes.Quieten, s.children...); err != nil {
		return err
	}
	o := &s.observed
	o.Limit = s.Engine.IsLimit()
	var err error
	if o.Before, err = s.Engine.Memory(); err != nil {
		return err
	}
	if err := s.Engine.ResetPeak(); err != nil {
		return err
	}
	misses := 0
	if s.Engine.IsLimit() {
		if misses, err = s.Engine.Misses(ctx); err != nil {
			return err
		}
	}
	if s.profile != nil {
		s.profile.begin(ctx)
	}
	reads := 0.0
	if !s.Engine.IsLimit() {
		if reads, err = s.Engine.ObjectReads(ctx, measuredResource); err != nil {
			return err
		}
	}
	usage, err := s.Etcd.Usage(ctx)
	if err != nil {
		return err
	}
	etcdCPU, err := s.Etcd.CPU()
	if err != nil {
		return err
	}
	serverCPU, err := s.Engine.CPU()
	if err != nil {
		return err
	}
	began := time.Now()

	if err := operations(ctx); err != nil {
		return err
	}

	o.Elapsed = time.Since(began)
	serverCPUAfter, err := s.Engine.CPU()
	if err != nil {
		return err
	}
	etcdCPUAfter, err := s.Etcd.CPU()
	if err != nil {
		return err
	}
	usageAfter, err := s.Etcd.Usage(ctx)
	if err != nil {
		return err
	}
	if o.Memory, err = s.Engine.Memory(); err != nil {
		return err
	}
	o.ServerCPU = serverCPUAfter - serverCPU
	o.EtcdCPU = etcdCPUAfter - etcdCPU
	o.EtcdRequests = usageAfter.Requests.Since(usage.Requests)
	o.EtcdSent = usageAfter.Sent - usage.Sent
	if !s.Engine.IsLimit() {
		readsAfter, err := s.Engine.ObjectReads(ctx, measuredResource)
		if err != nil {
			return err
		}
		o.ObjectReads = readsAfter - reads
	}
	delete(o.EtcdRequests, "Put") // the benchmark's own: API servers write in transactions
	if s.profile != nil {
		if err := s.profile.end(); err != nil {
			return err
		}
	}
	if s.Engine.IsLimit() && !s.Thorough { // the first sample is the one that shows it what to answer
		missesAfter, err := s.Engine.Misses(ctx)
		if err != nil {
			return err
		}
		if missesAfter > misses {
			return fmt.Errorf("the limit had to pass on %d requests", missesAfter-misses)
		}
	}
	return nil
}

// Start starts another process of the engine that is measured, on the same etcd, with further flags, and returns when it is ready. The caller
// must Stop it. It may be called concurrently.
func (s *Sample) Start(ctx context.Context, args ...string) (*target.Engine, error) {
	return s.start(ctx, args...)
}

// KeepHeap keeps the heap profile of this moment, where a profile is asked for, in place of that after the sample. It collects garbage first.
func (s *Sample) KeepHeap(ctx context.Context) error {
	if s.profile == nil {
		return nil
	}
	var err error
	s.profile.heap, err = s.Engine.Profile(ctx, "heap?gc=1")
	return err
}

// Observe counts one operation that took so long.
func (s *Sample) Observe(latency time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observed.Latencies = append(s.observed.Latencies, latency)
}

// ops is the number of operations.
func (o *Observation) ops() int { return len(o.Latencies) }

// Report notes a quantity.
func (s *Sample) Report(name string, unit Unit, value float64) {
	s.observed.Figures = append(s.observed.Figures, Figure{Name: name, Unit: unit, Value: value})
}

// Detail notes a phrase about what was measured.
func (s *Sample) Detail(format string, args ...any) { s.observed.Detail = fmt.Sprintf(format, args...) }

// Broken notes that the server gave up what it was asked to do.
func (s *Sample) Broken(format string, args ...any) { s.observed.Broken = fmt.Sprintf(format, args...) }
