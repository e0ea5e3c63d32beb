package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

var getWorkloads = []Workload{
	{
		Name: "get-16", Title: "GET, consistent, 16 in parallel", Op: "GET", Dataset: configMaps,
		Run:    getLoad{clients: 16}.run,
		Wanted: []Bound{{Measure: getsPerSecond, Of: "upstream", AtLeast: 1}, toUpstream(cpuPerGet, 0.4), toUpstream(etcdCPUPerGet, 1./5)},
	},
	{
		Name: "get-16-any", Title: "GET with resourceVersion=0, 16 in parallel", Op: "GET", Dataset: configMaps,
		Run:    getLoad{clients: 16, query: "?resourceVersion=0"}.run,
		Wanted: []Bound{{Measure: getsPerSecond, Of: "upstream", AtLeast: 1}, toUpstream(cpuPerGet, 0.35)},
	},
}

// Names of measures that have bounds.
const (
	getsPerSecond = "GETs per second"
	cpuPerGet     = "server CPU per GET"
	etcdCPUPerGet = "etcd CPU per GET"
)

// limitObjects is the number of objects that are requested from the limit: few enough that it can
// record all of them.
const limitObjects = 100

// getLoad is clients, with a connection each, that read random ConfigMaps one after the other.
type getLoad struct {
	clients int
	query   string // "" or from the question mark on
}

func (l getLoad) run(ctx context.Context, s *Sample) error {
	conns, err := s.opened(ctx, l.clients)
	if err != nil {
		return err
	}
	defer target.CloseAll(conns)
	objects := s.Data.ConfigMaps
	if s.Engine.IsLimit() {
		objects = min(objects, limitObjects)
	}
	if s.Engine.IsLimit() && s.Thorough {
		// it must record all of them, independent of the draws of the first sample
		for i := range objects {
			if err := conns[0].Read(ctx, target.Request{Path: l.path(dataset.ConfigMapName(i))}, s.Body); err != nil {
				return err
			}
		}
	}
	err = s.Measure(ctx, func(ctx context.Context) error {
		deadline := time.Now().Add(loop.at(s.Scale))
		clients, ctx := errgroup.WithContext(ctx)
		for _, conn := range conns {
			random := rand.New(rand.NewPCG(s.Rand.Uint64(), s.Rand.Uint64()))
			clients.Go(func() error {
				var body bytes.Buffer
				for time.Now().Before(deadline) {
					name := dataset.ConfigMapName(random.IntN(objects))
					if err := l.get(ctx, s, conn, name, &body); err != nil {
						return err
					}
				}
				return nil
			})
		}
		return clients.Wait()
	})
	if err != nil {
		return err
	}
	s.Report(getsPerSecond, PerSecond, float64(s.observed.ops())/s.observed.Elapsed.Seconds())
	return nil
}

func (l getLoad) path(name string) string { return configMapsPath + "/" + name + l.query }

func (l getLoad) get(ctx context.Context, s *Sample, conn *target.Conn, name string, body *bytes.Buffer) error {
	path := l.path(name)
	began := time.Now()
	if err := conn.Read(ctx, target.Request{Path: path}, body); err != nil {
		return err
	}
	s.Observe(time.Since(began))
	if !bytes.Contains(body.Bytes(), []byte(`"name":"`+name+`"`)) {
		return fmt.Errorf("GET %s is answered with another object: %.200s", path, body.Bytes())
	}
	return nil
}
