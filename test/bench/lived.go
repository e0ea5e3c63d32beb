package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"time"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// lived is a sequence of workloads that one process of each engine answers, one after the other, as
// a server of a cluster does. Each engine has an etcd of its own with the same data, so an engine
// that follows writes does not disturb the measurement of another. Its fields are flags.
type lived struct {
	pods, nodes, things, configMaps int // pods and custom resources have 2.5 KB

	informers, namespaceInformers         int
	watchers, watchRate                   int
	nodeWatchers, nodeRate                int
	loneRate, thingRate                   int
	otherWrites, clients, writers, rounds int
	during, rest                          time.Duration
	repeat                                int
}

func (l *lived) flags(fs *flag.FlagSet) {
	fs.IntVar(&l.pods, "pods", 100_000, "pods, of 2.5 KB, in namespaces of 1,000")
	fs.IntVar(&l.nodes, "nodes", 5_000, "nodes of the pods")
	fs.IntVar(&l.things, "things", 100_000, "custom resources, of 2.5 KB")
	fs.IntVar(&l.configMaps, "configmaps", 300_000, "ConfigMaps, of 1 KB")
	fs.IntVar(&l.informers, "informers", 8, "informers of all pods that start at once")
	fs.IntVar(&l.namespaceInformers, "namespace-informers", 100, "informers of a namespace that start at once")
	fs.IntVar(&l.watchers, "watchers", 1_000, "watches of all ConfigMaps")
	fs.IntVar(&l.watchRate, "watch-rate", 20, "events a second for each of these")
	fs.IntVar(&l.nodeWatchers, "node-watchers", 2_000, "watches of the pods of a node")
	fs.IntVar(&l.nodeRate, "node-rate", 500, "events a second for all of these together")
	fs.IntVar(&l.loneRate, "lone-rate", 4_000, "events a second for one watch of all pods")
	fs.IntVar(&l.thingRate, "thing-rate", 2_000, "events a second for one watch of all custom resources")
	fs.IntVar(&l.otherWrites, "other-writes", 1_000, "other writes a second beside own writes")
	fs.IntVar(&l.clients, "clients", 16, "clients that read at once")
	fs.IntVar(&l.writers, "writers", 8, "clients that write at once")
	// Enough for several collections of garbage on each engine. The smaller heap is collected more
	// often: fewer writes would meet one collection of it, and none of the other.
	fs.IntVar(&l.rounds, "rounds", 800, "objects that each of these creates, changes and deletes")
	fs.DurationVar(&l.during, "during", 10*time.Second, "how long events and own writes last")
	fs.DurationVar(&l.rest, "rest", time.Minute, "time without requests before memory is read")
	fs.IntVar(&l.repeat, "repeat", 1, "how often the sequence is run")
}

// data is the content of etcd.
func (l *lived) data() dataset.Spec {
	d := dataset.Spec{ConfigMaps: l.configMaps, Pods: l.pods, Things: l.things, Nodes: l.nodes, Namespaces: max(1, l.pods/podsPerNamespace), Managed: true}
	d.Pods -= d.Pods % d.Namespaces // as many in each
	return d
}

func exactly[T int | time.Duration](n T) sized[T] { return sized[T]{n, n} }

// startPods and startAll are the rows of fresh servers.
const startPods, startAll = "start-pods", "start"

