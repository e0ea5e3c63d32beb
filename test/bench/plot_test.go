package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestPlot_OfDay_IsCurrent compares the plot of docs/benchmarks/switching.md with the newest report
// of a day, and writes it with -update: CPU and memory of both servers in each part of the day.
func TestPlot_OfDay_IsCurrent(t *testing.T) {
	const plot = "../../docs/benchmarks/day.svg"
	files, err := filepath.Glob("../../docs/benchmarks/results/*.json")
	testcheck.NoError(t, err)
	var day *Result
	for _, file := range slices.Backward(files) {
		text, err := os.ReadFile(file)
		testcheck.NoError(t, err)
		var report Report
		testcheck.NoError(t, json.Unmarshal(text, &report))
		if i := slices.IndexFunc(report.Results, func(r Result) bool { return r.Name == "day" }); i >= 0 {
			day = &report.Results[i]
			break
		}
	}
	if day == nil {
		t.Fatal("no report of a day")
	}
	drawn := plotDay(t, day)
	if *update {
		testcheck.NoError(t, os.WriteFile(plot, []byte(drawn), 0o644))
	}
	if current, err := os.ReadFile(plot); err != nil || string(current) != drawn {
		t.Errorf("%s is stale: run the test with -update (%v)", plot, err)
	}
}

// plotDay draws two groups of bars as SVG, one bar for each server and part of the day.
func plotDay(t *testing.T, day *Result) string {
	t.Helper()
	const (
		left, width   = 150, 420 // of the bars
		bar, gap, top = 12, 12, 62
	)
	var b strings.Builder
	y := top
	for _, group := range []struct {
		title, prefix, unit string
		scale               float64
	}{
		{"CPU of the server, seconds", "server CPU: ", "s", 1},
		{"resident memory afterwards, MB", "resident after ", "MB", 1e-6},
	} {
		var rows []Row
		most := 0.0
		for _, r := range day.Rows {
			if strings.HasPrefix(r.Name, group.prefix) {
				rows = append(rows, r)
				most = max(most, r.Values["strata"], r.Values["stock"])
			}
		}
		if len(rows) < 2 || most <= 0 {
			t.Fatalf("the report has %d rows of %q", len(rows), group.prefix)
		}
		fmt.Fprintf(&b, `<text x="8" y="%d" class="title">%s</text>`+"\n", y, group.title)
		y += gap
		for _, r := range rows {
			fmt.Fprintf(&b, `<text x="%d" y="%d" class="part">%s</text>`+"\n", left-8, y+bar+4, strings.TrimPrefix(r.Name, group.prefix))
			for _, engine := range []string{"strata", "stock"} {
				n := r.Values[engine]
				fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%.1f" height="%d" class="%s"/>`, left, y, n/most*width, bar, engine)
				fmt.Fprintf(&b, `<text x="%.1f" y="%d">%.0f %s</text>`+"\n", left+n/most*width+4, y+bar-2, n*group.scale, group.unit)
				y += bar
			}
			y += gap
		}
		y += 2 * gap
	}
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" width="%[1]d" height="%[2]d" viewBox="0 0 %[1]d %[2]d" role="img">
<title>%[3]s: %[4]s</title>
<style>text{font:11px sans-serif;fill:#444}.title{font-weight:bold}.part{text-anchor:end}.strata{fill:#1565c0}.stock{fill:#9e9e9e}</style>
<rect width="%[1]d" height="%[2]d" fill="#fff"/>
<text x="8" y="18" class="title">%[3]s: %[4]s</text>
<rect x="8" y="28" width="12" height="12" class="strata"/><text x="24" y="38">Strata</text>
<rect x="80" y="28" width="12" height="12" class="stock"/><text x="96" y="38">kube-apiserver</text>
%[5]s</svg>
`, left+width+70, y-gap, day.Title, day.Detail, b.String())
}
