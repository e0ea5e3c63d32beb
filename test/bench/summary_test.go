package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

var update = flag.Bool("update", false, "write docs/benchmarks/summary.md and day.svg")

// TestSummary_OfResults_IsCurrent compares docs/benchmarks/summary.md with the reports in
// docs/benchmarks/results, which -out wrote: the rows with a bound, at most 60 in all. A workload
// of a later report replaces that of an earlier one.
func TestSummary_OfResults_IsCurrent(t *testing.T) {
	const page, most = "../../docs/benchmarks/summary.md", 60
	files, err := filepath.Glob("../../docs/benchmarks/results/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no reports: %v", err)
	}
	var b strings.Builder
	b.WriteString("# Results\n\nWritten by `go test ./test/bench -run TestSummary_ -update` from the reports in `docs/benchmarks/results`.\n")
	rows, shown := 0, map[string]bool{}
	for i := len(files) - 1; i >= 0; i-- { // the newest first
		text, err := os.ReadFile(files[i])
		testcheck.NoError(t, err)
		var report Report
		if err := json.Unmarshal(text, &report); err != nil {
			t.Fatalf("%s: %v", files[i], err)
		}
		report.Results = slices.DeleteFunc(report.Results, func(w Result) bool { return shown[w.Name] })
		for _, w := range report.Results {
			shown[w.Name] = true
		}
		header, body := report.table(true)
		fmt.Fprintf(&b, "\n## %s\n\n%s.\n\n", strings.TrimSuffix(filepath.Base(files[i]), ".json"), report.conditions())
		writeMarkdown(&b, header, body)
		rows += len(body)
	}
	if rows == 0 || rows > most {
		t.Errorf("%d rows, want 1 to %d", rows, most)
	}
	if *update {
		testcheck.NoError(t, os.WriteFile(page, []byte(b.String()), 0o644))
	}
	current, err := os.ReadFile(page)
	if err != nil || string(current) != b.String() {
		t.Errorf("%s is stale: run the test with -update (%v)", page, err)
	}
}
