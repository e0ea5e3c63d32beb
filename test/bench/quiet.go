package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Names of measures that have bounds.
const (
	latencyP99    = "latency p99"
	eventsCores   = "server cores more with the events"
	freshnessWait = "wait for freshness p99, at most"
)

// quietWorkloads are consistent LISTs of an unchanged resource, while others are written. Few
// writes disturb no other engine.
var quietWorkloads = []Workload{
	{
		Name: "quiet-list", Title: "consistent LIST of a quiet resource, 300 writes/s elsewhere", Op: "LIST", Dataset: configMaps, Tail: true,
		Prepare: putQuiet,
		Run:     quietLoad{clients: 1}.run,
		Wanted:  []Bound{absolute(latencyP99, 5e-3)},
	},
}

const (
	// quietResource is the resource of quiet objects: no server changes PodTemplates by itself.
	quietResource = "podtemplates"
)

// putQuiet puts the quiet objects into etcd if they are not there.
func putQuiet(ctx context.Context, s *Surroundings) error {
	there, err := dataset.Count(ctx, s.Etcd.Client, quietResource)
	if err != nil || there == s.Sizes.Quiet {
		return err
	}
	return putAll(ctx, s, s.Sizes.Quiet, func(i int) (string, []byte, error) {
		template := dataset.PodTemplate(i)
		value, err := dataset.Encode(template)
		return dataset.PodTemplateKey(template.Name), value, err
	})
}

// listQuiet LISTs the quiet resource and verifies that it is complete.
func listQuiet(ctx context.Context, s *Sample, conn *target.Conn) error {
	list, err := doList(ctx, conn, "/api/v1/namespaces/"+dataset.Namespace+"/"+quietResource, protobufFormat)
	if err == nil && list.Objects != s.Sizes.Quiet {
		err = fmt.Errorf("LIST %s has %d objects, want %d", quietResource, list.Objects, s.Sizes.Quiet)
	}
	return err
}

// observeQuiet is listQuiet, observed.
func observeQuiet(ctx context.Context, s *Sample, conn *target.Conn) error {
	began := time.Now()
	if err := listQuiet(ctx, s, conn); err != nil {
		return err
	}
	s.Observe(time.Since(began))
	return nil
}

// quietLoad is clients, each with a connection of its own, that LIST the quiet resource one after
// the other for Sizes.Beside.
type quietLoad struct{ clients int }

func (l quietLoad) run(ctx context.Context, s *Sample) error {
	elsewhere, err := configMapWrites(s)
	if err != nil {
		return err
	}
	conns := s.Engine.DialAll(l.clients)
	defer target.CloseAll(conns)
	for _, conn := range conns {
		if err := listQuiet(ctx, s, conn); err != nil {
			return err
		}
	}
	s.Detail("%s objects", grouped(s.Sizes.Quiet))
	return s.Measure(ctx, func(ctx context.Context) error {
		deadline := time.Now().Add(s.Sizes.Beside)
		all, ctx := errgroup.WithContext(ctx)
		all.Go(func() error { return elsewhere.run(ctx, fewWrites, s.Sizes.Beside) })
		for _, conn := range conns {
			all.Go(func() error {
				for time.Now().Before(deadline) {
					if err := observeQuiet(ctx, s, conn); err != nil {
						return err
					}
				}
				return nil
			})
		}
		return all.Wait()
	})
}