// rows are the workloads of the sequence. Those with Alone come first.
func (l *lived) rows() []Workload {
	during := exactly(l.during)
	row := func(name, title, op string, run func(context.Context, *Sample) error) Workload {
		return Workload{Name: name, Title: title, Op: op, Run: run, Tail: true, Wanted: []Bound{toUpstream("latency p99", 1), toUpstream("server CPU per "+op, 1)}}
	}
	bounded := func(w Workload, bounds ...Bound) Workload { w.Wanted = bounds; return w }
	tail := []Bound{toUpstream("latency p99", 1), toUpstream("latency p99.9", 1), toUpstream("server CPU per event", 1)}
	once := func(w Workload) Workload { w.Runs = 1; return w } // long enough to be measured once
	list := func(path func(*Sample) string, want count, f format, repeat bool) func(context.Context, *Sample) error {
		return listLoad{path: path, want: want, format: f, repeat: repeat}.run
	}
	allThings := stored(dataset.ThingsResource)
	start := startLoad{rest: exactly(l.rest)}.run
	startBounds := []Bound{toUpstream("until /readyz", 0.3), toUpstream("resident at rest", 0.3)}
	return []Workload{
		{Name: startPods, Title: "start with the pods alone", Run: start, Runs: 1, Alone: true, Wanted: startBounds},
		{Name: startAll, Title: "start with all data", Run: start, Runs: 1, Alone: true, Wanted: startBounds},
		row("informers", "informers of all pods that start at once", "informer", informerLoad{informers: exactly(l.informers)}.run),
		row("informers-namespace", "informers of the pods of a namespace each that start at once", "informer",
			informerLoad{informers: exactly(l.namespaceInformers), ofNamespaces: true}.run),
		row("custom-json", "LIST all custom resources, JSON", "LIST", list(fixed(dataset.ThingsPath), allThings, customJSON, false)),
		row("custom-gzip", "LIST all custom resources, gzip, JSON", "LIST", listLoad{path: fixed(dataset.ThingsPath), want: allThings, format: customJSON, gzip: true}.run),
		row("custom-field", "LIST the custom resource with a value of a selectable field, JSON", "LIST", list(thingOfAColor, one, customJSON, true)),
		row("custom-namespace", "LIST the custom resources of a namespace, JSON", "LIST", list(thingsOfANamespace, thingsOfEachNamespace, customJSON, true)),
		bounded(once(row("custom-watch", "one watch of all custom resources", "event", watchLoad{watchers: exactly(1), rate: l.thingRate, during: during, of: changedThings}.run)), tail...),
		once(row("own-writes", "own writes until the informer has them", "write", ownWritesLoad{during: during}.run)),
		bounded(once(row("own-writes-beside", "own writes until the informer has them, beside others", "write", ownWritesLoad{during: during, others: l.otherWrites}.run)), toUpstream("latency p99", 0.25)),
		bounded(once(row("own-writes-full", "own writes until the informer has them, beside as many as the machine carries", "write", ownWritesLoad{during: during, others: asMany}.run)), absolute("latency p99", 0.005)),
		bounded(once(row("watch-shared", "watches of all ConfigMaps", "event", watchLoad{watchers: exactly(l.watchers), rate: l.watchRate, during: during, of: changedConfigMaps}.run)), tail...),
		bounded(once(row("watch-nodes", "watches of the pods of a node each", "event",
			watchLoad{watchers: exactly(l.nodeWatchers), rate: l.nodeRate, during: during, of: changedPods, byNode: true}.run)), tail...),
		bounded(once(row("watch-lone", "one watch of all pods, many events", "event", watchLoad{watchers: exactly(1), rate: l.loneRate, during: during, of: changedPods}.run)), tail...),
		bounded(once(row("write-mixed", "create, update, merge patch, apply and delete ConfigMaps", "write", mixedLoad{clients: l.writers, rounds: exactly(l.rounds)}.run)), toUpstream("latency p99", 0.8), toUpstream("server CPU per write", 0.8)),
		bounded(row("get", "GET of a pod, consistent", "GET", getLoad{clients: exactly(l.clients), pods: true}.run), toUpstream("latency p99", 1), toUpstream("server CPU per GET", 0.45)),
		bounded(row("get-any", "GET of a pod with resourceVersion=0", "GET", getLoad{clients: exactly(l.clients), pods: true, query: "?resourceVersion=0"}.run), toUpstream("latency p99", 1), toUpstream("server CPU per GET", 0.45)),
		row("list-node", "LIST the pods of one node, protobuf, one client", "LIST", nodesLoad{clients: exactly(1)}.run),
		row("list-node-many", "LIST the pods of one node, protobuf, many clients", "LIST", nodesLoad{clients: exactly(l.clients)}.run),
		row("list-namespace", "LIST the pods of one namespace, protobuf", "LIST", list(podsOfANamespace, podsOfEachNamespace, protobufFormat, true)),
		row("list-json", "LIST all pods, JSON", "LIST", list(fixed(allPods), stored("pods"), jsonFormat, false)),
		row("list-protobuf", "LIST all pods, protobuf", "LIST", list(fixed(allPods), stored("pods"), protobufFormat, false)),
		row("list-label", "LIST the pods with labels that a tenth have, JSON", "LIST", list(fixed(allPods+labelsOfATenth()), tenthOfPods, jsonFormat, true)),
		row("list-pages", "LIST all pods by pages, JSON", "LIST", pagesLoad{path: allPods, want: stored("pods"), format: jsonFormat}.run),
	}
}

