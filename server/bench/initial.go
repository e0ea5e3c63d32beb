package main

import (
	"context"
	"fmt"

	"github.com/stratakube/strata/server/bench/internal/target"
	"github.com/stratakube/strata/server/bench/internal/wire"
)

var initialWorkloads = []Workload{
	{
		Name: "initial-json", Title: "initial events of all, JSON, one client", Op: "client", Dataset: configMaps,
		Run:    initialLoad{format: initialJSON}.run,
		Wanted: []Bound{toUpstream(latency, 1./5), absolute(peakAbove, 50e6)},
	},
	{
		Name: "initial-protobuf", Title: "initial events of all, protobuf, one client", Op: "client", Dataset: configMaps,
		Run:    initialLoad{format: initialProtobuf}.run,
		Wanted: []Bound{toUpstream(latency, 1./5), absolute(peakAbove, 50e6)},
	},
	{
		Name: "initial-crowd", Title: "initial events of all, JSON, several clients", Op: "client", Dataset: configMaps, Dear: true,
		Run:    initialLoad{format: initialJSON, crowd: true}.run,
		Wanted: []Bound{toUpstream("until all are done", 1./5), absolute(peakAbove, 50e6)},
	},
}

var (
	initialJSON     = format{"application/json", wire.ReadInitialJSONEvents}
	initialProtobuf = format{"application/vnd.kubernetes.protobuf;stream=watch", wire.ReadInitialProtobufEvents}
)

// initialPath is a watch of all ConfigMaps that begins with all of them as initial events.
const initialPath = allConfigMaps + "?watch=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"

// initialLoad is clients that ask for all ConfigMaps as the initial events of a watch. An operation lasts until the bookmark behind them.
type initialLoad struct {
	format format
	crowd  bool // Sizes.Streams clients at once; otherwise one
}

func (l initialLoad) run(ctx context.Context, s *Sample) error {
	want, err := stored("configmaps")(ctx, s)
	if err != nil {
		return err
	}
	clients := 1
	if l.crowd {
		clients = s.Sizes.Streams
	}
	return atOnce(ctx, s, clients, func(ctx context.Context, conn *target.Conn) error {
		ctx, endWatch := context.WithCancel(ctx)
		defer endWatch()
		response, err := conn.Do(ctx, target.Request{Path: initialPath, Accept: l.format.accept})
		if err != nil {
			return err
		}
		defer response.Body.Close()
		events, err := l.format.read(response.Body)
		if err == nil && events.Objects != want {
			err = fmt.Errorf("there are %d initial events, want %d", events.Objects, want)
		}
		return err
	})
}
