package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Workload is one measurement, taken alternately on each engine. To add one, declare it in the file
// of its kind (list.go, get.go, write.go, watch.go, ...) and add it to workloads.
type Workload struct {
	Name  string // for -workloads; lower case
	Title string // name in the table
	Op    string // name of one operation: "LIST", "write"

	// Dataset returns the initial content of etcd.
	Dataset func(Sizes) dataset.Spec

	// Alone runs the workload on a fresh engine, while no other engine runs: for first requests of
	// a process, and for writes at a rate at which an engine that follows them disturbs the other's
	// measurement. The limit is not measured. Otherwise all engines run, answer all workloads, and
	// are measured in turns, seconds apart.
	Alone bool

	// Session names the process that workloads with Alone share; those with another Session run in
	// another process.
	Session string

	// Env are further variables of the environment of the engines, as name=value. It needs Alone,
	// and a Session of its own.
	Env []string

	// Timeout bounds a run on one engine; 0 means sampleTimeout.
	Timeout time.Duration

	// Starts marks a workload that starts its engines itself, with Sample.Start. Sample.Engine is
	// nil. It needs Alone, and a Session of its own.
	Starts bool

	// Runs bounds Config.Runs where a sample is expensive; 0 does not.
	Runs int

	// Dear omits the warm-up run, except for the first engine and the limit: it is expensive, and
	// the other engines cache nothing in it.
	Dear bool

	// Prepare, if not nil, changes the content of etcd before the first sample.
	Prepare func(ctx context.Context, s *Surroundings) error

	// Change, if not nil, changes the content of etcd before each round of samples: each engine
	// answers the changed objects once.
	Change func(ctx context.Context, s *Surroundings) error

	// Run does the workload once: it prepares its requests, does the operations within s.Measure,
	// and verifies every answer. An error means that the engine failed, and its figures are not
	// compared.
	Run func(ctx context.Context, s *Sample) error

	// Tail reports p90 and p99 even of few operations.
	Tail bool

	// PassesOn permits Strata's byte read path to pass requests on. Without it, a request passed on
	// is an error of the whole run.
	PassesOn bool

	// Wanted are the bounds of the figures.
	Wanted []Bound
}

// Surroundings are the etcd, sizes and random source of a workload, shared by all engines.
type Surroundings struct {
	Etcd  *target.Etcd
	Data  dataset.Spec
	Sizes Sizes
	Rand  *rand.Rand // of its own for every use; equal runs draw equal numbers

	// Number is unique for each use: values written in one use must differ from those of another.
	Number int
}

// runs returns the number of measurements of each engine, at most asked.
func (w Workload) runs(asked int) int {
	if w.Runs == 0 {
		return asked
	}
	return min(w.Runs, asked)
}

// workloads are all workloads in the order in which they run and are shown: first those that run
// alone, last those that leave data, such as other objects, in an engine.
var workloads = slices.Concat(startWorkloads, writeWorkloads, watchWorkloads, coldWorkloads, mixedWorkloads, restoreWorkloads,
	checkWorkloads, nodeWorkloads, listWorkloads, getWorkloads, quietWorkloads, tableWorkloads, initialWorkloads, streamWorkloads,
	labelWorkloads, fieldWorkloads, thingWorkloads, coldPagesWorkloads, fewWorkloads, stormWorkloads)

// selectWorkloads returns the workloads whose whole name matches one of the comma-separated regular
// expressions; "" selects all.
func selectWorkloads(all []Workload, patterns string) ([]Workload, error) {
	if patterns == "" {
		return all, nil
	}
	var selected []Workload
	wanted := map[string]bool{}
	for _, pattern := range strings.Split(patterns, ",") {
		re, err := regexp.Compile("^(?:" + pattern + ")$")
		if err != nil {
			return nil, fmt.Errorf("-workloads: %w", err)
		}
		found := false
		for _, w := range all {
			if re.MatchString(w.Name) {
				wanted[w.Name], found = true, true
			}
		}
		if !found {
			return nil, fmt.Errorf("-workloads: unknown workload %q (-list shows them)", pattern)
		}
	}
	for _, w := range all {
		if wanted[w.Name] {
			selected = append(selected, w)
		}
	}
	return selected, nil
}

