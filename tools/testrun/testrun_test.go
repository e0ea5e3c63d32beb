package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// planted are packages with defects, by directory.
var planted = map[string]string{
	"race": `func TestRace(t *testing.T) {
	n, done := 0, make(chan bool)
	go func() { n++; close(done) }()
	n++
	<-done
}`,
	"before":       `func TestMain(m *testing.M) { os.Exit(1) }; func TestPasses(t *testing.T) {}`,
	"after":        `func TestMain(m *testing.M) { m.Run(); os.Exit(1) }; func TestPasses(t *testing.T) {}`,
	"both":         `func TestMain(m *testing.M) { m.Run(); println("outside of the tests: planted"); os.Exit(1) }; ` + once,
	"panics":       `func TestPanics(t *testing.T) { panic("planted") }`,
	"exits":        `func TestExits(t *testing.T) { os.Exit(1) }`,
	"hangs":        `func TestHangs(t *testing.T) { select {} }; func TestTicks(t *testing.T) { t.Parallel(); for range time.Tick(time.Second) {} }`,
	"builds":       `func TestBuilds(t *testing.T) { undefined() }`,
	"once":         once,
	"always":       `func TestAlways(t *testing.T) { t.Run("part", func(t *testing.T) { t.Error("planted") }) }`,
	"skips":        `func TestSkips(t *testing.T) { t.Skip("skipped without chromium: none here") }`,
	"crashes":      `func TestCrashes(t *testing.T) { crashOnce() }; ` + crashOnce,
	"crashestoo":   `func TestCrashes(t *testing.T) { crashOnce() }; ` + crashOnce,
	"crashesagain": `func TestCrashes(t *testing.T) { crash() }; ` + crashText,
	"crashesafter": `func TestFails(t *testing.T) { t.Error("planted") }; func TestCrashes(t *testing.T) { crashOnce() }; ` + crashOnce,
	"crasheswith": `func TestCrashes(t *testing.T) {
	t.Run("fails", func(t *testing.T) { t.Error("planted") })
	crashOnce()
}; ` + crashOnce,
	"crashesmain": `func TestMain(m *testing.M) { m.Run(); println("outside of the tests: planted"); crashOnce() }
func TestPasses(t *testing.T) {}; ` + crashOnce,
	"crashesafterall": `func TestMain(m *testing.M) { m.Run(); crashOnce() }; func TestPasses(t *testing.T) {}; ` + crashOnce,
	"crashespanic":    `func TestCrashes(t *testing.T) { println("fatal error: planted"); crashOnce() }; ` + crashOnce,
	"crashesfault": `func TestCrashes(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o644)
		os.Stderr.WriteString("SIGSEGV: segmentation violation\nPC=0x41cb49 m=3 sigcode=1 addr=0x0\n" + strconv.Itoa(1) + "\n")
		os.Exit(2)
	}
}`,
	"crashesnil": `func TestCrashes(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o644)
		var p *strconv.NumError
		println(p.Func)
	}
}`,
	// The log of a child has the text.
	"crasheschild": `func TestExits(t *testing.T) { t.Log("==1==ThreadSanitizer: CHECK failed: planted"); os.Exit(66) }`,
	"zero":         `func TestMain(m *testing.M) { m.Run(); os.Exit(0) }; ` + once,
	"zerobefore":   `func TestMain(m *testing.M) { os.Exit(0) }; func TestPasses(t *testing.T) {}`,
	"zeroduring":   `func TestStarts(t *testing.T) { syscall.Exit(0) }`,
	"zerounfinished": `func TestMain(m *testing.M) { go m.Run(); <-started; os.Stdout.WriteString("\x16PASS\n"); syscall.Exit(0) }
var started = make(chan bool)
func TestHangs(t *testing.T) { close(started); select {} }`,
	"passing": `func TestPasses(t *testing.T) { t.Run("part", func(t *testing.T) {}) }`,
}

