//go:build apiserver_v0_37

package kubestorage

import (
	"bufio"
	"bytes"
	"context"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestUpstreamBenchmarks_CacherToEngine_ReportsRatios runs upstream's benchmarks of lists and of
// writes in a process of its own, at full size unless -suites.percent is set, and reports the time
// of each variant on upstream's cacher in relation to that on the engine, and the geometric mean.
// Wanted are 3 for lists and 1 for writes. It takes half an hour with STRATA_TEST_LONG=1, and is
// skipped without.
func TestUpstreamBenchmarks_CacherToEngine_ReportsRatios(t *testing.T) {
	if os.Getenv("STRATA_TEST_LONG") != "1" {
		t.Skip("it takes half an hour; STRATA_TEST_LONG=1 runs it")
	}
	for _, suite := range []struct{ name, pattern string }{
		{"lists", "^BenchmarkStoreList$"},
		{"writes", "^BenchmarkMinorSuites$/^WriteThroughput$"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
		defer cancel()
		var out, errs bytes.Buffer
		run := exec.CommandContext(ctx, os.Args[0], "-test.run=^$", "-test.bench="+suite.pattern, "-test.timeout=2h",
			"-test.benchtime="+benchTime(), "-suites.percent="+strconv.Itoa(*suitesPercent))
		run.Stdout, run.Stderr = &out, &errs
		if err := run.Run(); err != nil {
			t.Fatalf("%s: %v\n%s%s", suite.name, err, out.String(), errs.String())
		}
		engine, cacher := map[string]float64{}, map[string]float64{}
		for lines := bufio.NewScanner(&out); lines.Scan(); {
			name, nanoseconds, ok := benchmarkLine(lines.Text())
			if variant, found := strings.CutSuffix(name, "@engine"); ok && found {
				engine[variant] = nanoseconds
			} else if variant, found := strings.CutSuffix(name, "@cacher"); ok && found {
				cacher[variant] = nanoseconds
			}
		}
		if len(engine) == 0 || len(engine) != len(cacher) {
			t.Fatalf("%s: %d variants on the engine, %d on the cacher", suite.name, len(engine), len(cacher))
		}
		sum, least := 0., math.Inf(1)
		var variants []string
		for variant := range engine {
			variants = append(variants, variant)
		}
		slices.Sort(variants)
		for _, variant := range variants {
			ratio := cacher[variant] / engine[variant]
			if ratio == 0 {
				t.Errorf("%s has no time on the cacher", variant)
			}
			t.Logf("%6.2f %s", ratio, variant)
			sum += math.Log(ratio)
			least = min(least, ratio)
		}
		t.Logf("%s: cacher/engine is %.2f in the geometric mean of %d variants, %.2f at least", suite.name, math.Exp(sum/float64(len(engine))), len(engine), least)
	}
}

// benchTime is the duration of each variant: short below the full size.
func benchTime() string {
	if *suitesPercent > 0 && *suitesPercent < 100 {
		return "100ms"
	}
	return "1s"
}

// benchmarkLine parses a line of a benchmark's output. The engine is cut out of the name and added
// at its end.
func benchmarkLine(line string) (name string, nanoseconds float64, ok bool) {
	parts := strings.Fields(line)
	if len(parts) < 4 || parts[3] != "ns/op" {
		return "", 0, false
	}
	nanoseconds, err := strconv.ParseFloat(parts[2], 64)
	if err != nil {
		return "", 0, false
	}
	for _, of := range []string{"engine", "cacher"} {
		if before, after, found := strings.Cut(parts[0], "/"+of); found {
			return before + after + "@" + of, nanoseconds, true
		}
	}
	return "", 0, false
}
