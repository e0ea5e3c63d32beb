package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestJudge_EventsOfTests_GiveResult: only a failed test kills a mutation, and only passed tests
// let it survive.
func TestJudge_EventsOfTests_GiveResult(t *testing.T) {
	const (
		passed   = `{"Action":"run","Test":"TestA"}` + "\n" + `{"Action":"pass","Test":"TestA"}` + "\n"
		failed   = `{"Action":"fail","Test":"TestB/case"}` + "\n" + `{"Action":"fail","Test":"TestB"}` + "\n" + `{"Action":"fail"}` + "\n"
		hanging  = `{"Action":"run","Test":"TestC"}` + "\n" + `{"Action":"output","Test":"TestC","Output":"panic: test timed out after 1m0s\n"}` + "\n" + `{"Action":"fail","Test":"TestC"}` + "\n" + `{"Action":"fail"}` + "\n"
		panics   = passed + `{"Action":"run","Test":"TestD"}` + "\n" + `{"Action":"output","Test":"TestD","Output":"panic: planted\n"}` + "\n" + `{"Action":"fail"}` + "\n"
		crashes  = passed + `{"Action":"output","Output":"fatal error: planted\n"}` + "\n" + `{"Action":"output","Output":"goroutine 7\n"}` + "\n" + `{"Action":"fail"}` + "\n"
		exits    = passed + `{"Action":"output","Output":"exit status 3\n"}` + "\n" + `{"Action":"fail"}` + "\n"
		noTests  = `{"Action":"output","Output":"testing: warning: no tests to run\n"}` + "\n" + `{"Action":"pass"}` + "\n"
		noBuild  = `{"ImportPath":"p","Action":"build-output","Output":"undefined: x\n"}` + "\n" + `{"ImportPath":"p","Action":"build-fail"}` + "\n" + `{"Action":"fail"}` + "\n"
		ofOthers = "not an event\n"
	)
	exit := errors.New("exit status 1")
	for name, c := range map[string]struct {
		events string
		exit   error
		want   outcome
		by     string
	}{
		"all tests pass":        {passed, nil, survived, ""},
		"a test fails":          {passed + failed, exit, killed, "TestB"},
		"a test hangs":          {passed + hanging, exit, killed, "TestC, which hangs"},
		"a goroutine panics":    {panics, exit, killed, "panic: planted"},
		"the runtime ends it":   {crashes, exit, killed, "fatal error: planted"},
		"the process ends":      {exits, exit, invalid, "no test has failed: exit status 1: exit status 3"},
		"no test runs":          {noTests, nil, invalid, "no test has run"},
		"no output":             {"", nil, invalid, "no test has run"},
		"it does not build":     {noBuild, exit, invalid, "it does not build"},
		"output of other kinds": {ofOthers + passed, nil, survived, ""},
	} {
		if r := judge([]byte(c.events), c.exit); r.outcome != c.want || r.by != c.by {
			t.Errorf("%s: %+v, want %s by %q", name, r, c.want, c.by)
		}
	}
}

// TestPasses_EventsOfTests_NamesWholeTests: a test that passes beside one that fails has missed a
// mutation of the simulation.
func TestPasses_EventsOfTests_NamesWholeTests(t *testing.T) {
	const of = `{"Time":"2026-01-01T00:00:00Z","Action":"%s","Package":"p","Test":"%s","Elapsed":0.1}` + "\n"
	for want, events := range map[string]string{
		"":      fmt.Sprintf(of+of+of, "pass", "TestA/run", "run", "TestA", "fail", "TestA") + `{"Action":"pass","Package":"p"}` + "\n",
		"TestB": fmt.Sprintf(of+of, "fail", "TestA", "pass", "TestB"),
	} {
		var got string
		if found := passes.FindStringSubmatch(events); found != nil {
			got = found[1]
		}
		if got != want {
			t.Errorf("%q passes, want %q, in\n%s", got, want, events)
		}
	}
}

// TestMutate_OldTextNotUnique_IsRefused: a table that does not fit the code is an error, not a
// mutation that survives.
func TestMutate_OldTextNotUnique_IsRefused(t *testing.T) {
	m := mutation{old: "a < b", new: "a <= b"}
	for content, want := range map[string]string{"if a < b {": "if a <= b {", "if a > b {": "", "if a < b || a < b {": ""} {
		if got, err := m.mutate(content); got != want || (err == nil) != (want != "") {
			t.Errorf("%q becomes %q, %v; want %q", content, got, err, want)
		}
	}
	m.times = 2
	if got, err := m.mutate("a < b, a < b"); err != nil || got != "a <= b, a <= b" {
		t.Errorf("both places become %q, %v", got, err)
	}
}