const (
	// once fails in its first run only.
	once     = `func TestOnce(t *testing.T) { testOnce(t) }; ` + testOnce
	testOnce = `func testOnce(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o644)
		t.Fatal("first run")
	}
}`
	// crashText ends a program as the race detector does when it fails itself; crashOnce does in
	// the first run only.
	crashText = `func crash() {
	os.Stderr.WriteString("==" + strconv.Itoa(os.Getpid()) + "==ThreadSanitizer: CHECK failed: planted\n")
	os.Exit(66)
}`
	crashOnce = crashText + `
func crashOnce() {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o644)
		crash()
	}
}`
)

// plant writes a repository with some of the planted packages, and returns a runner of its tests.
func plant(t *testing.T, names ...string) (*runner, *strings.Builder) {
	t.Helper()
	root := t.TempDir()
	write(t, filepath.Join(root, "go.mod"), "module "+modulePath+"\n\ngo 1.26\n")
	for _, name := range names {
		write(t, filepath.Join(root, name, name+"_test.go"), "package "+name+`

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"
)

var _, _, _, _, _ = os.Exit, time.Now, exec.Command, syscall.Getpid, strconv.Itoa

`+planted[name]+"\n")
	}
	out := &strings.Builder{}
	return &runner{root: root, goCommand: "go", flags: []string{"-timeout=1m"}, out: out}, out
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// requireRun runs the tests and checks the verdict, and that the report has each text.
func requireRun(t *testing.T, r *runner, out *strings.Builder, passes bool, want ...string) {
	t.Helper()
	err := r.run(t.Context(), []string{"./..."})
	if (err == nil) != passes {
		t.Errorf("passed %v, want %v", err == nil, passes)
	}
	for _, text := range want {
		if !strings.Contains(out.String(), text) {
			t.Errorf("the report lacks %q", text)
		}
	}
	if t.Failed() {
		t.Logf("report:\n%s", out)
	}
}

// requireNoSecondRun fails if a test of the package that fails once ran again: it would have
// passed.
func requireNoSecondRun(t *testing.T, out *strings.Builder) {
	t.Helper()
	if strings.Count(out.String(), "FAIL    ") == 0 {
		t.Errorf("a test ran again:\n%s", out)
	}
}

// TestRun_PlantedFailures_FailTheRun plants one defect per package.
func TestRun_PlantedFailures_FailTheRun(t *testing.T) {
	t.Parallel()
	names := []string{"before", "after", "both", "panics", "exits", "hangs", "builds", "once", "always", "skips", "passing"}
	r, out := plant(t, names...)
	r.flags = []string{"-timeout=30s"} // of the one that hangs
	requireRun(t, r, out, false,
		"=== FAILED: before (outside of its tests, exit status 1)",
		"=== FAILED: after (outside of its tests, no test failed)",
		"=== FAILED: both TestOnce (outside of its tests, planted)",
		"=== FAILED: both (outside of its tests, planted)",
		"=== FAILED: panics (outside of its tests, panic: planted",
		"=== FAILED: exits (outside of its tests, TestExits has not ended)",
		"=== FAILED: hangs (outside of its tests, panic: test timed out after 30s)",
		"=== FAILED: builds (outside of its tests, build or vet failed)", "undefined: undefined",
		"=== FAILED: once TestOnce\n    GOWORK=off go test -run='^TestOnce$' "+modulePath+"/once\n",
		"=== FAILED: always TestAlways\n", "planted\n",
		"1 skipped: 1 without chromium")
	requireNoSecondRun(t, out)
	for _, name := range []string{"skips", "passing"} {
		if strings.Contains(out.String(), "=== FAILED: "+name) {
			t.Errorf("package %s failed", name)
		}
	}
	if info, err := os.Stat(filepath.Join(r.root, "bin", "test.json")); err != nil || info.Size() == 0 {
		t.Errorf("bin/test.json: %v", err)
	}
}

func TestRun_DataRace_FailsTheRun(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command("go", "env", "CGO_ENABLED").Output(); err != nil || strings.TrimSpace(string(out)) != "1" {
		t.Skip("the race detector needs a C compiler")
	}
	r, out := plant(t, "race", "passing")
	r.race = true
	requireRun(t, r, out, false, "=== FAILED: race TestRace (data race in the package)", "WARNING: DATA RACE", "ok      passing")
	requireNoSecondRun(t, out)
}

// TestRun_RaceDetectorFails_RunsThePackageAgain: a crash of the detector is no verdict, but only
// once.
func TestRun_RaceDetectorFails_RunsThePackageAgain(t *testing.T) {
	t.Parallel()
	r, out := plant(t, "crashes", "passing")
	requireRun(t, r, out, true, "the race detector failed; once more: crashes\n", "ok      crashes",
		"3 tests in 2 packages, 0 failures, 1 package ran again after a crash of the race detector, ")
	r, out = plant(t, "crashesfault", "passing")
	requireRun(t, r, out, true, "the race detector failed; once more: crashesfault\n", "ok      crashesfault")
	r, out = plant(t, "crashesagain", "passing")
	requireRun(t, r, out, false, "once more: crashesagain\n", "=== FAILED: crashesagain (outside of its tests, TestCrashes has not ended)",
		"1 package ran again")
}

// TestRun_RaceDetectorFailsAfterFailure_FailsTheRun: the second run of each package would pass.
func TestRun_RaceDetectorFailsAfterFailure_FailsTheRun(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"crashesafter": "crashesafter TestFails (outside of its tests, TestCrashes has not ended)",
		// a subtest failed
		"crasheswith":     "crasheswith (outside of its tests, TestCrashes has not ended)",
		"crashesmain":     "crashesmain (outside of its tests, planted)",
		"crashesafterall": "crashesafterall (outside of its tests, no test failed)",
		"crashespanic":    "crashespanic (outside of its tests, fatal error: planted)",
		"crashesnil":      "crashesnil TestCrashes (outside of its tests, panic: runtime error: invalid memory address or nil pointer dereference",
		"crasheschild":    "crasheschild (outside of its tests, TestExits has not ended)",
	} {
		r, out := plant(t, name, "passing")
		requireRun(t, r, out, false, "=== FAILED: "+want)
		if strings.Contains(out.String(), "once more") {
			t.Errorf("%s ran again:\n%s", name, out)
		}
	}
}

