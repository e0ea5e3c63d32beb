package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
)

// managedWorkloads are LISTs of realistic objects with managed fields, and without, which upstream ignores.
var managedWorkloads = []Workload{
	managedWorkload("list-managed", "pods with managed fields of three managers", "JSON", managedPods, managedLoad{
		path: "/api/v1/pods", want: func(s *Sample) int { return s.Data.Pods }, format: jsonFormat}),
	managedWorkload("list-managed-protobuf", "pods with managed fields of three managers", "protobuf", managedPods, managedLoad{
		path: "/api/v1/pods", want: func(s *Sample) int { return s.Data.Pods }, format: protobufFormat}),
	managedWorkload("list-managed-custom", "custom resources with managed fields of two managers", "JSON", managedThings, managedLoad{
		path: dataset.Things.Path(), want: func(s *Sample) int { return s.Data.Things }, format: customJSON}),
}

func managedWorkload(name, objects, form string, data func(Sizes) dataset.Spec, load managedLoad) Workload {
	return Workload{
		Name: name, Title: "LIST " + objects + ", and without them on request, " + form, Op: "LIST", Dataset: data,
		Alone: true, Session: name, Runs: 3,
		Variant: "opt-out", Flags: map[string][]string{strataEngine: {"--strata-feature-gates=ManagedFieldsOptOut=true"}},
		Run:    load.run,
		Wanted: []Bound{absolute(bytesWithout, 0.6), absolute(cpuWithout, 0.7)},
	}
}

// Names of measures that have bounds.
const (
	bytesWithout = "bytes without managed fields / with"
	cpuWithout   = "server CPU without managed fields / with"
)

// managedPods and managedThings are the data of these workloads.
func managedPods(s Sizes) dataset.Spec {
	return dataset.Spec{Pods: s.OtherPods, Nodes: max(1, s.OtherPods/podsPerNode), Namespaces: max(1, s.OtherPods/podsPerNamespace), Managed: true}
}

func managedThings(s Sizes) dataset.Spec {
	return dataset.Spec{Things: s.OtherPods, Namespaces: 1, Managed: true}
}

// managedLoad is a LIST of objects with managed fields.
type managedLoad struct {
	path   string
	want   func(*Sample) int // objects
	format format
}

// run lists all objects as they are and without managed fields, in turns, after one LIST of each form.
func (l managedLoad) run(ctx context.Context, s *Sample) error {
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	forms := []*managedForm{
		{name: "with managed fields", format: l.format},
		{name: "without managed fields", format: format{l.format.accept + ";drop=metadata.managedFields", l.format.read}},
	}
	const lists = 9
	err := s.Measure(ctx, func(ctx context.Context) error {
		for i := range 1 + lists {
			for _, f := range forms {
				before, err := s.Engine.CPU()
				if err != nil {
					return err
				}
				began := time.Now()
				list, err := doList(ctx, conn, l.path, f.format)
				if err != nil {
					return err
				}
				took := time.Since(began)
				after, err := s.Engine.CPU()
				if err != nil {
					return err
				}
				if want := l.want(s); list.Objects != want {
					return fmt.Errorf("LIST %s has %d objects, want %d", l.path, list.Objects, want)
				}
				if f.bytes = list.Bytes; i == 0 {
					s.Report("first LIST "+f.name+", CPU", Seconds, (after - before).Seconds())
					continue
				}
				s.Observe(took)
				f.took, f.cpu = append(f.took, took), append(f.cpu, after-before)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, f := range forms {
		slices.Sort(f.took)
		slices.Sort(f.cpu)
		s.Report("LIST "+f.name+" p50", Seconds, stats.Percentile(f.took, 0.5).Seconds())
		s.Report("  server CPU "+f.name, Seconds, stats.Percentile(f.cpu, 0.5).Seconds())
		s.Report("  bytes "+f.name, Bytes, float64(f.bytes))
	}
	s.Detail("%s objects, %s each", grouped(l.want(s)), Bytes.Format(float64(forms[0].bytes)/float64(l.want(s))))
	s.Report(bytesWithout, Count, float64(forms[1].bytes)/float64(forms[0].bytes))
	s.Report(cpuWithout, Count, stats.Percentile(forms[1].cpu, 0.5).Seconds()/stats.Percentile(forms[0].cpu, 0.5).Seconds())
	return nil
}

// managedForm is a form of the LIST, and its measurements.
type managedForm struct {
	name      string
	format    format
	took, cpu []time.Duration
	bytes     int64
}
