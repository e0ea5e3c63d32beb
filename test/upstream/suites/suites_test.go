package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestRewriteImports_ChangesImportPathsOnly(t *testing.T) {
	const text = `/*
Copyright 2017 The Kubernetes Authors.
*/

package p // k8s.io/kubernetes/test/integration/framework

import (
	"fmt"

	kubeapiservertesting "k8s.io/kubernetes/cmd/kube-apiserver/app/testing"
	"k8s.io/kubernetes/test/integration"
	"k8s.io/kubernetes/test/integrations"
)

var s = fmt.Sprint("k8s.io/kubernetes/test/integration")
`
	got, replaced, err := rewriteImports(text, isCopied, func(path string) string { return "copy/" + path })
	if err != nil {
		t.Fatal(err)
	}
	want := strings.NewReplacer(
		`testing "k8s.io/kubernetes/cmd`, `testing "copy/k8s.io/kubernetes/cmd`,
		"\t\"k8s.io/kubernetes/test/integration\"", "\t\"copy/k8s.io/kubernetes/test/integration\"").Replace(text)
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if paths := []string{"k8s.io/kubernetes/cmd/kube-apiserver/app/testing", "k8s.io/kubernetes/test/integration"}; !slices.Equal(replaced, paths) {
		t.Errorf("replaced %v, want %v", replaced, paths)
	}
}

func TestPatch_MissingOrAmbiguousAnchor_ReturnsError(t *testing.T) {
	const text = "import (\n\t\"fmt\"\n)\n\nfunc f() {\n\ta()\n\tb()\n\tb()\n}\n"
	got, err := patch(text, []edit{{"\ta()", "\tbefore()\n"}})
	if err != nil || !strings.Contains(got, "\n\n\tstrata \"") || !strings.Contains(got, "\tbefore()\n\ta()\n") {
		t.Errorf("got %q, %v", got, err)
	}
	for _, anchor := range []string{"\tc()", "\tb()"} {
		if _, err := patch(text, []edit{{anchor, "\tbefore()\n"}}); err == nil {
			t.Errorf("patch before %q succeeded, want an error", anchor)
		}
	}
}

func TestParseTest2JSON_Events_ReturnsVerdictsAndLog(t *testing.T) {
	const events = `{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA","Output":"hello\n"}
not json
{"Action":"pass","Test":"TestA/sub"}
{"Action":"fail","Test":"TestA"}
{"Action":"skip","Test":"TestB"}
{"Action":"run","Test":"TestC"}
{"Action":"fail"}
`
	var log strings.Builder
	got, err := parseTest2JSON(strings.NewReader(events), &log)
	want := Verdicts{"TestA/sub": Pass, "TestA": Fail, "TestB": Skip}
	if err != nil || len(got) != len(want) {
		t.Fatalf("got %v, %v, want %v", got, err, want)
	}
	for test, verdict := range want {
		if got[test] != verdict {
			t.Errorf("%s: got %s, want %s", test, got[test], verdict)
		}
	}
	if log.String() != "hello\nnot json\n" {
		t.Errorf("log is %q", log.String())
	}
}

func TestDifferences_DivergingVerdicts_AreReported(t *testing.T) {
	byEngine := map[Engine]Verdicts{
		Upstream: {"TestSame": Pass, "TestBoth": Fail, "TestSub": Pass, "TestSub/a": Pass, "TestSub/b": Pass, "TestGone": Pass, "TestSkip": Skip},
		Strata:   {"TestSame": Pass, "TestBoth": Fail, "TestSub": Fail, "TestSub/a": Pass, "TestSub/b": Fail, "TestSkip": Skip},
	}
	if got, want := disputed(byEngine), []string{"TestBoth", "TestGone", "TestSub"}; !slices.Equal(got, want) {
		t.Errorf("disputed: got %v, want %v", got, want)
	}
	gone, sub := Finding{"TestGone", Pass, Absent}, Finding{"TestSub/b", Pass, Fail}
	if got, want := differences(byEngine), []Finding{gone, sub}; !slices.Equal(got, want) {
		t.Errorf("differences: got %v, want %v", got, want)
	}
	if got, want := failedEverywhere(byEngine), []string{"TestBoth"}; !slices.Equal(got, want) {
		t.Errorf("failed everywhere: got %v, want %v", got, want)
	}
	byEngine[Strata].merge(Verdicts{"TestSub": Pass, "TestSub/a": Fail, "TestSub/b": Pass, "TestGone": Pass})
	if found := differences(byEngine); len(found) != 0 {
		t.Errorf("after a retry that passed: differences %v, want none", found)
	}
}