// TestRun_RaceDetectorFailsTwice_FailsTheRun has two packages that would pass in a second run.
func TestRun_RaceDetectorFailsTwice_FailsTheRun(t *testing.T) {
	t.Parallel()
	r, out := plant(t, "crashes", "crashestoo")
	requireRun(t, r, out, false, "=== FAILED: crashes (outside of its tests, TestCrashes has not ended)", "=== FAILED: crashestoo (outside")
}

// TestRun_ExitStatusZero_IsNoVerdict has test programs that exit with 0 although a test failed, had
// not ended, or did not run.
func TestRun_ExitStatusZero_IsNoVerdict(t *testing.T) {
	t.Parallel()
	r, out := plant(t, "zero", "zerobefore", "zeroduring", "zerounfinished", "passing")
	requireRun(t, r, out, false,
		"=== FAILED: zero TestOnce (outside of its tests, exit status 0 though a test failed)",
		"=== FAILED: zerobefore (outside of its tests, no test ran)",
		"=== FAILED: zeroduring (outside of its tests, it has not ended)",
		"=== FAILED: zerounfinished (outside of its tests, TestHangs has not ended)",
		"FAIL    zerobefore", "ok      passing")
	requireNoSecondRun(t, out)
	r, out = plant(t, "once", "passing")
	r.flags = append(r.flags, "-run", "TestPasses") // of which package once has none
	requireRun(t, r, out, true, "2 tests in 2 packages, 0 failures")
}

func TestRun_WithoutTests_FailsTheRun(t *testing.T) {
	t.Parallel()
	r, out := plant(t, "passing")
	r.flags = append(r.flags, "-run=^TestOfAnotherName$")
	requireRun(t, r, out, false, "no test ran")
}

// TestRun_GoTestFails_FailsTheRun has go test end before it has events.
func TestRun_GoTestFails_FailsTheRun(t *testing.T) {
	t.Parallel()
	r, out := plant(t, "passing")
	r.flags = append(r.flags, "-p=none")
	requireRun(t, r, out, false, "=== FAILED: go test of engine", "no package failed")
}

