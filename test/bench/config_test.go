package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/bench/internal/target"
)

func parse(args ...string) (Config, error) { return parseFlags(args, io.Discard, io.Discard) }

func TestQuickFlag_UsesTenthOfObjects(t *testing.T) {
	full, err := parse()
	if err != nil {
		t.Fatal(err)
	}
	quick, err := parse("-quick")
	if err != nil {
		t.Fatal(err)
	}
	if full.Sizes.Objects != 300_000 || quick.Sizes.Objects*10 != full.Sizes.Objects || quick.Sizes.LoneRate != full.Sizes.LoneRate {
		t.Errorf("full %+v, quick %+v", full.Sizes, quick.Sizes)
	}
	if full.Sizes.Pods != 100_000 || full.Sizes.Nodes != 5_000 || full.Sizes.Namespaces != 100 {
		t.Errorf("full sizes %+v", full.Sizes)
	}
	if len(full.Workloads) != len(workloads) || full.Runs < 5 {
		t.Errorf("%d of %d workloads, %d runs", len(full.Workloads), len(workloads), full.Runs)
	}
}

func TestSelectWorkloads_MatchesWholeNames(t *testing.T) {
	names := func(patterns string) []string {
		selected, err := selectWorkloads(workloads, patterns)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, w := range selected {
			names = append(names, w.Name)
		}
		return names
	}
	if got := names("get"); !slices.Equal(got, []string{"get"}) {
		t.Errorf("get selects %v", got)
	}
	if got := names("get.*,create,get"); !slices.Equal(got, []string{"create", "get", "get-16", "get-64", "get-16-any"}) {
		t.Errorf("get.*,create,get selects %v", got)
	}
}

func TestWorkloads_NamesAreUnique(t *testing.T) {
	seen := map[string]bool{}
	for _, w := range workloads {
		if seen[w.Name] || w.Name != strings.ToLower(w.Name) || w.Title == "" {
			t.Errorf("workload %q (%s)", w.Name, w.Title)
		}
		seen[w.Name] = true
	}
}

func TestEnginesFlag_SetsLabelBinaryAndArgs(t *testing.T) {
	config, err := parse("-engines", "strata,old=strata@/tmp/old,upstream", "-engine-arg", "old:--v=2", "-memory-limit", "1Gi")
	if err != nil {
		t.Fatal(err)
	}
	want := []target.EngineSpec{
		{Label: "strata", Engine: "strata", MemoryLimit: 1 << 30},
		{Label: "old", Engine: "strata", Binary: "/tmp/old", Args: []string{"--v=2"}, MemoryLimit: 1 << 30},
		{Label: "upstream", Engine: "upstream", MemoryLimit: 1 << 30},
	}
	if !slices.EqualFunc(config.Engines, want, func(a, b target.EngineSpec) bool {
		args := slices.Equal(a.Args, b.Args)
		a.Args, b.Args = nil, nil
		return args && a.Label == b.Label && a.Engine == b.Engine && a.Binary == b.Binary && a.MemoryLimit == b.MemoryLimit
	}) {
		t.Errorf("got %+v", config.Engines)
	}
}

func TestStockFlag_SetsExecutableOfStockEngines(t *testing.T) {
	own, other := filepath.Join(t.TempDir(), "own"), filepath.Join(t.TempDir(), "other")
	for _, name := range []string{own, other} {
		if err := os.WriteFile(name, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	config, err := parse("-engines", "strata,stock,old=stock@"+other, "-stock", own)
	if err != nil {
		t.Fatal(err)
	}
	if got := []string{config.Engines[0].Binary, config.Engines[1].Binary, config.Engines[2].Binary}; !slices.Equal(got, []string{"", own, other}) {
		t.Errorf("executables are %q", got)
	}
	w := Workload{Flags: map[string][]string{upstreamEngine: {"--of-upstream"}}}
	if got := w.variant(config.Engines[1]); !slices.Equal(got.Args, []string{"--of-upstream"}) {
		t.Errorf("stock has the flags %q of a workload, want upstream's", got.Args)
	}
	_, err = parse("-engines", "strata,stock", "-stock", filepath.Join(t.TempDir(), "missing"))
	if err == nil || !strings.Contains(err.Error(), "make stock") {
		t.Errorf("a missing executable: %v, want an error that names make stock", err)
	}
}

func TestProfileFlag_ProfilesFirstEngineByDefault(t *testing.T) {
	for want, args := range map[string][]string{
		"strata":          {"-profile=p"},
		"strata,upstream": {"-profile=p", "-profile-engines=strata,upstream"},
	} {
		config, err := parse(args...)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(config.Profiled, ","); got != want {
			t.Errorf("%v profile %s, want %s", args, got, want)
		}
	}
}

func TestParseVersions_ReturnsOneLine(t *testing.T) {
	const output = "strata      v0.1.0-dev\nkubernetes  v1.37.1\ngo          go1.26.8 linux/amd64\n"
	if got := parseVersions(output); got != "strata v0.1.0-dev, kubernetes v1.37.1" {
		t.Errorf("got %q", got)
	}
}

func TestFlags_Invalid_ReturnOneLineError(t *testing.T) {
	for _, args := range [][]string{
		{"-nonsense"},
		{"stray"},
		{"-objects=10"},
		{"-runs=0"},
		{"-workloads=nonsense"},
		{"-workloads=("},
		{"-engines="},
		{"-engines=a,a"},
		{"-engines=a/b"},
		{"-engine-arg=strata"},
		{"-engine-arg=nobody:--v=2"},
		{"-memory-limit=much"},
		{"-engines=limit"},
		{"-profile-engines=nobody"},
		{"-profile-engines=limit"},
		{"-profile-md=x.md"},
	} {
		if _, err := parse(args...); err == nil {
			t.Errorf("%v is accepted", args)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%v: more than one line: %v", args, err)
		}
	}
}
