package main

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/onsi/ginkgo/v2/types"
)

// passed returns a report in which every listed spec passed, among others that were not asked for.
func passed() types.Report {
	report := types.Report{SpecReports: types.SpecReports{
		{LeafNodeType: types.NodeTypeSynchronizedBeforeSuite, State: types.SpecStatePassed},
		spec("[sig-node] Pods", "should run", types.SpecStateSkipped),
		{LeafNodeType: types.NodeTypeReportAfterSuite, LeafNodeText: "a report", State: types.SpecStatePassed},
	}}
	for _, a := range areas {
		for _, s := range a.specs {
			report.SpecReports = append(report.SpecReports, spec(a.name, s, types.SpecStatePassed))
		}
	}
	return report
}

func spec(container, text string, state types.SpecState) types.SpecReport {
	return types.SpecReport{
		ContainerHierarchyTexts: []string{container},
		LeafNodeType:            types.NodeTypeIt,
		LeafNodeText:            text,
		State:                   state,
		RunTime:                 time.Second,
	}
}

func TestJudgePassed(t *testing.T) {
	v := judge(passed(), areasFocus(), false)
	if len(v.problems) > 0 || v.passed != len(listed()) || len(v.lines) != len(listed()) {
		t.Errorf("%d passed, problems %q; want %d and none", v.passed, v.problems, len(listed()))
	}
}

func TestJudgeProblems(t *testing.T) {
	chunking, watchers := areas[0], areas[1]
	last := func(r *types.Report) *types.SpecReport { return &r.SpecReports[len(r.SpecReports)-1] }
	tests := map[string]struct {
		change  func(*types.Report)
		problem string
	}{
		"nothing ran": {
			func(r *types.Report) { r.SpecReports = nil },
			"no spec matches",
		},
		"a spec vanished": {
			func(r *types.Report) {
				*r = passed()
				r.SpecReports = append(r.SpecReports[:3], r.SpecReports[4:]...)
			},
			chunking.name + " " + chunking.specs[0] + ": there is no such spec",
		},
		"a spec was skipped": {
			func(r *types.Report) {
				last(r).State = types.SpecStateSkipped
				last(r).Failure.Message = "needs\n  two nodes"
			},
			last(new(passed())).FullText() + ": skipped: needs two nodes",
		},
		"a spec was skipped without a word": {
			func(r *types.Report) { last(r).State = types.SpecStateSkipped },
			last(new(passed())).FullText() + ": skipped",
		},
		"a spec failed": {
			func(r *types.Report) {
				last(r).State = types.SpecStateFailed
				last(r).Failure.Message = strings.Repeat("x", 1000)
			},
			last(new(passed())).FullText() + ": failed: " + strings.Repeat("x", 300) + "...",
		},
		"a spec was interrupted": {
			func(r *types.Report) { last(r).State = types.SpecStateInterrupted },
			last(new(passed())).FullText() + ": interrupted",
		},
		"a spec is pending": {
			func(r *types.Report) { last(r).State = types.SpecStatePending },
			last(new(passed())).FullText() + ": pending",
		},
		"a spec is new": {
			func(r *types.Report) {
				r.SpecReports = append(r.SpecReports, spec(watchers.name, "should be new", types.SpecStatePassed))
			},
			watchers.name + " should be new: is not listed in conformance/specs.go",
		},
		"the suite did not start": {
			func(r *types.Report) {
				r.SpecReports[0].State = types.SpecStateFailed
				r.SpecReports[0].Failure.Message = "no nodes"
			},
			"SynchronizedBeforeSuite : failed: no nodes",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			report := passed()
			test.change(&report)
			v := judge(report, areasFocus(), false)
			for _, problem := range v.problems {
				if strings.HasPrefix(problem, test.problem) {
					return
				}
			}
			t.Errorf("problems %q, want %q", v.problems, test.problem)
		})
	}
}

// A focus of the user's own decides alone.
func TestJudgeOwnFocus(t *testing.T) {
	report := passed()
	report.SpecReports = append(report.SpecReports, spec("[sig-api-machinery] Garbage collector", "should collect", types.SpecStatePassed))

	if v := judge(report, regexp.MustCompile("Garbage collector"), true); len(v.problems) > 0 || v.passed != 1 {
		t.Errorf("another spec: %d passed, problems %q; want 1 and none", v.passed, v.problems)
	}
	if v := judge(report, regexp.MustCompile("Watchers"), true); len(v.problems) > 0 || v.passed != len(areas[1].specs) {
		t.Errorf("one area: %d passed, problems %q; want %d and none", v.passed, v.problems, len(areas[1].specs))
	}
	if v := judge(report, regexp.MustCompile("no such thing"), true); len(v.problems) != 1 {
		t.Errorf("no spec: problems %q, want one", v.problems)
	}
}

// Ginkgo matches the focus against the name of the suite, a space and the text of the spec.
func TestFocusSelectsWholeAreas(t *testing.T) {
	focus := areasFocus()
	for _, text := range listed() {
		if !focus.MatchString(text) || !focus.MatchString("Kubernetes e2e suite "+text) {
			t.Errorf("the focus does not select %q", text)
		}
	}
	for _, text := range []string{
		"[sig-api-machinery] CustomResourceDefinition Watchers differ",
		"[sig-api-machinery] CustomResourceValidationRules [Privileged:ClusterAdmin] MUST",
		"[sig-cli] Kubectl client [sig-api-machinery] Watchersomething",
	} {
		if focus.MatchString(text) {
			t.Errorf("the focus selects %q", text)
		}
	}
}
