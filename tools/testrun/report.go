package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// report prints the failures and the counts, and returns the verdict.
func report(out io.Writer, rs *results, other []string, took time.Duration) bool {
	rs.slowest(out)
	failed := 0
	var short []string
	for _, f := range rs.failures() {
		failed++
		short = append(short, f.messages(rs)...)
		fmt.Fprintf(out, "\n=== FAILED: %s", f.title())
		if f.pkg.race {
			fmt.Fprint(out, " (data race in the package)")
		} else if outside := f.pkg.outside(); outside != "" {
			fmt.Fprintf(out, " (outside of its tests, %s)", outside)
		}
		fmt.Fprintf(out, "\n    %s\n", f.command())
		for _, line := range f.output(rs) {
			fmt.Fprint(out, line)
		}
	}
	for _, text := range other {
		failed++
		fmt.Fprintf(out, "\n=== FAILED: %s\n", text)
	}
	tests, skips := rs.count()
	if tests == 0 && failed == 0 {
		failed++
		fmt.Fprintf(out, "\n=== FAILED: no test ran\n")
	}
	for i, line := range short[:min(len(short), 20)] {
		if i == 0 {
			fmt.Fprint(out, "\nmessages of failed tests:\n")
		}
		fmt.Fprintf(out, "  %s\n", line[:min(len(line), 400)])
	}
	crashes := ""
	if slices.ContainsFunc(rs.packages, func(p *pkg) bool { return p.again }) {
		crashes = "1 package ran again after a crash of the race detector, "
	}
	fmt.Fprintf(out, "\n%d tests in %d packages, %d failures, %s%s\n", tests, len(rs.packages), failed, crashes, took.Round(time.Second))
	if text := summary(skips); text != "" {
		fmt.Fprintln(out, text)
	}
	return failed == 0
}

// title names a failure in the report.
func (f failure) title() string {
	if f.test == nil {
		return f.pkg.short()
	}
	return f.pkg.short() + " " + f.test.name
}

// command is the command line that repeats a failure.
func (f failure) command() string {
	line := "go test"
	for _, arg := range f.pkg.inv.args {
		switch {
		case strings.HasPrefix(arg, "-timeout="):
		case strings.HasPrefix(arg, "-run="):
			if f.test == nil {
				line += " '" + arg + "'"
			}
		default:
			line += " " + arg
		}
	}
	if f.pkg.inv.alone {
		line = "GOWORK=off " + line
	}
	if f.pkg.inv.dir != "." {
		line = "cd " + f.pkg.inv.dir + " && " + line
	}
	if f.test != nil {
		line += " -run='^" + f.test.name + "$'"
	}
	return line + " " + f.pkg.path
}

// output returns the lines that a failure printed.
func (f failure) output(rs *results) (lines []string) {
	if f.test == nil {
		for path, build := range rs.builds {
			if path == f.pkg.build {
				lines = append(lines, build...)
			}
		}
		lines = append(lines, f.pkg.output...)
		for _, t := range f.pkg.order {
			if t.action == "" {
				lines = append(lines, t.output...) // a panic, or the stacks at the time limit
			}
		}
	} else {
		for _, t := range f.pkg.order {
			if name, _, _ := strings.Cut(t.name, "/"); name == f.test.name && t.action == "fail" {
				lines = append(lines, t.output...)
			}
		}
	}
	return slices.DeleteFunc(lines, func(line string) bool { return strings.HasPrefix(line, "=== ") })
}

// messages returns the failed tests and subtests with their own messages, each once. The whole
// output may end with logs of servers that are longer than a reader of the end sees.
func (f failure) messages(rs *results) (lines []string) {
	if f.test == nil {
		return []string{f.title()}
	}
	for _, t := range f.pkg.order {
		if name, _, _ := strings.Cut(t.name, "/"); name != f.test.name || t.action != "fail" {
			continue
		}
		for _, line := range t.output {
			m := message.FindStringSubmatch(line)
			if m == nil || logged.MatchString(m[2]) {
				continue
			}
			if text := f.pkg.short() + " " + t.name + ": " + strings.TrimSpace(line); !slices.Contains(lines, text) {
				lines = append(lines, text)
			}
		}
	}
	return lines
}

