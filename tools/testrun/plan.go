package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// module is a Go module of the repository, or a part of one that runs with the flags of another.
type module struct {
	name string
	dir  string // from the top
	from string // the directory of go test: modules of one directory share an invocation
	// longest are packages that start first: their tests take the longest, and others fill the
	// gaps.
	longest []string
}

// modules are in the order in which their tests run. Tests of the engine on an etcd have the race
// detector, as those of kube. Tests of the server, and those that start it, share an invocation.
var modules = []module{
	{name: "engine", dir: ".", from: ".", longest: []string{"./mirror"}},
	{name: "kube", dir: "kube", from: "kube", longest: []string{"./kubestorage", "./readpath"}},
	{name: "test", dir: "test/engine", from: "kube", longest: []string{"../test/engine"}},
	{name: "test", dir: "test/e2e", from: "test", longest: []string{
		"./e2e/api/readpath", "./e2e/api/samebytes", "./e2e/api/clients", "./e2e/api/tables",
		"./e2e/resumption/dropin", "./e2e/faults/feed", "./e2e/replica", "./e2e/api/readclients",
		"./e2e/faults/chaos", "./e2e/resumption/restart", "./e2e/api/history"}},
	{name: "test", dir: "test/bench", from: "test", longest: []string{"./bench"}},
	{name: "test", dir: "test/harness", from: "test"},
	{name: "test", dir: "test/operator", from: "test"},
	{name: "server", dir: "server", from: "test", longest: []string{"../server/internal/apiserver"}},
	{name: "stratatest", dir: "stratatest", from: "stratatest"},
	{name: "tools", dir: "tools", from: "tools"},
}

// withoutRace are the tests that run a second time without the race detector, by the directory of
// their package: they skip themselves under it, or explore few states (internal/test/testrace).
var withoutRace = []struct{ dir, tests string }{
	{"mirror", "TestOrderings_|TestHistory_MemoryPerRevision_|TestWindow_MaxBytes_|TestWindow_CachedVersions_|" +
		"TestMirror_RandomSteps_|TestMirror_EmptyUnclaimedResources_|TestCursor_FollowingKeysOrValues_|TestLoad_RestoredHistory_|" +
		"TestReaders_ConcurrentWriter_|TestResource_AfterWaitReady_|TestSnapshot_RestoresOfEtcd_|TestCompressor_SupersededValues_"},
	{"kube/kubestorage", "TestSuitesOfThisMinor|TestSimulation_|TestPages_OfLargeValues_"},
	{"kube/loadshed", "TestHandle_Overload|TestHandle_BelowOverload_"},
	{"kube/readpath", "TestTable_Lists_|TestWatch_SlowReader_|TestList_LargeObjectsSlowClient_|TestWatch_FramesAndHeaders_|TestWatchMetrics_EventsAndSizes_"},
	{"kube/internal/gzipjoin", "TestCompress_JoinedLeaves_"},
	{"kube/internal/index", "TestKeys_RandomSteps_|TestPlan_AnySelector|TestKnown_AnyLimit"},
	{"kube/informer", "TestRandomWritesAndFaults_"},
	{"test/engine", "TestReplay_AnySegments_"},
	{"kube/transcode", "TestTranscoder_EveryKind_"},
}

// program is a program that tests start or build, or a module whose files they read. It is built or
// downloaded before the tests, whose time limits are not for that. The tests find it up to date, or
// its packages in the build cache.
type program struct {
	path  string   // below bin; "" for a module
	dir   string   // of the go command
	pkg   string   // the package of the program, or the path of the module
	env   []string // additions to the environment of the go command
	users []string // directories of packages that use it
}

var (
	alone = []string{"GOWORK=off"}
	// as tools/release builds
	release = []string{"CGO_ENABLED=0", "GOFLAGS=-trimpath", "GOFIPS140=off"}
	pinned  = []string{"GOWORK=off", "GOFLAGS=-mod=readonly"}
)

const clients = "test/e2e/api/clients"

