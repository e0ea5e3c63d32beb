package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

func parse(args ...string) (Config, error) { return parseFlags(args, io.Discard) }

func TestQuickFlag_UsesTenthOfObjects(t *testing.T) {
	full, err := parse()
	testcheck.NoError(t, err)
	quick, err := parse("-quick")
	testcheck.NoError(t, err)
	if got := configMaps.at(full.Scale); got != (dataset.Spec{ConfigMaps: 300_000, Pods: 10_000, Nodes: 500, Namespaces: 10}) {
		t.Errorf("full: %+v", got)
	}
	if got := cluster.at(quick.Scale); got != (dataset.Spec{ConfigMaps: 30_000, Pods: 10_000, Things: 10_000, Nodes: 500, Namespaces: 10}) {
		t.Errorf("quick: %+v", got)
	}
	if len(full.Workloads) != len(workloads) || full.Runs < 5 {
		t.Errorf("%d of %d workloads, %d runs", len(full.Workloads), len(workloads), full.Runs)
	}
}

func TestSelectWorkloads_MatchesWholeNames(t *testing.T) {
	names := func(patterns string) []string {
		selected, err := selectWorkloads(workloads, patterns)
		testcheck.NoError(t, err)
		var names []string
		for _, w := range selected {
			names = append(names, w.Name)
		}
		return names
	}
	if got := names("get-16"); !slices.Equal(got, []string{"get-16"}) {
		t.Errorf("get-16 selects %v", got)
	}
	if got := names("get.*,start,get-16"); !slices.Equal(got, []string{"start", "get-16", "get-16-any"}) {
		t.Errorf("get.*,start,get-16 selects %v", got)
	}
}

func TestWorkloads_NamesAreUnique(t *testing.T) {
	if len(workloads) > 30 {
		t.Errorf("%d workloads, want at most 30", len(workloads))
	}
	seen := map[string]bool{}
	for _, w := range workloads {
		if seen[w.Name] || w.Name != strings.ToLower(w.Name) || w.Title == "" {
			t.Errorf("workload %q (%s)", w.Name, w.Title)
		}
		seen[w.Name] = true
	}
}

func TestEnginesFlag_SetsLabelAndBinary(t *testing.T) {
	config, err := parse("-engines", "strata,old=strata@/tmp/old,upstream")
	testcheck.NoError(t, err)
	want := []target.EngineSpec{
		{Label: "strata", Engine: "strata"},
		{Label: "old", Engine: "strata", Binary: "/tmp/old"},
		{Label: "upstream", Engine: "upstream"},
	}
	if !slices.EqualFunc(config.Engines, want, func(a, b target.EngineSpec) bool {
		return a.Label == b.Label && a.Engine == b.Engine && a.Binary == b.Binary
	}) {
		t.Errorf("got %+v", config.Engines)
	}
}

func TestStockFlag_SetsExecutableOfStockEngines(t *testing.T) {
	own, other := filepath.Join(t.TempDir(), "own"), filepath.Join(t.TempDir(), "other")
	for _, name := range []string{own, other} {
		testcheck.NoError(t, os.WriteFile(name, nil, 0o755))
	}
	config, err := parse("-engines", "strata,stock,old=stock@"+other, "-stock", own)
	testcheck.NoError(t, err)
	if got := []string{config.Engines[0].Binary, config.Engines[1].Binary, config.Engines[2].Binary}; !slices.Equal(got, []string{"", own, other}) {
		t.Errorf("executables are %q", got)
	}
	_, err = parse("-engines", "strata,stock", "-stock", filepath.Join(t.TempDir(), "missing"))
	if err == nil || !strings.Contains(err.Error(), "make stock") {
		t.Errorf("a missing executable: %v, want an error that names make stock", err)
	}
}

func TestFlags_Invalid_ReturnOneLineError(t *testing.T) {
	for _, args := range [][]string{
		{"-nonsense"},
		{"stray"},
		{"-runs=0"},
		{"-workloads=nonsense"},
		{"-workloads=("},
		{"-engines="},
		{"-engines=a,a"},
		{"-engines=a/b"},
	} {
		if _, err := parse(args...); err == nil {
			t.Errorf("%v is accepted", args)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%v: more than one line: %v", args, err)
		}
	}
}
