package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/stratakube/strata/server/bench/internal/dataset"
	"github.com/stratakube/strata/server/bench/internal/stats"
	"github.com/stratakube/strata/server/bench/internal/wire"
)

// managedWorkloads are LISTs of realistic pods with managed fields, and without, which upstream ignores.
var managedWorkloads = []Workload{{
	Name: "list-managed", Title: "LIST pods with managed fields of three managers, and without them on request, JSON", Op: "LIST", Dataset: managedPods,
	Alone: true, Session: "managed", Runs: 3,
	Variant: "opt-out", Flags: map[string][]string{strataEngine: {"--strata-feature-gates=ManagedFieldsOptOut=true"}},
	Run:    measureManaged,
	Wanted: []Bound{absolute(bytesWithout, 0.6), absolute(cpuWithout, 0.7)},
}}

// Names of measures that have bounds.
const (
	bytesWithout = "bytes without managed fields / with"
	cpuWithout   = "server CPU without managed fields / with"
)

// managedPods is the data of these workloads.
func managedPods(s Sizes) dataset.Spec {
	return dataset.Spec{Pods: s.OtherPods, Nodes: max(1, s.OtherPods/podsPerNode), Namespaces: max(1, s.OtherPods/podsPerNamespace), Managed: true}
}

// measureManaged lists all pods as they are and without managed fields, in turns, after one LIST of each form.
func measureManaged(ctx context.Context, s *Sample) error {
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	forms := []*managedForm{
		{name: "with managed fields", format: jsonFormat},
		{name: "without managed fields", format: format{"application/json;drop=metadata.managedFields", wire.ReadJSONList}},
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
				list, err := doList(ctx, conn, "/api/v1/pods", f.format)
				if err != nil {
					return err
				}
				took := time.Since(began)
				after, err := s.Engine.CPU()
				if err != nil {
					return err
				}
				if list.Objects != s.Data.Pods {
					return fmt.Errorf("LIST has %d pods, want %d", list.Objects, s.Data.Pods)
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
		s.Report("  server CPU", Seconds, stats.Percentile(f.cpu, 0.5).Seconds())
		s.Report("  bytes", Bytes, float64(f.bytes))
	}
	s.Detail("%s pods, %s each in JSON", grouped(s.Data.Pods), Bytes.Format(float64(forms[0].bytes)/float64(s.Data.Pods)))
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