// A test of a missing program fails, or skips itself with the reason: a failed build is a warning,
// except that of the command.
var programs = []program{
	{"test/strata", ".", "./server/cmd/strata", nil, []string{"server", "test/e2e", "test/bench", "test/operator", "stratatest"}},
	{"test/etcd", "test", "./etcd", nil, []string{"kube/kubestorage", "test/engine", "kube/readpath", "kube/examples/apiserver"}},
	{"test/example-etcd", ".", "./examples/etcd", alone, []string{"test/engine"}},
	{"test/kubectl-strata", "server", "./cmd/kubectl-strata", nil, []string{"test/e2e/api/history"}},
	{"test/kubectl-strata-release", "server", "./cmd/kubectl-strata", release, []string{"test/e2e/api/history"}},
	{"test/release", "tools", "./release", alone, []string{"test/e2e/api/history"}},
	{"test/kine", "tools/kine", "github.com/k3s-io/kine", alone, []string{"test/e2e/api/contract", "test/e2e/api/kine"}},
	{"stock/etcd-3.5", "tools/stock/etcd-3.5", "go.etcd.io/etcd/server/v3", alone, []string{"test/e2e/api/contract"}},
	{"stock/etcd-3.6", "tools/stock/etcd-3.6", "go.etcd.io/etcd/server/v3", alone, []string{"test/e2e/api/contract", "test/e2e/resumption/skew"}},
	{"stock/etcd-3.7", "server", "go.etcd.io/etcd/server/v3", alone, []string{"test/e2e/resumption/skew"}},
	{"", clients + "/testdata/projects", "github.com/cert-manager/cert-manager", pinned, []string{clients}},
	{"", clients + "/testdata/projects", "sigs.k8s.io/gateway-api", pinned, []string{clients}},
}

// selection matches flags of go test with which a package may run no test.
var selection = regexp.MustCompile(`^--?(test\.)?(run|skip|list)(=|$)`)

// raceFlag matches the flags of the race detector.
var raceFlag = regexp.MustCompile(`^--?race(=|$)`)

// binaryEnv names the command that tests run.
const binaryEnv = "STRATA_BINARY"

// invocation is one call of go test.
type invocation struct {
	name     string
	dir      string
	alone    bool // GOWORK=off
	env      []string
	args     []string
	packages []string // relative to dir
	covers   []pattern
	selects  bool // the flags of the caller select tests: a package may have none of them
}

// pattern selects packages by their directory from the top, like a pattern of the go command that
// reaches into other modules.
type pattern struct {
	dir       string
	recursive bool
}

func (p pattern) matches(dir string) bool { return dir == p.dir || p.recursive && below(dir, p.dir) }

// below reports whether dir is the directory of, or stands below it.
func below(dir, of string) bool { return of == "." || dir == of || strings.HasPrefix(dir, of+"/") }

// plan returns the invocations for the words: stages that follow one another, of invocations that
// run at the same time.
func (r *runner) plan(words []string) (stages [][]invocation, err error) {
	byDir := map[string]*invocation{}
	add := func(m module, arg string, p pattern) {
		inv := byDir[m.from]
		if inv == nil {
			inv = r.invocation(m)
			byDir[m.from] = inv
		}
		if !slices.Contains(inv.packages, arg) {
			inv.packages = append(inv.packages, arg)
		}
		inv.covers = append(inv.covers, p)
	}
	var whole []module // after the packages that start first
	for _, word := range words {
		p, named := pattern{dir: filepath.ToSlash(filepath.Clean(word))}, len(whole)
		switch {
		case !strings.ContainsAny(word, "./"):
			for _, m := range modules {
				if m.name == word {
					whole = append(whole, m)
				}
			}
			if named == len(whole) {
				return nil, fmt.Errorf("no module %q; a package is ./path, several are ./path/...", word)
			}
			continue
		case filepath.Base(word) == "...":
			p = pattern{filepath.ToSlash(filepath.Dir(filepath.Clean(word))), true}
			for _, m := range modules {
				if _, err := os.Stat(filepath.Join(r.root, m.dir)); err == nil && below(m.dir, p.dir) {
					whole = append(whole, m)
				}
			}
		}
		owner, err := r.owner(p.dir)
		switch {
		case err != nil && named == len(whole):
			return nil, err
		case err != nil || p.recursive && p.dir == owner.dir: // whole modules
		case p.recursive:
			add(owner, relative(p.dir, owner.from)+"/...", p)
		default:
			add(owner, relative(p.dir, owner.from), p)
		}
	}
	for _, m := range whole {
		for _, first := range m.longest {
			if _, err := os.Stat(filepath.Join(r.root, m.from, first)); err == nil {
				add(m, first, pattern{m.dir, true})
			}
		}
	}
	for _, m := range whole {
		add(m, relative(m.dir, m.from)+"/...", pattern{m.dir, true})
	}
	if len(byDir) == 0 {
		return nil, fmt.Errorf("no packages; the arguments name modules or packages")
	}
	for _, from := range []string{".", "kube", "test", "stratatest", "tools"} {
		inv := byDir[from]
		if inv == nil {
			continue
		}
		if from == "stratatest" && byDir["test"] != nil {
			// both wait for servers most of the time
			stages[len(stages)-1] = append(stages[len(stages)-1], *inv)
			continue
		}
		stage := []invocation{*inv}
		if again := r.withoutRace(*inv); again != nil {
			stage = append(stage, *again) // fills the time in which the longest package is alone
		}
		stages = append(stages, stage)
	}
	if r.together {
		stages = [][]invocation{slices.Concat(stages...)}
	}
	return stages, nil
}

