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

// Workload is one measurement, taken alternately on each engine. To add one, declare it with its
// sizes in the file of its kind (list.go, write.go, watch.go, ...) and add it to workloads.
type Workload struct {
	Name  string // for -workloads; lower case
	Title string // name in the table
	Op    string // name of one operation: "LIST", "write"

	Dataset contents // the initial content of etcd

	// Alone runs the workload on a fresh engine, while no other engine runs: for first requests of
	// a process, and for writes at a rate at which an engine that follows them disturbs the other's
	// measurement. Otherwise all engines run, answer all workloads, and
	// are measured in turns, seconds apart.
	Alone bool

	// Fresh gives each sample of a workload with Alone an etcd of its own.
	Fresh bool

	// Lived adds the workload to the sequence of "bench lived", whose processes live on unless it
	// is Fresh. All content is that of the sequence there.
	Lived bool

	// Starts marks a workload with Alone that starts its engines itself, with Sample.Start.
	// Sample.Engine is nil.
	Starts bool

	// Runs bounds Config.Runs where a sample is expensive; 0 does not.
	Runs int

	// Change, if not nil, changes the content of etcd before each round of samples: each engine
	// answers the changed objects once.
	Change func(ctx context.Context, s *Surroundings) error

	// Run does the workload once: it prepares its requests, does the operations within s.Measure,
	// and verifies every answer. An error means that the engine failed, and its figures are not
	// compared.
	Run func(ctx context.Context, s *Sample) error

	// Tail reports the tail of the latencies even of few operations.
	Tail bool

	// PassesOn permits Strata's byte read path to pass requests on. Without it, a request passed on
	// is an error of the whole run.
	PassesOn bool

	// Wanted are the bounds of the figures.
	Wanted []Bound
}

// Surroundings are the etcd, data and random source of a workload, shared by all engines.
type Surroundings struct {
	Etcd  *target.Etcd
	Dir   string // for files of the run, such as logs
	Data  dataset.Spec
	Scale Scale
	Rand  *rand.Rand // of its own for every use; equal runs draw equal numbers

	// Number is unique for each use: values written in one use must differ from those of another.
	Number int
}

// Scale divides the sizes of all workloads: 1 is that of published figures.
type Scale int

const (
	published Scale = 1
	// quick is for smoke tests, not for quoting. Rates per second are those of published.
	quick Scale = 10
	// tiny makes most sizes the least at which their workloads work.
	tiny Scale = 10_000
)

// sized is a size of a workload: that of published figures, and the least at which it works.
type sized[T int | time.Duration] struct{ published, least T }

// size is a number of objects, clients or operations; span is a time.
type (
	size = sized[int]
	span = sized[time.Duration]
)

func (z sized[T]) at(s Scale) T { return max(z.published/T(s), z.least) }

var (
	// quieten bounds the wait for quiet: a process that is never quiet is measured too.
	quieten = span{10 * time.Second, 20 * time.Millisecond}
	// settled is the time without requests after which the memory of a server counts as "at rest":
	// the Go runtime returns memory in the background.
	settled = span{time.Minute, time.Millisecond}
	// loop is the time for which short reads are repeated per sample.
	loop = span{2 * time.Second, 50 * time.Millisecond}
)

// page is the number of objects on a page.
var page = size{500, 30}

// contents is a content of etcd, with the sizes of published figures.
type contents struct{ configMaps, pods, things size }

var (
	// cluster is the content of the sequence.
	cluster = contents{configMaps: size{300_000, 200}, pods: size{100_000, 100}, things: size{100_000, 100}}
	// as JSON above the threshold of compression
	configMaps = contents{configMaps: size{300_000, 200}, pods: size{10_000, 100}}
	// fewConfigMaps is for workloads on watches, not on the number of objects.
	fewConfigMaps = contents{configMaps: size{20_000, 200}}
	fleetPods     = contents{pods: size{60_000, 100}}
)

const podsPerNode, podsPerNamespace = 20, 1000

// at returns the content at a scale.
func (c contents) at(s Scale) dataset.Spec {
	spec := dataset.Spec{ConfigMaps: c.configMaps.at(s), Pods: c.pods.at(s), Things: c.things.at(s), Namespaces: 1}
	if spec.Pods > 0 {
		spec.Nodes, spec.Namespaces = max(1, spec.Pods/podsPerNode), max(1, spec.Pods/podsPerNamespace)
		spec.Pods -= spec.Pods % max(spec.Nodes, spec.Namespaces) // as many in each
	}
	return spec
}

// runs returns the number of measurements of each engine, at most asked.
func (w Workload) runs(asked int) int {
	if w.Runs == 0 {
		return asked
	}
	return min(w.Runs, asked)
}

// workloads are all workloads in the order in which they run and are shown.
var workloads = slices.Concat(startWorkloads, informerWorkloads, customWorkloads, watchWorkloads, writeWorkloads, getWorkloads, listWorkloads,
	fewWorkloads, dayWorkloads)

// selectWorkloads returns the workloads whose whole name matches one of the comma-separated regular
// expressions; "" selects all.
func selectWorkloads(all []Workload, patterns string) ([]Workload, error) {
	if patterns == "" {
		return all, nil
	}
	wanted := map[string]bool{}
	for pattern := range strings.SplitSeq(patterns, ",") {
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
	return slices.DeleteFunc(slices.Clone(all), func(w Workload) bool { return !wanted[w.Name] }), nil
}