// TestRun_GoTestFailsBesideTest_IsReported has a go command that fails after a test did.
func TestRun_GoTestFailsBesideTest_IsReported(t *testing.T) {
	t.Parallel()
	for script, want := range map[string]string{
		"echo go: planted >&2; exit 1": "=== FAILED: go test of engine itself: exit status 1: go: planted",
		"exit 3":                       "=== FAILED: go test of engine itself: exit status 3",
		"exit 1":                       "",
	} {
		r, out := plant(t, "once", "passing")
		r.goCommand = filepath.Join(r.root, "go.sh")
		// Another process writes it: a program that this one has open, a fork of it may hold open.
		cmd := exec.Command("sh", "-c", `cat >"$0" && chmod +x "$0"`, r.goCommand)
		cmd.Stdin = strings.NewReader("#!/bin/sh\ngo \"$@\" && exit\n" + script + "\n")
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		requireRun(t, r, out, false, "=== FAILED: once TestOnce\n", want)
		if want == "" && strings.Contains(out.String(), "go test of engine") {
			t.Errorf("an error of go test itself is reported:\n%s", out)
		}
	}
}

// TestPlan_Patterns_AreOfTheirModules plans runs of this repository.
func TestPlan_Patterns_AreOfTheirModules(t *testing.T) {
	r := &runner{root: "../..", goCommand: "go", race: true, out: io.Discard}
	for words, want := range map[string]string{
		"./btree":                            "engine[./btree]",
		"./mirror/...":                       "engine[./mirror/...]+engine, without the race detector[./mirror]",
		"./kube/readpath ./kube/kubestorage": "kube[./readpath ./kubestorage]+kube, without the race detector[./kubestorage ./readpath]",
		"./kube/loadshed ./kube/kubestorage": "kube[./loadshed ./kubestorage]+kube, without the race detector[./kubestorage ./loadshed]",
		"engine":                             "engine[./mirror ./...]+engine, without the race detector[./mirror]",
		"kube":                               "kube[./kubestorage ./readpath ./...]+kube, without the race detector[./kubestorage ./loadshed ./readpath ./internal/gzipjoin ./internal/index ./informer ./transcode]",
		"./test/engine":                      "kube[../test/engine]+kube, without the race detector[../test/engine]",
		"./test/e2e/replica":                 "test[./e2e/replica]",
		"./test/bench/...":                   "test[./bench ./bench/...]",
		"./server/internal/up":               "test[../server/internal/up]",
		"./server/... ./stratatest":          "test[../server/internal/apiserver ../server/...]+stratatest[.]",
		"./stratatest/...":                   "stratatest[./...]",
		"./btree ./tools/prose":              "engine[./btree] tools[./prose]",
	} {
		stages, err := r.plan(strings.Fields(words))
		if err != nil {
			t.Errorf("%s: %v", words, err)
			continue
		}
		var got []string
		for _, stage := range stages {
			var names []string
			for _, inv := range stage {
				names = append(names, fmt.Sprintf("%s%v", inv.name, inv.packages))
			}
			got = append(got, strings.Join(names, "+"))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %q", words, got, want)
		}
	}
	for _, words := range []string{"", "nothing", "./nothing", "./test/upstream/suites", "../other"} {
		if stages, err := r.plan(strings.Fields(words)); err == nil {
			t.Errorf("%q: %v, want an error", words, stages)
		}
	}
}

// TestPlan_RaceDetector_HasLargerHeap: only tests under the race detector, and the caller's GOGC
// wins.
func TestPlan_RaceDetector_HasLargerHeap(t *testing.T) {
	r := &runner{root: "../..", goCommand: "go", race: true, out: io.Discard}
	for set, want := range map[string]string{"": "[GOGC=300] [] []", "off": "[] [] []"} {
		t.Setenv("GOGC", set)
		stages, err := r.plan([]string{"./mirror", "./test/e2e/replica"})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, inv := range slices.Concat(stages...) {
			got = append(got, fmt.Sprint(inv.env))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("GOGC=%s: %q, want %q", set, got, want)
		}
	}
}

