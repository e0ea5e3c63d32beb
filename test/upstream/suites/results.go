package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"time"
)

// counts are the tests, subtests included, by verdict. Absent tests count as failed.
type counts struct {
	Passed  int `json:"passed"`
	Failed  int `json:"failed"`
	Skipped int `json:"skipped"`
	// Retried are the top-level tests that were run again, on both engines.
	Retried int `json:"retried"`
	// Servers is the number of API servers that the tests started on this engine, without retries;
	// 0 where the suite does not report it.
	Servers int `json:"servers,omitempty"`
	// Seconds is the time of all runs, retries included.
	Seconds int `json:"seconds"`
}

// outcome is the result of one unit: a row of the document.
type outcome struct {
	Source string `json:"source"`
	Date   string `json:"date"` // of the run
	// Exclusive: the unit ran on one engine after the other.
	Exclusive bool              `json:"exclusive,omitempty"`
	Engines   map[Engine]counts `json:"engines"`
	// Failed names the tests that failed on every engine.
	Failed []string `json:"failed,omitempty"`
	// Unstable names the top-level tests that failed and passed when they were run again, by
	// engine.
	Unstable    map[Engine][]string `json:"unstable,omitempty"`
	Differences []Finding           `json:"differences,omitempty"`
}

// results are the outcomes by suite and unit, of the last run of each unit.
type results map[string]map[string]outcome

func readResults(file string) (results, error) {
	r := results{}
	text, err := os.ReadFile(file)
	if os.IsNotExist(err) {
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return r, nil
}

func (r results) write(file string) error {
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}

// dropStale removes the rows of a suite that are not of its current units with their current
// source, and reports whether there were any.
func (r results) dropStale(suite string, units []Unit) bool {
	rows := len(r[suite])
	maps.DeleteFunc(r[suite], func(name string, row outcome) bool {
		return !slices.ContainsFunc(units, func(u Unit) bool { return u.Name == name && u.Source == row.Source })
	})
	return len(r[suite]) < rows
}

// testTime returns how long the units take one after the other, without builds. The engines run at
// the same time, but for units that are Exclusive.
func testTime(units map[string]outcome) time.Duration {
	var seconds int
	for _, row := range units {
		longest, sum := 0, 0
		for _, c := range row.Engines {
			longest, sum = max(longest, c.Seconds), sum+c.Seconds
		}
		if row.Exclusive {
			longest = sum
		}
		seconds += longest
	}
	return time.Duration(seconds) * time.Second
}

// count returns how many tests have each verdict.
func count(v Verdicts) counts {
	var c counts
	for test, verdict := range v {
		switch {
		case test == mainTest && verdict == Pass: // a binary is no test
		case verdict == Pass:
			c.Passed++
		case verdict == Skip:
			c.Skipped++
		default:
			c.Failed++
		}
	}
	return c
}

// total sums the counts of outcomes.
func total(units map[string]outcome, engine Engine) (sum counts, ok bool) {
	for _, o := range units {
		c, has := o.Engines[engine]
		ok = ok || has
		sum.Passed += c.Passed
		sum.Failed += c.Failed
		sum.Skipped += c.Skipped
		sum.Servers += c.Servers
	}
	return sum, ok
}

// document returns docs/conformance.md.
func document(suites []Suite, r results) string {
	var b strings.Builder
	var took time.Duration
	for _, s := range suites {
		took += testTime(r[s.Name])
	}
	b.WriteString(`# Test suites of other projects

` + "`make suites`" + ` runs test suites of other projects on upstream's storage layer and on Strata's, and writes this file and
` + "`test/upstream/suites/results.json`" + `. One test binary runs on both engines where that is possible. A difference, or a test that fails on every engine,
fails the run if it has no reason below; so does a reason that no longer occurs. The last suite is of this repository, beside programs of
others. [Suites](development/suites.md) has the details.

Tests are counted with their subtests. A test that fails, or whose verdicts differ, runs up to ` + fmt.Sprint(maxRetries) + ` times more on both engines, and counts as passed
if it passes once. Tests beside programs of others, and histories that validators reject, run once. "Servers" are the API servers that the tests started on Strata. All units together take
` + fmt.Sprint(math.Ceil(took.Minutes())) + ` minutes of test time, one after the other.
`)
	for _, s := range suites {
		writeSuite(&b, s, r[s.Name])
	}
	return b.String()
}

// writeSuite writes the section of a suite.
func writeSuite(b *strings.Builder, s Suite, units map[string]outcome) {
	fmt.Fprintf(b, "\n## %s\n\n%s\n\n", s.Title, s.About)
	if len(units) == 0 {
		b.WriteString("No results yet.\n")
		return
	}
	b.WriteString("| package | passed: upstream | passed: strata | servers |\n| --- | ---: | ---: | ---: |\n")
	sources, dates := map[string]bool{}, map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(units)) {
		writeRow(b, name, units[name].Engines)
		sources[units[name].Source], dates[units[name].Date] = true, true
	}
	sums := map[Engine]counts{}
	for _, e := range s.engines() {
		if sum, ok := total(units, e); ok {
			sums[e] = sum
		}
	}
	writeRow(b, "**all**", sums)
	fmt.Fprintf(b, "\nTested: %s, on %s.\n", strings.Join(slices.Sorted(maps.Keys(sources)), ", "), strings.Join(slices.Sorted(maps.Keys(dates)), " and "))
	writeFindings(b, s, units)
}

