package main

import (
	"context"
	"maps"
	"slices"
	"strings"
)

// Engine is a storage layer under test, a value of `strata apiserver --engine`.
type Engine string

const (
	Upstream Engine = "upstream"
	Strata   Engine = "strata"
)

// Verdict is the outcome of one test.
type Verdict string

const (
	Pass   Verdict = "pass"
	Fail   Verdict = "fail"
	Skip   Verdict = "skip"
	Absent Verdict = "absent" // the test did not end, or did not run
)

// Verdicts maps the name of a test, or of a subtest below a slash, to its outcome.
type Verdicts map[string]Verdict

// Suite is a set of tests of another project.
type Suite struct {
	// Name selects the suite on the command line, and is its key in results.json.
	Name string
	// Title and About are the heading and the paragraph of docs/conformance.md.
	Title, About string
	// Quick: a unit of the suite belongs to the subset that every change must pass.
	Quick bool
	// Engines are the columns; nil is both.
	Engines []Engine
	// Prepare builds the programs that the units share and returns the units. It is called once,
	// before any unit is built.
	Prepare func(ctx context.Context, env *Env) ([]Unit, error)
}

func (s *Suite) engines() []Engine {
	if s.Engines == nil {
		return []Engine{Upstream, Strata}
	}
	return s.Engines
}

// Unit is a part of a suite that is built and run by itself: a test package, for example.
type Unit struct {
	// Name is unique in the suite.
	Name string
	// Source is the tested module with its version, for the document.
	Source string
	// Quick names the top-level tests of the subset that every change must pass; nil if the subset
	// has none of this unit.
	Quick []string
	// Exclusive: the tests listen on ports or abstract sockets with fixed names, so that the unit
	// runs on one engine after the other, and not beside another such unit.
	Exclusive bool
	// StartsServers: the log of a run has a line for each API server that the tests started, which
	// names the engine (startedServers).
	StartsServers bool
	// Build makes the programs of the unit; nil if there is nothing to build.
	Build func(ctx context.Context) error
	// Run runs the named top-level tests, or all of them if only is nil, and returns a verdict of
	// each test that was run and of its subtests. A test that fails is a verdict and no error; an
	// error says that the run itself did not work. log names the file for the output.
	Run func(ctx context.Context, engine Engine, only []string, log string) (Verdicts, error)
	// Clean removes the files that Build wrote; it may be nil.
	Clean func()
}

// top returns the part of a test's name before the first slash.
func top(test string) string {
	name, _, _ := strings.Cut(test, "/")
	return name
}

// disputed returns the top-level tests, sorted, of which a test failed or is absent on an engine,
// or has different verdicts. With one engine a failure is all that counts.
func disputed(byEngine map[Engine]Verdicts) []string {
	found := map[string]bool{}
	for _, verdicts := range byEngine {
		for test, verdict := range verdicts {
			for _, others := range byEngine {
				if other, ok := others[test]; !ok || other != verdict {
					found[top(test)] = true
				}
			}
			if verdict == Fail || verdict == Absent {
				found[top(test)] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// merge adds the verdicts of another attempt: a test has passed if it did so once. A verdict of the
// last attempt replaces any other that is not Pass.
func (v Verdicts) merge(attempt Verdicts) {
	for test, verdict := range attempt {
		if v[test] != Pass {
			v[test] = verdict
		}
	}
}

// Finding is a test that needs an entry in known.go: its verdicts differ, or both are Fail.
type Finding struct {
	Test     string  `json:"test"`
	Upstream Verdict `json:"upstream"`
	Strata   Verdict `json:"strata"`
}

// failure returns the finding for a test that failed on every engine of its suite, of which there
// may be one only.
func failure(test string) Finding { return Finding{Test: test, Upstream: Fail, Strata: Fail} }

// differences returns the tests whose verdicts differ, without tests that have a differing subtest,
// which explains them.
func differences(byEngine map[Engine]Verdicts) []Finding {
	upstream, strata := byEngine[Upstream], byEngine[Strata]
	if upstream == nil || strata == nil {
		return nil
	}
	tests := map[string]bool{}
	for _, verdicts := range byEngine {
		for test := range verdicts {
			tests[test] = true
		}
	}
	of := func(verdicts Verdicts, test string) Verdict {
		if verdict, ok := verdicts[test]; ok {
			return verdict
		}
		return Absent
	}
	var found []Finding
	explained := map[string]bool{}
	for _, test := range slices.Backward(slices.Sorted(maps.Keys(tests))) {
		// subtests come before their test
		u, s := of(upstream, test), of(strata, test)
		if u == s {
			continue
		}
		if !explained[test] {
			found = append(found, Finding{Test: test, Upstream: u, Strata: s})
		}
		for name := test; strings.Contains(name, "/"); {
			name = name[:strings.LastIndex(name, "/")]
			explained[name] = true
		}
	}
	slices.Reverse(found)
	return found
}

// failedEverywhere returns the tests, sorted, that ran on every engine and failed on each with the
// same verdict: a failed test differs from one that did not end. A test is omitted if a subtest
// failed on each engine, which explains it.
func failedEverywhere(byEngine map[Engine]Verdicts) []string {
	failed := map[Engine][]string{}
	for e, verdicts := range byEngine {
		for test, verdict := range verdicts {
			if verdict == Fail || verdict == Absent {
				failed[e] = append(failed[e], test)
			}
		}
	}
	onEach := func(holds func(Engine) bool) bool {
		for e := range byEngine {
			if !holds(e) {
				return false
			}
		}
		return true
	}
	everywhere := map[string]bool{}
	for e, tests := range failed {
		for _, test := range tests {
			same := onEach(func(other Engine) bool { return byEngine[other][test] == byEngine[e][test] })
			bySubtest := onEach(func(other Engine) bool {
				return slices.ContainsFunc(failed[other], func(name string) bool { return strings.HasPrefix(name, test+"/") })
			})
			if same && !bySubtest {
				everywhere[test] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(everywhere))
}
