package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// peerTimeout bounds a run of tests that start programs of others.
const peerTimeout = 30 * time.Minute

// peersSuite are tests of this repository that need programs of others: those of `make skew` and
// `make etcd-contract`.
var peersSuite = Suite{
	Name:  "peers",
	Title: "Strata beside kube-apiserver and etcd",
	About: "Tests of this repository with unmodified programs of others: `make skew` runs Strata beside, before and after kube-apiservers, on etcds, of the two " +
		"newest minor versions ([version skew](releases.md#version-skew)); `make etcd-contract` tests what Strata requires of etcd on 3.4 to 3.7 and kine " +
		"([contract](etcd-contract.md)).",
	Engines: []Engine{Strata},
	Prepare: func(ctx context.Context, env *Env) ([]Unit, error) {
		kubernetes, err := env.serverModule(ctx, "k8s.io/kubernetes")
		if err != nil {
			return nil, err
		}
		etcd, err := env.serverModule(ctx, "go.etcd.io/etcd/server/v3")
		if err != nil {
			return nil, err
		}
		older, err := env.goOutput(ctx, filepath.Join(env.Root, "tools/stock/kube-apiserver-1.36"), "list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes")
		if err != nil {
			return nil, err
		}
		stock := func(ctx context.Context) ([]string, error) {
			strata, err := buildStrata(ctx, env)
			if err != nil {
				return nil, err
			}
			if _, err := env.output(ctx, "make", "stock"); err != nil {
				return nil, err
			}
			return []string{"STRATA_BINARY=" + strata, "STRATA_TEST_STOCK=" + filepath.Join(env.Root, "bin", "stock"), "STRATA_TEST_REQUIRE=stock"}, nil
		}
		old := func(ctx context.Context) ([]string, error) {
			path, err := env.output(ctx, "hack/old-etcd")
			return []string{"STRATA_TEST_OLD_ETCD=" + path, "STRATA_TEST_REQUIRE=old-etcd,kine"}, err
		}
		return []Unit{
			peerUnit(env, "e2e/resumption/skew", kubernetes.Path+" "+older+" and "+kubernetes.Version, stock),
			peerUnit(env, "e2e/api/contract", etcd.Path+" "+etcd.Version, old),
		}, nil
	},
}

// peerUnit runs a package below test/, with the environment that programs returns.
func peerUnit(env *Env, pkg, source string, programs func(context.Context) (environ []string, err error)) Unit {
	dir, binary := filepath.Join(env.Root, "test", pkg), filepath.Join(env.Bin, "tests", filepath.Base(pkg)+".test")
	tests := &goTest{binary: binary, dir: dir, timeout: peerTimeout}
	return Unit{
		Name: "test/" + pkg, Source: source,
		Build: func(ctx context.Context) (err error) {
			if tests.environ, err = programs(ctx); err != nil {
				return err
			}
			return env.inRepository().goRun(ctx, dir, "test", "-c", "-vet=off", "-ldflags=-s -w", "-o", binary, ".")
		},
		Run: func(ctx context.Context, _ Engine, only []string, log string) (Verdicts, error) {
			verdicts, err := tests.run(ctx, env, only, log)
			if err != nil {
				return verdicts, err
			}
			// A skipped test lacks a program of another project. No test is repeated.
			var others []string
			for test, verdict := range verdicts {
				if verdict != Pass {
					others = append(others, fmt.Sprintf("%s: %s", test, verdict))
				}
			}
			if len(others) > 0 {
				slices.Sort(others)
				return verdicts, fmt.Errorf("%s; see %s", strings.Join(others, ", "), log)
			}
			return verdicts, nil
		},
		Clean: func() { os.Remove(binary) },
	}
}

// output runs a command at the top of the repository and returns its output without surrounding
// space.
func (e *Env) output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Stderr = e.Root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}
