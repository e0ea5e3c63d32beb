package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// conformanceTimeout bounds one run of the specs; they take about ten minutes on two processors.
const conformanceTimeout = 50 * time.Minute

var conformanceSuite = Suite{
	Name:  "conformance",
	Title: "Kubernetes: conformance",
	About: "The end-to-end tests of k8s.io/kubernetes/test/e2e that need no running container, with kube-controller-manager: the tests of Kubernetes' " +
		"conformance that upstream passes without a kubelet (`test/upstream/conformance/specs.txt`), and those of streamed lists and of tables.",
	Prepare: func(ctx context.Context, env *Env) ([]Unit, error) {
		kubernetes, err := env.serverModule(ctx, "k8s.io/kubernetes")
		if err != nil {
			return nil, err
		}
		dir, programs := filepath.Join(env.Root, "test/upstream", "conformance"), filepath.Join(env.Bin, "programs")
		ldflags := "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion=" + kubernetes.Version
		unit := Unit{
			Name:   "test/e2e",
			Source: kubernetes.Path + " " + kubernetes.Version,
			Build: func(ctx context.Context) error {
				if _, err := buildStrata(ctx, env); err != nil {
					return err
				}
				return errors.Join(
					env.goRun(ctx, dir, "build", "-o", filepath.Join(programs, "conformance"), "."),
					env.goRun(ctx, dir, "build", ldflags, "-o", filepath.Join(programs, "kube-controller-manager"), "k8s.io/kubernetes/cmd/kube-controller-manager"),
					env.goRun(ctx, dir, "test", "-c", "-vet=off", ldflags, "-o", filepath.Join(programs, "e2e.test"), "k8s.io/kubernetes/test/e2e"),
				)
			},
			Run: func(ctx context.Context, engine Engine, only []string, log string) (Verdicts, error) {
				return runConformance(ctx, env, programs, engine, only, log)
			},
		}
		return []Unit{unit}, nil
	},
}

// runConformance runs the specs with these names, or all of the catalogue.
func runConformance(ctx context.Context, env *Env, programs string, engine Engine, only []string, log string) (Verdicts, error) {
	reports := strings.TrimSuffix(log, ".log")
	if err := os.MkdirAll(reports, 0o755); err != nil {
		return nil, err
	}
	args := []string{
		// both engines run at the same time
		"-engine=" + string(engine), "-reports=" + reports, "-processes=2",
		"-strata=" + filepath.Join(programs, "strata"), "-e2e=" + filepath.Join(programs, "e2e.test"),
		"-controller-manager=" + filepath.Join(programs, "kube-controller-manager"),
	}
	if slices.Contains(only, mainTest) {
		only = nil
	}
	if only != nil {
		text, err := os.ReadFile(filepath.Join(env.Root, "test/upstream", "conformance", "specs.txt"))
		if err != nil {
			return nil, err
		}
		specs := []string{}
		for spec := range strings.Lines(string(text)) {
			if spec = strings.TrimSuffix(spec, "\n"); slices.Contains(only, specName(spec)) {
				specs = append(specs, spec)
			}
		}
		file := filepath.Join(reports, "specs.json")
		if text, err = json.Marshal(specs); err != nil {
			return nil, err
		}
		if err := os.WriteFile(file, text, 0o644); err != nil {
			return nil, err
		}
		args = append(args, "-specs="+file)
	}
	out, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	ctx, cancel := context.WithTimeout(ctx, conformanceTimeout)
	defer cancel()
	cmd := exec.Command(filepath.Join(programs, "conformance"), args...)
	cmd.Dir = env.Root
	cmd.Stdout, cmd.Stderr = out, out
	runErr := runGroup(ctx, cmd)
	if exit := (*exec.ExitError)(nil); runErr != nil && !errors.As(runErr, &exit) {
		return nil, runErr
	}
	verdicts, err := specVerdicts(filepath.Join(reports, "report.json"), only)
	if err != nil {
		return nil, fmt.Errorf("%w; see %s", err, log)
	}
	// The run also fails if the catalogue disagrees with the tests, and if memory differs from
	// etcd.
	if only == nil && verdicts[mainTest] == "" {
		verdicts[mainTest] = Pass
		if runErr != nil && !slices.Contains(values(verdicts), Fail) {
			verdicts[mainTest] = Fail
		}
	}
	return verdicts, nil
}

func values(v Verdicts) (verdicts []Verdict) {
	for _, verdict := range v {
		verdicts = append(verdicts, verdict)
	}
	return verdicts
}
