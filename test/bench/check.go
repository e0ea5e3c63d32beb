package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Names of measures that have bounds.
const (
	checkCPU   = "server CPU of a check"
	checkAbove = "extra memory at the peak"
	checkSent  = "etcd sent"
)

// checkWorkloads measure the cost of comparing memory with etcd.
var checkWorkloads = []Workload{{
	Name: checkName, Title: "consistency check of all ConfigMaps", Op: "check", Dataset: onlyConfigMaps,
	Alone: true, Session: "check", Runs: 1,
	Run:    measureCheck,
	Wanted: []Bound{absolute(checkCPU, 1), absolute(checkAbove, 30e6), absolute(checkSent, 40e6)},
}}

const (
	checkName = "check"

	// checkSamples is the number of checks on demand of a median, after the first.
	checkSamples = 5
	// checkStep is the interval at which an engine that checks on a schedule is observed; a step in which etcd sends more than checkBytes
	// belongs to a check, which ends after checkSteps without that.
	checkStep  = 250 * time.Millisecond
	checkBytes = 1e6
	checkSteps = 8
)

// onlyConfigMaps is the data of workloads that must not mistake another resource for ConfigMaps.
func onlyConfigMaps(s Sizes) dataset.Spec { return dataset.Spec{ConfigMaps: s.Objects, Namespaces: 1} }

// measureCheck measures checks of Strata on demand. Upstream's checker has no such request: it compares 5 to 7.5 minutes after the
// start, and is observed from outside meanwhile, if Sizes.CheckWait is long enough.
func measureCheck(ctx context.Context, s *Sample) error {
	want, err := stored("configmaps")(ctx, s)
	if err != nil {
		return err
	}
	s.Detail("%s objects", grouped(want))
	rest, err := s.holds(ctx)
	if err != nil {
		return err
	}
	if s.Engine.Engine == "strata" {
		return s.checkOnDemand(ctx, want, float64(rest.resident))
	}
	if s.Sizes.CheckWait == 0 {
		return nil
	}
	cost, err := s.awaitCheck(ctx)
	if err != nil {
		return err
	}
	s.reportChecks([]listCost{cost}, float64(rest.resident))
	return nil
}

// checkOnDemand makes the engine compare memory with etcd, a few times.
func (s *Sample) checkOnDemand(ctx context.Context, want int, rest float64) error {
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	var costs []listCost
	for range 1 + checkSamples {
		cost, err := s.costOf(ctx, 0, func() error { return checkOnce(ctx, conn, want, s.Body) })
		if err != nil {
			return err
		}
		costs = append(costs, cost)
	}
	s.Report("first, "+checkCPU, Seconds, costs[0].cpuSeconds())
	s.reportChecks(costs, rest)
	return nil
}

// reportChecks reports medians, and the maximum of memory and of bytes sent by etcd.
func (s *Sample) reportChecks(costs []listCost, rest float64) {
	most := func(of func(listCost) float64) (v float64) {
		for _, cost := range costs {
			v = max(v, of(cost))
		}
		return v
	}
	s.Report("a check takes", Seconds, medianCost(costs, listCost.seconds))
	s.Report(checkCPU, Seconds, medianCost(costs, listCost.cpuSeconds))
	s.Report("  etcd CPU of a check", Seconds, medianCost(costs, listCost.etcdSeconds))
	s.Report(checkAbove, Bytes, most(listCost.aboveRest))
	s.Report(checkSent, Bytes, most(listCost.sentBytes))
	s.Report("resident at rest", Bytes, rest)
}

// checkOnce compares once, and requires that it finds no difference.
func checkOnce(ctx context.Context, conn *target.Conn, want int, body *bytes.Buffer) error {
	const path = "/debug/strata/consistency?resource=configmaps"
	if err := conn.Read(ctx, target.Request{Method: http.MethodPost, Path: path}, body); err != nil {
		return err
	}
	var answer struct {
		Items []struct {
			Status, Error string
			Keys          int
		}
	}
	if err := json.Unmarshal(body.Bytes(), &answer); err != nil {
		return fmt.Errorf("POST %s: %w", path, err)
	}
	if len(answer.Items) != 1 || answer.Items[0].Status != "success" || answer.Items[0].Keys != want {
		return fmt.Errorf("POST %s: %+v, want success with %d keys", path, answer.Items, want)
	}
	return nil
}

// looked is the usage of an engine and of etcd at a moment.
type looked struct {
	at       time.Time
	cpu      []time.Duration // of the server and etcd
	sent     float64         // by etcd
	resident uint64
}

func (s *Sample) look(ctx context.Context) (l looked, err error) {
	usage, err := s.Etcd.Usage(ctx)
	if err != nil {
		return l, err
	}
	memory, err := s.Engine.Memory()
	if err != nil {
		return l, err
	}
	cpu, err := cpuOf([]*process.Child{s.Engine.Child, s.Etcd.Child})
	return looked{time.Now(), cpu, usage.Sent, memory.Resident}, err
}

// awaitCheck waits for a check of the engine's own schedule. It begins with the step before the one in which etcd begins to send:
// the engine goes through its memory first.
func (s *Sample) awaitCheck(ctx context.Context) (cost listCost, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.Sizes.CheckWait, fmt.Errorf("no check within %v", s.Sizes.CheckWait))
	defer cancel()
	last, err := s.look(ctx)
	if err != nil {
		return cost, err
	}
	before := last // the step before the last
	for {
		if err := s.Engine.ResetPeak(); err != nil {
			return cost, err
		}
		if !waitUntil(ctx, time.Now().Add(checkStep)) {
			return cost, context.Cause(ctx)
		}
		now, err := s.look(ctx)
		if err != nil {
			return cost, err
		}
		if now.sent-last.sent < checkBytes {
			before, last = last, now
			continue
		}
		end, err := s.whileSent(ctx, now)
		if err != nil {
			return cost, err
		}
		n, err := s.checksOf(ctx)
		if err != nil {
			return cost, err
		}
		if n == 0 { // etcd sent data for another request
			before, last = end, end
			continue
		}
		memory, err := s.Engine.Memory()
		if err != nil {
			return cost, err
		}
		cost.took = end.at.Sub(before.at)
		cost.cpu, cost.etcdCPU = end.cpu[0]-before.cpu[0], end.cpu[1]-before.cpu[1]
		cost.above = float64(memory.Peak - min(before.resident, memory.Peak))
		cost.sent = end.sent - before.sent
		return cost, nil
	}
}

// whileSent returns the usage in the first of checkSteps in which etcd sent little.
func (s *Sample) whileSent(ctx context.Context, last looked) (end looked, err error) {
	end = last
	for quiet := 0; quiet < checkSteps; {
		if !waitUntil(ctx, time.Now().Add(checkStep)) {
			return end, context.Cause(ctx)
		}
		now, err := s.look(ctx)
		if err != nil {
			return end, err
		}
		if quiet++; now.sent-last.sent >= checkBytes {
			quiet = 0
		}
		if quiet <= 1 {
			end = now
		}
		last = now
	}
	return end, nil
}

// checksOf is the number of checks of ConfigMaps that found no difference.
func (s *Sample) checksOf(ctx context.Context) (n float64, err error) {
	all, err := s.Engine.Series(ctx, "apiserver_storage_consistency_checks_total")
	for _, series := range all {
		if series.Labels["resource"] == measuredResource && series.Labels["group"] == "" && series.Labels["status"] == "success" {
			n += series.Value
		}
	}
	return n, err
}
