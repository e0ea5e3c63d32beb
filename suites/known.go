package main

import "fmt"

// knownDifference is a difference that has a reason. Test names one test; if its subtests differ, each has an entry.
type knownDifference struct {
	Suite, Unit, Test string
	Upstream, Strata  Verdict
	Reason            string
}

// known are all differences that may occur, and must.
var known = []knownDifference{
	{"kubernetes", "test/integration/apiserver/tracing", "TestAPIServerTracing/get_node", Pass, Fail, spansOfStorage},
	{"kubernetes", "test/integration/apiserver/tracing", "TestAPIServerTracing/get_node_from_cache", Pass, Fail, spansOfStorage},
	{"kubernetes", "test/integration/apiserver/tracing", "TestAPIServerTracing/WatchList_nodes", Pass, Fail, spansOfStorage},
	{"kubernetes", "test/integration/apiserver/tracing", "TestAPIServerTracing/List_nodes", Pass, Fail, spansOfStorage},
}

// skipped are the packages whose authors skip all of their tests.
var skipped = []string{"test/integration/apiserver/httpproxy"}

const spansOfStorage = "The test waits for spans of upstream's watch cache and of requests to etcd. Strata answers reads from memory, without these calls. " +
	"The spans of the handlers are those of upstream (server/test/readclients, TestTraces)."

// judge returns the reasons of the differences that are known, by test, and a line for each that is not and for each known
// difference of the unit that did not occur.
func judge(known []knownDifference, suite, unit string, found []Difference) (reasons map[string]string, problems []string) {
	reasons = map[string]string{}
	for _, k := range known {
		if k.Suite != suite || k.Unit != unit {
			continue
		}
		occurred := false
		for _, d := range found {
			if d == (Difference{Unit: unit, Test: k.Test, Upstream: k.Upstream, Strata: k.Strata}) {
				occurred = true
				reasons[k.Test] = k.Reason
			}
		}
		if !occurred {
			problems = append(problems, fmt.Sprintf("%s %s: the known difference of %s (upstream %s, strata %s) no longer occurs: remove it from suites/known.go",
				suite, unit, k.Test, k.Upstream, k.Strata))
		}
	}
	for _, d := range found {
		if reasons[d.Test] == "" {
			problems = append(problems, fmt.Sprintf("%s %s: %s: upstream %s, strata %s", suite, unit, d.Test, d.Upstream, d.Strata))
		}
	}
	return reasons, problems
}
