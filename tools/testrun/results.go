package main

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// event is a line of go test -json: see `go doc test2json` and `go help buildjson`.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
	ImportPath, FailedBuild       string // of a build
}

// results are the packages of a run in the order of their first events. A package that runs under
// the race detector and without it stands there twice.
type results struct {
	packages []*pkg
	builds   map[string][]string // output of the compiler and of vet, by import path
}

// pkg is the result of a package in an invocation.
type pkg struct {
	inv     invocation
	path    string
	action  string // pass, fail or skip; "" until it ends
	elapsed float64
	cached  bool
	race    bool     // the race detector reported a data race
	crashed bool     // the race detector itself failed, which is no verdict
	again   bool     // this is the second run of a package in which the race detector failed
	exit    string   // a line that reports an end other than by failed tests, such as a panic
	build   string   // the import path of the failed build
	output  []string // outside of its tests
	tests   map[string]*test
	order   []*test
}

// test is a test or subtest. Those that passed have no output.
type test struct {
	name    string
	action  string // pass, fail or skip; "" until it ends
	elapsed float64
	output  []string
}

var (
	race = regexp.MustCompile(`WARNING: DATA RACE|race detected during execution of test`)
	// crash matches how the race detector reports its own failure. It then ends the program with
	// crashExit, which go test prints only if there is no other output. A fault in its code, which
	// is not Go's, has no other sign; one in Go code is a panic or a fatal error.
	crash = regexp.MustCompile(`^==\d+==(FATAL: )?ThreadSanitizer: CHECK failed|^SIGSEGV: segmentation violation\s*$`)
	// exit matches how a test program ends other than by failed tests. The server's harness prints
	// the last form when its own checks, after the tests, fail.
	exit = regexp.MustCompile(`^(exit status \d+|signal: |panic: |fatal error: |outside of the tests: )`)
)

const crashExit = "exit status 66"

// add applies an event. It returns the package if it has ended.
func (rs *results) add(inv invocation, e event) *pkg {
	if e.Action == "build-output" {
		if rs.builds == nil {
			rs.builds = map[string][]string{}
		}
		rs.builds[e.ImportPath] = append(rs.builds[e.ImportPath], e.Output)
		return nil
	}
	if e.Package == "" {
		return nil
	}
	p := rs.pkg(inv, e.Package)
	if e.Test == "" {
		switch e.Action {
		case "output":
			p.output = append(p.output, e.Output)
			p.cached = p.cached || strings.HasSuffix(e.Output, "\t(cached)\n")
			p.inspect(e.Output)
		case "pass", "fail", "skip":
			p.action, p.elapsed, p.build = e.Action, e.Elapsed, e.FailedBuild
			return p
		}
		return nil
	}
	t := p.test(e.Test)
	switch e.Action {
	case "output":
		t.output = append(t.output, e.Output)
		p.inspect(e.Output)
	case "pass", "fail", "skip":
		if t.action == "fail" {
			break // with -count, a test runs several times: a failure stays
		}
		t.elapsed = max(t.elapsed, e.Elapsed)
		if t.action = e.Action; t.action == "pass" {
			t.output = nil
		}
	}
	return nil
}

// inspect looks for signs of a failure outside of the tests.
func (p *pkg) inspect(line string) {
	p.race = p.race || race.MatchString(line)
	p.crashed = p.crashed || crash.MatchString(line)
	if (p.exit == "" || p.exit == crashExit) && exit.MatchString(line) {
		p.exit = strings.TrimPrefix(strings.TrimSpace(line), "outside of the tests: ")
	}
}

func (rs *results) pkg(inv invocation, path string) *pkg {
	for _, p := range rs.packages {
		if p.path == path && p.inv.name == inv.name {
			return p
		}
	}
	p := &pkg{inv: inv, path: path, tests: map[string]*test{}}
	rs.packages = append(rs.packages, p)
	return p
}

func (p *pkg) test(name string) *test {
	t := p.tests[name]
	if t == nil {
		t = &test{name: name}
		p.tests[name] = t
		p.order = append(p.order, t)
	}
	return t
}

