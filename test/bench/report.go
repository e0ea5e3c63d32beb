package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/stratakube/strata/test/bench/internal/stats"
)

// Report is the result of a run of the benchmark.
type Report struct {
	Date     time.Time `json:"date"`
	Go       string    `json:"go"`
	CPU      string    `json:"cpu"`
	CPUs     int       `json:"cpus"`
	Memory   uint64    `json:"memoryBytes"`
	Versions []string  `json:"versions"` // of the engines, in their order
	Quick    bool      `json:"quick"`
	Data     string    `json:"data,omitempty"` // of all workloads; "" if each has its own
	Runs     int       `json:"runs"`
	Engines  []string  `json:"engines"`
	Results  []Result  `json:"workloads"`
}

// Result contains the rows of a workload for all engines.
type Result struct {
	Name   string `json:"name"`
	Title  string `json:"title"`
	Detail string `json:"detail,omitempty"`
	Runs   int    `json:"runs,omitempty"` // of the engine with most
	Rows   []Row  `json:"rows"`
	// by engine: the reason for missing figures, or an omitted step
	Notes  map[string]string `json:"notes,omitempty"`
	Wanted []Bound           `json:"wanted,omitempty"`
}

// Row is one measure.
type Row struct {
	Name   string             `json:"measure"`
	Unit   Unit               `json:"unit"`
	Values map[string]float64 `json:"values"` // by engine
}

// perRunTail is how many latencies a run needs for percentiles of its own: its p99 is then not
// simply its maximum.
const perRunTail = 200

// fewOperations is the number of operations below which p99 is omitted: the slowest operation
// describes their tail.
const fewOperations = 100

// summarize makes the rows of a workload: medians over the runs, and percentiles as
// stats.Percentiles describes them. Engines that failed or broke have no values in rows that the
// failure makes incomparable.
func summarize(w Workload, engines []string, observed map[string][]Observation, failed map[string]error) Result {
	result := Result{Name: w.Name, Title: w.Title, Notes: map[string]string{}, Wanted: w.Wanted}
	// set stores a value. A new row is inserted after the previous row of the same engine.
	set := func(engine string, behind int, name string, unit Unit, value float64) (at int) {
		at = slices.IndexFunc(result.Rows, func(r Row) bool { return r.Name == name })
		if at < 0 {
			at = behind + 1
			result.Rows = slices.Insert(result.Rows, at, Row{Name: name, Unit: unit, Values: map[string]float64{}})
		}
		result.Rows[at].Values[engine] = value
		return at
	}
	tail := true // of enough operations; all engines have the same rows
	for _, engine := range engines {
		total := 0
		for _, run := range observed[engine] {
			total += run.ops()
		}
		tail = tail && (total >= fewOperations || failed[engine] != nil)
	}
	for _, engine := range engines {
		runs := observed[engine]
		if err := failed[engine]; err != nil {
			result.Notes[engine] = "failed: " + firstLine(err)
			continue
		}
		if len(runs) == 0 {
			continue
		}
		result.Runs = max(result.Runs, len(runs))
		if result.Detail == "" {
			result.Detail = runs[0].Detail
		}
		broken := 0
		for _, run := range runs {
			if run.Broken != "" {
				broken++
				result.Notes[engine] = run.Broken
			}
		}
		if broken > 0 {
			result.Notes[engine] = fmt.Sprintf("%d of %d runs: %s", broken, len(runs), result.Notes[engine])
		}
		if reasons := passedOnReasons(runs); reasons != "" && !w.PassesOn {
			result.Notes[engine] = strings.TrimPrefix(result.Notes[engine]+"; reads were passed on: "+reasons, "; ")
		}
		at := -1
		summarizeEngine(w, runs, broken > 0, tail || w.Tail, func(name string, unit Unit, value float64) { at = set(engine, at, name, unit, value) })
	}
	return result
}

