package main

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/internal/test/testcheck"
)

func TestUnitFormat_ScalesAndRounds(t *testing.T) {
	for _, c := range []struct {
		unit  Unit
		value float64
		want  string
	}{
		{Seconds, 0, "0 s"},
		{Seconds, 26e-6, "26.0 µs"},
		{Seconds, 0.000_999_7, "1.00 ms"},
		{Seconds, 0.0993, "99.3 ms"},
		{Seconds, 0.121, "121 ms"},
		{Seconds, 0.9996, "1.00 s"},
		{Seconds, 3.866, "3.87 s"},
		{Bytes, 93, "93 B"},
		{Bytes, 96e3, "96.0 kB"},
		{Bytes, 375e6, "375 MB"},
		{Bytes, 1.16e9, "1.16 GB"},
		{PerSecond, 1566.4, "1,566/s"},
		{Percent, 100, "100 %"},
		{Count, 2, "2.00"},
		{Count, 0.0123, "0.012"},
		{Count, 1_234_567, "1,234,567"},
	} {
		if got := c.unit.Format(c.value); got != c.want {
			t.Errorf("%v in %q is %q, want %q", c.value, string(c.unit), got, c.want)
		}
	}
}

// listRun is a run of one LIST with the given latency.
func listRun(took time.Duration) Observation {
	return Observation{
		Latencies:    []time.Duration{took},
		Elapsed:      took,
		ServerCPU:    2 * took,
		EtcdCPU:      took / 10,
		EtcdRequests: 1,
		Before:       process.Memory{Resident: 0.9e9, Peak: 1e9},
		Memory:       process.Memory{Resident: 1e9, Peak: 2e9},
		Detail:       "3 objects, 30 B",
	}
}

func exampleReport() *Report {
	w := Workload{Name: "list-json", Title: "LIST all, JSON", Op: "LIST", Wanted: []Bound{
		toUpstream(cpuPerList, 1./8), absolute(latency, 2), toUpstream(latency, 0.05),
	}}
	lone := Workload{Name: "watch-lone", Title: "one watcher", Op: "event"}
	engines := []string{"strata", "upstream"}
	broken := listRun(time.Millisecond)
	broken.Broken = "1 of 1 watches were ended"
	broken.Figures = []Figure{{"events delivered", Percent, 12.5}}
	whole := listRun(time.Millisecond)
	whole.Figures = []Figure{{"events delivered", Percent, 100}}
	return &Report{
		Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Go: "go1.26.8", CPU: "Some CPU", CPUs: 2, Memory: 24e9,
		Versions: []string{"strata v0.1.0"}, Runs: 3, Engines: engines,
		Results: []Result{
			summarize(w, engines, map[string][]Observation{
				"strata":   {listRun(400 * time.Millisecond), listRun(500 * time.Millisecond), listRun(600 * time.Millisecond)},
				"upstream": {listRun(4 * time.Second), listRun(6 * time.Second), listRun(5 * time.Second)},
			}, nil),
			summarize(lone, engines, map[string][]Observation{"strata": {whole}, "upstream": {whole, broken}}, nil),
		},
	}
}

func TestWriteText_FormatsReport(t *testing.T) {
	var b bytes.Buffer
	testcheck.NoError(t, exampleReport().WriteText(&b))
	const want = `2026-01-02; go1.26.8 on 2 x Some CPU, 24.0 GB memory. Data: sizes as documented. Medians of 3 runs. Versions: strata v0.1.0.

  measure                 strata  upstream  strata / upstream  wanted

LIST all, JSON (3 objects, 30 B)
  latency p50             500 ms    5.00 s               0.10  ≤ 2.00 s: yes; ≤ 1/20 × upstream: NO
  server CPU per LIST     1.00 s    10.0 s               0.10  ≤ 1/8 × upstream: yes


  measure                 strata  upstream  strata / upstream  wanted

LIST all, JSON (3 objects, 30 B)
  latency p50             500 ms    5.00 s               0.10  ≤ 2.00 s: yes; ≤ 1/20 × upstream: NO
  latency max             600 ms    6.00 s               0.10
  server CPU per LIST     1.00 s    10.0 s               0.10  ≤ 1/8 × upstream: yes
  etcd CPU per LIST      50.0 ms    500 ms               0.10
  etcd requests per LIST    1.00      1.00               1.00
  etcd sent per LIST         0 B       0 B                  -
  resident afterwards    1.00 GB   1.00 GB               1.00
  peak memory            2.00 GB   2.00 GB               1.00
  peak above before      1.10 GB   1.10 GB               1.00

one watcher (3 objects, 30 B; 2 runs)
  events delivered         100 %    56.2 %               1.78
  latency p50            1.00 ms         -                  -
  latency max            1.00 ms         -                  -
  server CPU per event   2.00 ms         -                  -
  etcd CPU per event      100 µs         -                  -
  etcd requests per event   1.00         -                  -
  etcd sent per event        0 B         -                  -
  resident afterwards    1.00 GB   1.00 GB               1.00
  peak memory            2.00 GB         -                  -
  peak above before      1.10 GB         -                  -
  upstream: 1 of 2 runs: 1 of 1 watches were ended
`
	if got := b.String(); normal(got) != normal(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// normal makes runs of spaces one space.
func normal(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		b.WriteString(strings.Join(strings.Fields(line), " ") + "\n")
	}
	return b.String()
}

func TestWriteMarkdown_FormatsReport(t *testing.T) {
	var b bytes.Buffer
	testcheck.NoError(t, exampleReport().WriteMarkdown(&b))
	for _, want := range []string{
		"| workload | measure | strata | upstream | strata / upstream | wanted |\n| --- | --- | ---: | ---: | ---: | --- |\n",
		"| LIST all, JSON (3 objects, 30 B) | latency p50 | 500 ms | 5.00 s | 0.10 | ≤ 2.00 s: yes; ≤ 1/20 × upstream: NO |\n",
		"|  | server CPU per LIST | 1.00 s | 10.0 s | 0.10 | ≤ 1/8 × upstream: yes |\n\nAll measures:\n\n",
		"|  | upstream: 1 of 2 runs: 1 of 1 watches were ended |  |  |  |  |\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing in\n%s", want, b.String())
		}
	}
}

