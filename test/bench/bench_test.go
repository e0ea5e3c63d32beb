package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testbin"
	"github.com/stratakube/strata/internal/test/testcheck"
)

// smoke are the workloads of the short form: a list and a watch of each engine, and an engine of
// its own.
var smoke = []string{"list-json", "watch-shared", "restore"}

// TestBenchmark_EndToEnd_ReportsEveryWorkload runs the workloads of smoke, or all with
// STRATA_TEST_LONG=1, with few objects: each finds its engines, gets correct answers and reports
// figures, and no process or file remains. The figures do not matter, so two benchmarks run at
// once.
func TestBenchmark_EndToEnd_ReportsEveryWorkload(t *testing.T) {
	testbin.Strata(t) // the first time it takes minutes, which are not the benchmark's
	ctx, cancel := context.WithTimeout(t.Context(), 12*time.Minute)
	defer cancel()
	var fresh, others []Workload
	for _, w := range workloads {
		switch {
		case os.Getenv("STRATA_TEST_LONG") != "1" && !slices.Contains(smoke, w.Name):
		case w.Alone:
			fresh = append(fresh, w)
		default:
			others = append(others, w)
		}
	}
	if len(fresh)+len(others) < len(smoke) {
		t.Fatalf("%d workloads, want those of smoke: %v", len(fresh)+len(others), smoke)
	}
	var all sync.WaitGroup
	var reports [2]*Report
	for i, some := range [][]Workload{fresh, others} {
		all.Go(func() { reports[i] = benchmarkOf(ctx, t, some) })
	}
	all.Wait()
	var results []Result
	for _, report := range reports {
		if report == nil {
			return // it has failed
		}
		results = append(results, report.Results...)
	}
	if want := len(fresh) + len(others); len(results) != want {
		t.Errorf("%d workloads reported, want %d", len(results), want)
	}
	for _, result := range results {
		measured := map[string]bool{}
		if len(result.Notes) > 0 {
			t.Errorf("%s: %v", result.Name, result.Notes)
		}
		for _, row := range result.Rows {
			if _, strata := row.Values["strata"]; !strata {
				t.Errorf("%s, %s: values of %v, want one of Strata", result.Name, row.Name, row.Values)
			}
			if _, upstream := row.Values["upstream"]; !upstream && !ofStrata(row.Name) {
				t.Errorf("%s, %s: values of %v, want one of upstream", result.Name, row.Name, row.Values)
			}
			measured[row.Name] = true
		}
		for _, bound := range result.Wanted {
			if !measured[bound.Measure] {
				t.Errorf("%s: %q is wanted and not measured", result.Name, bound.Measure)
			}
		}
	}
}

// TestLived_TinySizes_ReportsEveryRow runs the sequence once, and twice with STRATA_TEST_LONG=1:
// each row has its latencies and the server's CPU, and the processes' state is reported after each
// sequence.
func TestLived_TinySizes_ReportsEveryRow(t *testing.T) {
	testbin.Strata(t)
	args, rows := []string{"lived", "-engines=strata,upstream"}, livedRows()
	memory := []string{"goroutines at the end", "heap 6ms later", "resident at the end"}
	if os.Getenv("STRATA_TEST_LONG") == "1" {
		args = append(args, "-repeat=2")
		memory = []string{"goroutines at the end, after sequence 2", "heap 6ms later, after sequence 2", "resident at the end, after sequence 1"}
	}
	report := benchmarkOf(t.Context(), t, nil, args...)
	if report == nil {
		return // it has failed
	}
	if len(report.Results) != len(rows)+1 {
		t.Errorf("%d results, want %d and the memory", len(report.Results), len(rows))
	}
	for i, result := range report.Results {
		wanted := memory
		switch {
		case i == len(rows):
		case rows[i].Fresh:
			wanted = []string{untilReadyz, "resident at rest"}
		default:
			wanted = []string{"latency p50", "latency p99", "latency p99.9", "resident afterwards", "server CPU per " + rows[i].Op}
		}
		values := map[string]map[string]float64{} // by the row's name, then the engine
		for _, row := range result.Rows {
			values[row.Name] = row.Values
		}
		for _, engine := range []string{"strata", "upstream"} {
			if delivered, watched := values["events delivered"][engine]; watched && delivered < 100 {
				continue // a busy machine breaks watches off, which then have no latencies
			}
			if note := result.Notes[engine]; note != "" {
				t.Errorf("%s of %s: %s", result.Name, engine, note)
			}
			for _, name := range wanted {
				if _, measured := values[name][engine]; !measured {
					t.Errorf("%s lacks %q of %s: %v", result.Name, name, engine, result.Rows)
				}
			}
		}
	}
}

