package main

import (
	"context"
	"fmt"
	"time"

	"github.com/stratakube/strata/server/bench/internal/dataset"
	"github.com/stratakube/strata/server/bench/internal/target"
	"github.com/stratakube/strata/server/bench/internal/wire"
)

const protobufMediaType = "application/vnd.kubernetes.protobuf"

var listWorkloads = []Workload{
	{
		Name: "list-json", Title: "LIST all, JSON", Op: "LIST", Dataset: configMaps,
		Run: listLoad{path: fixed("/api/v1/configmaps"), want: stored("configmaps")}.run,
	},
	{
		Name: "list-protobuf", Title: "LIST all, protobuf", Op: "LIST", Dataset: configMaps,
		Run: listLoad{path: fixed("/api/v1/configmaps"), want: stored("configmaps"), protobuf: true}.run,
	},
	{
		Name: "list-none", Title: "LIST, label selector that selects nothing", Op: "LIST", Dataset: configMaps,
		Run: listLoad{path: fixed("/api/v1/configmaps?labelSelector=app%3Dnone"), want: nothing, repeat: true}.run,
	},
}

var podWorkloads = []Workload{
	{
		Name: "list-node", Title: "LIST the pods of one node, protobuf", Op: "LIST", Dataset: pods,
		Run: listLoad{path: podsOfANode, want: podsPerNode, protobuf: true, repeat: true}.run,
	},
	{
		Name: "list-namespace", Title: "LIST the pods of one namespace, protobuf", Op: "LIST", Dataset: pods,
		Run: listLoad{path: podsOfANamespace, want: podsPerNamespace, protobuf: true, repeat: true}.run,
	},
}

// listLoad is one client that LISTs.
type listLoad struct {
	path     func(s *Sample) string                            // with the query; asked before each LIST
	want     func(ctx context.Context, s *Sample) (int, error) // the number of objects that each answer must have
	protobuf bool                                              // otherwise JSON
	repeat   bool                                              // for Sizes.Loop, one after the other; otherwise once
}

func fixed(path string) func(*Sample) string { return func(*Sample) string { return path } }

// stored expects as many objects as etcd holds: the servers keep a few ConfigMaps of their own.
func stored(resource string) func(context.Context, *Sample) (int, error) {
	return func(ctx context.Context, s *Sample) (int, error) { return dataset.Count(ctx, s.Etcd.Client, resource) }
}

func nothing(context.Context, *Sample) (int, error) { return 0, nil }

func podsOfANode(s *Sample) string {
	return "/api/v1/pods?fieldSelector=spec.nodeName%3D" + dataset.NodeName(s.Rand.IntN(s.Data.Nodes), s.Data.Nodes)
}

func podsPerNode(_ context.Context, s *Sample) (int, error) { return s.Data.Pods / s.Data.Nodes, nil }

func podsOfANamespace(s *Sample) string {
	return "/api/v1/namespaces/" + dataset.PodNamespace(s.Rand.IntN(s.Data.Namespaces), s.Data.Namespaces) + "/pods"
}

func podsPerNamespace(_ context.Context, s *Sample) (int, error) {
	return s.Data.Pods / s.Data.Namespaces, nil
}

func (l listLoad) run(ctx context.Context, s *Sample) error {
	want, err := l.want(ctx, s)
	if err != nil {
		return err
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	return s.Measure(ctx, func(ctx context.Context) error {
		for deadline := time.Now().Add(s.Sizes.Loop); ; {
			path := l.path(s)
			began := time.Now()
			list, err := l.do(ctx, conn, path)
			if err != nil {
				return err
			}
			s.Observe(time.Since(began))
			if list.Objects != want {
				return fmt.Errorf("LIST %s has %d objects, want %d", path, list.Objects, want)
			}
			s.Detail("%s objects, %s", grouped(list.Objects), Bytes.Format(float64(list.Bytes)))
			if !l.repeat || time.Now().After(deadline) {
				return nil
			}
		}
	})
}

// do sends a LIST and reads the answer to its end.
func (l listLoad) do(ctx context.Context, conn *target.Conn, path string) (wire.List, error) {
	request := target.Request{Path: path, Accept: "application/json"}
	read := wire.ReadJSONList
	if l.protobuf {
		request.Accept, read = protobufMediaType, wire.ReadProtobufList
	}
	response, err := conn.Do(ctx, request)
	if err != nil {
		return wire.List{}, err
	}
	defer response.Body.Close()
	list, err := read(response.Body)
	if err != nil {
		return wire.List{}, fmt.Errorf("LIST %s: %w", path, err)
	}
	return list, nil
}
