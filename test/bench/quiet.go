package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Names of measures that have bounds.
const (
	latencyP99    = "latency p99"
	eventsCores   = "server cores more with the events"
	freshnessWait = "wait for freshness p99, at most"
)

// quietWorkloads are consistent LISTs of an unchanged resource, while others are written. Few writes disturb no other engine.
var quietWorkloads = []Workload{
	{
		Name: "quiet-list", Title: "consistent LIST of a quiet resource, 300 writes/s elsewhere", Op: "LIST", Dataset: configMaps, Tail: true,
		Prepare: putQuiet,
		Run:     quietLoad{clients: 1}.run,
		Wanted:  []Bound{absolute(latencyP99, 5e-3)},
	},
	{
		Name: "quiet-list-4", Title: "consistent LIST of a quiet resource, 4 in parallel, 300 writes/s elsewhere", Op: "LIST", Dataset: configMaps, Tail: true,
		Prepare: putQuiet,
		Run:     quietLoad{clients: 4}.run,
		Wanted:  []Bound{absolute(latencyP99, 5e-3)},
	},
}

// consistentSession is that of the workloads of consistent reads that run alone.
const consistentSession = "consistent"

// besideWorkloads are the same beside so many writes that an engine that follows them disturbs the other's measurement.
var besideWorkloads = []Workload{
	{
		Name: "quiet-events", Title: "1,000 writes/s of events beside 100 consistent LISTs/s of a quiet resource and 300 writes/s elsewhere", Op: "LIST",
		Dataset: configMaps, Alone: true, Session: consistentSession, Runs: 3, Tail: true,
		Run:    measureEvents,
		Wanted: []Bound{absolute(eventsCores, 0.05)},
	},
	{
		Name: "quiet-wait", Title: "100 consistent LISTs/s of a quiet resource, 1,000 writes/s elsewhere", Op: "LIST",
		Dataset: configMaps, Alone: true, Session: consistentSession, Runs: 3, Tail: true,
		Run:    measureWait,
		Wanted: []Bound{absolute(freshnessWait, 10e-3)},
	},
}

const (
	// quietResource is the resource of quiet objects: no server changes PodTemplates by itself.
	quietResource = "podtemplates"

	// quietRate is the number of LISTs per second where they are paced, so that all engines answer the same number.
	quietRate = 100

	// quietAtOnce bounds the LISTs in flight: an engine that has more delays the following ones.
	quietAtOnce = 64
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

// quietLoad is clients, each with a connection of its own, that LIST the quiet resource one after the other for Sizes.Beside.
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

// quietBeside is a paced number of LISTs of the quiet resource beside others' writes.
type quietBeside struct {
	s    *Sample
	conn *target.Conn
}

// newQuietBeside prepares the quiet resource and an engine that may just have been started. The caller must close the connection
// if there is no error.
func newQuietBeside(ctx context.Context, s *Sample) (quietBeside, error) {
	if err := putQuiet(ctx, &s.Surroundings); err != nil {
		return quietBeside{}, err
	}
	q := quietBeside{s: s, conn: s.Engine.Dial()}
	// The first requests of a fresh process and of a new connection are not measured.
	const warmUp = 100
	for range warmUp {
		if err := listQuiet(ctx, s, q.conn); err != nil {
			q.conn.Close()
			return quietBeside{}, err
		}
	}
	return q, nil
}

// run LISTs for Sizes.Beside, while the functions given run.
func (q quietBeside) run(ctx context.Context, beside ...func(ctx context.Context) error) error {
	all, ctx := errgroup.WithContext(ctx)
	for _, f := range beside {
		all.Go(func() error { return f(ctx) })
	}
	all.Go(func() error {
		return perSecond(quietRate, q.s.Sizes.Beside, quietAtOnce).run(ctx, func(ctx context.Context, _ int) error {
			return observeQuiet(ctx, q.s, q.conn)
		})
	})
	return all.Wait()
}

// measureEvents compares the CPU time of a server and its etcd with and without writes of events, in turns: without, with, with, without.
func measureEvents(ctx context.Context, s *Sample) error {
	elsewhere, err := configMapWrites(s)
	if err != nil {
		return err
	}
	events, err := eventWrites(s)
	if err != nil {
		return err
	}
	q, err := newQuietBeside(ctx, s)
	if err != nil {
		return err
	}
	defer q.conn.Close()
	var server, etcd [2][]float64 // cores, without and with events
	err = s.Measure(ctx, func(ctx context.Context) error {
		for _, with := range []int{0, 1, 1, 0} {
			beside := []func(ctx context.Context) error{
				func(ctx context.Context) error { return elsewhere.run(ctx, fewWrites, s.Sizes.Beside) },
				func(ctx context.Context) error { return events.run(ctx, manyWrites, s.Sizes.Beside) },
			}
			cores, err := coresOf(func() error { return q.run(ctx, beside[:1+with]...) }, s.Engine.Child, s.Etcd.Child)
			if err != nil {
				return err
			}
			server[with] = append(server[with], cores[0])
			etcd[with] = append(etcd[with], cores[1])
		}
		return nil
	})
	if err != nil {
		return err
	}
	s.Detail("%s objects", grouped(s.Sizes.Quiet))
	s.Report("server cores without events", Count, stats.Median(server[0]))
	s.Report("server cores with events", Count, stats.Median(server[1]))
	s.Report(eventsCores, Count, stats.Median(server[1])-stats.Median(server[0]))
	s.Report("etcd cores without events", Count, stats.Median(etcd[0]))
	s.Report("etcd cores with events", Count, stats.Median(etcd[1]))
	s.Report("etcd cores more with the events", Count, stats.Median(etcd[1])-stats.Median(etcd[0]))
	return nil
}

// measureWait reports the server's own histogram of the waits of LISTs until memory was as fresh as etcd.
func measureWait(ctx context.Context, s *Sample) error {
	elsewhere, err := configMapWrites(s)
	if err != nil {
		return err
	}
	q, err := newQuietBeside(ctx, s)
	if err != nil {
		return err
	}
	defer q.conn.Close()
	before, err := s.Engine.ReadWaits(ctx, quietResource)
	if err != nil {
		return err
	}
	err = s.Measure(ctx, func(ctx context.Context) error {
		return q.run(ctx, func(ctx context.Context) error { return elsewhere.run(ctx, manyWrites, s.Sizes.Beside) })
	})
	if err != nil {
		return err
	}
	after, err := s.Engine.ReadWaits(ctx, quietResource)
	if err != nil {
		return err
	}
	s.Detail("%s objects", grouped(s.Sizes.Quiet))
	s.Report("server cores", Count, s.observed.ServerCPU.Seconds()/s.observed.Elapsed.Seconds())
	s.Report("etcd cores", Count, s.observed.EtcdCPU.Seconds()/s.observed.Elapsed.Seconds())
	waits := after.Since(before)
	if waits.Total() == 0 {
		return nil // a server that does not measure it, such as an older one
	}
	bound, err := waits.AtMost(0.99)
	if err != nil {
		return fmt.Errorf("wait for freshness: %w", err)
	}
	s.Report(freshnessWait, Seconds, bound)
	return nil
}
