package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/stats"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// kepWorkloads are the load by which KEP-2340 measures consistent reads from memory: a LIST every second that selects nothing, on many small
// objects and on few large ones.
var kepWorkloads = []Workload{
	{
		Name: "kep-baseline", Title: "KEP-2340, baseline: no LISTs", Op: "LIST", Dataset: configMaps,
		Alone: true, Session: consistentSession, Runs: 3,
		Run: kepLoad{}.run,
	},
	{
		Name: "kep-small", Title: "KEP-2340, small objects: 1 LIST/s that selects none of them", Op: "LIST", Dataset: configMaps,
		Alone: true, Session: consistentSession, Runs: 3, Tail: true,
		Run: kepLoad{list: allConfigMaps}.run,
	},
}

// kepLargeWorkloads are last in their processes, which keep the history of large objects for a while.
var kepLargeWorkloads = []Workload{{
	Name: "kep-large", Title: "KEP-2340, large objects: 1 LIST/s that selects none of them", Op: "LIST", Dataset: configMaps,
	Alone: true, Session: consistentSession, Runs: 3, Tail: true,
	Run: kepLoad{list: largeConfigMaps, large: true}.run,
}}

// kepDisabledWorkloads are the same without memory.
var kepDisabledWorkloads = []Workload{
	{
		Name: "kep-small-disabled", Title: "KEP-2340, small objects, LISTs read from etcd", Op: "LIST", Dataset: configMaps,
		Alone: true, Session: "from etcd", Runs: 1, Tail: true, PassesOn: true, Variant: "disabled", Flags: disabledFlags,
		Run: kepLoad{list: allConfigMaps}.run,
	},
	{
		Name: "kep-large-disabled", Title: "KEP-2340, large objects, LISTs read from etcd", Op: "LIST", Dataset: configMaps,
		Alone: true, Session: "from etcd", Runs: 1, Tail: true, PassesOn: true, Variant: "disabled", Flags: disabledFlags,
		Run: kepLoad{list: largeConfigMaps, large: true}.run,
	},
}

// disabledFlags make consistent LISTs of ConfigMaps read etcd. Upstream has locked its gate, so there they are kept out of the cache.
var disabledFlags = map[string][]string{
	strataEngine:   {"--strata-feature-gates=ConsistentListFromCache=false"},
	upstreamEngine: {"--watch-cache-sizes=configmaps#0"},
}

// kepAtOnce bounds the LISTs in flight: each LIST from etcd needs memory for all objects in both processes, several times over.
// While so many run, due ones are skipped, as in the KEP, where less than 1 LIST/s was handled.
const kepAtOnce = 4

// Measures that the KEP's table has as columns.
const (
	handled = "LISTs per second"

	serverCoresP50, serverCoresP90, serverCoresP99 = "server cores p50", "server cores p90", "server cores p99"
	etcdCoresP50, etcdCoresP90, etcdCoresP99       = "etcd cores p50", "etcd cores p90", "etcd cores p99"
)

// kepLoad begins Sizes.Lists LISTs, one every Sizes.ListInterval, and records the cores that the server and etcd use in each interval.
type kepLoad struct {
	list  string // path; "" means that there are no LISTs
	large bool   // the large objects exist meanwhile
}

func (l kepLoad) run(ctx context.Context, s *Sample) (err error) {
	if l.large {
		if err := putLarge(ctx, &s.Surroundings); err != nil {
			return err
		}
		defer func() {
			if deleteErr := deleteLarge(ctx, &s.Surroundings); err == nil {
				err = deleteErr
			}
		}()
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	if l.list != "" { // the first LIST of a process is not measured
		if _, err := l.do(ctx, conn); err != nil {
			return err
		}
	}
	duration := time.Duration(s.Sizes.Lists) * s.Sizes.ListInterval
	var server, etcd []float64
	err = s.Measure(ctx, func(ctx context.Context) error {
		meterCtx, stopMeter := context.WithCancel(ctx)
		defer stopMeter()
		var meter errgroup.Group
		meter.Go(func() error {
			return coresEach(meterCtx, s.Sizes.ListInterval, func(cores []float64) {
				server, etcd = append(server, cores[0]), append(etcd, cores[1])
			}, s.Engine.Child, s.Etcd.Child)
		})
		lists := pace{interval: s.Sizes.ListInterval, duration: duration, atOnce: kepAtOnce}
		err := lists.run(ctx, func(ctx context.Context, _ int) error {
			if l.list == "" {
				return nil
			}
			took, err := l.do(ctx, conn)
			if err == nil {
				s.Observe(took)
			}
			return err
		})
		stopMeter()
		if meterErr := meter.Wait(); err == nil {
			err = meterErr
		}
		return err
	})
	if err != nil {
		return err
	}
	s.Report(handled, PerSecond, float64(s.observed.ops())/s.observed.Elapsed.Seconds())
	slices.Sort(server)
	slices.Sort(etcd)
	s.Report(serverCoresP50, Count, stats.Percentile(server, 0.5))
	s.Report(serverCoresP90, Count, stats.Percentile(server, 0.9))
	s.Report(serverCoresP99, Count, stats.Percentile(server, 0.99))
	s.Report(etcdCoresP50, Count, stats.Percentile(etcd, 0.5))
	s.Report(etcdCoresP90, Count, stats.Percentile(etcd, 0.9))
	s.Report(etcdCoresP99, Count, stats.Percentile(etcd, 0.99))
	return nil
}

// do is one LIST that selects nothing.
func (l kepLoad) do(ctx context.Context, conn *target.Conn) (took time.Duration, err error) {
	path := l.list + selectsNothing
	began := time.Now()
	list, err := doList(ctx, conn, path, jsonFormat)
	if err == nil && list.Objects != 0 {
		err = fmt.Errorf("LIST %s has %d objects, want none", path, list.Objects)
	}
	return time.Since(began), err
}

// kepRows are the rows of the KEP's table, in its order: their titles, and the workloads.
var kepRows = []struct{ title, workload string }{
	{"Baseline", "kep-baseline"},
	{"Enabled Large Objects", "kep-large"},
	{"Disabled Large Objects", "kep-large-disabled"},
	{"Enabled Small Objects", "kep-small"},
	{"Disabled Small Objects", "kep-small-disabled"},
}

// kepColumns are its columns: measures of the workloads.
var kepColumns = []string{
	handled, serverCoresP50, serverCoresP90, serverCoresP99, etcdCoresP50, etcdCoresP90, etcdCoresP99, latency, "latency p90", latencyP99,
}

// kepTable returns the KEP's table with a row for each engine, and the flags that it had. There are no rows if none of it was measured.
func (r *Report) kepTable() (header []string, body [][]string) {
	header = append([]string{"KEP-2340's load", "engine"}, kepColumns...)
	header = append(header, "flags")
	for _, row := range kepRows {
		at := slices.IndexFunc(r.Results, func(result Result) bool { return result.Name == row.workload })
		if at < 0 {
			continue
		}
		result := r.Results[at]
		title := row.title
		for _, engine := range r.Engines {
			cells := []string{title, engine}
			found := false
			for _, column := range kepColumns {
				cell := "-"
				for _, measure := range result.Rows {
					if value, ok := measure.Values[engine]; ok && measure.Name == column {
						cell, found = measure.Unit.Format(value), true
					}
				}
				cells = append(cells, cell)
			}
			if found {
				body = append(body, append(cells, result.Flags[engine]))
				title = ""
			}
		}
	}
	return header, body
}