// summarizeEngine calls set for every row of one engine. An engine that broke has only its
// memory and the figures that the workload itself reports: the times of its other operations would
// be too favourable. tail
// reports whether there are enough operations for p99 and p99.9.
func summarizeEngine(w Workload, runs []Observation, broken, tail bool, set func(name string, unit Unit, value float64)) {
	median := func(of func(Observation) float64) float64 {
		values := make([]float64, len(runs))
		for i, run := range runs {
			values[i] = of(run)
		}
		return stats.Median(values)
	}
	for _, figure := range figuresOf(runs) {
		set(figure.Name, figure.Unit, figure.Value)
	}
	resident := median(func(o Observation) float64 { return float64(o.Memory.Resident) })
	if broken && resident > 0 {
		set("resident afterwards", Bytes, resident)
	}
	if broken || runs[0].ops() == 0 {
		return
	}
	latencies := make([][]time.Duration, len(runs))
	for i, run := range runs {
		latencies[i] = run.Latencies
	}
	percentiles := stats.Percentiles(latencies, perRunTail, 0.5, 0.99, 0.999, 1)
	set("latency p50", Seconds, percentiles[0].Seconds())
	if tail {
		set("latency p99", Seconds, percentiles[1].Seconds())
		set("latency p99.9", Seconds, percentiles[2].Seconds())
	} else {
		set("latency max", Seconds, percentiles[3].Seconds())
	}
	set("server CPU per "+w.Op, Seconds, median(func(o Observation) float64 { return o.ServerCPU.Seconds() / float64(o.ops()) }))
	set("etcd CPU per "+w.Op, Seconds, median(func(o Observation) float64 { return o.EtcdCPU.Seconds() / float64(o.ops()) }))
	set("etcd requests per "+w.Op, Count, median(func(o Observation) float64 { return o.EtcdRequests / float64(o.ops()) }))
	set("etcd sent per "+w.Op, Bytes, median(func(o Observation) float64 { return o.EtcdSent / float64(o.ops()) }))
	set("resident afterwards", Bytes, resident)
	set("peak memory", Bytes, median(func(o Observation) float64 { return float64(o.Memory.Peak) }))
	set("peak above before", Bytes, median(func(o Observation) float64 { return float64(o.Memory.Peak - min(o.Before.Resident, o.Memory.Peak)) }))
}

// figuresOf returns the medians of the figures that a workload reports itself, in its order. A run
// that broke may have fewer of them.
func figuresOf(runs []Observation) []Figure {
	var figures []Figure
	values := map[string][]float64{}
	for _, run := range runs {
		for _, figure := range run.Figures {
			if len(values[figure.Name]) == 0 {
				figures = append(figures, figure)
			}
			values[figure.Name] = append(values[figure.Name], figure.Value)
		}
	}
	for i := range figures {
		figures[i].Value = stats.Median(values[figures[i].Name])
	}
	return figures
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// table returns the rows as cells: workload, measure, one column per engine, one per ratio of the
// first engine to another, and the bound. A workload's name is in its first row only. It returns
// all rows, or those with a bound, and the notes of their workloads.
func (r *Report) table(bounds bool) (header []string, body [][]string) {
	header = append([]string{"workload", "measure"}, r.Engines...)
	for _, other := range r.Engines[1:] {
		header = append(header, r.Engines[0]+" / "+other)
	}
	header = append(header, "wanted")
	for _, result := range r.Results {
		title := result.Title
		var details []string
		if result.Detail != "" {
			details = append(details, result.Detail)
		}
		if result.Runs > 0 && result.Runs < r.Runs {
			details = append(details, fmt.Sprintf("%d runs", result.Runs))
		}
		if len(details) > 0 {
			title += " (" + strings.Join(details, "; ") + ")"
		}
		before := len(body)
		for _, row := range result.Rows {
			bound := wanted(result.Wanted, row, r.Engines[0], r.Quick)
			if bounds && (bound == "" || title == "" && len(row.Values) < 2 && len(result.Notes) > 0) {
				continue // a note says why there is nothing to compare with
			}
			cells := []string{title, row.Name}
			title = ""
			for _, engine := range r.Engines {
				cells = append(cells, formatValue(row, engine))
			}
			for _, other := range r.Engines[1:] {
				cells = append(cells, formatRatio(row, r.Engines[0], other))
			}
			body = append(body, append(cells, bound))
		}
		if bounds && len(body) == before {
			continue
		}
		for _, engine := range r.Engines {
			if note := result.Notes[engine]; note != "" {
				cells := make([]string, len(header))
				cells[0], cells[1] = title, engine+": "+note
				title = ""
				body = append(body, cells)
			}
		}
	}
	return header, body
}

func formatValue(row Row, engine string) string {
	value, ok := row.Values[engine]
	if !ok {
		return "-"
	}
	return row.Unit.Format(value)
}

func formatRatio(row Row, engine, other string) string {
	a, okA := row.Values[engine]
	b, okB := row.Values[other]
	if !okA || !okB || b == 0 {
		return "-"
	}
	return digits(a / b)
}

// conditions describes date, machine, data and versions of the run.
func (r *Report) conditions() string {
	sizes := cmp.Or(r.Data, "sizes as documented")
	if r.Quick {
		sizes = "quick run, a tenth of the documented sizes"
	}
	runs := "One run"
	if r.Runs > 1 {
		runs = fmt.Sprintf("Medians of %d runs", r.Runs)
	}
	return fmt.Sprintf("%s; %s on %d x %s, %s memory. Data: %s. %s. Versions: %s",
		r.Date.Format(time.DateOnly), r.Go, r.CPUs, r.CPU, Bytes.Format(float64(r.Memory)), sizes, runs,
		strings.Join(r.Versions, "; "))
}

// WriteText writes aligned tables, of rows with a bound and of all rows: a line per workload, its
// measures below.
func (r *Report) WriteText(w io.Writer) error {
	return r.write(w, "\n", func(b *strings.Builder, header []string, body [][]string) {
		aligned := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
		line := func(cells []string) { fmt.Fprintf(aligned, "  %s\n", strings.Join(cells, "\t")) }
		line(header[1:])
		for _, cells := range body {
			if cells[0] != "" {
				fmt.Fprintf(aligned, "\n%s\n", cells[0])
			}
			if cells[2] == "" { // a note, whose length is not bounded
				cells = cells[:2]
			}
			line(cells[1:])
		}
		aligned.Flush() // a strings.Builder returns no error
	})
}

// WriteMarkdown writes the tables for a document.
func (r *Report) WriteMarkdown(w io.Writer) error {
	return r.write(w, "All measures:\n\n", writeMarkdown)
}

// write writes the rows with a bound, if there are any, and all rows, with a text between them.
func (r *Report) write(w io.Writer, between string, table func(b *strings.Builder, header []string, body [][]string)) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s.\n\n", r.conditions())
	if header, body := r.table(true); len(body) > 0 {
		table(&b, header, body)
		b.WriteString("\n" + between)
	}
	header, body := r.table(false)
	table(&b, header, body)
	_, err := io.WriteString(w, b.String())
	return err
}