// benchmarkOf runs a benchmark of some workloads, or those that args select, in a directory of its
// own and returns its report, nil if it has failed. It may be called concurrently.
func benchmarkOf(ctx context.Context, t *testing.T, some []Workload, args ...string) *Report {
	binary, err := testbin.Path()
	if err != nil {
		t.Error(err)
		return nil
	}
	dir, err := os.MkdirTemp(t.TempDir(), "")
	if err != nil {
		t.Error(err)
		return nil
	}
	stderr, err := os.Create(filepath.Join(dir, "stderr"))
	if err != nil {
		t.Error(err)
		return nil
	}
	defer stderr.Close()
	data, reportFile := filepath.Join(dir, "data"), filepath.Join(dir, "report.json")
	config, err := parse(append(args, "-runs=1", "-binary="+binary, "-data="+data, "-out="+reportFile)...)
	if err != nil {
		t.Error(err)
		return nil
	}
	for i := range config.Engines {
		// upstream does not end by itself while a watch is open
		config.Engines[i].Grace = 2 * time.Second
	}
	if config.Scale = tiny; some != nil {
		config.Workloads = some
	}
	var stdout strings.Builder
	if err := benchmark(ctx, config, &stdout, stderr); err != nil {
		progress, _ := os.ReadFile(stderr.Name()) // only shown
		t.Errorf("%v\n%s", err, progress)
		return nil
	}
	encoded, err := os.ReadFile(reportFile)
	report := new(Report)
	if err == nil {
		err = json.Unmarshal(encoded, report)
	}
	if err != nil {
		t.Error(err)
		return nil
	}
	for _, result := range report.Results {
		if !strings.Contains(stdout.String(), result.Title) {
			t.Errorf("the table does not name %q:\n%s", result.Title, stdout.String())
		}
	}
	left, err := filepath.Glob(filepath.Join(data, "run-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	return report
}

// ofStrata reports whether only Strata has a measure.
func ofStrata(measure string) bool {
	return strings.Contains(measure, "restored")
}

func TestBenchmark_Interrupted_LeavesNoProcess(t *testing.T) {
	stderr, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	testcheck.NoError(t, err)
	defer stderr.Close()
	data := t.TempDir()
	config, err := parse("-quick", "-binary="+testbin.Strata(t), "-data="+data)
	testcheck.NoError(t, err)
	config.Scale = tiny
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- benchmark(ctx, config, new(strings.Builder), stderr)
	}()
	// Interrupt it when both an etcd and an engine run.
	requireWithin(t, func() bool { return len(runningOn(t, data)) >= 2 })
	cancel()
	select {
	case err := <-done:
		if err == nil {
			t.Fatal("an interrupted benchmark succeeded")
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("the benchmark does not end")
	}
	if left := runningOn(t, data); len(left) > 0 {
		t.Errorf("still running: %q", left)
	}
}

func requireWithin(t *testing.T, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the condition is not met")
		}
	}
}

// runningOn returns the command lines of all processes that name a directory.
func runningOn(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	testcheck.NoError(t, err)
	var found []string
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(line), dir) { // others may have ended meanwhile
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}