// slowest prints the packages and the top-level tests that took the longest, if a second and more.
func (rs *results) slowest(out io.Writer) {
	type took struct {
		seconds float64
		name    string
	}
	var packages, tests []took
	for _, p := range rs.packages {
		if p.cached {
			continue
		}
		packages = append(packages, took{p.elapsed, p.short()})
		for _, t := range p.order {
			if !strings.Contains(t.name, "/") {
				tests = append(tests, took{t.elapsed, p.short() + " " + t.name})
			}
		}
	}
	list := func(what string, all []took) {
		slices.SortStableFunc(all, func(a, b took) int { return cmp.Compare(b.seconds, a.seconds) })
		for i, t := range all[:min(len(all), 10)] {
			if t.seconds < 1 {
				break
			}
			if i == 0 {
				fmt.Fprintf(out, "\nslowest %s:\n", what)
			}
			fmt.Fprintf(out, "%7.1fs %s\n", t.seconds, t.name)
		}
	}
	list("packages", packages)
	list("tests", tests)
}

// count returns the number of tests and subtests that ran, and the reasons of the skipped ones. A
// test that another pass ran is not skipped.
func (rs *results) count() (tests int, skips map[string]int) {
	skips = map[string]int{}
	ran := map[string]bool{}
	for _, p := range rs.packages {
		for _, t := range p.order {
			tests++
			ran[p.path+" "+t.name] = ran[p.path+" "+t.name] || t.action != "skip"
		}
	}
	seen := map[string]bool{}
	for _, p := range rs.packages {
		for _, t := range p.order {
			if id := p.path + " " + t.name; t.action == "skip" && !ran[id] && !seen[id] {
				seen[id] = true
				skips[reason(t.output)]++
			}
		}
	}
	return tests, skips
}

var (
	message = regexp.MustCompile(`^\s+(\S+\.go):\d+: (.*)`)
	logged  = regexp.MustCompile(`^[IWEF]\d{4} `) // a line of klog
	without = regexp.MustCompile(`^skipped without (\S+?):? `)
	// reasons are the reasons of skips, in a form that is the same for all tests with that reason.
	reasons = []struct {
		pattern *regexp.Regexp
		reason  string
	}{
		{regexp.MustCompile(`^Test\w+ runs it`), "as a part of another test"},
		{regexp.MustCompile(`STRATA_TEST_LONG`), "only in make nightly"},
		{regexp.MustCompile(`^short: `), "not in make quick"},
		{regexp.MustCompile(`race detector`), "not under the race detector"},
		{regexp.MustCompile(`C compiler`), "without a C compiler"},
		{regexp.MustCompile(`^upstream|the console is a part of the engine`), "not on the engine under test"},
		{regexp.MustCompile(`not (yet )?supported|[Ff]eature ?[Gg]ate|does not know the gate`), "not in this version of k8s.io/apiserver"},
	}
)

// reason returns why a test skipped itself: the last message of its output.
func reason(output []string) string {
	text := "without a reason"
	for _, line := range output {
		m := message.FindStringSubmatch(line)
		if m == nil || logged.MatchString(m[2]) {
			continue
		}
		text = strings.TrimSpace(m[2])
		if text == "" && !strings.HasSuffix(m[1], "_test.go") {
			text = "by upstream's storage suites themselves" // which are a library
		}
		text = cmp.Or(text, "without a reason")
	}
	if m := without.FindStringSubmatch(text); m != nil {
		return "without " + m[1]
	}
	for _, r := range reasons {
		if r.pattern.MatchString(text) {
			return r.reason
		}
	}
	return text
}

// summary returns the counts of skipped tests, the most frequent reason first.
func summary(skips map[string]int) string {
	total := 0
	var parts []string
	for _, text := range slices.SortedFunc(maps.Keys(skips), func(a, b string) int {
		return cmp.Or(skips[b]-skips[a], strings.Compare(a, b))
	}) {
		total += skips[text]
		parts = append(parts, fmt.Sprintf("%d %s", skips[text], text))
	}
	if total == 0 {
		return ""
	}
	return fmt.Sprintf("%d skipped: %s", total, strings.Join(parts, ", "))
}