func writeMarkdown(b *strings.Builder, header []string, body [][]string) {
	line := func(cells []string) {
		b.WriteString("|")
		for _, cell := range cells {
			b.WriteString(" " + strings.ReplaceAll(strings.TrimSpace(cell), "|", `\|`) + " |")
		}
		b.WriteString("\n")
	}
	line(header)
	rule := []string{"---", "---"}
	for range header[2 : len(header)-1] {
		rule = append(rule, "---:")
	}
	line(append(rule, "---")) // the bound
	for _, cells := range body {
		line(cells)
	}
}

// WriteJSON writes the whole report.
func (r *Report) WriteJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}

// Unit is the unit in which a quantity is shown.
type Unit string

// The units. In JSON a quantity is a number in the unit named.
const (
	Seconds   Unit = "s"
	Bytes     Unit = "B"
	Count     Unit = ""
	PerSecond Unit = "/s"
	Percent   Unit = "%"
)

// Format shows a quantity with two or three significant digits and a prefix that suits its size
// (decimal, also for bytes).
func (u Unit) Format(v float64) string {
	switch u {
	case Seconds:
		switch {
		case v == 0:
			return "0 s"
		case v < 0.000_999_5:
			return digits(v*1e6) + " µs"
		case v < 0.999_5:
			return digits(v*1e3) + " ms"
		}
		return digits(v) + " s"
	case Bytes:
		switch {
		case v < 999.5:
			return grouped(int(v+0.5)) + " B"
		case v < 999.5e3:
			return digits(v/1e3) + " kB"
		case v < 999.5e6:
			return digits(v/1e6) + " MB"
		}
		return digits(v/1e9) + " GB"
	case PerSecond:
		return digits(v) + "/s"
	case Percent:
		return digits(v) + " %"
	}
	return digits(v)
}

// digits shows two or three significant digits, and all digits of the integer part.
func digits(v float64) string {
	switch {
	case v >= 99.95:
		return grouped(int(v + 0.5))
	case v >= 9.995:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case v >= 0.0995 || v == 0:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

// grouped shows an integer with a comma before each third digit.
func grouped(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", grouped(n/1000), n%1000)
}
