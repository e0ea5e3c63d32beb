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
		Name: "get-16", Title: "GET, consistent, 16 in parallel", Op: "GET", Dataset: configMaps,
		Run:    getLoad{clients: size{16, 16}}.run,
		Wanted: []Bound{{Measure: getsPerSecond, Of: "upstream", AtLeast: 1}, toUpstream(cpuPerGet, 0.4), toUpstream(etcdCPUPerGet, 1./5)},
	},
	{
		Name: "get-16-any", Title: "GET with resourceVersion=0, 16 in parallel", Op: "GET", Dataset: configMaps,
		Run:    getLoad{clients: size{16, 16}, query: "?resourceVersion=0"}.run,
		Wanted: []Bound{{Measure: getsPerSecond, Of: "upstream", AtLeast: 1}, toUpstream(cpuPerGet, 0.35)},
	},
}

// Names of measures that have bounds.
const (
	getsPerSecond = "GETs per second"
	cpuPerGet     = "server CPU per GET"
	etcdCPUPerGet = "etcd CPU per GET"
)

// getLoad is clients, with a connection each, that read random objects one after the other.
type getLoad struct {
	clients size
	query   string // "" or from the question mark on
	pods    bool   // of the dataset; otherwise its ConfigMaps
}

func (l getLoad) run(ctx context.Context, s *Sample) error {
	objects := s.Data.ConfigMaps
	if l.pods {
		objects = s.Data.Pods
	}
	seed := s.Rand.Uint64()
	var next atomic.Uint64
	err := repeatedly(ctx, s, l.clients.at(s.Scale), loop.at(s.Scale), func(ctx context.Context, conn *target.Conn) error {
		path := l.path(s, rand.New(rand.NewPCG(seed, next.Add(1))).IntN(objects))
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

// path is the path of object number i.
func (l getLoad) path(s *Sample, i int) string {
	if l.pods {
		return podPath(i, s.Data)
	}
	return configMapsPath + "/" + dataset.ConfigMapName(i)
}
