package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/onsi/ginkgo/v2/types"
)

func spec(text string, state types.SpecState) types.SpecReport {
	return types.SpecReport{LeafNodeType: types.NodeTypeIt, LeafNodeText: text, State: state, RunTime: time.Second}
}

// passing returns a report in which every spec of the catalogue that runs passed, the specs that
// must be in it, and all that exist.
func passing() (reports []types.SpecReport, wanted, all []string) {
	reports = []types.SpecReport{
		{LeafNodeType: types.NodeTypeSynchronizedBeforeSuite, State: types.SpecStatePassed},
		{LeafNodeType: types.NodeTypeReportAfterSuite, LeafNodeText: "a report", State: types.SpecStatePassed},
	}
	wanted = catalogue(specsFile)
	for _, s := range wanted {
		reports = append(reports, spec(s, types.SpecStatePassed))
	}
	all = slices.Concat(wanted, catalogue(excludedFile), []string{"[sig-node] Pods should run"})
	return reports, wanted, all
}

func TestJudge_AllPassed_HasNoProblems(t *testing.T) {
	reports, wanted, all := passing()
	v := judge(reports, wanted, all)
	if len(v.problems) > 0 || v.passed != len(wanted) || len(v.lines) != len(wanted) {
		t.Errorf("%d passed, problems %q; want %d and none", v.passed, v.problems, len(wanted))
	}
}

func TestJudge_Problem_IsReported(t *testing.T) {
	first := catalogue(specsFile)[0]
	tests := map[string]struct {
		change  func(reports *[]types.SpecReport, all *[]string)
		problem string
	}{
		"nothing ran": {
			func(reports *[]types.SpecReport, _ *[]string) { *reports = nil },
			"no spec ran",
		},
		"a spec did not run": {
			func(reports *[]types.SpecReport, _ *[]string) { *reports = slices.Delete(*reports, 2, 3) },
			first + ": did not run",
		},
		"a spec does not exist": {
			func(_ *[]types.SpecReport, all *[]string) { *all = (*all)[1:] },
			first + ": is in the catalogue and does not exist",
		},
		"a spec is new": {
			func(_ *[]types.SpecReport, all *[]string) {
				*all = append(*all, "[sig-cli] should be new [Conformance]")
			},
			"[sig-cli] should be new [Conformance]: is not in the catalogue",
		},
		"a spec of an area is new": {
			func(_ *[]types.SpecReport, all *[]string) { *all = append(*all, areas[0]+" should be new") },
			areas[0] + " should be new: is not in the catalogue",
		},
		"a spec was skipped": {
			func(reports *[]types.SpecReport, _ *[]string) {
				(*reports)[2].State = types.SpecStateSkipped
				(*reports)[2].Failure.Message = "needs\n  two nodes"
			},
			first + ": skipped: needs two nodes",
		},
		"a spec was skipped without a message": {
			func(reports *[]types.SpecReport, _ *[]string) { (*reports)[2].State = types.SpecStateSkipped },
			first + ": skipped",
		},
		"a spec failed": {
			func(reports *[]types.SpecReport, _ *[]string) {
				(*reports)[2].State = types.SpecStateFailed
				(*reports)[2].Failure.Message = strings.Repeat("x", 1000)
			},
			first + ": failed: " + strings.Repeat("x", 300) + "...",
		},
		"a spec was interrupted": {
			func(reports *[]types.SpecReport, _ *[]string) { (*reports)[2].State = types.SpecStateInterrupted },
			first + ": interrupted",
		},
		"the suite did not start": {
			func(reports *[]types.SpecReport, _ *[]string) {
				(*reports)[0].State = types.SpecStateFailed
				(*reports)[0].Failure.Message = "no nodes"
			},
			"SynchronizedBeforeSuite : failed: no nodes",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			reports, wanted, all := passing()
			test.change(&reports, &all)
			v := judge(reports, wanted, all)
			if !slices.ContainsFunc(v.problems, func(problem string) bool { return strings.HasPrefix(problem, test.problem) }) {
				t.Errorf("problems %q, want %q", v.problems, test.problem)
			}
		})
	}
}

// With a focus of the user, any spec may be missing, but at least one must run.
func TestJudge_UserFocus_RequiresOneSpec(t *testing.T) {
	_, _, all := passing()
	one := []types.SpecReport{spec("[sig-api-machinery] Garbage collector should collect", types.SpecStatePassed)}
	if v := judge(one, nil, all); len(v.problems) > 0 || v.passed != 1 {
		t.Errorf("one spec: %d passed, problems %q; want 1 and none", v.passed, v.problems)
	}
	if v := judge(nil, nil, all); len(v.problems) != 1 {
		t.Errorf("no spec: problems %q, want one", v.problems)
	}
}

func TestCatalogue_IsSortedAndDisjoint(t *testing.T) {
	specs, excluded := catalogue(specsFile), catalogue(excludedFile)
	for name, list := range map[string][]string{"specs.txt": specs, "excluded.txt": excluded} {
		if len(list) == 0 || !slices.IsSorted(list) {
			t.Errorf("%s has %d lines, sorted: %t", name, len(list), slices.IsSorted(list))
		}
		for _, s := range list {
			if !isCandidate(s) {
				t.Errorf("%s: %s is neither a conformance test nor in one of the areas", name, s)
			}
		}
	}
	for _, s := range specs {
		if slices.Contains(excluded, s) {
			t.Errorf("%s is in both files", s)
		}
	}
}

// Ginkgo matches the focus against the name of the suite, a space and the text of the spec.
func TestExactly_SelectsWholeTexts(t *testing.T) {
	specs := catalogue(specsFile)
	focus := exactly(specs)
	for _, text := range specs {
		if !focus.MatchString(text) || !focus.MatchString("Kubernetes e2e suite "+text) {
			t.Errorf("the focus does not select %q", text)
		}
		if focus.MatchString(text + " [Slow]") {
			t.Errorf("the focus selects %q with another tag", text)
		}
	}
}

func TestShards_ContainEverySpecOnceAndSerialApart(t *testing.T) {
	specs := []string{"a", "b [Serial]", "c", "d", "e [Conformance] [Serial]", "f"}
	for n := 1; n < 8; n++ {
		simultaneous, alone := shards(specs, n)
		if !slices.Equal(alone, []string{"b [Serial]", "e [Conformance] [Serial]"}) {
			t.Errorf("%d processes: alone %q", n, alone)
		}
		if got := slices.Sorted(slices.Values(slices.Concat(simultaneous...))); !slices.Equal(got, []string{"a", "c", "d", "f"}) || len(simultaneous) > n {
			t.Errorf("%d processes: %q", n, simultaneous)
		}
	}
}