// owner returns the module of a directory: of the modules of the nearest go.mod, the innermost.
func (r *runner) owner(dir string) (module, error) {
	if info, err := os.Stat(filepath.Join(r.root, dir)); err != nil || !info.IsDir() {
		return module{}, fmt.Errorf("no directory %s", dir)
	}
	for at := dir; ; at = filepath.ToSlash(filepath.Dir(at)) {
		if _, err := os.Stat(filepath.Join(r.root, at, "go.mod")); err == nil {
			var owner module
			for _, m := range modules {
				if below(dir, m.dir) && below(m.dir, at) && len(m.dir) > len(owner.dir) {
					owner = m
				}
			}
			if owner.dir == "" {
				return module{}, fmt.Errorf("%s has other tests than make test runs (see make help)", dir)
			}
			return owner, nil
		}
		if at == "." || at == "/" {
			return module{}, fmt.Errorf("%s is in no module", dir)
		}
	}
}

// relative returns dir, from the top, as an argument of the go command in another directory.
func relative(dir, from string) string {
	rel, err := filepath.Rel(from, dir)
	if err != nil {
		panic(err) // both are relative to the top
	}
	if rel == "." || strings.HasPrefix(rel, "..") {
		return filepath.ToSlash(rel)
	}
	return "./" + filepath.ToSlash(rel)
}

// invocation returns the call for a module, without packages.
func (r *runner) invocation(m module) *invocation {
	// Tests of kube and server wait for processes, intervals and deadlines a third of the time.
	// More packages of the server at a time than processors take as long, and clients then time
	// out.
	waiting := fmt.Sprintf("-parallel=%d", 2*runtime.NumCPU())
	inv := &invocation{name: m.from, dir: m.from}
	var race bool
	switch m.from {
	case ".":
		inv.name, inv.alone, race = "engine", true, r.race
	case "kube":
		// The tag selects the suites of the minor version of k8s.io/apiserver in the workspace.
		inv.args = []string{fmt.Sprintf("-p=%d", runtime.NumCPU()+1), waiting, "-tags=apiserver_v0_37"}
		race = r.race
	case "test":
		// The server's test programs link all of Kubernetes: without symbols for a debugger, that
		// takes half the time. Go's cache of results does not know the processes that tests start.
		inv.args = []string{waiting, "-ldflags=-s", "-count=1"}
	case "stratatest":
		inv.args = []string{"-count=1"}
		race = r.race
	case "tools":
		// Guards read files of other modules, which Go's cache of results does not know.
		inv.alone, inv.args = true, []string{"-count=1"}
	}
	if race {
		inv.args = append(inv.args, "-race")
		if os.Getenv("GOGC") == "" {
			// The race detector makes a collection expensive. A larger heap takes a sixth of the
			// processor time from tests of mirror and kube/internal/index.
			inv.env = append(inv.env, "GOGC=300")
		}
	}
	inv.args = append(inv.args, r.flags...)
	inv.selects = slices.ContainsFunc(r.flags, selection.MatchString)
	return inv
}

