package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
	"github.com/stratakube/strata/test/bench/internal/wire"
)

// labelWorkloads are LISTs by labels of ConfigMaps that have five of them.
var labelWorkloads = []Workload{
	{
		Name: "label-one", Title: "LIST by a label that 1 % have, JSON", Op: "LIST", Dataset: labelled,
		Run:    listLoad{path: fixed(allConfigMaps + "?" + onePercent), want: onePercentOf, format: jsonFormat, repeat: true}.run,
		Wanted: []Bound{absolute(latency, 15e-3)},
	},
}

// fieldWorkloads are reads by fields.
var fieldWorkloads = []Workload{
	{
		Name: "list-node-16", Title: "LIST the pods of one node, protobuf, 16 clients at once", Op: "LIST", Dataset: pods,
		Run:    listNodesAtOnce,
		Wanted: []Bound{toUpstream(cpuPerList, 0.4)},
	},
	{
		Name: "initial-nodes", Title: "clients that start to watch the pods of one node each, with initial events", Op: "client", Dataset: pods,
		Alone: true, Session: "initial nodes", Runs: 2, Tail: true,
		Run:    initialOfNodes,
		Wanted: []Bound{toUpstream("server CPU per client", 1./10)},
	},
}

// thingWorkloads are reads of custom resources.
var thingWorkloads = []Workload{{
	Name: "custom-field", Title: "LIST the custom resource with a value of a selectable field, JSON", Op: "LIST", Dataset: things,
	Run: listLoad{
		path:   func(s *Sample) string { return thingOf(s.Data.Things / 2) },
		want:   func(context.Context, *Sample) (int, error) { return 1, nil },
		format: customJSON, repeat: true,
	}.run,
	Wanted: []Bound{absolute(latency, 2e-3)},
}}

const (
	onePercent    = "labelSelector=app%3Dapp-7"
	bytesPerLabel = "index bytes per object and label"
)

func thingOf(index int) string {
	return dataset.Things.Path() + "?fieldSelector=spec.color%3D" + dataset.Color(index)
}

// labelled is the data of workloads on labels, things that of custom resources.
func labelled(s Sizes) dataset.Spec {
	return dataset.Spec{ConfigMaps: s.Objects, Labelled: true, Namespaces: 1}
}
func things(s Sizes) dataset.Spec { return dataset.Spec{Things: s.Pods, Namespaces: 1} }

func onePercentOf(_ context.Context, s *Sample) (int, error) { return s.Data.ConfigMaps / 100, nil }

// listNodesAtOnce is Sizes.Crowd clients, with a connection each, that LIST the pods of nodes one
// after the other for Sizes.Loop.
func listNodesAtOnce(ctx context.Context, s *Sample) error {
	var next atomic.Int64
	nodes := s.Rand.Perm(s.nodes())
	return repeatedly(ctx, s, s.Sizes.Crowd, func(ctx context.Context, conn *target.Conn) error {
		path := "/api/v1/pods?fieldSelector=spec.nodeName%3D" + dataset.NodeName(nodes[int(next.Add(1))%len(nodes)], s.Data.Nodes)
		list, err := doList(ctx, conn, path, protobufFormat)
		if want := s.Data.Pods / s.Data.Nodes; err == nil && list.Objects != want {
			err = fmt.Errorf("LIST %s has %d objects, want %d", path, list.Objects, want)
		}
		return err
	})
}

// repeatedly measures n clients, each with a connection of its own, that do operations one after
// the other for Sizes.Loop.
func repeatedly(ctx context.Context, s *Sample, n int, operation func(ctx context.Context, conn *target.Conn) error) error {
	conns := s.Engine.DialAll(n)
	defer target.CloseAll(conns)
	for _, conn := range conns {
		if err := conn.Open(ctx); err != nil {
			return err
		}
	}
	return s.Measure(ctx, func(ctx context.Context) error {
		deadline := time.Now().Add(s.Sizes.Loop)
		clients, ctx := errgroup.WithContext(ctx)
		for _, conn := range conns {
			clients.Go(func() error {
				for time.Now().Before(deadline) {
					began := time.Now()
					if err := operation(ctx, conn); err != nil {
						return err
					}
					s.Observe(time.Since(began))
				}
				return nil
			})
		}
		return clients.Wait()
	})
}

// initialOfNodes opens a watch with initial events of the pods of each node. An operation lasts
// until the bookmark behind them; the watches stay open until the last is there.
func initialOfNodes(ctx context.Context, s *Sample) error {
	conns := s.Engine.DialAll(connsFor(s.Data.Nodes))
	defer target.CloseAll(conns)
	for _, conn := range conns {
		if err := conn.Open(ctx); err != nil {
			return err
		}
	}
	watching, endWatches := context.WithCancel(ctx)
	defer endWatches()
	err := s.Measure(ctx, func(ctx context.Context) error {
		var clients errgroup.Group
		clients.SetLimit(initialAtOnce)
		for i := range s.Data.Nodes {
			clients.Go(func() error { return initialOfNode(watching, s, conns[i%len(conns)], i) })
		}
		return clients.Wait()
	})
	if err != nil {
		return err
	}
	s.Detail("%s of them, %s pods", grouped(s.Data.Nodes), grouped(s.Data.Pods))
	s.Report("until all are done", Seconds, s.observed.Elapsed.Seconds())
	return nil
}

// initialOfNode reads the initial events of the pods of node i, and leaves the watch open until ctx
// ends.
func initialOfNode(ctx context.Context, s *Sample, conn *target.Conn, i int) error {
	path := "/api/v1/pods?watch=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&fieldSelector=spec.nodeName%3D" +
		dataset.NodeName(i, s.Data.Nodes)
	began := time.Now()
	response, err := conn.Do(ctx, target.Request{Path: path})
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { response.Body.Close() })
	events, err := wire.ReadInitialJSONEvents(response.Body)
	if want := s.Data.Pods / s.Data.Nodes; err == nil && events.Objects != want {
		err = fmt.Errorf("node %d has %d initial events, want %d", i, events.Objects, want)
	}
	if err == nil {
		s.Observe(time.Since(began))
	}
	return err
}

// initialAtOnce is the number of clients that wait for their initial events at a time.
const initialAtOnce = 100
