package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// robustnessTimeout bounds the run of both tests and of the planted defects.
const robustnessTimeout = 30 * time.Minute

var robustnessSuite = Suite{
	Name:  "robustness",
	Title: "etcd: validators of the robustness tests",
	About: "The validators of go.etcd.io/etcd/tests/v3/robustness judge the mirror: `test/upstream/robustness/` records reads and watches of a mirror, which are " +
		"not part of upstream's storage layer, as reads and watches of etcd, beside writes, compactions and interruptions of the feed. " +
		"Planted defects prove that each validator finds what it is for.",
	Quick:   true,
	Engines: []Engine{Strata},
	Prepare: func(ctx context.Context, env *Env) ([]Unit, error) {
		dir := filepath.Join(env.Root, "test/upstream", "robustness")
		version, err := env.goOutput(ctx, dir, "list", "-m", "-f", "{{.Version}}", "go.etcd.io/etcd/tests/v3")
		if err != nil {
			return nil, err
		}
		binary := filepath.Join(env.Bin, "tests", "robustness.test")
		tests := &goTest{binary: binary, dir: dir, timeout: robustnessTimeout}
		return []Unit{{
			Name:   "robustness/validate",
			Source: "go.etcd.io/etcd/tests/v3 " + version,
			Quick:  []string{"TestMirror_PassesEtcdValidators", "TestEtcdValidators_DetectPlantedDefects"},
			Build: func(ctx context.Context) error {
				return env.goRun(ctx, dir, "test", "-c", "-vet=off", "-ldflags=-s -w", "-o", binary, ".")
			},
			Run: func(ctx context.Context, _ Engine, only []string, log string) (Verdicts, error) {
				verdicts, err := tests.run(ctx, env, only, log)
				// A history that is wrong once is wrong: another run would be another history.
				for test, verdict := range verdicts {
					if err == nil && strings.HasPrefix(test, "TestMirror_PassesEtcdValidators") && (verdict == Fail || verdict == Absent) {
						err = fmt.Errorf("the validators reject a history; see %s", log)
					}
				}
				return verdicts, err
			},
			Clean: func() { os.Remove(binary) },
		}}, nil
	},
}