// TestPlan_LongestPackages_Exist fails when a package moved.
func TestPlan_LongestPackages_Exist(t *testing.T) {
	for _, m := range modules {
		for _, dir := range m.longest {
			if _, err := os.Stat(filepath.Join("../..", m.from, dir)); err != nil {
				t.Error(err)
			}
		}
	}
	for _, p := range programs {
		for _, dir := range p.users {
			if _, err := os.Stat(filepath.Join("../..", dir)); err != nil {
				t.Errorf("%s: %v", p.pkg, err)
			}
		}
	}
}

func TestPrograms_AreNeededByTheirUsersOnly(t *testing.T) {
	for dir, want := range map[string]int{"./btree": 0, "./kube/...": 1, "./test/engine": 2, "./...": len(programs), "./server/internal/up": 1,
		"./test/e2e/api/kine": 2, "./test/e2e/api/clients": 3, "./test/e2e/...": len(programs) - 2, "./stratatest": 1} {
		r := &runner{root: "../..", out: io.Discard}
		stages, err := r.plan([]string{dir})
		if err != nil {
			t.Fatal(err)
		}
		needed := 0
		for _, p := range programs {
			if p.needed(stages) {
				needed++
			}
		}
		if needed != want {
			t.Errorf("%s needs %d programs, want %d", dir, needed, want)
		}
	}
}

// TestPrograms_Changed_TestsRunAgain: a result in go's cache is of the same program. A program that
// does not build differs from one that does.
func TestPrograms_Changed_TestsRunAgain(t *testing.T) {
	t.Parallel()
	r, out := plant(t, "passing")
	write(t, filepath.Join(r.root, "kube", "go.mod"), "module "+modulePath+"/kube\n\ngo 1.26\n")
	variable := program{path: "test/etcd"}.hashVariable()
	write(t, filepath.Join(r.root, "kube", "readpath", "x_test.go"), fmt.Sprintf(
		"package x\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestX(t *testing.T) { t.Logf(\"%%q\", os.Getenv(%q)) }\n", variable))
	write(t, filepath.Join(r.root, "test", "go.mod"), "module "+modulePath+"/test\n\ngo 1.26\n")
	for _, step := range []struct {
		source string
		cached bool
	}{{"func main() {}", false}, {"func main() {}", true}, {"func main() { println() }", false}, {"func main() { undefined() }", false}} {
		write(t, filepath.Join(r.root, "test", "etcd", "main.go"), "package main\n\n"+step.source+"\n")
		out.Reset()
		r = &runner{root: r.root, goCommand: "go", out: out}
		if err := r.run(t.Context(), []string{"./kube/readpath"}); err != nil {
			t.Errorf("%s: %v", step.source, err)
		}
		if cached := strings.Contains(out.String(), " cached\n"); cached != step.cached {
			t.Errorf("%s: cached %v, want %v\n%s", step.source, cached, step.cached, out)
		}
	}
	if got := (program{path: "stock/etcd-3.5"}).hashVariable(); got != "STRATA_TEST_HASH_STOCK_ETCD_3_5" {
		t.Errorf("%s: internal/test/testbin has another name", got)
	}
	text, err := os.ReadFile("../../internal/test/testbin/testbin.go")
	if err != nil || !strings.Contains(string(text), "_ = os.Getenv(HashEnvVar(name))") {
		t.Errorf("internal/test/testbin reads no hash, %v", err)
	}
}

