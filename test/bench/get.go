package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

var getWorkloads = []Workload{
	{
		Name: "get-16", Title: "GET of a pod, consistent, 16 in parallel", Op: "GET", Dataset: cluster, Lived: true, Tail: true,
		Run:    getLoad{clients: size{16, 3}}.run,
		Wanted: []Bound{toUpstream(latencyP99, 1), toUpstream(cpuPerGet, 0.45)},
	},
	{
		Name: "get-16-any", Title: "GET of a pod with resourceVersion=0, 16 in parallel", Op: "GET", Dataset: cluster, Lived: true, Tail: true,
		Run:    getLoad{clients: size{16, 3}, query: "?resourceVersion=0"}.run,
		Wanted: []Bound{toUpstream(latencyP99, 1), toUpstream(cpuPerGet, 0.45)},
	},
}

// Names of measures that have bounds.
const (
	getsPerSecond = "GETs per second"
	cpuPerGet     = "server CPU per GET"
)

// getLoad is clients, with a connection each, that read random pods one after the other.
type getLoad struct {
	clients size
	query   string // "" or from the question mark on
}

func (l getLoad) run(ctx context.Context, s *Sample) error {
	seed := s.Rand.Uint64()
	var next atomic.Uint64
	err := repeatedly(ctx, s, l.clients.at(s.Scale), loop.at(s.Scale), func(ctx context.Context, conn *target.Conn) error {
		path := podPath(rand.New(rand.NewPCG(seed, next.Add(1))).IntN(s.Data.Pods), s.Data)
		body := bodies.Get().(*bytes.Buffer)
		defer bodies.Put(body)
		if err := conn.Read(ctx, target.Request{Path: path + l.query}, body); err != nil {
			return err
		}
		if !bytes.Contains(body.Bytes(), []byte(`"name":"`+filepath.Base(path)+`"`)) {
			return fmt.Errorf("GET %s is answered with another object: %.200s", path, body.Bytes())
		}
		return nil
	})
	s.Report(getsPerSecond, PerSecond, float64(s.observed.ops())/max(s.observed.Elapsed, 1).Seconds())
	return err
}

var bodies = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// podPath is the path of the pod with this index.
func podPath(index int, data dataset.Spec) string {
	return "/api/v1/namespaces/" + dataset.PodNamespace(index, data.Namespaces) + "/pods/" + dataset.PodName(index)
}