// TestTable_OldTexts_ExistOnce reads the files of this repository: a change of a place changes its
// mutation. `make mutants`, which takes minutes, is not needed to notice that.
func TestTable_OldTexts_ExistOnce(t *testing.T) {
	const root = "../.."
	for _, m := range mutations {
		content, err := os.ReadFile(filepath.Join(root, m.file))
		if err == nil {
			_, err = m.mutate(string(content))
		}
		if err != nil {
			t.Errorf("%s: %s: %v", m.id, m.file, err)
		}
		run, _, _ := strings.Cut(m.run, "/") // the rest selects subtests
		tests := regexp.MustCompile(run)
		files, err := filepath.Glob(filepath.Join(root, m.tests(), "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(files, func(file string) bool {
			text, err := os.ReadFile(file)
			return err == nil && slices.ContainsFunc(declared.FindAllStringSubmatch(string(text), -1), func(name []string) bool {
				return tests.MatchString(name[1])
			})
		}) {
			t.Errorf("%s: no test %s in %s", m.id, m.run, m.tests())
		}
	}
}

var declared = regexp.MustCompile(`(?m)^func (Test\w+|Fuzz\w+)\(`)

// TestTable_Mutations_AreComplete: each changes something, has a file of the product and tests that
// can be selected.
func TestTable_Mutations_AreComplete(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range mutations {
		if _, err := regexp.Compile(m.run); err != nil || m.run == "" {
			t.Errorf("%s: tests %q, %v", m.id, m.run, err)
		}
		if seen[m.id] || m.old == m.new || m.old == "" || strings.HasSuffix(m.file, "_test.go") {
			t.Errorf("%s: %+v", m.id, m)
		}
		seen[m.id] = true
	}
}

// TestTable_PlantedBugsOfSimulation_HaveKeptRuns: the run is there, and that of no other mutation.
func TestTable_PlantedBugsOfSimulation_HaveKeptRuns(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range mutations {
		if m.run != simulation {
			continue
		}
		if _, err := os.Stat("../../kube/kubestorage/testdata/simulation/" + m.kept + ".txt"); err != nil || seen[m.kept] {
			t.Errorf("%s: kept run %q, %v", m.id, m.kept, err)
		}
		seen[m.kept] = true
	}
}

// TestPlaces_EachKind_HasItsMutations: one place of each kind, and the code that it becomes.
func TestPlaces_EachKind_HasItsMutations(t *testing.T) {
	const code = "package p\n\nfunc f(a, b int, ok bool, err error, mu sync.Locker, c chan int) (int, error) {\n%s\nreturn a, nil\n}\n"
	for line, want := range map[string][]string{
		"if a < b { a++ }":                  {"if a <= b { a++ }", "if a >= b { a++ }"},
		"if err == nil { a++ }":             {"if err != nil { a++ }"},
		"if ok { a++ }":                     {"if !(ok) { a++ }"},
		"if ok && a == b { a++ }":           {"if ok || a == b { a++ }", "if ok && a != b { a++ }"},
		"return a, err":                     {"return a, nil"},
		"return a, nil":                     nil,
		"return f(a, b, ok, err, mu, c)":    nil, // all results in one
		"_ = func() string { return \"\" }": nil,
		"mu.Lock()":                         {"{}"},
		"defer mu.Unlock()":                 {"{}"},
		"c <- a":                            {"{}"},
		"<-c":                               {"<-closed"},
		"a, ok = <-c":                       {"a, ok = <-closed"},
		"close(c)":                          {"{}"},
		"select { case c <- a: default: }":  {"select { case nil <- a: default: }"},
		"select { case a, ok = <-c: }":      {"select { case a, ok = <-nil: }"},
		"select { case <-c: close(c) }":     {"select { case <-nil: close(c) }", "select { case <-c: {} }"},
		"switch { case ok: mu.Unlock() }":   {"switch { case !(ok): mu.Unlock() }", "switch { case ok: {} }"},
		"switch a { case b: mu.Unlock() }":  {"switch a { case b: {} }"},
		"clear(m)":                          nil,
	} {
		content := strings.Replace(code, "%s", line, 1)
		places, err := placesOf("p.go", content)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range places {
			mutated, err := m.mutate(content)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, strings.Split(mutated, "\n")[3])
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s becomes %q, want %q", line, got, want)
		}
	}
}