// withoutRace returns the second call, for tests of withoutRace, or nil. A -run among the flags of
// go test comes later, and replaces the choice.
func (r *runner) withoutRace(inv invocation) *invocation {
	race := slices.IndexFunc(inv.args, raceFlag.MatchString)
	if race < 0 {
		return nil
	}
	again := inv
	again.name += ", without the race detector"
	again.packages, again.env = nil, nil
	var tests []string
	for _, w := range withoutRace {
		if m, err := r.owner(w.dir); err == nil && m.from == inv.dir && inv.covered(w.dir) {
			again.packages = append(again.packages, relative(w.dir, inv.dir))
			tests = append(tests, w.tests)
		}
	}
	if len(again.packages) == 0 {
		return nil
	}
	again.args = slices.Concat(inv.args[:race], []string{"-p=1", "-run=^(" + strings.Join(tests, "|") + ")"}, inv.args[race:])
	again.args = slices.DeleteFunc(again.args, raceFlag.MatchString) // also those of the caller
	return &again
}

func (inv invocation) covered(dir string) bool {
	return slices.ContainsFunc(inv.covers, func(p pattern) bool { return p.matches(dir) })
}

// uses reports whether the invocation runs tests of packages in or below dir.
func (inv invocation) uses(dir string) bool {
	return inv.dir != "." && slices.ContainsFunc(inv.covers, func(p pattern) bool { return p.matches(dir) || below(p.dir, dir) })
}

// needed reports whether tests of the invocations run the program.
func (p program) needed(stages [][]invocation) bool {
	return slices.ContainsFunc(slices.Concat(stages...), func(inv invocation) bool {
		return slices.ContainsFunc(p.users, inv.uses)
	})
}

// hashVariable is the environment variable with the hash of the program, as internal/test/testbin
// names it. A test that reads it has no cached result of another program.
func (p program) hashVariable() string {
	return "STRATA_TEST_HASH_" + strings.ToUpper(strings.NewReplacer("/", "_", "-", "_", ".", "_").Replace(p.path))
}

// hash identifies a program, or the error of its build.
func hash(path string, err error, output []byte) string {
	sum := sha256.New()
	if err == nil {
		var f *os.File
		if f, err = os.Open(path); err == nil {
			defer f.Close()
			_, err = io.Copy(sum, f)
		}
	}
	if err != nil {
		fmt.Fprintf(sum, "%v\n%s", err, output)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// buildPrograms builds the programs and downloads the modules that the invocations need. Tests find
// the hash of each program in an environment variable.
func (r *runner) buildPrograms(ctx context.Context, stages [][]invocation) error {
	for _, p := range programs {
		command := p.path == "test/strata"
		if !p.needed(stages) || command && os.Getenv(binaryEnv) != "" {
			continue
		}
		path, err := filepath.Abs(filepath.Join(r.root, "bin", p.path))
		if err != nil {
			return err
		}
		what, args := "build   bin/"+p.path, []string{"build", "-o", path, p.pkg}
		if p.path == "" {
			what, args = "download "+p.pkg, []string{"mod", "download", p.pkg}
		}
		fmt.Fprintln(r.out, what)
		build := exec.CommandContext(ctx, r.goCommand, args...)
		build.Dir = filepath.Join(r.root, p.dir)
		build.Env = append(os.Environ(), p.env...)
		out, err := build.CombinedOutput()
		if p.path != "" {
			r.environ = append(r.environ, p.hashVariable()+"="+hash(path, err, out))
		}
		switch {
		case err != nil && command:
			return fmt.Errorf("build the command: %w\n%s", err, out)
		case err != nil:
			fmt.Fprintf(r.out, "warning: %s: %v\n%s\n", what, err, out)
		case command:
			r.environ = append(r.environ, binaryEnv+"="+path)
		}
	}
	return nil
}