func TestFailedEverywhere_BothEnginesFail_ReturnsTests(t *testing.T) {
	for name, test := range map[string]struct {
		upstream, strata Verdicts
		want             []string
	}{
		"both fail":              {Verdicts{"T": Fail}, Verdicts{"T": Fail}, []string{"T"}},
		"neither ends":           {Verdicts{"T": Absent}, Verdicts{"T": Absent}, []string{"T"}},
		"one passes":             {Verdicts{"T": Fail}, Verdicts{"T": Pass}, nil},
		"missing on strata":      {Verdicts{"T": Fail, "T/a": Fail}, Verdicts{"T": Fail}, []string{"T"}},
		"missing on upstream":    {Verdicts{}, Verdicts{"T": Fail}, nil},
		"fails and does not end": {Verdicts{"T": Fail}, Verdicts{"T": Absent}, nil},
		"for the same subtest":   {Verdicts{"T": Fail, "T/a": Fail}, Verdicts{"T": Fail, "T/a": Fail}, []string{"T/a"}},
		"for other subtests":     {Verdicts{"T": Fail, "T/a": Fail, "T/b": Pass}, Verdicts{"T": Fail, "T/a": Pass, "T/b": Fail}, nil},
	} {
		if got := failedEverywhere(map[Engine]Verdicts{Upstream: test.upstream, Strata: test.strata}); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
	if got := failedEverywhere(map[Engine]Verdicts{Strata: {"T": Fail, "U": Pass}}); !slices.Equal(got, []string{"T"}) {
		t.Errorf("one engine: got %q, want T", got)
	}
}

func TestJudge_UnknownFinding_IsProblem(t *testing.T) {
	entry := func(unit string, f Finding) knownFinding {
		return knownFinding{Suite: "s", Unit: unit, Test: f.Test, Upstream: f.Upstream, Strata: f.Strata, Reason: "because"}
	}
	gone, sub, both := Finding{"TestGone", Pass, Absent}, Finding{"TestSub/b", Pass, Fail}, failure("TestBoth")
	found := []Finding{gone, sub, both}
	all := []knownFinding{entry("u", gone), entry("u", sub), entry("u", both)}
	for name, test := range map[string]struct {
		known    []knownFinding
		problems int
	}{
		"unknown":           {nil, 3},
		"differences known": {all[:2], 1},
		"known":             {all, 0},
		"other verdict":     {[]knownFinding{all[0], entry("u", failure("TestSub/b")), all[2]}, 2},
		"no longer occurs":  {append(slices.Clone(all), entry("u", failure("TestSame"))), 1},
		"other unit":        {append(slices.Clone(all), entry("v", failure("TestSame"))), 0},
	} {
		if problems := judge(test.known, "s", "u", found); len(problems) != test.problems {
			t.Errorf("%s: problems %q, want %d", name, problems, test.problems)
		}
	}
	if got := reason(all, "s", "u", both); got != "because" {
		t.Errorf("reason of %v is %q", both, got)
	}
}

func TestJudgeActivity_IdleUnit_IsProblem(t *testing.T) {
	idle := []idleUnit{{Suite: "s", Unit: "idle"}}
	for name, test := range map[string]struct {
		unit     Unit
		counts   counts
		problems int
	}{
		"servers":                 {Unit{Name: "u", StartsServers: true}, counts{Passed: 1, Servers: 1}, 0},
		"no servers":              {Unit{Name: "u", StartsServers: true}, counts{Passed: 1}, 1},
		"no servers, not counted": {Unit{Name: "u"}, counts{Passed: 1}, 0},
		"no test passed":          {Unit{Name: "u", StartsServers: true}, counts{Skipped: 1}, 1},
		"idle":                    {Unit{Name: "idle", StartsServers: true}, counts{Skipped: 1}, 0},
		"no longer idle":          {Unit{Name: "idle", StartsServers: true}, counts{Passed: 1, Servers: 1}, 1},
	} {
		if problems := judgeActivity(idle, "s", test.unit, Strata, test.counts); len(problems) != test.problems {
			t.Errorf("%s: problems %q, want %d", name, problems, test.problems)
		}
	}
}

func TestStartedServers_CountsOneEngine(t *testing.T) {
	const text = `I1122 13:24:18.574131   30126 attach.go:52] "Starting a server" engine="strata"
    server_test.go:8: I1122 13:24:19.5   30126 attach.go:52] "Starting a server" engine="strata"
I1122 13:24:26.128381   30126 attach.go:52] "Starting a server" engine="upstream"
`
	log := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(log, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if strata, upstream := startedServers(log, Strata), startedServers(log, Upstream); strata != 2 || upstream != 1 {
		t.Errorf("%d servers on strata and %d on upstream, want 2 and 1", strata, upstream)
	}
}

func TestWithoutUnit_EntriesOfMissingUnits_AreProblems(t *testing.T) {
	known := []knownFinding{{Suite: "s", Unit: "u", Test: "T"}, {Suite: "s", Unit: "gone", Test: "T"}, {Suite: "other", Unit: "v", Test: "T"}}
	idle := []idleUnit{{Suite: "s", Unit: "u"}, {Suite: "s", Unit: "gone"}, {Suite: "other", Unit: "v"}}
	if problems := withoutUnit(known, idle, "s", []Unit{{Name: "u"}}); len(problems) != 2 {
		t.Errorf("problems %q, want 2", problems)
	}
}

func TestKnown_EntriesNameSuiteAndReason(t *testing.T) {
	names := map[string]bool{}
	for _, s := range all {
		names[s.Name] = true
	}
	for _, k := range known {
		if !names[k.Suite] || k.Reason == "" {
			t.Errorf("%+v has no suite or no reason", k)
		}
	}
	for _, i := range idle {
		if !names[i.Suite] || i.Reason == "" {
			t.Errorf("%+v has no suite or no reason", i)
		}
	}
}

func TestDropStale_RemovesResultsOfOtherVersions(t *testing.T) {
	r := results{"s": {"u": {Source: "m v2"}, "old": {Source: "m v1"}, "gone": {Source: "m v2"}}, "other": {"v": {Source: "m v1"}}}
	units := []Unit{{Name: "u", Source: "m v2"}, {Name: "old", Source: "m v2"}, {Name: "new", Source: "m v2"}}
	if !r.dropStale("s", units) || len(r["s"]) != 1 || r["s"]["u"].Source != "m v2" || len(r["other"]) != 1 {
		t.Errorf("after dropStale: %v", r)
	}
	if r.dropStale("s", units) || r.dropStale("unknown", units) {
		t.Error("dropStale removed rows of the current version")
	}
}

func TestTestTime_ExclusiveUnit_AddsBothEngines(t *testing.T) {
	engines := map[Engine]counts{Upstream: {Seconds: 10}, Strata: {Seconds: 7}}
	if got := testTime(map[string]outcome{"u": {Engines: engines}, "v": {Engines: engines, Exclusive: true}}); got != 27*time.Second {
		t.Errorf("%s, want 27s", got)
	}
}

// The document is generated: a change of it, of the results or of the generator alone is an error.
func TestDocument_MatchesResultsFile(t *testing.T) {
	r, err := readResults("results.json")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../../docs/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != document(all, r) {
		t.Error("docs/conformance.md differs from results.json: run go run . -document")
	}
}
