package main

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// controllerRuntime is the release for the minor version of Kubernetes that server/ is built from.
const (
	controllerRuntime        = "sigs.k8s.io/controller-runtime"
	controllerRuntimeVersion = "v0.25.2"
)

// controllerRuntimeTimeout bounds one run of one package; the slowest takes two minutes on two
// processors.
const controllerRuntimeTimeout = 20 * time.Minute

var controllerRuntimeSuite = Suite{
	Name:  "controller-runtime",
	Title: "controller-runtime",
	About: "The packages of sigs.k8s.io/controller-runtime whose tests start a control plane: caches, clients, controllers, managers, webhooks. " +
		"The programs kube-apiserver, etcd and kubectl that they start are `strata apiserver --engine=...`, an etcd, and `strata kubectl`. " +
		"Specs of ginkgo count as tests. The subtests `aggregatedDiscovery=false` of pkg/client/apiutil are skipped: " + downloads + ".",
	Prepare: controllerRuntimeUnits,
}

// controllerRuntimeUnits copies the module to a directory where its tests can be built, with the
// dependencies that it names itself, and builds the programs.
func controllerRuntimeUnits(ctx context.Context, env *Env) ([]Unit, error) {
	source, err := env.download(ctx, controllerRuntime, controllerRuntimeVersion)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(env.Bin, "controller-runtime")
	packages, err := controlPlanePackages(source)
	if err != nil {
		return nil, err
	}
	if err := replaceCopy(source, dir); err != nil {
		return nil, err
	}
	if err := skipDownloads(dir); err != nil {
		return nil, err
	}
	assets, err := assets(ctx, env)
	if err != nil {
		return nil, err
	}
	var units []Unit
	for _, pkg := range packages {
		unit, err := controlPlaneUnit(env, controllerRuntime+" "+controllerRuntimeVersion, dir, pkg, assets)
		if err != nil {
			return nil, err
		}
		unit.Exclusive = pkg == "pkg/internal/recorder" // its metrics have the default port
		units = append(units, unit)
	}
	return units, nil
}

// controlPlaneUnit returns the unit of a package in dir, a copy of source, whose tests start the
// programs of assets.
func controlPlaneUnit(env *Env, source, dir, pkg string, assets map[Engine]string) (Unit, error) {
	pkgDir := filepath.Join(dir, filepath.FromSlash(pkg))
	runner, err := specRunner(pkgDir)
	if err != nil {
		return Unit{}, err
	}
	module, _, _ := strings.Cut(source, " ")
	binary := filepath.Join(env.Bin, "tests", module, filepath.FromSlash(pkg), path.Base(pkg)+".test")
	return Unit{
		Name:   pkg,
		Source: source,
		Build: func(ctx context.Context) error {
			args := []string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-o", binary, "./" + pkg}
			if env.Workspace == "" {
				args = slices.Insert(args, 1, "-mod=mod")
			}
			return env.goRun(ctx, dir, args...)
		},
		Run: func(ctx context.Context, engine Engine, only []string, log string) (Verdicts, error) {
			tests := &goTest{binary: binary, dir: pkgDir, timeout: controllerRuntimeTimeout, environ: []string{"KUBEBUILDER_ASSETS=" + assets[engine]}}
			if runner == "" {
				return tests.run(ctx, env, only, log)
			}
			return runWithSpecs(ctx, env, tests, runner, only, log)
		},
		Clean: func() { os.Remove(binary) },
	}, nil
}

// downloads is the reason for skipping subtests of pkg/client/apiutil.
const downloads = "they download the kube-apiserver of Kubernetes 1.28 and test that, not an engine"

// skipDownloads makes the copied tests skip where they download the programs that they test. Those
// contain no engine, and the verdict depends on the network.
func skipDownloads(dir string) error {
	file := filepath.Join(dir, "pkg", "client", "apiutil", "restmapper_test.go")
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	patched, err := insert(string(text), []edit{{"\t\ttestEnv.DownloadBinaryAssets = true\n", fmt.Sprintf("\t\tt.Skip(%q)\n", downloads)}})
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return os.WriteFile(file, []byte(patched), 0o644)
}

// ginkgoGrace is how much earlier than the binary the specs reach their timeout, so that ginkgo can
// write its report.
const ginkgoGrace = 2 * time.Minute

