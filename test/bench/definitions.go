package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// definitionWorkloads are servers with many custom resources.
var definitionWorkloads = []Workload{{
	Name: "definitions", Title: "many custom resources that no client reads", Op: "LIST", Dataset: fewConfigMaps,
	Alone: true, Session: "definitions", Starts: true, Runs: 1, Timeout: 20 * time.Minute,
	Run:    measureDefinitions,
	Wanted: []Bound{toUpstream(definitionsMemory, 1./3), toUpstream(writeCPU, 1)},
}}

// Names of measures that have bounds.
const (
	definitionsMemory = "resident above a server without definitions"
	writeCPU          = "server CPU of an unrelated write"
)

// objectsOfDefinition is the number of objects of each custom resource.
const objectsOfDefinition = 10

// measureDefinitions starts an engine without custom resources, and one with Sizes.Definitions of them, and compares memory, goroutines and
// the cost of writes of another resource.
func measureDefinitions(ctx context.Context, s *Sample) error {
	if err := deleteDefinitions(ctx, s); err != nil {
		return err
	}
	without, err := s.startAndRest(ctx)
	if err != nil {
		return err
	}
	cpuWithout, err := s.unrelatedWrites(ctx)
	s.Engine.Stop()
	if err != nil {
		return err
	}

	err = putAll(ctx, &s.Surroundings, s.Sizes.Definitions*(1+objectsOfDefinition), func(i int) (string, []byte, error) {
		r := dataset.NumberedResource(i / (1 + objectsOfDefinition))
		if i %= 1 + objectsOfDefinition; i == 0 {
			value, err := dataset.Encode(r.Definition())
			return r.Key(), value, err
		}
		value, err := dataset.Encode(r.Object(i))
		return r.ObjectKey(i), value, err
	})
	if err != nil {
		return err
	}
	defer deleteDefinitions(context.WithoutCancel(ctx), s) // the next sample does it too
	with, err := s.startAndRest(ctx)
	if err != nil {
		return err
	}
	defer func() { s.Engine.Stop() }()
	s.Detail("%s of them, %d objects each", grouped(s.Sizes.Definitions), objectsOfDefinition)
	s.Report("until ready", Seconds, s.Engine.Startup.Ready.Seconds())
	s.Report("resident at rest", Bytes, float64(with.resident))
	s.Report(definitionsMemory, Bytes, float64(with.resident)-float64(without.resident))
	s.Report("goroutines above", Count, float64(with.Goroutines)-float64(without.Goroutines))
	s.Report("live heap above", Bytes, float64(with.Live)-float64(without.Live))
	s.Report(writeCPU+" without definitions", Seconds, cpuWithout)
	cpu, err := s.unrelatedWrites(ctx)
	if err != nil {
		return err
	}
	s.Report(writeCPU, Seconds, cpu)
	if err := s.Measure(ctx, func(ctx context.Context) error { return s.listEach(ctx, s.Sizes.Definitions) }); err != nil {
		return err
	}
	read, err := s.holds(ctx)
	if err != nil {
		return err
	}
	s.Report("resident above, after a LIST of each", Bytes, float64(read.resident)-float64(without.resident))
	s.Report("goroutines above, after a LIST of each", Count, float64(read.Goroutines)-float64(without.Goroutines))
	return nil
}

// listEach lists the objects of the first n custom resources.
func (s *Sample) listEach(ctx context.Context, n int) error {
	conn := s.Engine.Dial()
	defer conn.Close()
	for i := range n {
		path := dataset.NumberedResource(i).Path()
		began := time.Now()
		list, err := doList(ctx, conn, path, customJSON)
		for deadline := began.Add(10 * time.Second); errors.Is(err, target.ErrStatus) && time.Now().Before(deadline); {
			waitUntil(ctx, time.Now().Add(10*time.Millisecond)) // upstream's cache begins to load with the first request, and refuses meanwhile
			list, err = doList(ctx, conn, path, customJSON)
		}
		s.Observe(time.Since(began))
		if err != nil {
			return err
		}
		if list.Objects != objectsOfDefinition {
			return fmt.Errorf("LIST %s has %d objects, want %d", path, list.Objects, objectsOfDefinition)
		}
	}
	return nil
}

// unrelatedWrites updates ConfigMaps, and returns the server's CPU time for each.
func (s *Sample) unrelatedWrites(ctx context.Context) (cpu float64, err error) {
	const warmUp = 50
	requests, err := updates(ctx, s, warmUp+s.Sizes.Writes)
	if err != nil {
		return 0, err
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	var body bytes.Buffer
	var before time.Duration
	for i, request := range requests {
		if i == warmUp {
			if before, err = s.Engine.CPU(); err != nil {
				return 0, err
			}
		}
		if err := conn.Read(ctx, request, &body); err != nil {
			return 0, err
		}
	}
	after, err := s.Engine.CPU()
	return (after - before).Seconds() / float64(s.Sizes.Writes), err
}

func deleteDefinitions(ctx context.Context, s *Sample) error {
	for _, prefix := range []string{dataset.Definitions, "/registry/" + dataset.CustomGroup + "/", "/registry/apiregistration.k8s.io/apiservices/v1." + dataset.CustomGroup} {
		if _, err := s.Etcd.Client.Delete(ctx, prefix, clientv3.WithPrefix()); err != nil {
			return fmt.Errorf("delete the definitions: %w", err)
		}
	}
	return nil
}