// TestPlan_TestsWithoutRace_Exist fails when a test of the second pass was renamed.
func TestPlan_TestsWithoutRace_Exist(t *testing.T) {
	for _, w := range withoutRace {
		files, err := filepath.Glob(filepath.Join("../..", w.dir, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for name := range strings.SplitSeq(w.tests, "|") {
			if !slices.ContainsFunc(files, func(file string) bool {
				text, err := os.ReadFile(file)
				return err == nil && strings.Contains(string(text), "\nfunc "+name)
			}) {
				t.Errorf("%s has no test %s", w.dir, name)
			}
		}
	}
}

// selected matches a command of a makefile that runs some tests of a package.
var selected = regexp.MustCompile(`cd (\S+) && .*-run ["']([^"']+)["'] .*?(\./\S+)`)

// TestMakefiles_SelectedTests_Exist fails when a test was renamed that a target selects: go test
// passes if it has no test to run.
func TestMakefiles_SelectedTests_Exist(t *testing.T) {
	const root = "../.."
	makefiles, err := filepath.Glob(filepath.Join(root, "hack", "*.mk"))
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	commands := 0
	for _, makefile := range append(makefiles, filepath.Join(root, "Makefile")) {
		text, err := os.ReadFile(makefile)
		if err != nil {
			t.Fatal(err)
		}
		for _, command := range selected.FindAllStringSubmatch(string(text), -1) {
			commands++
			files, err := filepath.Glob(filepath.Join(root, command[1], command[3], "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, file := range files {
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				for _, name := range declared.FindAllStringSubmatch(string(text), -1) {
					names = append(names, name[1])
				}
			}
			for pattern := range strings.SplitSeq(strings.ReplaceAll(command[2], "$$", "$"), "|") {
				if !slices.ContainsFunc(names, regexp.MustCompile(pattern).MatchString) {
					t.Errorf("%s: %s has no test %s", makefile, filepath.Join(command[1], command[3]), pattern)
				}
			}
		}
	}
	if commands < 6 {
		t.Errorf("found %d commands", commands)
	}
}

// TestPlan_SecondPass_HasNoRaceDetector: whatever flags of the caller turn it on, and a -run of the
// caller replaces the choice.
func TestPlan_SecondPass_HasNoRaceDetector(t *testing.T) {
	r := &runner{root: "../..", goCommand: "go", race: true, flags: []string{"-race", "--race", "-race=true", "-vet=off", "-run=TestX"}, out: io.Discard}
	stages, err := r.plan([]string{"./kube/informer"})
	if err != nil || len(stages) != 1 || len(stages[0]) != 2 {
		t.Fatal(stages, err)
	}
	for i, inv := range stages[0] {
		with := slices.ContainsFunc(inv.args, func(arg string) bool { return strings.Contains(arg, "race") })
		if with != (i == 0) || inv.args[len(inv.args)-2] != "-vet=off" || inv.args[len(inv.args)-1] != "-run=TestX" {
			t.Errorf("%s: %q", inv.name, inv.args)
		}
	}
}

// TestPlan_TestsOfTestrace_RunWithoutRace: a test that depends on the race detector, by itself or
// by a function of its package, also runs without it.
func TestPlan_TestsOfTestrace_RunWithoutRace(t *testing.T) {
	const root = "../.."
	functions := map[string][]*ast.FuncDecl{} // of the tests of a directory
	depends := map[string]bool{}              // directories and functions that use testrace
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "bin" || d.Name() == ".git" || d.Name() == "tools" || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			f, function := decl.(*ast.FuncDecl)
			if function {
				functions[dir] = append(functions[dir], f)
			}
			if names(decl)["testrace"] {
				depends[dir] = true
				if function {
					depends[dir+" "+f.Name.Name] = true
				}
			}
		}
		return nil
	})
	if err != nil || len(depends) < 10 {
		t.Fatalf("found %d uses, %v", len(depends), err)
	}
	for dir, all := range functions {
		if !depends[dir] {
			continue
		}
		i := slices.IndexFunc(withoutRace, func(w struct{ dir, tests string }) bool { return w.dir == filepath.ToSlash(dir) })
		if i < 0 {
			t.Errorf("withoutRace lacks %s", dir)
			continue
		}
		tests := regexp.MustCompile("^(" + withoutRace[i].tests + ")")
		for _, f := range all {
			uses := depends[dir+" "+f.Name.Name]
			for name := range names(f) {
				uses = uses || depends[dir+" "+name]
			}
			if uses && strings.HasPrefix(f.Name.Name, "Test") && !tests.MatchString(f.Name.Name) {
				t.Errorf("withoutRace lacks %s of %s", f.Name.Name, dir)
			}
		}
	}
}

// names returns the identifiers of a declaration.
func names(decl ast.Decl) map[string]bool {
	found := map[string]bool{}
	ast.Inspect(decl, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok {
			found[id.Name] = true
		}
		return true
	})
	return found
}