// failed reports whether a package of an invocation failed.
func (rs *results) failed(inv invocation) bool {
	return slices.ContainsFunc(rs.packages, func(p *pkg) bool { return p.inv.name == inv.name && p.bad() })
}

// undecided returns the package that has no verdict, because the race detector itself failed before
// a test did. It returns nil if there are several: one crash is rare, several have a cause.
func (rs *results) undecided() *pkg {
	crashed := slices.DeleteFunc(slices.Clone(rs.packages), func(p *pkg) bool { return !p.undecided() })
	if len(crashed) != 1 {
		return nil
	}
	return crashed[0]
}

// undecided reports whether only a crash of the race detector ended the package, during a test. It
// did not if a test or a subtest had failed, or if TestMain, a panic or a signal ended the program.
func (p *pkg) undecided() bool {
	if !p.crashed || p.action != "fail" || p.race || p.build != "" || p.exit != "" && p.exit != crashExit {
		return false
	}
	during := false
	for _, t := range p.order {
		if t.action == "fail" {
			return false
		}
		during = during || t.action == ""
	}
	return during
}

// bad reports whether the package did not pass. Its own event is not enough: TestMain may end with
// status 0 although a test failed, or has not ended, or none ran.
func (p *pkg) bad() bool {
	switch p.action {
	case "pass":
		return p.withoutTests() || slices.ContainsFunc(p.order, func(t *test) bool { return t.action == "fail" || t.action == "" })
	case "skip": // no test files
		return false
	}
	return true
}

// withoutTests reports whether no test of a package with test files ran, though the flags of go
// test do not select tests.
func (p *pkg) withoutTests() bool { return p.action == "pass" && len(p.order) == 0 && !p.inv.selects }

// roots returns the failed top-level tests of the package.
func (p *pkg) roots() (failed []*test) {
	for _, t := range p.order {
		if t.action == "fail" && !strings.Contains(t.name, "/") {
			failed = append(failed, t)
		}
	}
	return failed
}

// outside returns how the package failed outside of its tests, or "".
func (p *pkg) outside() string {
	unfinished := ""
	for _, t := range p.order {
		if t.action == "" {
			unfinished = t.name
		}
	}
	switch {
	case !p.bad():
		return ""
	case p.action == "":
		return "it has not ended"
	case p.build != "":
		return "build or vet failed"
	case p.exit != "":
		return p.exit
	case unfinished != "":
		return unfinished + " has not ended"
	case p.withoutTests():
		return "no test ran"
	case p.action == "pass":
		return "exit status 0 though a test failed"
	case len(p.roots()) == 0:
		return "no test failed"
	}
	return ""
}

// line is the line of a package that ended.
func (p *pkg) line() string {
	verdict := "ok"
	if p.bad() {
		verdict = "FAIL"
	}
	line := fmt.Sprintf("%-7s %-60s %6.1fs", verdict, p.short(), p.elapsed)
	if p.cached {
		line = fmt.Sprintf("%-7s %-60s cached", verdict, p.short())
	}
	for _, t := range p.roots() {
		line += " " + t.name
	}
	return line
}

// short is the path from the top of the repository, with the pass if there is another one.
func (p *pkg) short() string {
	path := strings.TrimPrefix(strings.TrimPrefix(p.path, modulePath), "/")
	_, pass, _ := strings.Cut(p.inv.name, ", ")
	return strings.TrimSpace(cmp.Or(path, ".") + " " + pass)
}

// modulePath is the module path of the engine, and the prefix of the others.
const modulePath = "github.com/stratakube/strata"

// failure is a failed top-level test, or a package that failed outside of its tests (test is nil).
type failure struct {
	pkg  *pkg
	test *test
}

// failures returns all failures of the run.
func (rs *results) failures() (all []failure) {
	for _, p := range rs.packages {
		if !p.bad() {
			continue
		}
		for _, t := range p.roots() {
			all = append(all, failure{pkg: p, test: t})
		}
		if p.outside() != "" {
			all = append(all, failure{pkg: p})
		}
	}
	return all
}