// Sizes are the numbers of objects, clients and operations, and the durations.
type Sizes struct {
	Objects    int // ConfigMaps
	Pods       int // spread over Nodes and Namespaces
	Nodes      int
	Namespaces int

	Few         int // ConfigMaps where more would only be in the way
	OtherPods   int // pods beside the ConfigMaps, podsPerNamespace in each namespace
	Changed     int // objects that change between two LISTs
	Page        int // objects on a page
	Crowd       int // clients that LIST at once
	Streams     int // clients that request initial events at once
	Quiet       int // objects of a resource that nothing changes
	IdleObjects int // watchers of one object each, of which none changes
	Resumed     int // watches that continue after a restart
	History     int // revisions of etcd's history when an engine starts
	Fleet       int // clients that LIST all pods at once
	FleetPods   int // pods that they LIST
	FleetBytes  int // random bytes of each of these

	// bound of the wait for quiet: a process that is never quiet is measured too
	Quieten time.Duration
	// time without requests after which the memory of a started engine counts as "at rest"
	Rest          time.Duration
	Settle        time.Duration // the same after the last workload
	Writes        int           // writes of one kind per sample
	MixedWrites   int           // writes of several kinds and clients per sample
	Loop          time.Duration // how long short reads are repeated per sample
	WatchDuration time.Duration // how long events are made per sample
	// the same for watchers of nodes: at their low rate, long enough for the collector to have its
	// share
	NodeDuration time.Duration
	LoneRate     int // events per second for the lone watcher
	Watchers     int // watchers of one collection
	SharedRate   int // events per second for them
	NodeWatchers int // watchers of the pods of one node each
	NodeRate     int // events per second for all of them together
	// duration of the writes beside the measured requests, per sample or phase
	Beside    time.Duration
	FleetWait time.Duration // for the answer to each client of the fleet, refusals included
}

// fullSizes are the sizes of published figures.
func fullSizes() Sizes {
	s := Sizes{
		Quieten:       10 * time.Second,
		Rest:          10 * time.Second,
		Settle:        time.Minute,
		Writes:        5_000,
		MixedWrites:   4_000,
		Loop:          2 * time.Second,
		WatchDuration: 5 * time.Second,
		LoneRate:      4_000,
		Watchers:      1_000,
		SharedRate:    20,
		NodeWatchers:  2_000,
		NodeRate:      500,
		NodeDuration:  20 * time.Second,
		IdleObjects:   5_000,
		Resumed:       100,
		History:       200_000,
		Fleet:         1_000,
		FleetPods:     20_000,
		FleetBytes:    10_000,
		FleetWait:     15 * time.Minute,
		Few:           20_000,
		OtherPods:     10_000,
		Page:          500,
		Crowd:         16,
		Streams:       20,
		Quiet:         100,
		Beside:        5 * time.Second,
	}
	s.setObjects(300_000)
	return s
}

// podsPerNamespace is the number of pods in each namespace.
const podsPerNamespace = 1000

// setObjects sets the number of ConfigMaps, and the others in proportion: one in a hundred changes
// between two LISTs, one in twenty after the listed revision; workloads on pods have a third as
// many pods, 20 on each node.
func (s *Sizes) setObjects(n int) {
	s.Objects = n
	s.Changed = max(1, n/100)
	s.Namespaces = max(1, n/3/podsPerNamespace)
	s.Pods = s.Namespaces * podsPerNamespace
	s.Nodes = s.Pods / podsPerNode
}

const podsPerNode = 20

// quickSizes are a tenth, for smoke tests, not for quoting. Rates per second are those of
// fullSizes.
func quickSizes() Sizes {
	s := fullSizes()
	s.setObjects(s.Objects / 10)
	s.Rest, s.Settle = time.Second, time.Second
	s.MixedWrites /= 4
	s.Writes /= 4 // a tenth would be fewer than the p99 of a run needs
	s.Loop = time.Second
	s.WatchDuration = 3 * time.Second
	s.NodeDuration = 3 * time.Second
	s.Watchers /= 10
	s.NodeWatchers /= 10
	s.IdleObjects = 2_000 // fewer would fit into memory that a server has allocated anyway
	s.History /= 10
	s.Fleet /= 10
	s.FleetPods /= 10
	s.FleetWait = 2 * time.Minute
	s.Few /= 10
	s.Streams /= 4
	s.Beside = 2 * time.Second
	return s
}

// configMaps is the data of most workloads.
func configMaps(s Sizes) dataset.Spec {
	return dataset.Spec{
		ConfigMaps: s.Objects, Pods: s.OtherPods, Nodes: max(1, s.OtherPods/podsPerNode), Namespaces: max(1, s.OtherPods/podsPerNamespace),
	}
}

// fleetPods is the data of a fleet of clients.
func fleetPods(s Sizes) dataset.Spec {
	return dataset.Spec{
		Pods: s.FleetPods, PodBytes: s.FleetBytes, Nodes: max(1, s.FleetPods/podsPerNode), Namespaces: max(1, s.FleetPods/podsPerNamespace),
	}
}

// fewConfigMaps is the data of workloads whose subject is watches, not the number of objects.
func fewConfigMaps(s Sizes) dataset.Spec { return dataset.Spec{ConfigMaps: s.Few, Namespaces: 1} }

// pods is the data of workloads on many pods, which have more fields and more selectors than
// ConfigMaps.
func pods(s Sizes) dataset.Spec {
	return dataset.Spec{Pods: s.Pods, Nodes: s.Nodes, Namespaces: s.Namespaces}
}