// TestReason_Messages_AreCountedTogether has messages of tests of this repository.
func TestReason_Messages_AreCountedTogether(t *testing.T) {
	rs := &results{}
	for i, text := range []string{
		"skipped without stock: STRATA_TEST_STOCK does not name the directory (STRATA_TEST_REQUIRE=stock makes this a failure)",
		"skipped without stock: another text",
		"takes minutes: STRATA_TEST_LONG=1",
		"the race detector's heap is another",
		"something else",
	} {
		name := fmt.Sprintf("Test%d", i)
		rs.add(invocation{}, event{Action: "output", Package: "p", Test: name, Output: "    x_test.go:1: " + text + "\n"})
		rs.add(invocation{}, event{Action: "output", Package: "p", Test: name, Output: "    x.go:2: I1126 11:36:48.455545] a cleanup\n"})
		rs.add(invocation{}, event{Action: "skip", Package: "p", Test: name})
	}
	rs.add(invocation{}, event{Action: "output", Package: "p", Test: "TestSuite", Output: "    store_tests.go:1: \n"})
	rs.add(invocation{}, event{Action: "skip", Package: "p", Test: "TestSuite"})
	// Another pass runs the one that the race detector excludes.
	rs.add(invocation{name: "again"}, event{Action: "pass", Package: "p", Test: "Test3"})
	_, skips := rs.count()
	if got, want := summary(skips), "5 skipped: 2 without stock, 1 by upstream's storage suites themselves, 1 only in make nightly, 1 something else"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestReport_SlowestAndDuration_AreRounded(t *testing.T) {
	var out strings.Builder
	rs := &results{}
	rs.add(invocation{}, event{Action: "pass", Package: "p", Test: "TestX", Elapsed: 1.21})
	rs.add(invocation{}, event{Action: "pass", Package: "p", Test: "TestY", Elapsed: 58})
	rs.add(invocation{}, event{Action: "pass", Package: "p", Test: "TestY/part", Elapsed: 58})
	rs.add(invocation{}, event{Action: "pass", Package: "p", Test: "TestZ", Elapsed: 0.9})
	rs.add(invocation{}, event{Action: "pass", Package: "p", Elapsed: 60.4})
	passed := report(&out, rs, nil, 61400*time.Millisecond)
	const want = `
slowest packages:
   60.4s p

slowest tests:
   58.0s p TestY
    1.2s p TestX

4 tests in 1 packages, 0 failures, 1m1s
`
	if !passed || out.String() != want {
		t.Errorf("passed %v, %s", passed, out.String())
	}
}

// TestReport_LongLogs_MessagesStandAtTheEnd requires the messages of failed tests after the logs.
func TestReport_LongLogs_MessagesStandAtTheEnd(t *testing.T) {
	var out strings.Builder
	rs := &results{}
	output := func(test, line string) {
		rs.add(invocation{}, event{Action: "output", Package: modulePath + "/p", Test: test, Output: line})
	}
	output("TestX/part", "    x_test.go:7: got 1, want 2\n")
	output("TestX/part", "    x_test.go:7: got 1, want 2\n")
	output("TestX/part", "    x_test.go:9: I0101 00:00:00.000000 a line of a log\n")
	output("TestX", "    env.go:1: the servers' logs:\n")
	output("TestX", strings.Repeat("        a line of a log\n", 100))
	output("TestY", "    y_test.go:1: of a test that passes\n")
	for test, action := range map[string]string{"TestX/part": "fail", "TestX": "fail", "TestY": "pass", "": "fail"} {
		rs.add(invocation{}, event{Action: action, Package: modulePath + "/p", Test: test})
	}
	passed := report(&out, rs, nil, 0)
	const want = `
messages of failed tests:
  p TestX/part: x_test.go:7: got 1, want 2
  p TestX: env.go:1: the servers' logs:

3 tests in 1 packages, 1 failures, 0s
`
	if passed || !strings.HasSuffix(out.String(), want) {
		t.Errorf("passed %v, %s", passed, out.String())
	}
}