func thingsNamespace(s *Sample) string {
	return dataset.PodNamespace(s.Number%s.Data.Namespaces, s.Data.Namespaces)
}

func thingsOfANamespace(s *Sample) string { return dataset.ThingsIn(thingsNamespace(s)) }

func thingsOfEachNamespace(ctx context.Context, s *Sample) (int, error) {
	return dataset.Count(ctx, s.Etcd.Client, dataset.ThingsResource+"/"+thingsNamespace(s))
}

// labelsOfATenth selects ten of the hundred values that the objects have in turn.
func labelsOfATenth() string {
	values := make([]string, 10)
	for i := range values {
		values[i] = fmt.Sprintf("app-%d", i)
	}
	return "?labelSelector=app%20in%20(" + strings.Join(values, ",") + ")"
}

func tenthOfPods(_ context.Context, s *Sample) (int, error) {
	return s.Data.Pods/100*10 + min(s.Data.Pods%100, 10), nil
}

// run runs the sequence.
func (l *lived) run(ctx context.Context, r *runner) error {
	sequence := r.config.Workloads
	for ; len(sequence) > 0 && sequence[0].Alone; sequence = sequence[1:] {
		data := l.data()
		if sequence[0].Name == startPods {
			data.ConfigMaps, data.Things = 0, 0
		}
		for _, spec := range r.config.Engines {
			if err := r.measureFresh(ctx, data, sequence[0], spec, 0); err != nil {
				return err
			}
		}
	}
	if len(sequence) == 0 {
		return nil
	}
	lives := map[string]*bench{}
	for _, spec := range r.config.Engines {
		b, err := r.open(ctx, l.data(), "etcd-"+spec.Label)
		if err != nil {
			return err
		}
		defer b.close()
		if _, err := b.engine(ctx, spec); err != nil {
			return err
		}
		lives[spec.Label] = b
	}
	after := &livedMemory{result: Result{Name: "memory", Title: "the processes after the sequence", Notes: map[string]string{},
		Wanted: []Bound{toUpstream(fmt.Sprintf("resident %v later", l.rest), 0.35)}}, first: map[string]*target.Engine{}}
	for label, b := range lives {
		after.first[label] = b.engines[0]
	}
	defer func() { r.memory = append(r.memory, after.result) }()
	for round := range l.repeat {
		for _, w := range sequence {
			for _, b := range lives {
				if err := b.compact(ctx); err != nil {
					return err
				}
			}
			for run := range w.runs(r.config.Runs) {
				for _, spec := range r.config.Engines {
					if err := lives[spec.Label].measure(ctx, w, spec, run, true); err != nil {
						return err
					}
				}
			}
		}
		suffix := ""
		if l.repeat > 1 {
			suffix = fmt.Sprintf(", after sequence %d", round+1)
		}
		if err := after.note(ctx, lives, "at the end"+suffix); err != nil {
			return err
		}
		r.steps.step("rest")
		if !waitUntil(ctx, time.Now().Add(l.rest)) {
			return context.Cause(ctx)
		}
		r.steps.done("done")
		if err := after.note(ctx, lives, fmt.Sprintf("%v later%s", l.rest, suffix)); err != nil {
			return err
		}
	}
	return nil
}

// livedMemory is the result with the state of the processes.
type livedMemory struct {
	result Result
	first  map[string]*target.Engine // the processes of the start
}

// note adds rows with the memory and the goroutines of the engines.
func (m *livedMemory) note(ctx context.Context, lives map[string]*bench, when string) error {
	rows := []Row{{Name: "resident " + when, Unit: Bytes}, {Name: "heap " + when, Unit: Bytes}, {Name: "goroutines " + when, Unit: Count}}
	for i := range rows {
		rows[i].Values = map[string]float64{}
	}
	for label, b := range lives {
		if len(b.engines) == 0 || b.engines[0] != m.first[label] || b.engines[0].Ended() != nil {
			m.result.Notes[label] = "had to be started again: its rows are not of one process"
			continue
		}
		memory, err := b.engines[0].Memory()
		if err != nil {
			return err
		}
		state, err := b.engines[0].State(ctx) // collects garbage: after the resident memory
		if err != nil {
			return errors.Join(err, b.engines[0].Ended())
		}
		for i, value := range []float64{float64(memory.Resident), float64(state.Heap), float64(state.Goroutines)} {
			rows[i].Values[label] = value
		}
	}
	m.result.Rows = append(m.result.Rows, rows...)
	return nil
}