func TestSummarize_FailedEngine_HasNoValues(t *testing.T) {
	w := Workload{Name: "get", Title: "GET", Op: "GET"}
	result := summarize(w, []string{"strata", "upstream"},
		map[string][]Observation{"strata": {listRun(time.Second)}, "upstream": {listRun(time.Second)}},
		map[string]error{"strata": errors.New("GET is answered with another object\nand more")})
	for _, row := range result.Rows {
		if _, ok := row.Values["strata"]; ok {
			t.Errorf("%s has a value of the failed engine", row.Name)
		}
	}
	if got := result.Notes["strata"]; got != "failed: GET is answered with another object" {
		t.Errorf("note is %q", got)
	}
}

func TestSummarize_RowOfOneEngine_KeepsOrder(t *testing.T) {
	first, second := listRun(time.Second), listRun(time.Second)
	first.Figures, second.Figures = []Figure{{"a", Count, 1}, {"c", Count, 1}}, []Figure{{"a", Count, 1}, {"b", Count, 1}, {"c", Count, 1}}
	result := summarize(Workload{Op: "LIST"}, []string{"a", "b"}, map[string][]Observation{"a": {first}, "b": {second}}, nil)
	if got := rowNames(result); !strings.HasPrefix(got, "a,b,c,latency p50") {
		t.Errorf("rows are %s", got)
	}
}

func TestSummarize_ManyOperations_ReportsTailLatency(t *testing.T) {
	run := listRun(time.Millisecond)
	for range 300 {
		run.Latencies = append(run.Latencies, time.Millisecond)
	}
	result := summarize(Workload{Op: "GET"}, []string{"strata"}, map[string][]Observation{"strata": {run}}, nil)
	if got := rowNames(result); !strings.HasPrefix(got, "latency p50,latency p99,latency p99.9,server CPU per GET") {
		t.Errorf("rows are %s", got)
	}
	result = summarize(Workload{Op: "GET"}, []string{"strata", "upstream"},
		map[string][]Observation{"strata": {run}, "upstream": {listRun(time.Second)}}, nil)
	if got := rowNames(result); !strings.HasPrefix(got, "latency p50,latency max,server CPU per GET") {
		t.Errorf("one engine has few operations, rows are %s", got)
	}
}

func rowNames(r Result) string {
	var names []string
	for _, row := range r.Rows {
		names = append(names, row.Name)
	}
	return strings.Join(names, ",")
}

func TestSummarize_PassedOnReads_AreReported(t *testing.T) {
	first, second := listRun(time.Second), listRun(time.Second)
	first.PassedOn = map[string]float64{"table": 1, "cbor": 2}
	second.PassedOn = map[string]float64{"table": 4}
	observed := map[string][]Observation{"strata": {first, second}, "upstream": {listRun(time.Second)}}
	result := summarize(Workload{Op: "LIST"}, []string{"strata", "upstream"}, observed, nil)
	if got := result.Notes["strata"]; got != "reads were passed on: cbor 2, table 5" {
		t.Errorf("note is %q", got)
	}
	result = summarize(Workload{Op: "LIST", PassesOn: true}, []string{"strata", "upstream"}, observed, nil)
	if len(result.Notes) > 0 {
		t.Errorf("notes %v, want none for a workload with PassesOn", result.Notes)
	}
}

func TestFiguresOf_MissingFigure_UsesOtherRuns(t *testing.T) {
	got := figuresOf([]Observation{
		{Figures: []Figure{{"a", Seconds, 1}}},
		{Figures: []Figure{{"a", Seconds, 3}, {"b", Bytes, 7}}},
		{Figures: []Figure{{"a", Seconds, 2}, {"b", Bytes, 9}}},
	})
	if want := []Figure{{"a", Seconds, 2}, {"b", Bytes, 8}}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