// runWithSpecs runs a test binary of which the test named runner runs specs, and returns the
// verdicts of the specs in place of the runner's.
func runWithSpecs(ctx context.Context, env *Env, tests *goTest, runner string, only []string, log string) (Verdicts, error) {
	report := strings.TrimSuffix(log, ".log") + ".json"
	if err := os.Remove(report); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	goTests, specs := splitSpecs(only, runner)
	tests.serial = true
	tests.args = append(tests.args, "-ginkgo.json-report="+report, "-ginkgo.no-color", "-ginkgo.timeout="+(tests.timeout-ginkgoGrace).String())
	if len(specs) > 0 {
		tests.args = append(tests.args, "-ginkgo.focus="+specFocus(specs))
	}
	verdicts, err := tests.run(ctx, env, goTests, log)
	if err != nil {
		return nil, err
	}
	if verdict, ok := verdicts[runner]; !ok || verdict == Skip {
		return verdicts, nil
	}
	bySpec, err := specVerdicts(report, specs)
	if err != nil { // the binary crashed
		bySpec = nil
	}
	return replaceRunner(verdicts, runner, bySpec), nil
}

// splitSpecs returns the Go tests and the specs among the names, nil for all. The runner or
// mainTest represent all specs; the runner is among the Go tests if there are specs to run.
func splitSpecs(only []string, runner string) (goTests, specs []string) {
	if only == nil || slices.Contains(only, mainTest) {
		return nil, nil
	}
	goTests = []string{}
	for _, name := range only {
		if strings.HasPrefix(name, "Test") && !strings.Contains(name, " ") {
			goTests = append(goTests, name)
		} else {
			specs = append(specs, name)
		}
	}
	if slices.Contains(goTests, runner) {
		return goTests, nil
	}
	if len(specs) > 0 {
		goTests = append(goTests, runner)
	}
	return goTests, specs
}

// replaceRunner replaces the verdict of the test that runs specs by theirs, which are nil if there
// is no report. A failure of the runner that no spec explains becomes one of mainTest: like each
// other verdict, a later attempt can replace it.
func replaceRunner(verdicts Verdicts, runner string, bySpec Verdicts) Verdicts {
	verdict := verdicts[runner]
	delete(verdicts, runner)
	maps.Copy(verdicts, bySpec)
	if bySpec == nil || verdict != Pass && !slices.Contains(values(bySpec), Fail) {
		verdicts[mainTest] = Fail
	}
	return verdicts
}

// controlPlane matches the literals of envtest.Environment and controlplane.ControlPlane, which
// start a control plane.
var controlPlane = regexp.MustCompile(`\b(Environment|ControlPlane)\{`)

// controlPlanePackages returns the packages, as paths in the module, whose tests start a control
// plane.
func controlPlanePackages(dir string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(filepath.Join(dir, "pkg"), func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		pkg, err := filepath.Rel(dir, filepath.Dir(file))
		if err != nil {
			return err
		}
		pkg = filepath.ToSlash(pkg)
		if controlPlane.Match(text) && !slices.Contains(found, pkg) {
			found = append(found, pkg)
		}
		return nil
	})
	slices.Sort(found)
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("%s has no package whose tests start a control plane", dir)
	}
	return found, err
}

// assets returns, for each engine, a directory with the programs that controller-runtime's tests
// start.
func assets(ctx context.Context, env *Env) (map[Engine]string, error) {
	etcd := filepath.Join(env.Bin, "programs", "etcd-server")
	if err := env.goRun(ctx, filepath.Join(env.Root, "test/upstream", "robustness"), "build", "-o", etcd, "go.etcd.io/etcd/server/v3"); err != nil {
		return nil, err
	}
	strata, err := buildStrata(ctx, env)
	if err != nil {
		return nil, err
	}
	dirs := map[Engine]string{}
	for _, engine := range []Engine{Upstream, Strata} {
		dirs[engine] = filepath.Join(env.Bin, "assets-"+string(engine))
		if err := os.MkdirAll(dirs[engine], 0o755); err != nil {
			return nil, err
		}
		for name, command := range map[string]string{
			"kube-apiserver": fmt.Sprintf("%q apiserver --engine=%s", strata, engine),
			"kubectl":        fmt.Sprintf("%q kubectl", strata),
			"etcd":           fmt.Sprintf("%q", etcd),
		} {
			script := fmt.Sprintf("#!/bin/sh\nexec %s \"$@\"\n", command)
			if err := os.WriteFile(filepath.Join(dirs[engine], name), []byte(script), 0o755); err != nil {
				return nil, err
			}
		}
	}
	return dirs, nil
}

// buildStrata builds the program strata and returns its path.
func buildStrata(ctx context.Context, env *Env) (string, error) {
	strata := filepath.Join(env.Bin, "programs", "strata")
	if err := env.inRepository().goRun(ctx, env.Root, "build", "-o", strata, "./server/cmd/strata"); err != nil {
		return "", err
	}
	return strata, nil
}
