package main

import (
	"fmt"
	"slices"
)

// knownFinding is a finding that has a reason. Test names one test; if its subtests differ or fail,
// each has an entry. Fail on both engines is a test that fails on every engine of its suite, also
// if that is one.
type knownFinding struct {
	Suite, Unit, Test string
	Upstream, Strata  Verdict
	Reason            string
}

func (k knownFinding) finding() Finding {
	return Finding{Test: k.Test, Upstream: k.Upstream, Strata: k.Strata}
}

// known are all findings that may occur, and must.
var known = []knownFinding{
	{"kubernetes", "test/integration/apiserver/tracing", "TestAPIServerTracing/get_node", Pass, Fail, spansOfStorage},
	{"kubernetes", "test/integration/apiserver/tracing", "TestAPIServerTracing/List_nodes", Pass, Fail, spansOfStorage},
	{"kubernetes", "test/integration/apiserver/tracing", "TestAPIServerTracingWithKMSv2/get_secret", Pass, Fail, decryptedOnce},
	{"kubernetes", "test/integration/controlplane/transformation", "TestKMSv2Provider/regular_gcm", Pass, Fail, decryptedOnce},
	{"kubernetes", "test/integration/controlplane/transformation", "TestKMSv2Provider/extended_nonce_gcm", Pass, Fail, decryptedOnce},
}

const decryptedOnce = "Strata decrypts a stored secret once for all readers of a form: a watch inside the server has encoded the event, and the GET is answered with the same " +
	"bytes. The tests want a decryption for each of the two: one counts them, one waits for its span in the trace of the GET."

const spansOfStorage = "The test waits for the span of a request to etcd that belongs to the read. Strata answers it from memory, after a read of etcd's revision that " +
	"other requests share. The spans of the handlers and of the watch cache are those of upstream (test/e2e/api/readclients, TestTraces)."

// idleUnit is a unit in which no test passes and no API server is started, for a reason.
type idleUnit struct{ Suite, Unit, Reason string }

// idle are all units that may be idle, and must.
var idle = []idleUnit{
	{"kubernetes", "test/integration/apiserver/httpproxy", "Its only test skips itself: \"this test does not pass for the reason we think it passes\"."},
}

// reason returns why the finding is expected, "" if it is not.
func reason(known []knownFinding, suite, unit string, f Finding) string {
	for _, k := range known {
		if k.Suite == suite && k.Unit == unit && k.finding() == f {
			return k.Reason
		}
	}
	return ""
}

// judge returns a line for each finding of the unit that is not known, and for each known finding
// that did not occur.
func judge(known []knownFinding, suite, unit string, found []Finding) (problems []string) {
	for _, k := range known {
		if k.Suite == suite && k.Unit == unit && !slices.Contains(found, k.finding()) {
			problems = append(problems, fmt.Sprintf("%s %s: the known verdicts of %s (upstream %s, strata %s) no longer occur: remove them from test/upstream/suites/known.go",
				suite, unit, k.Test, k.Upstream, k.Strata))
		}
	}
	for _, f := range found {
		switch {
		case reason(known, suite, unit, f) != "":
		case f == failure(f.Test):
			problems = append(problems, fmt.Sprintf("%s %s: %s: failed on every engine", suite, unit, f.Test))
		default:
			problems = append(problems, fmt.Sprintf("%s %s: %s: upstream %s, strata %s", suite, unit, f.Test, f.Upstream, f.Strata))
		}
	}
	return problems
}

// judgeActivity returns a line if no test of a unit passed on an engine, or none started a server
// with that engine, unless the unit is idle; and if an idle unit is no longer idle.
func judgeActivity(idle []idleUnit, suite string, unit Unit, engine Engine, c counts) (problems []string) {
	problem := func(text string) {
		problems = append(problems, fmt.Sprintf("%s %s on %s: %s", suite, unit.Name, engine, text))
	}
	isIdle := slices.ContainsFunc(idle, func(i idleUnit) bool { return i.Suite == suite && i.Unit == unit.Name })
	switch {
	case isIdle && (c.Passed > 0 || c.Servers > 0):
		problem(fmt.Sprintf("%d tests passed and %d servers started: the unit is no longer idle: remove it from test/upstream/suites/known.go", c.Passed, c.Servers))
	case isIdle:
	case c.Passed == 0:
		problem("no test passed")
	case unit.StartsServers && c.Servers == 0:
		problem("no test started a server with this engine: the patches of test/upstream/suites/copy.go have no effect")
	}
	return problems
}

// withoutUnit returns a line for each entry of known and idle that names a unit which the suite
// does not have.
func withoutUnit(known []knownFinding, idle []idleUnit, suite string, units []Unit) (problems []string) {
	check := func(of, unit, entry string) {
		if of == suite && !slices.ContainsFunc(units, func(u Unit) bool { return u.Name == unit }) {
			problems = append(problems, fmt.Sprintf("%s %s: test/upstream/suites/known.go has %s of this unit, which does not exist", suite, unit, entry))
		}
	}
	for _, k := range known {
		check(k.Suite, k.Unit, k.Test)
	}
	for _, i := range idle {
		check(i.Suite, i.Unit, "an entry")
	}
	return problems
}