// writeRow writes a row of a suite's table.
func writeRow(b *strings.Builder, name string, engines map[Engine]counts) {
	verdicts := func(e Engine) string {
		c, ok := engines[e]
		if !ok {
			return ""
		}
		cell := fmt.Sprint(c.Passed)
		if c.Failed > 0 {
			cell += fmt.Sprintf(", %d failed", c.Failed)
		}
		if c.Skipped > 0 {
			cell += fmt.Sprintf(", %d skipped", c.Skipped)
		}
		return cell
	}
	servers := ""
	if n := engines[Strata].Servers; n > 0 {
		servers = fmt.Sprint(n)
	}
	fmt.Fprintf(b, "| %s | %s | %s | %s |\n", name, verdicts(Upstream), verdicts(Strata), servers)
}

// writeFindings writes the differences of a suite, and its failed and unstable tests.
func writeFindings(b *strings.Builder, s Suite, units map[string]outcome) {
	var differing, failed, unstable []string
	for _, name := range slices.Sorted(maps.Keys(units)) {
		explanation := func(f Finding) string {
			if text := reason(known, s.Name, name, f); text != "" {
				return text
			}
			return "not explained: an error"
		}
		for _, d := range units[name].Differences {
			differing = append(differing, fmt.Sprintf("| %s | %s | %s | %s | %s |", name, d.Test, d.Upstream, d.Strata, explanation(d)))
		}
		for _, test := range units[name].Failed {
			failed = append(failed, fmt.Sprintf("| %s | %s | %s |", name, test, explanation(failure(test))))
		}
		for _, e := range s.engines() {
			if tests := units[name].Unstable[e]; len(tests) > 0 {
				unstable = append(unstable, fmt.Sprintf("- %s, %s: %s", name, e, strings.Join(tests, ", ")))
			}
		}
	}
	if len(s.engines()) > 1 {
		if len(differing) == 0 {
			b.WriteString("\nNo differences.\n")
		} else {
			b.WriteString("\n| package | differing test | upstream | strata | reason |\n| --- | --- | --- | --- | --- |\n" + strings.Join(differing, "\n") + "\n")
		}
	}
	if len(failed) > 0 {
		b.WriteString("\nFailed on every engine:\n\n| package | failed test | reason |\n| --- | --- | --- |\n" + strings.Join(failed, "\n") + "\n")
	}
	if len(unstable) > 0 {
		b.WriteString("\nFailed at first and passed when run again:\n\n" + strings.Join(unstable, "\n") + "\n")
	}
}

// today is the date of a run.
func today() string { return time.Now().UTC().Format(time.DateOnly) }
