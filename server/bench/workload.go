package main

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/server/bench/internal/dataset"
)

// Workload is one measurement, taken alternately on each engine. To add one, write it beside its like (list.go, get.go, write.go, watch.go)
// and name it in workloads.
type Workload struct {
	Name  string // for -workloads; lower case
	Title string // what the table calls it
	Op    string // what one operation is called: "LIST", "write"

	// Dataset says what etcd holds.
	Dataset func(Sizes) dataset.Spec

	// Alone runs the workload on an engine that was just started, while no other engine runs. Whatever changes etcd needs it, because the
	// other engine would follow the changes too. Otherwise all engines run and are measured in turns, seconds apart.
	Alone bool

	// Run does the workload once: it prepares what it needs, does the operations within s.Measure, and verifies every answer. An error
	// means that the engine failed, and its figures are not compared.
	Run func(ctx context.Context, s *Sample) error
}

// workloads are all workloads in the order in which they run and are shown; those that run alone come first.
var workloads = slices.Concat(startWorkloads, writeWorkloads, watchWorkloads, listWorkloads, getWorkloads, podWorkloads)

// selectWorkloads returns the workloads whose whole name matches one of the comma-separated regular expressions; "" selects all.
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
			return nil, fmt.Errorf("-workloads: no workload is called %q (-list shows them)", pattern)
		}
	}
	for _, w := range all {
		if wanted[w.Name] {
			selected = append(selected, w)
		}
	}
	return selected, nil
}

// Sizes says how much there is of everything.
type Sizes struct {
	Objects    int // ConfigMaps
	Pods       int // spread over Nodes and Namespaces
	Nodes      int
	Namespaces int

	Rest          time.Duration // how long a started engine is left alone before what it holds counts as "at rest"
	Writes        int           // writes of one kind per sample
	Loop          time.Duration // how long short reads are repeated per sample
	WatchDuration time.Duration // how long events are made per sample
	LoneRate      int           // events per second for the lone watcher
	Watchers      int           // watchers of one collection
	SharedRate    int           // events per second for them
}

// fullSizes are the sizes that figures are quoted for.
func fullSizes() Sizes {
	s := Sizes{
		Rest:          10 * time.Second,
		Writes:        1_000,
		Loop:          3 * time.Second,
		WatchDuration: 10 * time.Second,
		LoneRate:      4_000,
		Watchers:      1_000,
		SharedRate:    20,
	}
	s.setObjects(300_000)
	return s
}

// setObjects sets the number of ConfigMaps, and the others in proportion: a third as many pods, 20 on each node, 1,000 in each namespace.
func (s *Sizes) setObjects(n int) {
	const perNode, perNamespace = 20, 1000
	s.Objects = n
	s.Namespaces = max(1, n/3/perNamespace)
	s.Pods = s.Namespaces * perNamespace
	s.Nodes = s.Pods / perNode
}

// quickSizes are a tenth: to see that all works, not to quote. Rates per second stay what they are.
func quickSizes() Sizes {
	s := fullSizes()
	s.setObjects(s.Objects / 10)
	s.Rest = time.Second
	s.Writes /= 4 // a tenth would be fewer than the p99 of a run needs
	s.Loop = time.Second
	s.WatchDuration = 3 * time.Second
	s.Watchers /= 10
	return s
}

// statusPods is how many pods lie beside the ConfigMaps for status patches.
const statusPods = 1_000

// configMaps is the data of most workloads.
func configMaps(s Sizes) dataset.Spec {
	return dataset.Spec{ConfigMaps: s.Objects, Pods: statusPods, Nodes: 50, Namespaces: 1}
}

// pods is the data of workloads on pods, which have more fields and more selectors than ConfigMaps.
func pods(s Sizes) dataset.Spec {
	return dataset.Spec{Pods: s.Pods, Nodes: s.Nodes, Namespaces: s.Namespaces}
}
